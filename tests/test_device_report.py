"""What a machine with a device runs (tests/device), on this one."""

import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import qstate

FOLDER = Path(__file__).parent / "device"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"device_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(monkeypatch):
    module = load("compare")
    monkeypatch.setattr(module, "SHAPES", ((33, 256), (7,)))
    monkeypatch.setattr(module, "pairs", lambda: {"fp8": qstate.storage("fp8")})
    return module


def test_a_comparison(compare, monkeypatch, tmp_path, capsys):
    path = tmp_path / "compare.json"
    monkeypatch.setattr(sys, "argv", ["compare.py", "--json", str(path)])
    assert compare.main() == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["of_codes"] == compare.STEPS * 2 * (33 * 256 + 7)
    assert row["codes"] == row["scale_places"] == row["update_places"] == 0
    assert "fp8" in capsys.readouterr().out


def test_a_comparison_sees_codes(compare):
    difference = compare.Difference("fp8")
    state = qstate.scale_by_adam(mu_storage=qstate.storage("fp8")[0]).init([jnp.ones((64, 128))])
    other = state._replace(
        mu=state.mu.__class__(**vars(state.mu) | {"codes": [state.mu.codes[0] + 1]})
    )
    compare._count(difference, ([jnp.float32(1)], state), ([jnp.float32(1) + 2**-20], other))
    assert difference.codes == 64 * 128
    assert difference.update_places == 8
    assert not difference.passes


def test_every_part_of_a_report_ends(tmp_path):
    report = load("report")
    assert report._run(["-c", "print(1 + 1)"], 60, {})[::2] == (0, "2")
    assert report._run(["-c", "raise SystemExit(3)"], 60, {})[0] == 3
    status, seconds, _ = report._run(["-c", "import time; time.sleep(60)"], 1, {})
    assert status == "timeout"
    assert seconds < 30
    assert report._BITWISE + report._COMPARISON + 2 * report._BENCHMARK < 360
