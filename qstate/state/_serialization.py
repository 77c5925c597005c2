"""Nodes of a state in `flax.serialization`, which knows only types that are registered with it.

Flax is not a dependency, and importing it takes longer than JAX does: a type is registered when a
state is made and Flax has been imported by then.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any


def register_with_flax(node_type: type, fields: Sequence[str], layout: str | None = None) -> None:
    """Registers a frozen dataclass with `flax.serialization`, if that is in use.

    Args:
      node_type: the dataclass.
      fields: names of its fields that are saved; all others stay those of the target.
      layout: name of an attribute that has to agree for what was saved to be read.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def to_state_dict(node: Any) -> dict[str, Any]:
        state = {name: serialization.to_state_dict(getattr(node, name)) for name in fields}
        return state if layout is None else {**state, "layout": getattr(node, layout)}

    def from_state_dict(node: Any, state: dict[str, Any]) -> Any:
        if layout is not None and state.get("layout") != getattr(node, layout):
            raise ValueError(
                f"the state was saved as {state.get('layout')} and cannot be read as "
                f"{getattr(node, layout)}: restore it with the storage that it was saved with"
            )
        restored = {
            name: serialization.from_state_dict(getattr(node, name), state[name], name)
            for name in fields
        }
        return dataclasses.replace(node, **restored)

    serialization.register_serialization_state(
        node_type, to_state_dict, from_state_dict, override=True
    )
