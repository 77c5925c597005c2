"""`qstate bench`: what it times and compiles, what it prints, and what it refuses."""

import dataclasses
import json

import jax
import pytest

from qstate import cli
from qstate.cli import _targets, _timing
from qstate.cli._steps import REFERENCE, SHAPES, Step, steps_of
from qstate.cli._timing import time_steps, timing_table, total

SIZE = 1024 * 4096  # of the shapes called "small"


def test_the_storages_and_both_calls_beside_optax():
    steps = [(step.optimizer, step.call) for step in steps_of(["bf16", "fp8"])]
    assert steps == [
        (REFERENCE, "update"),
        ("qstate bf16", "step"),
        ("qstate bf16", "update"),
        ("qstate fp8", "step"),
        ("qstate fp8", "update"),
    ]


def test_steps_do_what_optax_does():
    shapes = [(64, 128)]
    grads = {"0": jax.random.normal(jax.random.key(0), shapes[0])}
    results = []
    for step in steps_of(["fp32"]):
        params = {"0": jax.random.normal(jax.random.key(1), shapes[0])}
        results.append(jax.jit(step.advance)(params, step.init(params), grads)[0]["0"])
    for result in results[1:]:
        assert jax.numpy.allclose(result, results[0], rtol=1e-6)


def test_medians_of_rounds_that_take_turns(monkeypatch):
    """Each step's calls advance the clock by what a list says, in milliseconds."""
    now, calls = 0.0, []
    durations = {REFERENCE: [99, 99, 2, 4, 3], "other": [99, 99, 6, 12, 8]}
    left = {name: iter(values) for name, values in durations.items()}
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now)

    class Program:
        def __init__(self, name):
            self.name = name

        def __call__(self, params, state, grads):
            nonlocal now
            now += 1e-3 * next(left[self.name])
            calls.append(self.name)
            return params, state

        def memory_analysis(self):
            return jax.jit(lambda x: x).lower(1.0).compile().memory_analysis()

    def start(step, grads):
        return _timing._Run(step, Program(step.optimizer), None, None, state_bytes=128)

    monkeypatch.setattr(_timing, "_start", start)
    steps = [Step(name, "step", lambda p: p, lambda p, s, g: (p, s)) for name in durations]
    first, second = time_steps(steps, [(8, 4)], rounds=3)
    assert first.rounds == pytest.approx([2, 4, 3])
    assert second.rounds == pytest.approx([6, 12, 8])
    assert (first.milliseconds, second.milliseconds) == pytest.approx((3, 8))
    assert (first.ratio, second.ratio) == pytest.approx((1, 8 / 3))
    assert first.state_bytes == 128 / 32
    # Every round has all steps, not always in the same order.
    rounds = {tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)}
    assert rounds == {(REFERENCE, "other"), ("other", REFERENCE)}


def test_progress_counts_to_the_total():
    said = []
    steps = steps_of([])
    time_steps(steps, [(8, 4)], rounds=3, show=lambda done, text: said.append((done, text)))
    assert [done for done, _ in said] == list(range(total(steps, 3)))
    assert said[0][1] == "compiling optax.adamw update"


def test_times_print_and_json_agree(capsys, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--shapes", "small", "--storage", "fp8", "--rounds", "3", "--quiet"]
    assert cli.main(["bench", *arguments, "--json", str(path)]) == 0
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    assert "1 of 1024 x 4096 in float32, gradients in float32, on cpu" in printed
    assert report["platform"] == "cpu"
    assert report["shapes"] == [[1024, 4096]]
    optax, step, update = report["rows"]
    assert (optax["optimizer"], optax["ratio"]) == (REFERENCE, 1)
    assert [step["call"], update["call"]] == ["step", "update"]
    assert len(step["rounds"]) == 3
    assert optax["state_bytes"] == pytest.approx(8, abs=1e-4)
    assert step["state_bytes"] == pytest.approx(2 + 2 * 4 / 128, abs=1e-4)
    # In place: parameters, gradients and the state are all there is, but for the update.
    assert step["peak_bytes"] == pytest.approx(8 + step["state_bytes"], abs=0.2)
    assert update["temporary_bytes"] == pytest.approx(4, abs=0.2)
    lines = [line for line in printed.splitlines() if line.startswith(("optax", "qstate "))]
    for line, row in zip(lines, report["rows"], strict=True):
        assert line.startswith(f"{row['optimizer']}".ljust(11) + f"  {row['call']}")
        assert line.split()[-4:] == [
            f"{row[name]:.2f}" for name in ("ratio", "state_bytes", "temporary_bytes", "peak_bytes")
        ]


def test_bfloat16_gradients_take_half(capsys, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--shapes", "small", "--storage", "fp8", "--rounds", "3", "--quiet"]
    cli.main(["bench", *arguments, "--gradients", "bfloat16", "--json", str(path)])
    assert "gradients in bfloat16" in capsys.readouterr().out
    _, step, _ = json.loads(path.read_text())["rows"]
    assert step["peak_bytes"] == pytest.approx(4 + 2 + step["state_bytes"], abs=0.2)


def test_what_the_compilers_say(capsys, tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["--compile-only", "gpu:h100", "--shapes", "small", "--storage", "fp8", "--quiet"]
    status = cli.main(["bench", *arguments, "--json", str(path)])
    if status and set(_targets.H100.packages) - _targets._installed():
        pytest.skip("the compiler for GPUs is not installed")
    assert status == 0
    optax, step, _ = json.loads(path.read_text())["rows"]
    printed = capsys.readouterr().out
    assert printed.count("gpu:h100") == 3
    assert (optax["kernels"], step["kernels"]) == (0, 1)
    assert step["moved_bytes"] == pytest.approx(step["least_bytes"], rel=0.01)
    assert step["least_bytes"] == pytest.approx(3 * 4 + 2 * (2 + 2 * 4 / 128), abs=1e-3)
    assert optax["least_bytes"] == pytest.approx(3 * 4 + 2 * 8, abs=1e-3)
    assert step["in_place"] == 1
    assert step["collectives"] == 0
    assert step["temporary_bytes"] < 0.2


def test_a_compiler_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(_targets, "_installed", lambda: {"jax"})
    fresh = dataclasses.replace(_targets.V5E)  # what has been compiled for knows its devices
    monkeypatch.setitem(_targets.TARGETS, "tpu:v5e", fresh)
    assert cli.main(["bench", "--compile-only", "tpu:v5e", "--quiet"]) == 2
    assert "needs libtpu" in capsys.readouterr().err


def test_a_peer_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--peer", "--quiet"]) == 2
    assert "pip install flashoptim-jax" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "2"], "--rounds must be at least 3, got 2"),
        (["--json", "no/such/directory.json"], "not a file in a directory that exists"),
        (["--peer", "--compile-only", "gpu:h100"], "--peer is for steps that run"),
        (["--implementation", "cuda"], "implementation is None or one of reference"),
        (["--implementation", "pallas_tpu"], "pallas_tpu does not run on this device, a cpu"),
    ],
    ids=["rounds", "json", "peer", "implementation", "elsewhere"],
)
def test_refuses(arguments, message, capsys):
    assert cli.main(["bench", "--shapes", "small", "--quiet", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_table_of_times():
    steps = [step for step in steps_of([]) if step.optimizer == REFERENCE]
    rows = time_steps(steps, [(256, 128)], rounds=3)
    heading, units, rule, line = timing_table(rows).splitlines()
    assert heading.split() == ["ratio", "to", "state", "temporary", "peak"]
    assert units.split()[:3] == ["optimizer", "call", "ms"]
    assert set(rule) == {"-"}
    assert line.startswith("optax.adamw  update")


def test_shapes_are_matrices():
    assert all(len(shape) == 2 for shapes in SHAPES.values() for shape in shapes)
