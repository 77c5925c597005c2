"""`Storage`: what it refuses, how it prints, and the recipes."""

import dataclasses

import pytest

from qstate.numerics import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    F16,
    F32,
    UDYNAMIC8,
    UE2M2,
    ULINEAR4,
    Block,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    storage,
)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(lambda: Storage("e4m3"), TypeError, "must be a Format", id="format"),
        pytest.param(lambda: Storage(E4M3, 128), TypeError, "NoScale", id="scaling"),
        pytest.param(lambda: Storage(E4M3, Block), TypeError, "NoScale", id="scaling-class"),
        pytest.param(lambda: Storage(E4M3, rounding="up"), ValueError, "rounding", id="rounding"),
        pytest.param(lambda: Storage(E4M3, domain="log"), ValueError, "domain", id="domain"),
        pytest.param(lambda: Storage(F32, Block(128)), ValueError, "NoScale", id="f32-scaled"),
        pytest.param(lambda: Storage(BF16, PerTensor()), ValueError, "NoScale", id="bf16-scaled"),
        pytest.param(lambda: storage("fp6"), ValueError, "fp32, bf16, fp8", id="recipe"),
    ],
)
def test_what_cannot_work_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_storages_are_values():
    one, other = Storage(E4M3, Block(128)), Storage(E4M3, Block(128))
    assert one == other
    assert hash(one) == hash(other)
    assert one != one.without_zero() == other.without_zero()
    assert len({one, other, Storage(E4M3), Storage(DYNAMIC8), Storage(DYNAMIC4)}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rounding = "stochastic"


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (Storage(F32), "f32"),
        (Storage(BF16, NoScale(), "stochastic"), "bf16, no scale, stochastic"),
        (Storage(E4M3, Block(128)), "e4m3, block 128, nearest"),
        (Storage(E4M3, Block(64, "bfloat16")), "e4m3, block 64 bfloat16, nearest"),
        (Storage(F16, PerTensor()), "f16, per tensor, nearest"),
        (
            Storage(UE2M2, Block(128), "stochastic", "sqrt").without_zero(),
            "ue2m2 without zero, block 128, stochastic, square root",
        ),
        (Storage(ULINEAR4, Rank1()), "ulinear4, rank-1, nearest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_a_storage_prints(held, text):
    assert str(held) == text


@pytest.mark.parametrize(
    ("held", "exact", "drawn", "packed", "scaled"),
    [
        (Storage(F32), True, False, False, False),
        (Storage(F32, rounding="stochastic"), True, False, False, False),
        (Storage(F32, domain="sqrt"), False, False, False, False),
        (Storage(BF16, NoScale(), "stochastic"), False, True, False, False),
        (Storage(E4M3, Block(128)), False, False, False, True),
        (Storage(E2M1), False, False, True, True),  # the scale carries NaN
        (Storage(ULINEAR4, Rank1(), "stochastic"), False, True, True, True),
    ],
    ids=str,
)
def test_what_a_storage_says_of_itself(held, exact, drawn, packed, scaled):
    assert held.exact == exact
    assert held.stochastic == drawn
    assert held.packed == packed
    assert held.has_scales == scaled


def test_the_recipes():
    drawn = "stochastic"
    assert storage("fp32") == (Storage(F32), Storage(F32))
    assert storage("bf16") == (
        Storage(BF16, NoScale(), drawn),
        Storage(BF16.without_zero(), NoScale(), drawn),
    )
    assert storage("fp8") == (
        Storage(E4M3, Block(128), drawn),
        Storage(E4M3.without_zero(), Block(128), drawn),
    )
    assert storage("fp4") == (
        Storage(E2M1, Block(128), drawn),
        Storage(UE2M2.without_zero(), Block(128), drawn, domain="sqrt"),
    )
    assert storage("int8") == (
        Storage(DYNAMIC8, Block(256), drawn),
        Storage(UDYNAMIC8.without_zero(), Block(256), drawn),
    )
    assert storage("int4") == (
        Storage(DYNAMIC4, Block(128), drawn),
        Storage(ULINEAR4.without_zero(), Rank1(), drawn),
    )
