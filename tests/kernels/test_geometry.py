"""How kernels cut a leaf, and what they take its codes and scales to be."""

import math

import jax
import jax.numpy as jnp
import pytest

from qstate.kernels import Program
from qstate.kernels._geometry import Geometry, geometry
from qstate.kernels._operands import flat, pairs
from qstate.numerics import BF16, E2M1, E4M3, INT8, UE2M2, Block, Delayed, Rank1, Storage, encode

STORAGES = [
    Storage(BF16),
    Storage(E4M3),
    Storage(E4M3, Block(32)),
    Storage(INT8, Block(128, "power_of_two")),
    Storage(E2M1, Block(32, "bfloat16")),
    Storage(E2M1, Block(128)),
    Storage(UE2M2, Block(64, "power_of_two"), domain="sqrt"),
]
LENGTHS = [1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 383, 1280]
E4M3_32, E2M1_32 = Storage(E4M3, Block(32)), Storage(E2M1, Block(32, "bfloat16"))


def cut(storages, shape):
    """A leaf's `Geometry`, or why there is none."""
    nothing = lambda *_: []  # noqa: E731
    return geometry(Program(nothing, nothing, nothing, storages, storages, (), ()), shape)


def encoded(storage, shape):
    """Shapes and dtypes of codes and scales."""
    return jax.eval_shape(lambda x: encode(x, storage), jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_structs_are_what_encode_gives(storage, length):
    for shape in [(length,), (6, length), (2, 3, length)]:
        found = cut((storage,), shape)
        if isinstance(found, str):  # a block of rows
            assert 2 * length <= storage.scaling.block
            continue
        assert (found.rows, found.columns) == (math.prod(shape[:-1]), length)
        codes, scales = encoded(storage, shape)
        assert found.code_columns(storage) == codes.shape[-1]
        stored = [x for x in (codes, scales) if x is not None]
        want = [((found.rows, x.shape[-1]), x.dtype) for x in stored]
        assert [(s.shape, s.dtype) for s in found.structs([storage])] == want


@pytest.mark.parametrize(
    ("columns", "blocks", "tail"), [(1, 1, 1), (31, 1, 31), (32, 1, 0), (33, 2, 1), (95, 3, 31)]
)
def test_blocks_and_tail(columns, blocks, tail):
    found = Geometry(rows=4, columns=columns, block=32)
    assert (found.blocks, found.tail) == (blocks, tail)


def test_structs_lie_one_after_the_other():
    found = cut((E4M3_32, Storage(BF16), E2M1_32), (4, 5, 96))
    structs = found.structs([E4M3_32, Storage(BF16), E2M1_32])
    assert [s.shape for s in structs] == [(20, 96), (20, 3), (20, 96), (20, 48), (20, 3)]
    dtypes = [jnp.uint8, jnp.float32, jnp.bfloat16, jnp.uint8, jnp.bfloat16]
    assert [s.dtype for s in structs] == dtypes


def test_flat_and_pairs_are_inverse():
    stored = [("codes", "scales"), ("codes only", None), ("last codes", "last scales")]
    storages = [E4M3_32, Storage(BF16), E2M1_32]
    arrays = flat(stored)
    assert arrays == ["codes", "scales", "codes only", "last codes", "last scales"]
    assert pairs(storages, arrays) == stored


def test_a_scalar_is_a_row_of_one():
    assert cut((E4M3_32,), ()) == Geometry(rows=1, columns=1, block=1)


def test_without_blocks_rows_are_cut_at_128():
    assert cut((Storage(BF16), Storage(E4M3)), (4, 300)) == Geometry(4, 300, 128)


def test_storages_without_blocks_take_those_of_others():
    assert cut((Storage(BF16), E4M3_32), (4, 300)) == Geometry(4, 300, 32)


@pytest.mark.parametrize(
    ("storages", "shape", "reason"),
    [
        pytest.param(
            (Storage(E4M3, Block(256)), E4M3_32),
            (4, 300),
            "blocks of 32 and 256 elements",
            id="two-sizes",
        ),
        pytest.param(
            (E4M3_32, Storage(E2M1)), (4, 300), "blocks of 32 and 128", id="packed-without-scales"
        ),
        pytest.param(
            (Storage(E4M3, Rank1()), E4M3_32), (4, 300), "span more than a block", id="rank-1"
        ),
        pytest.param(
            (E4M3_32, Storage(E4M3, Delayed(4))), (4, 300), "span more than a block", id="delayed"
        ),
        pytest.param((Storage(INT8),), (4, 300), "span more than a block", id="scale-of-all"),
        pytest.param((E4M3_32,), (4, 16), "span its last 2 axes", id="short-rows"),
        pytest.param((E4M3_32,), (9, 2, 3), "span its last 3 axes", id="two-short-axes"),
    ],
)
def test_what_no_kernel_can_cut(storages, shape, reason):
    assert reason in cut(storages, shape)
