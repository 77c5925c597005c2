"""Kernels against the reference, both on this machine's device: `python compare.py --help`.

Where a compiler fuses a product with a sum that the other one does not, a fresh average differs in
its last place; so may, then, a scale, and a code that is next to a threshold. That is what the
limits leave room for. On a device without a kernel the way that runs there is compared.
"""

import argparse
import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qstate
from qstate import E2M1, E4M3, E5M2, INT8, UE2M2, UE4M4, Block, NoScale, Storage
from qstate.cli._table import format_table

KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}
STEPS = 3
SHAPES = ((1024, 4096), (1601, 1280), (3, 77, 200), (129,))
CODES = 1e-4  # share of codes that may differ
PLACES = 4  # units in the last place that updates and scales may differ by


def pairs() -> dict[str, tuple[Storage, Storage]]:
    """Storages of both moments, by name."""
    found = {name: qstate.storage(name) for name in ("bf16", "fp8", "fp4")}
    for rounding in ("nearest", "stochastic"):
        for scale in ("float32", "bfloat16", "power_of_two"):
            block = Block(64, scale)
            found[f"e4m3 64 {scale} {rounding}"] = (Storage(E4M3, block, rounding),) * 2
            found[f"e2m1 64 {scale} {rounding}"] = (
                Storage(E2M1, block, rounding),
                Storage(UE2M2, block, rounding, "sqrt"),
            )
    for name, (mu, nu) in {
        "ue4m4": (E4M3, UE4M4),
        "e5m2": (E5M2, E5M2),
        "int8": (INT8,) * 2,
    }.items():
        found[f"{name} 128"] = tuple(Storage(f, Block(128), "stochastic") for f in (mu, nu))
    found["e5m2 no scale"] = (Storage(E5M2, NoScale(), "stochastic"),) * 2
    return found


@dataclasses.dataclass
class Difference:
    """Of all steps on all shapes in one storage."""

    storage: str
    codes: int = 0
    of_codes: int = 0
    scale_places: int = 0
    update_places: int = 0

    @property
    def passes(self) -> bool:
        return (
            self.codes <= CODES * self.of_codes
            and self.scale_places <= PLACES
            and self.update_places <= PLACES
        )


def compare(name: str, mu: Storage, nu: Storage, implementation: str | None) -> Difference:
    """Steps by both, each from the state that the reference left."""

    def adam(implementation):
        return qstate.scale_by_adam(
            mu_storage=mu, nu_storage=nu, exempt=lambda *_: False, implementation=implementation
        )

    reference, other = adam("reference"), adam(implementation)
    params = [jnp.zeros(shape) for shape in SHAPES]
    state, steps = reference.init(params), [jax.jit(tx.update) for tx in (reference, other)]
    difference = Difference(name)
    for number in range(STEPS):
        keys = jax.random.split(jax.random.key(number), len(params))
        gradients = [
            jax.random.normal(key, p.shape) * jnp.exp(2 * jax.random.normal(key, p.shape[-1:]))
            for key, p in zip(keys, params, strict=True)
        ]
        (updates, new), (others, other_new) = (step(gradients, state) for step in steps)
        _count(difference, (updates, new), (others, other_new))
        state = new
    return difference


def _count(difference: Difference, one: Any, other: Any) -> None:
    (updates, state), (other_updates, other_state) = one, other
    difference.update_places = max(difference.update_places, _places(updates, other_updates))
    for a, b in ((state.mu, other_state.mu), (state.nu, other_state.nu)):
        difference.scale_places = max(difference.scale_places, _places(a.scales, b.scales))
        for x, y in zip(jax.tree.leaves(a.codes), jax.tree.leaves(b.codes), strict=True):
            difference.codes += int((np.asarray(x) != np.asarray(y)).sum())
            difference.of_codes += x.size


def _places(one: Any, other: Any) -> int:
    """The largest difference in units in the last place, of arrays of any dtype."""
    largest = 0
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        kind = f"u{x.dtype.itemsize}"
        a, b = (np.asarray(z).view(kind).astype(np.int64).ravel() for z in (x, y))
        largest = max(largest, int(np.abs(a - b).max(initial=0)))
    return largest


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the differences")
    parser.add_argument("--seconds", type=float, default=130, help="start no storage after them")
    args = parser.parse_args()
    start = time.monotonic()
    warnings.filterwarnings("ignore", ".*only ever rises", UserWarning)  # here it may
    device = jax.devices()[0]
    implementation = KERNELS.get(device.platform)
    rows, left = [], []
    for name, pair in pairs().items():
        if time.monotonic() - start > args.seconds:
            left.append(name)
        else:
            rows.append(compare(name, *pair, implementation))
    print(f"{implementation or 'None'} against reference on {device.device_kind}, {STEPS} steps\n")
    heading = [
        ("", "codes", "codes that", "ulp of", "ulp of", ""),
        ("storage", "compared", "differ", "scales", "updates", "passes"),
    ]
    cells = [
        (
            row.storage,
            f"{row.of_codes:,}",
            f"{row.codes:,}",
            str(row.scale_places),
            str(row.update_places),
            "yes" if row.passes else "NO",
        )
        for row in rows
    ]
    print(format_table(heading, cells, left=1))
    if left:
        print(f"\nNot compared, since {args.seconds:g} s were over: {', '.join(left)}.")
    if args.json:
        report = {
            "device": device.device_kind,
            "implementation": implementation,
            "not_compared": left,
            "rows": [dataclasses.asdict(row) | {"passes": row.passes} for row in rows],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
