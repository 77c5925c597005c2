"""The kernels, interpreted, against the reference: the same bits for every storage and shape."""

import itertools

import jax
import numpy as np
import pytest

from qstate import BF16, E2M1, E4M3, E5M2, INT8, UE2M2, UE4M4, Block, NoScale, Storage
from qstate.kernels import _tpu
from qstate.numerics import decode, encode

kernels = pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
encode_jit = jax.jit(encode, static_argnums=1)
decode_jit = jax.jit(decode, static_argnums=(2, 3))

FORMATS = {
    "e4m3": (E4M3, E4M3),
    "e5m2": (E5M2, E5M2),
    "ue4m4": (E4M3, UE4M4),
    "int8": (INT8, INT8),
    "fp4": (E2M1, UE2M2),
    "bf16": (BF16, BF16),
    "unscaled": (E4M3, E5M2),
}
SHAPES = {
    "scalar": lambda block: (),
    "short": lambda block: (7,),
    "vector": lambda block: (129,),
    "one-block": lambda block: (40, block),
    "three-blocks": lambda block: (33, 3 * block),
    "five-blocks": lambda block: (5, 5 * block),
    "even-tail": lambda block: (3, 5, 260),
    "odd-tail": lambda block: (70, 2 * block + 13),
    "wide": lambda block: (6, 512 + 3 * block),  # more than one tile
    "wide-tail": lambda block: (6, 512 + 3 * block + 20),
    "tall": lambda block: (1601, 1280),
}
F32, F16, MIXED = ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")
NEVER, HARD, SOFT = (None, None), ("hard", "soft"), ("soft", "hard")
NONE, FIRST, BOTH = (False, False), (True, False), (True, True)
AXES = [
    tuple(FORMATS),
    (32, 64, 128, 256),
    ("float32", "bfloat16", "power_of_two"),
    ("nearest", "stochastic"),
    tuple(SHAPES),
    (F32, F16, MIXED),  # of the gradient and of the parameter
    ("update", "parameter"),  # what comes out
    (NEVER, HARD, SOFT),  # resets of the two moments
    (NONE, FIRST, BOTH),  # which of those are due
]
# Every value of every axis is in one of them.
QUICK = [
    ("e4m3", 128, "float32", "stochastic", "odd-tail", F32, "parameter", HARD, BOTH),
    ("e5m2", 32, "bfloat16", "nearest", "five-blocks", F16, "update", NEVER, NONE),
    ("ue4m4", 64, "power_of_two", "stochastic", "three-blocks", MIXED, "parameter", SOFT, FIRST),
    ("int8", 256, "float32", "nearest", "wide-tail", F32, "update", SOFT, NONE),
    ("fp4", 128, "float32", "stochastic", "vector", F32, "update", HARD, FIRST),
    ("fp4", 32, "bfloat16", "stochastic", "wide", MIXED, "parameter", NEVER, NONE),
    ("fp4", 64, "power_of_two", "nearest", "even-tail", F16, "parameter", SOFT, BOTH),
    ("bf16", 128, "float32", "stochastic", "one-block", F16, "parameter", HARD, NONE),
    ("unscaled", 128, "float32", "nearest", "scalar", F32, "update", NEVER, NONE),
    ("e4m3", 256, "power_of_two", "nearest", "short", F32, "update", NEVER, NONE),
    ("fp4", 128, "float32", "stochastic", "tall", F32, "parameter", NEVER, NONE),
]


def _pairs(case):
    return set(itertools.combinations(enumerate(case), 2))


def _all_pairs():
    """Cases in which every two values of two axes meet, but for those that QUICK has."""
    rng = np.random.default_rng(0)
    numbered = [[(i, value) for value in axis] for i, axis in enumerate(AXES)]
    missing = set()
    for one, other in itertools.combinations(numbered, 2):
        missing.update(itertools.product(one, other))
    missing = missing.difference(*map(_pairs, QUICK))
    cases = []
    while missing:
        tries = []
        for pair in sorted(missing, key=repr)[:4] * 12:
            tries.append([axis[rng.integers(len(axis))] for axis in AXES])
            for i, value in pair:
                tries[-1][i] = value
        cases.append(max(map(tuple, tries), key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(cases[-1])
    return cases


def _id(case):
    *parts, dtypes, output, resets, due = case
    clocks = (
        f"{kind}-{'due' if is_due else 'later'}" if kind else "never"
        for kind, is_due in zip(resets, due, strict=True)
    )
    return "-".join(map(str, (*parts, *dtypes, output, *clocks)))


CASES = [pytest.param(case, id=_id(case)) for case in QUICK]
CASES += [pytest.param(case, id=_id(case), marks=pytest.mark.slow) for case in _all_pairs()]


def _storages(formats, block, scale, rounding):
    mu, nu = FORMATS[formats]
    scaling = NoScale() if formats in ("bf16", "unscaled") else Block(block, scale)
    domain = "sqrt" if formats == "fp4" else "linear"
    return Storage(mu, scaling, rounding), Storage(nu, scaling, rounding, domain).without_zero()


def test_the_quick_cases_have_every_value():
    for axis, values in zip(AXES, zip(*QUICK, strict=True), strict=True):
        assert set(axis) == set(values)


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Tiles of a quarter of their width: XLA takes long to compile a tile of many blocks."""
    monkeypatch.setattr(_tpu, "_TILE_COLUMNS", 512)


@pytest.mark.usefixtures("narrow_tiles")
@kernels
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_adam(adam, assert_same, case, kernel):
    formats, block, scale, rounding, shape, dtypes, output, resets, due = case
    storages = _storages(formats, block, scale, rounding)
    leaf = adam(
        storages,
        SHAPES[shape](storages[0].scaling.block),
        dtypes,
        in_place=output == "parameter",
        resets=resets,
        due=due,
    )
    operands = leaf.operands
    assert_same(leaf.run(kernel, operands), leaf.run("reference", operands))


@pytest.mark.parametrize("formats", ["e4m3", "fp4"])
def test_tiles_of_full_width(adam, assert_same, formats):
    """Two tiles of columns, the second not full, and two of rows, the second not full."""
    leaf = adam(_storages(formats, 256, "float32", "stochastic"), (130, 2048 + 512))
    assert_same(leaf.run("pallas_tpu"), leaf.run("reference"))


ALONE = [
    Storage(E4M3, Block(128), "stochastic"),
    Storage(E4M3, Block(32, "power_of_two")),
    Storage(INT8, Block(64, "power_of_two"), "stochastic"),
    Storage(E2M1, Block(128, "bfloat16"), "stochastic"),
    Storage(UE2M2, Block(32), "stochastic", "sqrt").without_zero(),
    Storage(UE2M2, Block(64, "power_of_two")).without_zero(),
    Storage(BF16, NoScale(), "stochastic"),
    Storage(BF16, NoScale(), "nearest", "sqrt"),
]


@kernels
@pytest.mark.parametrize("shape", [(7,), (5, 3, 131)], ids=str)
@pytest.mark.parametrize("storage", ALONE, ids=str)
def test_encode_and_decode_alone(encode_by, decode_by, draw, assert_same, storage, shape, kernel):
    x = draw(shape, 0)
    stored = encode_jit(x, storage, 5)
    assert_same(encode_by(storage, x, 5, kernel), stored)
    assert_same(decode_by(stored, storage, shape, kernel), decode_jit(*stored, storage, shape))


@kernels
@pytest.mark.parametrize(
    ("formats", "scale"),
    [("e4m3", "float32"), ("fp4", "power_of_two"), ("unscaled", "float32")],
)
def test_a_bad_number_stays_in_its_block(adam, assert_same, formats, scale, kernel):
    """In the first block of a row, in the middle, and in the last one, which is not full."""
    leaf = adam(_storages(formats, 32, scale, "stochastic"), (9, 108))
    (gradient,), *others = leaf.operands
    places = {(2, 3): -np.inf, (4, 70): np.nan, (6, 107): np.inf}
    broken = gradient
    for place, bad in places.items():
        broken = broken.at[place].set(bad)
    good, got = (leaf.run(kernel, ([g], *others)) for g in (gradient, broken))
    assert_same(got, leaf.run("reference", ([broken], *others)))
    touched = np.zeros(leaf.shape, bool)
    for row, column in places:
        first = column if formats == "unscaled" else column - column % 32
        touched[row, first : column + 1 if formats == "unscaled" else first + 32] = True
    for storage, was, now in zip(leaf.storages, good[1], got[1], strict=True):
        was, now = (np.asarray(decode_jit(*pair, storage, leaf.shape)) for pair in (was, now))
        assert not np.isfinite(now[touched]).any()
        np.testing.assert_array_equal(now[~touched], was[~touched])
