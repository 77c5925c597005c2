"""Runs the checks of a device one after the other, and writes one report and one table of them.

Every part is a process of its own with a time limit, so that what fails or hangs takes nothing
along. Usage: see run.sh.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Seconds for every part; 350 together.
_BITWISE, _COMPARISON, _BENCHMARK = 80, 150, 60
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "optax", "numpy")


def main(out: Path) -> int:
    report: dict[str, Any] = {"python": platform.python_version(), "versions": _versions()}
    lines = [f"Python {report['python']}, " + ", ".join(map(" ".join, report["versions"].items()))]
    bitwise = ["-m", "pytest", "tests/kernels/test_interpret.py", "-q", "-m", "not slow"]
    bitwise += ["-p", "no:cacheprovider", "-n", str(min(8, os.cpu_count() or 1))]
    parts = [
        ("bitwise, in interpret mode", bitwise, _BITWISE, {"JAX_PLATFORMS": "cpu"}, None),
        ("kernels against the reference", ["tests/device/compare.py"], _COMPARISON, {}, "compare"),
    ]
    for shapes in ("squares", "mlp"):
        command = ["-c", "import sys; from qstate.cli import main; sys.exit(main(sys.argv[1:]))"]
        command += ["bench", "--shapes", shapes, "--quiet", "--rounds", "25"]
        parts.append((f"benchmark, {shapes}", command, _BENCHMARK, {}, f"bench-{shapes}"))
    for name, command, limit, environment, kept in parts:
        path = None if kept is None else out / f"{kept}.json"
        arguments = command if path is None else [*command, "--json", str(path)]
        status, seconds, text = _run(arguments, limit, environment)
        result: dict[str, Any] = {"status": status, "seconds": round(seconds, 1)}
        if path is not None and path.exists():
            result["result"] = json.loads(path.read_text())
            path.unlink()
        report[name] = result
        said = "passed" if status == 0 else f"FAILED ({status})"
        lines += ["", f"== {name}: {said}, {seconds:.0f} s", text.strip()]
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(part["status"] for part in report.values() if "status" in part))


def _run(arguments: list[str], limit: int, environment: dict[str, str]) -> tuple[Any, float, str]:
    """The exit status, or "timeout"; seconds; the end of what was printed."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
        status, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stopped:
        printed = stopped.stdout or b""
        status = "timeout"
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
    return status, time.perf_counter() - start, "\n".join(text.splitlines()[-60:])


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
