"""An average as it lies between steps: trees of plain arrays, and static settings beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qstate
from qstate.state import Average, dequantize_average, is_average, small_leaf, zeros

NAMES = ("bf16", "fp8", "fp4", "int8", "int4")


def test_leaves_are_plain_arrays_with_the_parameters_structure():
    params = {"a": jnp.ones((64, 128)), "b": [jnp.ones(3), None], "c": jnp.arange(4)}
    average = zeros(params, qstate.storage("fp8")[0])
    assert average.codes["b"][1] is None
    assert average.codes["c"] is None
    assert average.scales["b"][0] is None
    assert average.shapes == ((64, 128), None, None, None)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(average))
    assert (average.age.dtype, average.mass.dtype) == (jnp.int32, jnp.float32)
    assert average.monitor is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moment", [0, 1], ids=["mu", "nu"])
@pytest.mark.parametrize("shape", [(3, 5, 300), (4097, 3)], ids=str)
def test_a_blank_average_is_what_zeros_are_encoded_as(name, moment, shape):
    storage = qstate.storage(name)[moment]
    blank = zeros(jnp.ones(shape), storage, exempt=lambda path, leaf: False)
    encode = jax.jit(lambda x: qstate.numerics.encode(x, storage, key=0))
    codes, scales = encode(jnp.zeros(shape))
    for held, encoded in ((blank.codes, codes), (blank.scales, scales)):
        assert jax.tree.structure(held) == jax.tree.structure(encoded)
        jax.tree.map(np.testing.assert_array_equal, held, encoded)
        assert [h.dtype for h in jax.tree.leaves(held)] == [
            e.dtype for e in jax.tree.leaves(encoded)
        ]
    np.testing.assert_array_equal(jax.jit(dequantize_average)(blank), np.zeros(shape))


def test_settings_are_static():
    average = zeros(jnp.ones((64, 128)), qstate.storage("fp4")[1])
    leaves, treedef = jax.tree.flatten(average)
    assert len(leaves) == 4
    again = treedef.unflatten(leaves)
    assert isinstance(again, Average)
    assert (again.storage, again.shapes) == (average.storage, average.shapes)
    other = jax.tree.structure(zeros(jnp.ones((64, 128)), qstate.storage("fp4")[0]))
    assert other != treedef


def test_paths_name_the_layout_and_the_parameter():
    # Checkpoints name arrays by their paths: one of another layout does not fit.
    average = zeros({"a": {"b": jnp.ones((64, 128))}}, qstate.storage("fp8")[0])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(average)]
    codes = ".codes_e4m3_block128_float32_in_1['a']['b']"
    assert paths == [codes, ".scales['a']['b']", ".age", ".mass"]


def test_the_paths_of_all_layouts_differ():
    block = qstate.Block
    storages = [
        qstate.Storage(qstate.F32),
        qstate.Storage(qstate.BF16),
        qstate.Storage(qstate.F16),
        *(qstate.Storage(qstate.E4M3, scaling) for scaling in (
            qstate.NoScale(), qstate.PerTensor(), qstate.Rank1(), block(128), block(64),
            block(128, scale="bfloat16"), block(128, scale="power_of_two"),
        )),
        qstate.Storage(qstate.E4M3, block(128), domain="sqrt"),
        *(qstate.Storage(format, block(128)) for format in (
            qstate.E5M2, qstate.E2M1, qstate.UE2M2, qstate.UE4M4, qstate.INT8,
            qstate.DYNAMIC8, qstate.UDYNAMIC8, qstate.DYNAMIC4, qstate.ULINEAR4,
        )),
    ]  # fmt: skip
    average = [zeros(jnp.ones((64, 128)), storage) for storage in storages]
    paths = {jax.tree_util.keystr(jax.tree.leaves_with_path(a)[0][0]) for a in average}
    assert len(paths) == len(storages)
    nearest, stochastic = (
        zeros(jnp.ones((64, 128)), qstate.Storage(qstate.E4M3, block(128), rounding))
        for rounding in ("nearest", "stochastic")
    )
    path = lambda a: jax.tree.leaves_with_path(a)[0][0]  # noqa: E731
    assert path(nearest) == path(stochastic)


@pytest.mark.parametrize(
    ("shape", "small"),
    [((4095,), True), ((4096,), False), ((64, 64), False), ((63, 65), True), ((), True),
     ((0, 9999), True)],
    ids=str,
)  # fmt: skip
def test_leaves_under_4096_elements_are_small(shape, small):
    assert small_leaf("any", jax.ShapeDtypeStruct(shape, jnp.float32)) == small


def test_empty_leaves_are_never_encoded():
    average = zeros(jnp.ones((0, 3)), qstate.storage("fp8")[0], exempt=lambda path, leaf: False)
    assert average.shapes == (None,)
    assert average.codes.shape == (0, 3)


def test_a_shape_is_enough_to_start_from():
    struct = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    average = zeros(struct, qstate.storage("fp8")[0])
    assert is_average(average)
    assert not is_average((average,))
    assert average.codes.dtype == jnp.uint8
