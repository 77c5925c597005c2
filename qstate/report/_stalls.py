"""The stall meter: how much of each average a step left as it was."""

from typing import Any

import jax

from qstate.state import Average, is_average, path_name, unchanged_share


def stall_fraction(before: Any, after: Any) -> dict[str, jax.Array]:
    """Share of stored codes that did not change from one state to the next.

    Under nearest rounding this diagnoses averages that stopped moving. Under stochastic rounding
    many codes stay in any one step while the averages stay unbiased: look at both.

    Args:
      before: an optimizer state, of one transformation or of a chain.
      after: the same optimizer's state one step later.

    Returns:
      For every stored average, by its field's name (``"mu"``, ``"nu"``...), a float32 scalar.
      Fields
      of one name are counted together. Leaves that stay float32 do not count, unless all of them
      do.

    Raises:
      ValueError: if the two are not states of the same optimizer, or hold no average of qstate.

    Example:
      >>> import jax.numpy as jnp, qstate
      >>> tx = qstate.scale_by_adam(nu_storage=qstate.storage("bf16")[1])
      >>> before = tx.init(jnp.ones((64, 64)))
      >>> _, after = tx.update(jnp.ones((64, 64)), before)
      >>> float(qstate.stall_fraction(before, after)["nu"])
      0.0
    """
    first, second = named_averages(before), named_averages(after)
    if not first:
        raise ValueError(
            "the state holds no average of qstate: pass the state of a qstate optimizer"
        )
    if [(path, a.storage, a.shapes) for path, a in first] != [
        (path, a.storage, a.shapes) for path, a in second
    ]:
        raise ValueError("the two states are not of one optimizer: pass one before and one after")
    steps: dict[str, list[tuple[Average, Average]]] = {}
    for (path, old), (_, new) in zip(first, second, strict=True):
        steps.setdefault(path.rsplit("/", 1)[-1], []).append((old, new))
    return {name: unchanged_share(pairs) for name, pairs in steps.items()}


def named_averages(state: Any) -> list[tuple[str, Average]]:
    """The averages in a state, with their paths."""
    pairs = jax.tree.leaves_with_path(state, is_leaf=is_average)
    return [(path_name(path), node) for path, node in pairs if is_average(node)]
