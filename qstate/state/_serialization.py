"""Averages in `flax.serialization`, which knows only types that are registered with it.

Flax is not a dependency, and importing it takes longer than JAX does: an average is registered when
a state is made and Flax has been imported by then.
"""

import sys
from typing import Any

_FIELDS = ("codes", "scales", "age", "mass", "monitor")


def register_with_flax(average: type) -> None:
    """Registers the type of averages with `flax.serialization`, if that is in use."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def to_state_dict(node: Any) -> dict[str, Any]:
        state = {name: serialization.to_state_dict(getattr(node, name)) for name in _FIELDS}
        return {**state, "layout": node.layout}

    def from_state_dict(node: Any, state: dict[str, Any]) -> Any:
        saved = state.get("layout")
        if saved != node.layout:
            raise ValueError(
                f"the state was saved as {saved} and cannot be read as {node.layout}: "
                "restore it with the storage that it was saved with"
            )
        fields = [serialization.from_state_dict(getattr(node, n), state[n], n) for n in _FIELDS]
        return average(*fields, node.storage, node.shapes)

    serialization.register_serialization_state(
        average, to_state_dict, from_state_dict, override=True
    )
