"""What is known of how parameters are partitioned, where their types do not say.

Under `jax.jit` on a mesh of automatic axes an array's type says nothing of its partition. It is
known from the user, or from the parameters that `init` was given, if those were arrays. It is kept
beside the transformation, not in its state: a state is tied to no mesh.
"""

from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding

from qstate.kernels import sharding_of
from qstate.state._average import leaves_of


class Hints:
    """The shardings of parameters, leaf by leaf.

    Args:
      shardings: a tree of `jax.sharding.NamedSharding` like the parameters', or a prefix of it;
        None to go by what `look_at` sees.

    Raises:
      TypeError: for anything else in the tree.
    """

    def __init__(self, shardings: Any):
        for leaf in jax.tree.leaves(shardings):
            if not isinstance(leaf, NamedSharding):
                raise TypeError(
                    "shardings is a tree of jax.sharding.NamedSharding like the parameters', such "
                    f"as jax.tree.map(lambda p: p.sharding, params); got {leaf!r} in it"
                )
        self._given = shardings
        self._seen: tuple[Any, list[NamedSharding | None]] | None = None

    def look_at(self, params: Any) -> None:
        """Sees how parameters are partitioned, if they are arrays.

        Tracers, as under `jax.jit` and `jax.eval_shape`, say nothing: what was seen before stands.
        """
        leaves, treedef = leaves_of(params)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return
        self._seen = treedef, [sharding_of(leaf) for leaf in leaves]

    def of(self, tree: Any) -> list[NamedSharding | None]:
        """What is known of every leaf of a tree like the parameters, None among the leaves."""
        leaves, treedef = leaves_of(tree)
        if self._given is not None:
            known = iter(jax.tree.leaves(jax.tree.broadcast(self._given, tree)))
            return [None if leaf is None else next(known) for leaf in leaves]
        if self._seen is not None and self._seen[0] == treedef:
            return self._seen[1]
        return [None] * len(leaves)
