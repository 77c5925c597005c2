"""Ways to save a tree and to restore it: ``(saved, another tree like it, folder)``."""

import flax.serialization
import jax
import orbax.checkpoint as ocp


def standard(saved, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "standard", target)


def manager(saved, target, folder):
    with ocp.CheckpointManager(folder / "manager") as manager:
        manager.save(8, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))


def pytree(saved, target, folder):
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(folder / "pytree", saved)
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    return checkpointer.restore(folder / "pytree", item=target, restore_args=restore_args)


def flax_bytes(saved, target, folder):
    (folder / "state.msgpack").write_bytes(flax.serialization.to_bytes(saved))
    return flax.serialization.from_bytes(target, (folder / "state.msgpack").read_bytes())


WAYS = {
    "StandardCheckpointer": standard,
    "CheckpointManager": manager,
    "PyTreeCheckpointer": pytree,
    "flax.serialization": flax_bytes,
}
