"""Which implementation runs a program on a leaf.

- ``"pallas_tpu"`` and ``"pallas_gpu"``: one kernel, each byte moved once.
- ``"tiled_xla"``: a few fused loops, in place; runs everything everywhere.
- ``"reference"``: the same operations with nothing done about speed or memory.

All give the same bits. A name runs or raises; None takes the first that can run.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from qstate.kernels import _gpu, _tpu, _xla
from qstate.kernels._gate import Gate
from qstate.kernels._geometry import Geometry, geometry
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
    jax.jit, static_argnames=("program", "shape", "implementation", "interpret"), inline=True
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
      interpret: for tests: run a kernel on any machine, slowly.

    Returns:
      The outputs; the codes and scales that are written; ``passed`` for the next leaf.

    Raises:
      ValueError: for an implementation that cannot run this.
    """
    operands = dense, stored, scalars, words, passed
    plain = functools.partial(_plain, program, shape)
    if implementation == "reference":
        return _plain(program, shape, *operands, gated=False)
    if implementation == "tiled_xla":
        return lax.platform_dependent(
            *operands, cpu=functools.partial(plain, on_cpu=True), default=plain
        )
    if implementation is not None:
        reason = _unsupported(implementation, program, shape)
        if reason is not None:
            raise ValueError(
                f"implementation={implementation!r} cannot run this: {reason}; use None, which "
                "takes what can"
            )
        return _kernel(implementation, program, shape, *operands, interpret=interpret)
    branches = {"cpu": functools.partial(plain, on_cpu=True)}
    if jax.device_count() == 1:  # a kernel does not know how its operands are partitioned
        for platform, name in (("tpu", "pallas_tpu"), ("cuda", "pallas_gpu")):
            if _unsupported(name, program, shape) is None:
                branches[platform] = functools.partial(_kernel, name, program, shape)
    return lax.platform_dependent(*operands, **branches, default=plain)


def _unsupported(name: str, program: Program, shape: tuple[int, ...]) -> str | None:
    """Why a kernel cannot run a program on a leaf of that shape; None if it can."""
    found = geometry(program, shape)
    return found if isinstance(found, str) else _KERNELS[name].supports(program, found)


def _plain(
    program, shape, dense, stored, scalars, words, passed, *, on_cpu=False, gated=True
) -> Result:
    gate = Gate(passed if gated else None)
    outputs, written = _xla.run(program, shape, dense, stored, scalars, words, gate, on_cpu=on_cpu)
    return outputs, written, passed if gate.passed is None else gate.passed


def _kernel(
    name, program, shape, dense, stored, scalars, words, passed, *, interpret=False
) -> Result:
    found = geometry(program, shape)
    assert isinstance(found, Geometry)
    seeds = [seed for h in range(program.hashes) for seed in place_seeds(words[h])]
    outputs, written = _KERNELS[name].run(
        program,
        found,
        [x.reshape(found.rows, found.columns) for x in dense],
        [_reshaped(pair, (found.rows,)) for pair in stored],
        scalars,
        jnp.stack(seeds) if seeds else jnp.zeros(0, jnp.uint32),
        jnp.zeros(2, jnp.uint32),
        interpret=interpret,
    )
    return (
        [x.reshape(shape) for x in outputs],
        [_reshaped(pair, shape[:-1]) for pair in written],
        passed,
    )


def _reshaped(pair: Stored, leading: tuple[int, ...]) -> Stored:
    """Codes and scales with other leading axes."""
    codes, scales = pair
    return codes.reshape(*leading, codes.shape[-1]), (
        None if scales is None else scales.reshape(*leading, scales.shape[-1])
    )
