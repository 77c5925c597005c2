"""Nodes of a type in an optimizer's state, wherever they are."""

from typing import Any, TypeVar

import jax

T = TypeVar("T")


def find(opt_state: Any, kind: type[T]) -> list[T]:
    """Every node of a type, in the state's order; not those inside of one that was found."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
