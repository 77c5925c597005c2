"""What a state holds: leaf by leaf, in bytes, and as plain float32 trees."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qstate.report._table import aligned
from qstate.state import dequantize_average, is_average, path_name, stored_leaves


class Row(NamedTuple):
    """One leaf of a state."""

    path: str
    shape: tuple[int, ...]
    storage: str
    bytes: int


class Table(list[Row]):
    """Rows that print as an aligned table with a total."""

    def __str__(self) -> str:
        cells = [("path", "shape", "storage", "bytes")]
        cells += [(r.path, str(r.shape), r.storage, f"{r.bytes:,}") for r in self]
        cells += [("total", "", "", f"{sum(r.bytes for r in self):,}")]
        lines = aligned(cells, texts=3)
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    __repr__ = __str__


def describe(opt_state: Any) -> Table:
    """What every leaf of an optimizer state is held in, and what it takes.

    Args:
      opt_state: the state of any optax transformation.

    Returns:
      Rows ``(path, shape, storage, bytes)``, one for every leaf of an average (its codes and scales
      together) and one for every other array; printed, a table.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> tx = qstate.scale_by_adam(nu_storage=qstate.storage("fp8")[1])
      >>> print(qstate.describe(tx.init({"w": jnp.ones((64, 128))})))
      path   shape      storage                                    bytes
      ------------------------------------------------------------------
      count  ()         int32                                          4
      mu/w   (64, 128)  f32                                       32,768
      mu     ()         age and mass                                   8
      nu/w   (64, 128)  e4m3 without zero, block 128, stochastic   8,448
      nu     ()         age and mass                                   8
      key    (2,)       uint32                                         8
      ------------------------------------------------------------------
      total                                                       41,244
    """
    rows = Table()
    for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=is_average):
        name = path_name(path)
        if is_average(node):
            rows += _average_rows(name, node)
        else:
            rows.append(Row(name, jnp.shape(node), str(jnp.result_type(node)), nbytes(node)))
    return rows


def nbytes(opt_state: Any) -> int:
    """Bytes of all arrays in an optimizer state.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> tx = qstate.adamw(1e-3, storage="fp4")
      >>> qstate.nbytes(tx.init(jnp.ones((1024, 1024)))) / 2**20
      1.0625...
    """
    return sum(
        math.prod(jnp.shape(leaf)) * jnp.result_type(leaf).itemsize
        for leaf in jax.tree.leaves(opt_state)
    )


def dequantize(opt_state: Any) -> Any:
    """An optimizer state with a float32 tree in place of every stored average.

    Args:
      opt_state: the state of a qstate transformation, or of a chain that has one.

    Returns:
      The same NamedTuples. Integer leaves, which have no average, are None.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> state = qstate.adamw(1e-3).init({"w": jnp.ones((64, 128))})
      >>> qstate.dequantize(state)[0].nu["w"].dtype
      dtype('float32')
    """
    return jax.tree.map(
        lambda node: dequantize_average(node) if is_average(node) else node,
        opt_state,
        is_leaf=is_average,
    )


def _average_rows(name: str, average) -> list[Row]:
    paths = jax.tree.flatten_with_path(average.codes, is_leaf=lambda x: x is None)[0]
    leaves, _ = stored_leaves(average)
    rows = []
    for (path, _), (code, scale), shape in zip(paths, leaves, average.shapes, strict=True):
        if code is not None:
            leaf = path_name(path)
            exact = "f32" if code.dtype == jnp.float32 else str(code.dtype)
            held = exact if shape is None else str(average.storage)
            full = "/".join(part for part in (name, leaf) if part)
            rows.append(Row(full, shape or code.shape, held, nbytes((code, scale))))
    clock = nbytes((average.age, average.mass, average.monitor))
    return [*rows, Row(name, (), "age and mass", clock)]
