"""Parameters in 16 bits, and a warning where nothing carries what they round away.

Whether master weights or stochastic rounding do is not known to a link of a chain when it is
initialised: the link that rounds comes last. So a warning waits for the first update, and a later
link may call it off until then.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qstate.precision._dtypes import is_narrow
from qstate.state import path_name, warn

_waiting: list["NarrowParametersWatch"] = []


class NarrowParametersWatch:
    """Warns once, at a transformation's first update, of parameters that round its updates away."""

    def __init__(self):
        self._warning: str | None = None

    def look_at(self, params: Any) -> None:
        """In ``init``: finds the first parameter of fewer than 32 bits."""
        self._call_off()
        for path, leaf in jax.tree.leaves_with_path(params):
            if is_narrow(leaf):
                self._warning = _message(path_name(path), leaf.dtype)
                _waiting.append(self)
                return

    def warn(self) -> None:
        """In ``update``: what is waiting is said now."""
        message = self._warning
        if message is not None:
            self._call_off()
            warn(message)

    def _call_off(self) -> None:
        self._warning = None
        if self in _waiting:
            _waiting.remove(self)


def waiting_warnings() -> list[NarrowParametersWatch]:
    """The warnings that wait for a first update."""
    return list(_waiting)


def call_off_warnings(but: Sequence[NarrowParametersWatch] = ()) -> None:
    """What was initialised up to now is followed by something that carries the rounding.

    Args:
      but: warnings to leave waiting.
    """
    for watch in waiting_warnings():
        if watch not in but:
            watch._call_off()


def _message(name: str, dtype: Any) -> str:
    precision = -jnp.finfo(dtype).nmant - 1
    return (
        f"parameters in {jnp.finfo(dtype).bits} bits: {name!r} is {dtype}, so an update of less "
        f"than 2^{precision} of a weight changes nothing, and training stands still once the "
        "steps are that small. Keep float32 weights beside it, qstate.with_master_weights(tx), or "
        "round its updates stochastically, optax.chain(tx, qstate.stochastic_round_params(key))."
    )
