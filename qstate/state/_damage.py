"""Refusing states that were cast: what a mixed-precision policy does to every floating array."""

from typing import Any

import jax.numpy as jnp

from qstate.numerics import SCALE_DTYPES
from qstate.state._average import Average, has_average, stored_leaves


def check_dtype(what: str, array: Any, dtype: Any) -> None:
    """Refuses a part of a state that has another dtype than it was made with.

    Raises:
      TypeError: with the dtype that it has and the one that is right.
    """
    if array.dtype != dtype:
        raise TypeError(
            f"{what} in the optimizer's state is {array.dtype} and has to be {jnp.dtype(dtype)}: "
            "cast parameters and inputs with a jmp policy, never an optimizer's state"
        )


def check_average(average: Average) -> None:
    """Refuses an average whose scales, exact leaves or mass were cast."""
    storage = average.storage
    check_dtype("the mass of an average", average.mass, jnp.float32)
    for (codes, scales), shape in zip(stored_leaves(average)[0], average.shapes, strict=True):
        if shape is None:
            if has_average(codes):
                check_dtype("an exact leaf of an average", codes, jnp.float32)
            continue
        check_dtype(f"an average stored as {storage}", codes, storage.format.dtype)
        for scale in scales if isinstance(scales, tuple) else (scales,):
            if scale is not None:
                dtype = SCALE_DTYPES[storage.scaling.scale]
                check_dtype(f"a scale of an average stored as {storage}", scale, dtype)
