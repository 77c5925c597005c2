"""What runs as a kernel where, as the table in docs/kernels.md: `python tests/aot/support.py`."""

import re

import jax
import jax.numpy as jnp

import qstate
from qstate import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    E5M2,
    F16,
    INT8,
    UDYNAMIC8,
    UE2M2,
    UE4M4,
    Block,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
)

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu")
HEADING = ["| m and v | parameters | TPU (Mosaic) | GPU (Triton) |", "|---|---|---|---|"]
_REFUSED = re.compile(r"cannot run this: (.*); use None")


def cases() -> list[tuple[str, tuple[int, ...], Storage, Storage]]:
    """What stands in a row, the parameters' shape, and the storages of both moments."""

    def both(format, scaling, domain="linear"):
        return Storage(format, scaling, "stochastic"), Storage(
            format, scaling, "stochastic", domain
        )

    fp4 = lambda scaling: (both(E2M1, scaling)[0], both(UE2M2, scaling, "sqrt")[1])  # noqa: E731
    return [
        ("bf16", (1024, 4096), *both(BF16, NoScale())),
        ("float16, blocks of 128", (1024, 4096), *both(F16, Block(128))),
        ("e4m3, blocks of 32", (1024, 4096), *both(E4M3, Block(32))),
        ("e4m3, blocks of 128", (1024, 4096), *both(E4M3, Block(128))),
        ("e4m3, blocks of 256, bf16 scales", (1024, 4096), *both(E4M3, Block(256, "bfloat16"))),
        ("e4m3, blocks of 2048", (1024, 4096), *both(E4M3, Block(2048))),
        ("e5m2, powers of two", (1024, 4096), *both(E5M2, Block(128, "power_of_two"))),
        ("e4m3 and ue4m4", (1024, 4096), both(E4M3, Block(128))[0], both(UE4M4, Block(128))[0]),
        ("int8, evenly spaced", (1024, 4096), *both(INT8, Block(128))),
        ("e2m1 and √ue2m2, blocks of 128", (1024, 4096), *fp4(Block(128))),
        ("bf16 and e4m3", (1024, 4096), both(BF16, NoScale())[0], both(E4M3, Block(128))[0]),
        ("e4m3 and e2m1", (1024, 4096), both(E4M3, Block(128))[0], both(E2M1, Block(128))[0]),
        (
            "e4m3, blocks of two sizes",
            (1024, 4096),
            both(E4M3, Block(64))[0],
            both(E4M3, Block())[0],
        ),
        ("e4m3, a scale a tensor", (1024, 4096), *both(E4M3, PerTensor())),
        ("e4m3, rank-1 scales", (1024, 4096), *both(E4M3, Rank1())),
        ("8-bit maps", (1024, 4096), both(DYNAMIC8, Block())[0], both(UDYNAMIC8, Block())[0]),
        ("4-bit map and √ue2m2", (1024, 4096), both(DYNAMIC4, Block())[0], fp4(Block())[1]),
        ("e4m3, blocks of 128", (1601, 1280), *both(E4M3, Block(128))),
        ("e4m3, blocks of 128", (1601, 1300), *both(E4M3, Block(128))),
        ("e4m3, blocks of 128", (8, 512, 300), *both(E4M3, Block(128))),
        ("e4m3, blocks of 128", (4096,), *both(E4M3, Block(128))),
        ("e4m3, blocks of 128", (4096, 32), *both(E4M3, Block(128))),
        ("e2m1 and √ue2m2, blocks of 128", (1601, 1300), *fp4(Block(128))),
        ("e2m1 and √ue2m2, blocks of 128", (64, 8300), *fp4(Block(128))),
    ]


def transformation(implementation: str, mu: Storage, nu: Storage):
    return qstate.scale_by_adam(
        mu_storage=mu, nu_storage=nu, exempt=lambda *_: False, implementation=implementation
    )


def refusal(implementation: str, shape: tuple[int, ...], mu: Storage, nu: Storage) -> str | None:
    """Why there is no kernel; None if there is one."""
    tx = transformation(implementation, mu, nu)
    gradient = jax.ShapeDtypeStruct(shape, jnp.float32)
    try:
        jax.eval_shape(tx.update, gradient, jax.eval_shape(tx.init, gradient))
    except ValueError as error:
        return _REFUSED.search(str(error))[1]
    return None


def table() -> list[str]:
    """The table's lines."""
    lines = list(HEADING)
    for name, shape, mu, nu in cases():
        told = [refusal(implementation, shape, mu, nu) for implementation in IMPLEMENTATIONS]
        cells = ["kernel" if reason is None else f"no: {reason}" for reason in told]
        lines.append("| " + " | ".join([name, " x ".join(map(str, shape)), *cells]) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
