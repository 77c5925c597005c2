"""What one pass over a leaf computes: the interface between a rule and the backends.

A program is written for arrays of any shape and never sees a code. Backends hand it pieces: a tile,
a block, the halves of a block. It must be elementwise, and take every traced number as a scalar.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from qstate.numerics import Storage

Scalars = Mapping[str, jax.Array]
Arrays = Sequence[jax.Array]
Stored = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Program:
    """One pass: read what is stored, compute, store again.

    Attributes:
      advance: ``(scalars, dense, old) -> fresh``: new averages (float32) from old ones.
      emit: ``(scalars, dense, fresh) -> outputs``: the dense results, float32.
      keep: ``(scalars, fresh) -> kept``: what is stored of the new averages.
      reads: storages of what is read; none for a program that only encodes.
      writes: storages of what is written: the same ones, or none for a program that only decodes.
      dtypes: dtypes of the outputs.
      onto: for every output the dense operand whose memory it takes, or None.
    """

    advance: Callable[[Scalars, Arrays, Arrays], Arrays]
    emit: Callable[[Scalars, Arrays, Arrays], Arrays]
    keep: Callable[[Scalars, Arrays], Arrays]
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    dtypes: tuple[Any, ...]
    onto: tuple[int | None, ...]

    @property
    def storages(self) -> tuple[Storage, ...]:
        return self.reads or self.writes

    @property
    def in_place(self) -> bool:
        """Whether what is written takes the memory of what is read."""
        return bool(self.reads) and bool(self.writes)

    @property
    def packed(self) -> bool:
        return any(s.packed for s in self.storages)

    @property
    def hashes(self) -> int:
        """How many words of random bits an element needs: one serves two averages."""
        stochastic = [j for j, s in enumerate(self.writes) if s.stochastic]
        return max(stochastic) // 2 + 1 if stochastic else 0
