"""What is compiled in these tests."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import qstate
from qstate.cli._targets import CompilerMissing, Target


def installed(target: Target) -> Target:
    """The target, if its compiler is there; else the test is skipped."""
    try:
        target.devices()
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    return target


def arrays(shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.float32) -> list[Any]:
    """Leaves of those shapes, without numbers."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def adam(target: Target, mu: qstate.Storage, nu: qstate.Storage, **more: Any) -> Any:
    """The transformation, by the kernel for a target."""
    return qstate.scale_by_adam(
        mu_storage=mu, nu_storage=nu, implementation=target.implementation, **more
    )


def stored_arrays(state: Any) -> int:
    """How many arrays of codes and scales a state has."""
    averages = state.mu, state.nu
    return len(jax.tree.leaves([(average.codes, average.scales) for average in averages]))


def state_first(tx: optax.GradientTransformationExtraArgs) -> Callable[[Any, Any], Any]:
    """Its update, returning the state first, as donating it asks for."""
    return lambda gradients, state: tx.update(gradients, state)[::-1]
