"""`qstate demo --policy --loss-scale --remainder`: mixed precision by words."""

import functools
import json

import jax.numpy as jnp
import jmp
import optax
import pytest

import qstate
from qstate import cli
from qstate.cli import _model, _train
from qstate.cli._precision import Precision, parse_precision

BF16 = "params=bfloat16,compute=bfloat16,output=float32"


@pytest.fixture
def tiny(monkeypatch):
    """The command with a one-layer model, and short windows."""
    model = _model.ModelConfig(layers=1, hidden=128)
    training = functools.partial(
        _train.TrainConfig, batch_size=4, sequence_length=48, validation_points=2
    )
    monkeypatch.setattr(_model, "ModelConfig", lambda: model)
    monkeypatch.setattr(_train, "TrainConfig", training)


def run(tmp_path, *arguments):
    written = tmp_path / "out.json"
    assert cli.main(["demo", "--storage", "fp8", "--json", str(written), *arguments]) == 0
    return json.loads(written.read_text())


@pytest.mark.parametrize(
    ("arguments", "bytes_a_weight"),
    [
        pytest.param(["--policy", BF16], 6, id="bf16"),
        pytest.param(
            ["--policy", BF16, "--remainder", "8"], 3, id="bf16-remainder", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--policy", "params=float32,compute=float16,output=float32"],
            4,
            id="fp16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_stays_within_noise_of_float32(tiny, tmp_path, capsys, arguments, bytes_a_weight):
    report = run(tmp_path, "--steps", "60", "--loss-scale", "dynamic", *arguments)
    fp32, fp8 = report["storages"]
    first = fp32["training_losses"][0]
    assert first - fp32["validation_loss"] > 1.0  # it has learnt something
    assert abs(fp8["difference"]) < 0.05
    assert fp8["training_losses"][0] == pytest.approx(first, rel=1e-2)
    assert fp8["training_losses"] != fp32["training_losses"]
    assert fp32["weight_bytes_per_parameter"] == pytest.approx(4, abs=0.01)
    assert fp8["weight_bytes_per_parameter"] == pytest.approx(bytes_a_weight, abs=0.01)
    assert fp8["bytes_per_parameter"] == pytest.approx(fp32["bytes_per_parameter"] / 4, abs=0.2)
    assert abs(fp8["bias_v"]) < 0.03  # counts applied steps only
    assert fp32["skipped_steps"] == 0
    shown = capsys.readouterr().out
    assert "loss scale dynamic" in report["precision"]
    assert "steps" in shown
    assert "skipped" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.slow
def test_a_scale_that_is_too_large_is_seen_in_the_skipped_steps(tiny, tmp_path, capsys):
    report = run(
        tmp_path,
        "--steps",
        "5",
        "--loss-scale",
        "1e30",
        "--policy",
        "params=float32,compute=float16",
    )
    fp8 = report["storages"][1]
    assert fp8["skipped_steps"] == 5
    assert fp8["training_losses"][0] == pytest.approx(fp8["training_losses"][-1], abs=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--policy", "params=int8"], "--policy params=int8: ", id="dtype"),
        pytest.param(["--policy", "weights=half"], "--policy weights=half: ", id="key"),
        pytest.param(["--loss-scale", "-1"], "none, dynamic or a positive number", id="negative"),
        pytest.param(["--loss-scale", "many"], "none, dynamic or a positive number", id="word"),
        pytest.param(["--loss-scale", "inf"], "none, dynamic or a positive number", id="infinite"),
        pytest.param(
            ["--remainder", "8"], "--remainder is for parameters in 16 bits", id="float32"
        ),
    ],
)
def test_words_that_stand_for_nothing_are_refused(arguments, message, capsys):
    assert cli.main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_what_a_policy_takes_around_an_optimizer():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    plain = Precision()
    assert not plain.mixed
    assert isinstance(plain.wrap(optax.sgd(1.0)).init(params), tuple)
    assert isinstance(plain.scale_in(()), jmp.NoOpLossScale)
    mixed = parse_precision(BF16, "1024", 16)
    state = mixed.wrap(optax.sgd(1.0)).init(params)
    assert float(mixed.scale_in(state).loss_scale) == 1024
    assert qstate.master_params(state, params)["w"].dtype == jnp.float32
    assert str(mixed) == (
        "parameters in bfloat16, 16-bit remainders, computed in bfloat16, output in float32, "
        "loss scale static"
    )
