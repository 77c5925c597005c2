"""One moving average as it lives between steps: trees of plain arrays, and one clock for all.

``codes`` and ``scales`` have the parameters' tree structure, and their arrays the parameters' rank,
so what is known of a parameter (its path, its partition) is known of its state. The settings travel
as static metadata of the whole average, not of its leaves.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qstate.kernels import filled
from qstate.numerics import Rank1, Scales, Storage, decode, encode, encode_unpacked, packed
from qstate.state._reset import Adaptive, Every, Monitor
from qstate.state._serialization import register_with_flax

SMALLEST_QUANTIZED = 4096
_SAVED = ("codes", "scales", "age", "mass", "monitor")

Exempt = Callable[[str, Any], bool]
Stored = tuple[Any, Scales]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Average:
    """A moving average of arrays shaped like the parameters.

    In paths the codes are named after their layout and the number of leaves that have it, as in
    ``mu.codes_e4m3_block128_float32_in_12``: a checkpoint of another layout does not fit, whatever
    its shapes.

    Attributes:
      codes: a tree like the parameters': codes, or float32 values of leaves that are kept exact;
        None for leaves that have no average (integers).
      scales: the same tree: scales, or None where a leaf has none; for `Rank1` a tuple of trees,
        one an axis.
      age: int32[], applied steps since the average last started over.
      mass: float32[], the bias-correction mass at age 0; 0 but after a soft reset.
      monitor: what an adaptive reset policy has seen, else None.
      storage: how the codes are held (static).
      shapes: for every leaf the shape it was encoded from, None if it is kept exact (static).
    """

    codes: Any
    scales: Any
    age: jax.Array
    mass: jax.Array
    monitor: Monitor | None
    storage: Storage
    shapes: tuple[tuple[int, ...] | None, ...]

    @property
    def layout(self) -> str:
        """A name for what has to agree for codes to be read."""
        quantized = sum(shape is not None for shape in self.shapes)
        return f"{self.storage.layout}_in_{quantized}"

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        children = (
            (key(f"codes_{self.layout}"), self.codes),
            (key("scales"), self.scales),
            (key("age"), self.age),
            (key("mass"), self.mass),
            (key("monitor"), self.monitor),
        )
        return children, (self.storage, self.shapes)

    def tree_flatten(self):
        children = (self.codes, self.scales, self.age, self.mass, self.monitor)
        return children, (self.storage, self.shapes)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


def small_leaf(path: str, leaf: Any) -> bool:
    """The default of ``exempt``: leaves of fewer than 4096 elements stay float32."""
    del path
    return math.prod(leaf.shape) < SMALLEST_QUANTIZED


def is_average(node: Any) -> bool:
    return isinstance(node, Average)


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree of arrays, None among them, and its structure."""
    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


def zeros(
    params: Any,
    storage: Storage,
    *,
    exempt: Exempt | None = None,
    policy: Every | Adaptive | None = None,
    others: bool = False,
) -> Average:
    """An average that has seen nothing, for a tree of parameters.

    Args:
      params: the parameters.
      storage: how its codes are held.
      exempt: which leaves are kept exact.
      policy: when it is reset.
      others: whether leaves that are no floats are held as well, as they are.
    """
    register_with_flax(Average, _SAVED, layout="layout")
    _, treedef = leaves_of(params)
    shapes, leaves = [], []
    for path, leaf in jax.tree.flatten_with_path(params, is_leaf=lambda x: x is None)[0]:
        shape = _quantized_shape(path, leaf, storage, exempt or small_leaf)
        shapes.append(shape)
        if shape is not None:
            blank = _blank(leaf, storage)
        elif has_average(leaf) or (others and leaf is not None):
            dtype = jnp.float32 if has_average(leaf) else leaf.dtype
            struct = jax.eval_shape(lambda x, dtype=dtype: x.astype(dtype), leaf)
            blank = filled(struct, 0, leaf), None
        else:
            _refuse_complex(path, leaf)
            blank = None, None
        leaves.append(blank)
    return Average(
        codes=treedef.unflatten(codes for codes, _ in leaves),
        scales=_scale_trees(leaves, treedef, storage),
        age=jnp.zeros([], jnp.int32),
        mass=jnp.zeros([], jnp.float32),
        monitor=Monitor.start() if isinstance(policy, Adaptive) else None,
        storage=storage,
        shapes=tuple(shapes),
    )


def has_average(leaf: Any | None) -> bool:
    """Whether a parameter or gradient is one that is averaged: of a floating dtype."""
    return leaf is not None and jnp.issubdtype(leaf.dtype, jnp.floating)


def stored_leaves(average: Average) -> tuple[list[Stored], Any]:
    """Codes and scales of every leaf, None among them, and the tree's structure."""
    codes, treedef = leaves_of(average.codes)
    if not isinstance(average.storage.scaling, Rank1):
        return list(zip(codes, treedef.flatten_up_to(average.scales), strict=True)), treedef
    axes = [treedef.flatten_up_to(tree) for tree in average.scales]
    scales = [tuple(axis[i] for axis in axes if axis[i] is not None) for i in range(len(codes))]
    return [(c, s or None) for c, s in zip(codes, scales, strict=True)], treedef


def with_leaves(average: Average, leaves: Sequence[Stored], **clock: Any) -> Average:
    """The average with other codes and scales, and other values of its clock."""
    _, treedef = leaves_of(average.codes)
    return dataclasses.replace(
        average,
        codes=treedef.unflatten(codes for codes, _ in leaves),
        scales=_scale_trees(leaves, treedef, average.storage),
        **clock,
    )


def _scale_trees(leaves: Sequence[Stored], treedef: Any, storage: Storage) -> Any:
    scales = [scales for _, scales in leaves]
    if not isinstance(storage.scaling, Rank1):
        return treedef.unflatten(scales)
    # A tree an axis, not a tuple a leaf: where a parameter has an array, its state has arrays.
    depth = max((len(s) for s in scales if s is not None), default=0)
    return tuple(
        treedef.unflatten(s[axis] if s is not None and axis < len(s) else None for s in scales)
        for axis in range(depth)
    )


def read(average: Average, i: int, codes: jax.Array, scales: Scales) -> jax.Array:
    """Leaf ``i`` of an average as float32."""
    shape = average.shapes[i]
    return codes if shape is None else decode(codes, scales, average.storage, shape)


def write(
    average: Average, i: int, x: jax.Array, bits: jax.Array | None, previous: Scales
) -> Stored:
    """Codes and scales of a new value (float32) of leaf ``i``; ``previous`` are its old scales."""
    shape = average.shapes[i]
    if shape is None:
        return x, None
    codes, scales = encode_unpacked(x, average.storage, bits, previous)
    return packed(codes, average.storage, shape), scales


def dequantize_average(average: Average) -> Any:
    """An average as a tree of float32 arrays, None where a leaf has none."""
    leaves, treedef = stored_leaves(average)
    return treedef.unflatten(
        None if codes is None else read(average, i, codes, scales)
        for i, (codes, scales) in enumerate(leaves)
    )


def _quantized_shape(path, leaf: Any, storage: Storage, exempt: Exempt) -> tuple[int, ...] | None:
    if leaf is None or not has_average(leaf) or storage.exact or math.prod(leaf.shape) == 0:
        return None
    return None if exempt(path_name(path), leaf) else tuple(leaf.shape)


def _refuse_complex(path, leaf: Any) -> None:
    if leaf is not None and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            f"{path_name(path)} is complex; averages are of real numbers: keep its real and "
            "imaginary parts as two leaves, or mask it with optax.masked"
        )


def path_name(path: Any) -> str:
    """A leaf's path as users write it: ``"layers/0/kernel"``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _blank(leaf: Any, storage: Storage) -> tuple[jax.Array, Scales]:
    """What zeros are encoded as, without encoding them: all codes and scales are 0."""
    blank = jax.eval_shape(lambda x: encode(x, storage, key=0), leaf)
    return jax.tree.map(lambda struct: filled(struct, 0, leaf), blank)
