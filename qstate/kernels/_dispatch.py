"""Which implementation runs a program on a leaf.

- ``"pallas_tpu"`` and ``"pallas_gpu"``: one kernel, each byte moved once.
- ``"tiled_xla"``: a few fused loops, in place; runs everything everywhere.
- ``"reference"``: the same operations with nothing done about speed or memory.

All give the same bits. A name runs or raises; None takes the first that can run.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from qstate.kernels import _gpu, _tpu, _xla
from qstate.kernels._gate import Gate
from qstate.kernels._geometry import Geometry, geometry
from qstate.kernels._partition import (
    LOCAL,
    Placement,
    Shard,
    on_every_shard,
    runs_on,
    shard_of,
)
from qstate.kernels._program import Program, Stored
from qstate.numerics import place_seeds

IMPLEMENTATIONS = ("reference", "tiled_xla", "pallas_tpu", "pallas_gpu")
_KERNELS = {"pallas_tpu": _tpu, "pallas_gpu": _gpu}

Result = tuple[list[jax.Array], list[Stored], jax.Array]


def check_implementation(implementation: str | None) -> None:
    """Refuses a name that is none.

    Raises:
      ValueError: with the names there are.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is None or one of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}"
        )


@functools.partial(
    jax.jit,
    static_argnames=("program", "shape", "implementation", "placement", "interpret"),
    inline=True,
)
def run(
    program: Program,
    shape: tuple[int, ...],
    dense: Sequence[jax.Array],
    stored: Sequence[Stored],
    scalars: Mapping[str, jax.Array],
    words: jax.Array,
    passed: jax.Array,
    *,
    implementation: str | None = None,
    placement: Placement = LOCAL,
    interpret: bool = False,
) -> Result:
    """Runs a program on a leaf.

    Args:
      program: what to compute.
      shape: of the leaf.
      dense: dense operands, of that shape, in any floating dtype.
      stored: codes and scales that are read.
      scalars: the program's scalars, float32[].
      words: uint32[hashes, 2], keys of the random bits.
      passed: int32[], above 0: what the leaf before returned.
      implementation: a name, or None.
      placement: where the leaf lies; see `placement_of`.
      interpret: for tests: run a kernel on any machine, slowly.

    Returns:
      The outputs; the codes and scales that are written; ``passed`` for the next leaf.

    Raises:
      ValueError: for an implementation that cannot run this.
    """
    operands = dense, stored, scalars, words, passed
    plain = functools.partial(_plain, program, shape)
    if implementation == "reference" or math.prod(shape) == 0:
        return _plain(program, shape, *operands, gated=False)
    if implementation == "tiled_xla":
        return lax.platform_dependent(
            *operands, cpu=functools.partial(plain, on_cpu=True), default=plain
        )
    if implementation is not None:
        # Who names a kernel where nothing is known of the partition says that there is none.
        planned = _plan(implementation, program, shape, placement or LOCAL)
        if isinstance(planned, str):
            raise ValueError(
                f"implementation={implementation!r} cannot run this: {planned}; use None, which "
                "takes what can"
            )
        return _kernel(implementation, program, shape, planned, *operands, interpret=interpret)
    branches = {"cpu": functools.partial(plain, on_cpu=True)}
    for platform, name in (("tpu", "pallas_tpu"), ("cuda", "pallas_gpu")):
        planned = _plan(name, program, shape, placement)
        if isinstance(planned, str):
            if isinstance(placement, NamedSharding) and runs_on(placement) == platform:
                _say_that_no_kernel_runs(shape, planned)
        else:
            branches[platform] = functools.partial(_kernel, name, program, shape, planned)
    return lax.platform_dependent(*operands, **branches, default=plain)


@functools.cache
def _say_that_no_kernel_runs(shape: tuple[int, ...], reason: str) -> None:
    """Once for every shape."""
    warnings.warn(
        f"the step of parameters {shape} runs as plain loops, not as one kernel: {reason}",
        stacklevel=2,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a kernel runs on a leaf: what it sees, and which part of the leaf that is."""

    geometry: Geometry
    shard: Shard | None  # None: all of it


def _plan(name: str, program: Program, shape: tuple[int, ...], placement: Placement) -> _Plan | str:
    """How a kernel runs on a leaf, or why it cannot."""
    if placement is None:
        return "it is not known how its arrays are partitioned"
    whole = geometry(program, shape)
    if isinstance(whole, str):
        return whole
    if placement == LOCAL:
        return _KERNELS[name].supports(program, whole) or _Plan(whole, None)
    assert isinstance(placement, NamedSharding)
    shard = shard_of(shape, placement, whole.block)
    if isinstance(shard, str):
        return shard
    rows, columns = math.prod(shard.shape[:-1]), shard.shape[-1]
    part = Geometry(rows, columns, whole.block, shard.run, shard.stride)
    return _KERNELS[name].supports(program, part) or _Plan(part, shard)


def _plain(
    program, shape, dense, stored, scalars, words, passed, *, on_cpu=False, gated=True
) -> Result:
    gate = Gate(passed, shut=gated)
    outputs, written = _xla.run(program, shape, dense, stored, scalars, words, gate, on_cpu=on_cpu)
    return outputs, written, gate.passed


def _kernel(
    name, program, shape, plan: _Plan, dense, stored, scalars, words, passed, *, interpret=False
) -> Result:
    del shape

    def run(dense, stored, scalars, words, passed):
        offset = jnp.zeros(2, jnp.uint32) if plan.shard is None else plan.shard.offset()
        results = _on_rows(
            name, program, plan.geometry, dense, stored, scalars, words, offset, interpret
        )
        return *results, passed

    if plan.shard is None:
        return run(dense, stored, scalars, words, passed)
    return on_every_shard(run, plan.shard, dense, stored, scalars, words, passed)


def _on_rows(
    name, program, found: Geometry, dense, stored, scalars, words, offset, interpret
) -> tuple[list[jax.Array], list[Stored]]:
    """A kernel on a leaf of any rank."""
    leading = (dense[0] if dense else stored[0][0]).shape[:-1]
    shape = dense[0].shape if dense else (*leading, found.columns)
    seeds = [seed for h in range(program.hashes) for seed in place_seeds(words[h])]
    outputs, written = _KERNELS[name].run(
        program,
        found,
        [x.reshape(found.rows, found.columns) for x in dense],
        [_reshaped(pair, (found.rows,)) for pair in stored],
        scalars,
        jnp.stack(seeds) if seeds else jnp.zeros(0, jnp.uint32),
        offset,
        interpret=interpret,
    )
    return (
        [x.reshape(shape) for x in outputs],
        [_reshaped(pair, leading) for pair in written],
    )


def _reshaped(pair: Stored, leading: tuple[int, ...]) -> Stored:
    """Codes and scales with other leading axes."""
    codes, scales = pair
    return codes.reshape(*leading, codes.shape[-1]), (
        None if scales is None else scales.reshape(*leading, scales.shape[-1])
    )
