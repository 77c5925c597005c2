"""One after the other: the order that XLA's schedulers do not keep by themselves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax import lax

from qstate.kernels._filled import filled


class Gate:
    """Lets one step after the other pass, so that they share their temporaries.

    A step runs in a branch that is taken when the step before is done. Nothing less keeps XLA's
    schedulers from starting all at once, or its fusions from computing what a step returns anew for
    everyone who needs it. Outside of a trace operations run in order anyway.

    Args:
      passed: int32[], above 0, which the compiler must not know.
      shut: whether steps wait for each other; else they are left to the compiler.
    """

    def __init__(self, passed: jax.Array, *, shut: bool = True):
        self.passed = passed  # what the next gate starts from
        self._shut = shut and isinstance(passed, jax.core.Tracer)

    def __call__(self, step: Callable[[Any], tuple[Any, Any]], updated: Any = None) -> Any:
        """``step(updated)``, after all steps before.

        Args:
          step: returns results, and what it updated in place.
          updated: arrays that it updates in place.
        """
        if not self._shut:
            return step(updated)
        results, _ = jax.eval_shape(step, updated)
        self.passed, done = lax.cond(
            self.passed > 0,
            lambda passed: (passed + 1, step(updated)),
            lambda passed: (passed, (jax.tree.map(lambda r: filled(r, 0), results), updated)),
            self.passed,
        )
        return done

    @property
    def open(self) -> jax.Array:
        """True (bool[]), which the compiler does not know."""
        return self.passed > 0
