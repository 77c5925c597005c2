"""The optimizer steps that are timed or compiled, and the shapes of what they update."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import qstate

# One list for the benchmark and the tests: matrices of a language model of 7 billion parameters.
SHAPES = {
    "small": ((1024, 4096),),
    "squares": ((4096, 4096),) * 3,
    "mlp": ((4096, 11008),),
    "embedding": ((32000, 4096),),
}
STORAGES = ("fp32", "bf16", "fp8", "fp4", "int8", "int4")
REFERENCE = "optax.adamw"
PEER = "flashoptim-jax"
_LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Step:
    """One way to take an optimizer step.

    Attributes:
      optimizer: what takes it.
      call: how: ``"update"``, which is ``tx.update`` and `optax.apply_updates`, or ``"step"``.
      init: the state for parameters.
      advance: ``(params, state, grads) -> (params, state)``.
    """

    optimizer: str
    call: str
    init: Callable[[Any], Any]
    advance: Callable[[Any, Any, Any], tuple[Any, Any]]


def steps_of(
    storages: Sequence[str], *, implementation: str | None = None, peer: bool = False
) -> list[Step]:
    """optax's AdamW in float32, every storage by both calls, and another package's.

    Raises:
      ModuleNotFoundError: if the other package is asked for and not installed.
    """
    reference = optax.adamw(_LEARNING_RATE)
    steps = [Step(REFERENCE, "update", reference.init, _by_update(reference))]
    for name in storages:
        tx = qstate.adamw(_LEARNING_RATE, storage=name, implementation=implementation)
        by_step = functools.partial(_by_step, tx)
        steps += [
            Step(f"qstate {name}", "step", tx.init, by_step),
            Step(f"qstate {name}", "update", tx.init, _by_update(tx)),
        ]
    return [*steps, _peer()] if peer else steps


def arrays(shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.float32) -> dict[str, Any]:
    """A tree of leaves of those shapes, without numbers."""
    return {str(i): jax.ShapeDtypeStruct(shape, dtype) for i, shape in enumerate(shapes)}


def _by_step(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    return qstate.step(tx, grads, state, params)


def _by_update(tx: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    def advance(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return advance


def _peer() -> Step:
    """The JAX port of FlashOptim, https://arxiv.org/abs/2602.23349."""
    if importlib.util.find_spec("flashoptim_jax") is None:
        raise ModuleNotFoundError(f"{PEER} is not installed: pip install {PEER}")
    from flashoptim_jax import flash_adamw  # pyright: ignore[reportMissingImports]

    # Its kernel is for GPUs, and float32 parameters have no master weights.
    on_gpu = jax.default_backend() == "gpu"
    tx = flash_adamw(_LEARNING_RATE, master_weight_bits=None, fused=on_gpu)
    return Step(PEER, "step", tx.init, tx.step)
