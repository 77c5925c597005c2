"""The order in which a kernel takes its operands and gives its results."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qstate.kernels._program import Program, Stored
from qstate.numerics import Storage

_BEFORE = 2  # the scalars, and the offset with the seeds


class Operands(NamedTuple):
    """Of a kernel, or their references inside of it.

    In this order: the scalars, ``float32[scalars]``; the offset and the seeds,
    ``uint32[2 + 2 * hashes]``; dense operands; codes and scales that are read; and of the results
    outputs; codes and scales that are written.
    """

    dense: Sequence[Any]
    read: Sequence[Any]  # pairs of codes and scales, None for scales of a storage without
    outputs: Sequence[Any]
    written: Sequence[Any]


def gathered(
    scalars: Mapping[str, jax.Array],
    offset: jax.Array,
    seeds: jax.Array,
    dense: Sequence[jax.Array],
    stored: Sequence[Stored],
) -> list[jax.Array]:
    """Everything that goes into a kernel."""
    values = [scalars[name] for name in sorted(scalars)] or [jnp.float32(0)]
    return [jnp.stack(values), jnp.concatenate([offset, seeds]), *dense, *flat(stored)]


def named(
    program: Program, scalars: Sequence[str], values: Any, refs: Sequence[Any]
) -> tuple[dict[str, Any], Operands]:
    """The scalars by name, and what is behind the offset and the seeds.

    Args:
      program: what the kernel computes.
      scalars: their names.
      values: the first operand.
      refs: all references behind the second one.
    """
    reads, writes = _arrays(program.reads), _arrays(program.writes)
    outputs = len(program.dtypes)
    dense = len(refs) - reads - outputs - writes
    operands, results = refs[: dense + reads], refs[dense + reads :]
    return {name: values[k] for k, name in enumerate(sorted(scalars))}, Operands(
        dense=operands[:dense],
        read=pairs(program.reads, operands[dense:]),
        outputs=results[:outputs],
        written=pairs(program.writes, results[outputs:]),
    )


def aliases(program: Program, dense: int) -> dict[int, int]:
    """Which result takes the memory of which operand, of a program with that many dense ones."""
    found = {_BEFORE + d: k for k, d in enumerate(program.onto) if d is not None}
    if program.in_place:
        first, outputs = _BEFORE + dense, len(program.dtypes)
        found |= {first + k: outputs + k for k in range(_arrays(program.reads))}
    return found


def flat(stored: Sequence[Stored]) -> list[Any]:
    """Codes and scales, one array after the other, as in `Geometry.structs`."""
    return [x for pair in stored for x in pair if x is not None]


def pairs(storages: Sequence[Storage], arrays: Sequence[Any]) -> list[Any]:
    """The inverse of `flat`: ``(codes, scales)``, None for scales of a storage without."""
    rest = iter(arrays)
    return [(next(rest), next(rest) if s.has_scales else None) for s in storages]


def _arrays(storages: Sequence[Storage]) -> int:
    return sum(2 if s.has_scales else 1 for s in storages)
