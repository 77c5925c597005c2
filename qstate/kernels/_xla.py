"""The pass in plain XLA, in place: the way on CPUs, and the fallback everywhere.

No loop fits all of it: XLA fuses no two results into one, and runs what updates a slice in place on
one thread. So it is a few loops over the whole leaf, each of them fused, each on all threads:
codes are read and the outputs computed; then, for one average after the other, the largest of every
block is found, and the codes are written where the old ones were. They go through a gate, so that
nothing still reads the old codes when they are overwritten: no copy of them is made, and no average
is ever in memory in float32. All is elementwise, or within a block: whatever the partition, XLA
keeps to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qstate.kernels._gate import Gate
from qstate.kernels._program import Program, Stored
from qstate.kernels._views import Randomness, View, views
from qstate.numerics import (
    Block,
    Storage,
    decode_by_half,
    decode_scaled,
    decode_unscaled,
    encode_scaled,
    encode_unscaled,
    magnitudes,
    narrow_scale,
    pack,
    scale_number,
    unpack,
    widen_scale,
)


def run(
    program: Program,
    shape: tuple[int, ...],
    dense: Sequence[jax.Array],
    stored: Sequence[Stored],
    scalars: Mapping[str, jax.Array],
    words: jax.Array,
    gate: Gate,
    *,
    on_cpu: bool = False,
) -> tuple[list[jax.Array], list[Stored]]:
    """Runs a program on a leaf of any shape, with any storages.

    Args:
      program: what to compute.
      shape: of the leaf.
      dense: dense operands, of that shape.
      stored: codes and scales that are read.
      scalars: the program's scalars, float32[].
      words: uint32[hashes, 2], keys of the random bits.
      gate: what the loops pass through, one after the other.
      on_cpu: whether to take ways that are fast on CPUs alone; the numbers are the same.

    Returns:
      The outputs, and the codes and scales that are written.
    """
    leaf = _Leaf(program, shape, dense, stored, scalars, words, gate, on_cpu)
    outputs = leaf.emit() if program.dtypes else []
    return outputs, [leaf.write(j) for j in range(len(program.writes))]


class _Leaf:
    """A program's operands for one leaf, as they go through the gate."""

    def __init__(self, program, shape, dense, stored, scalars, words, gate: Gate, on_cpu: bool):
        self._program, self._scalars, self._gate, self._on_cpu = program, scalars, gate, on_cpu
        self._views = views(program.storages, shape)
        self._dense, self._shape = dense, shape
        self._random = [Randomness(words[h], shape) for h in range(program.hashes)]
        self._scales = [scales for _, scales in stored]
        self._codes = [
            self._unpack(codes, storage, view)
            for (codes, _), storage, view in zip(stored, program.reads, self._views, strict=False)
        ]

    def emit(self) -> list[jax.Array]:
        """The outputs."""
        program, view = self._program, self._views[0]
        dense = [view.enter(x) for x in self._dense]
        sources = [source for source in program.onto if source is not None]

        def step(updated):
            operands = list(dense)
            for source, x in zip(sources, updated, strict=True):
                operands[source] = x
            rows = [view.rows(x).astype(jnp.float32) for x in operands]
            results = program.emit(self._scalars, rows, self._fresh(view, operands, self._codes))
            results = [
                view.leave(x.astype(dtype))
                for x, dtype in zip(results, program.dtypes, strict=True)
            ]
            pairs = list(zip(results, program.onto, strict=True))
            return [x for x, onto in pairs if onto is None], [
                x for x, onto in pairs if onto is not None
            ]

        new, in_place = map(iter, self._gate(step, [dense[source] for source in sources]))
        results = (next(new if onto is None else in_place) for onto in program.onto)
        return [view.exit(x).reshape(self._shape) for x in results]

    def write(self, j: int) -> Stored:
        """Codes and scales of average ``j``."""
        program, storage, view = self._program, self._program.writes[j], self._views[j]
        dense = [view.enter(x) for x in self._dense]
        by_block = isinstance(storage.scaling, Block)
        parts = view.parts if storage.packed else (None,)

        def kept(codes, part):
            old = [*self._codes[:j], codes, *self._codes[j + 1 :]] if program.reads else []
            return program.keep(self._scalars, self._fresh(view, dense, old, part))[j]

        def measure(_):
            own = self._codes[j] if program.reads else None
            found = [kept(own, part) for part in (parts if by_block else (None,))]
            found = [view.emptied(x) for x in magnitudes(found, storage)]
            return (view.maximum(found) if by_block else self._measure(found[0], j)), None

        def encode(own):
            codes, previous = own
            xs = [kept(codes, part) for part in parts]
            random = self._random[j // 2] if storage.stochastic else None
            bits = [random and random.bits(view, j, part) for part in parts]
            if not storage.has_scales:
                new = [encode_unscaled(x, storage, b) for x, b in zip(xs, bits, strict=True)]
                return self._joined(new, storage, view), None
            new, scales = [], None
            # Only the parts of a block have something to settle among them.
            for group in [parts] if by_block else [(part,) for part in parts]:
                taken = slice(len(new), len(new) + len(group))
                codes, scales = encode_scaled(
                    xs[taken],
                    storage,
                    bits[taken],
                    measured,
                    measure=view.maximum,
                    spread=lambda scales, part=group[0]: view.spread(storage, scales, part),
                    previous=previous,
                )
                new += codes
            scales = jax.tree.map(lambda w: narrow_scale(w, storage.scaling.scale), scales)
            return self._joined(new, storage, view), scales

        measured = self._gate(measure)[0] if storage.has_scales else None
        if program.reads:
            own = self._codes[j], self._scales[j]
            _, (codes, scales) = self._gate(lambda own: (None, encode(own)), own)
        else:
            (codes, scales), _ = self._gate(lambda _: (encode((None, None)), None))
        return self._pack(codes, storage, view), scales

    def _measure(self, rows: jax.Array, j: int) -> Any:
        view = self._views[j]
        return self._program.writes[j].scaling.measure(view.whole(rows), view.blocks)

    def _fresh(
        self, view: View, dense: Sequence[jax.Array], codes: Sequence[Any], part: int | None = None
    ) -> Any:
        """The new averages, as rows of a view; ``dense`` and ``codes`` as they go through."""
        rows = [view.rows(x, part).astype(jnp.float32) for x in dense]
        reads = self._program.reads
        old = [
            view.rows_of(self._decode(c, scales, storage, own, view, part), own, part)
            for c, scales, storage, own in zip(
                codes, self._scales, reads, self._views[: len(reads)], strict=True
            )
        ]
        return self._program.advance(self._scalars, rows, old)

    def _decode(self, codes: jax.Array, scales: Any, storage: Storage, own: View, view: View, part):
        """Rows of an average's own view; a part of them where the other view has the same."""
        part = part if own.blocks == view.blocks else None
        shared = storage.packed and own.halved
        codes = own.codes(codes, part) if shared else own.rows(codes, part)
        if not storage.has_scales:
            return decode_unscaled(storage.format.widen(codes), storage)
        numbers = jax.tree.map(lambda s: scale_number(widen_scale(s)), scales)
        scale = own.spread(storage, numbers, part)
        if self._on_cpu and storage.format.fits_half:
            return decode_by_half(codes, scale, storage, self._gate.open)
        return decode_scaled(storage.format.widen(codes), scale, storage)

    def _joined(self, parts: Sequence[jax.Array], storage: Storage, view: View) -> jax.Array:
        """Codes as they go through the gate."""
        code = parts[0] if len(parts) == 1 else parts[0] | (parts[1] << 4)
        return view.leave(storage.format.narrow(code))

    # Where bytes are not shared by halves that have an axis of their own, loops over them are slow,
    # and best on their own.

    def _unpack(self, codes: jax.Array, storage: Storage, view: View) -> jax.Array:
        if not storage.packed:
            return view.enter(codes)
        if view.halved:
            return view.enter_bytes(codes)
        return self._gate(lambda _: (view.leave(unpack(codes, view.blocks)), None))[0]

    def _pack(self, codes: jax.Array, storage: Storage, view: View) -> jax.Array:
        if not storage.packed:
            return view.exit(codes)
        if view.halved:
            return view.exit_bytes(codes)
        return self._gate(lambda _: (pack(view.rows(codes), view.blocks), None))[0]
