"""`qstate demo`: its text, its model, its training, and how it refuses what it cannot do."""

import functools
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qstate
from qstate import cli
from qstate.cli import _demo, _model, _train
from qstate.cli._data import Corpus, DataError, load_corpus, sample_windows, spaced_windows
from qstate.cli._model import Decoder, ModelConfig, rotary_embedding
from qstate.cli._train import TrainConfig

TINY_MODEL = ModelConfig(layers=1, hidden=128)
TINY_TRAINING = {
    "batch_size": 2,
    "sequence_length": 32,
    "validation_windows": 4,
    "validation_points": 3,
    "stall_steps": 4,
}


@pytest.fixture(scope="module")
def library():
    return load_corpus(max_bytes=200_000)


@pytest.fixture
def tiny(monkeypatch):
    """The command with a small model and short windows."""
    monkeypatch.setattr(_model, "ModelConfig", lambda: TINY_MODEL)
    monkeypatch.setattr(_train, "TrainConfig", functools.partial(TrainConfig, **TINY_TRAINING))


def write(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


# Text


def test_the_standard_library_gives_the_same_text_every_time(library):
    again = load_corpus(max_bytes=200_000)
    np.testing.assert_array_equal(library.train, again.train)
    np.testing.assert_array_equal(library.validation, again.validation)
    assert library.train.dtype == np.uint8
    assert library.train.size > library.validation.size > 10_000


def test_whole_files_are_held_out(tmp_path):
    write(tmp_path, {f"{n:02}.txt": bytes([65 + n]) * 100 for n in range(20)})
    corpus = load_corpus(tmp_path)
    train, validation = set(corpus.train) - {10}, set(corpus.validation) - {10}
    assert not train & validation
    assert train | validation == {65 + n for n in range(20)}
    assert len(validation) == 2  # 10 %


def test_the_largest_file_is_not_held_out(tmp_path):
    write(tmp_path, {"large": b"L" * 900, "small": b"s" * 100})
    corpus = load_corpus(tmp_path)
    assert corpus.train.tobytes() == b"L" * 900
    assert corpus.validation.tobytes() == b"s" * 100


def test_a_single_file_is_cut_once(tmp_path):
    text = bytes(range(1, 201)) * 5
    write(tmp_path, {"one.txt": text})
    corpus = load_corpus(tmp_path / "one.txt")
    assert corpus.train.tobytes() == text[:900]
    assert corpus.validation.tobytes() == text[900:]


def test_binary_hidden_and_empty_files_and_test_folders_are_passed_over(tmp_path):
    write(
        tmp_path,
        {
            "a.txt": b"a" * 500,
            "b/c.txt": b"c" * 500,
            "binary": b"x\0x" * 500,
            "empty": b"",
            ".hidden": b"h" * 500,
            ".git/config": b"g" * 500,
            "tests/t.py": b"t" * 500,
        },
    )
    corpus = load_corpus(tmp_path)
    assert set(corpus.train) | set(corpus.validation) == set(b"ac")


def test_reading_stops_at_the_limit(tmp_path):
    write(tmp_path, {f"{n}.txt": b"a" * 1000 for n in range(10)})
    corpus = load_corpus(tmp_path, max_bytes=2500)
    assert corpus.train.size + corpus.validation.size == 2500 + 1  # a newline joins two of three


@pytest.mark.parametrize(
    ("texts", "path", "message"),
    [
        pytest.param({}, "absent", "absent: no such file or directory", id="absent"),
        pytest.param({}, ".", "every file is empty or binary", id="no-files"),
        pytest.param({"a": b"x\0"}, "a", "every file is empty or binary", id="binary"),
        pytest.param({"a": b"x" * 100}, "a", "90 bytes to train on and 10 held out", id="small"),
    ],
)
def test_unusable_text_is_refused(tmp_path, texts, path, message):
    write(tmp_path, texts)
    with pytest.raises(DataError, match=message):
        load_corpus(tmp_path / path, min_bytes=50)


def test_windows_are_consecutive_bytes_and_repeat_with_the_seed():
    text = np.arange(40, dtype=np.uint8)
    windows = sample_windows(text, np.random.default_rng(1), 500, 8)
    assert windows.shape == (500, 9)
    assert windows.dtype == np.uint8
    np.testing.assert_array_equal(np.diff(windows.astype(int)), 1)
    assert (windows.min(), windows.max()) == (0, 39)  # the first and the last byte are reached
    again = sample_windows(text, np.random.default_rng(1), 500, 8)
    np.testing.assert_array_equal(windows, again)


def test_validation_windows_span_the_text():
    windows = spaced_windows(np.arange(100, dtype=np.uint8), 4, 9)
    np.testing.assert_array_equal(windows[:, 0], [0, 30, 60, 90])
    assert windows[-1, -1] == 99


# Model


@functools.cache
def decoder() -> Decoder:
    return Decoder(TINY_MODEL, rngs=nnx.Rngs(0))


def test_logits_are_float32_for_every_byte():
    logits = decoder()(jnp.zeros((2, 5), jnp.uint8))
    assert logits.shape == (2, 5, 256)
    assert logits.dtype == jnp.float32


def test_blocks_of_128_tile_every_matrix():
    params = jax.tree.leaves(nnx.split(Decoder(ModelConfig(), rngs=nnx.Rngs(0)))[1])
    assert all(leaf.shape[-1] % 128 == 0 for leaf in params)
    assert 500_000 < sum(leaf.size for leaf in params) < 1_000_000


def test_a_later_byte_does_not_change_earlier_logits():
    tokens = jnp.arange(12, dtype=jnp.uint8)[None]
    logits = decoder()(tokens)
    changed = decoder()(tokens.at[0, 7].set(200))
    np.testing.assert_array_equal(logits[0, :7], changed[0, :7])
    assert (np.abs(logits - changed)[0, 7:].max(axis=-1) > 1e-4).all()


def test_the_order_of_earlier_bytes_matters():
    logits = decoder()(jnp.array([[1, 2, 3, 4], [2, 1, 3, 4]], jnp.uint8))
    assert np.abs(logits[0, -1] - logits[1, -1]).max() > 1e-5


def test_rotary_products_depend_on_the_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    ones = jnp.ones((1, 6, 1, 1))
    rotated_query = rotary_embedding(query * ones, 100.0)[0, :, 0]
    rotated_key = rotary_embedding(key * ones, 100.0)[0, :, 0]
    products = np.asarray(rotated_query @ rotated_key.T)
    for distance in range(-5, 6):
        np.testing.assert_allclose(np.ptp(np.diagonal(products, distance)), 0, atol=1e-5)
    np.testing.assert_allclose(products[0, 0], query @ key, rtol=1e-5)
    assert abs(products[0, 0] - products[0, 3]) > 0.1


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="width 128 must be a multiple of 2 x heads 48"):
        ModelConfig(heads=48)


# Training


def test_the_fp32_run_is_plain_optax(library):
    config = TrainConfig(steps=5, **TINY_TRAINING)
    tx = qstate.adamw(
        config.learning_rate_schedule(), weight_decay=config.weight_decay, storage="fp32"
    )
    run = _train.train(library, {"fp32": tx}, config, TINY_MODEL)["fp32"]

    graph, params = nnx.split(Decoder(TINY_MODEL, rngs=nnx.Rngs(config.seed)))
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(config.learning_rate_schedule(), weight_decay=config.weight_decay),
    )
    state, rng, losses = plain.init(params), np.random.default_rng(config.seed), []

    @jax.jit
    def step(params, state, windows):
        def loss(params):
            logits = nnx.merge(graph, params)(windows[:, :-1])
            chosen = jnp.take_along_axis(
                jax.nn.log_softmax(logits), windows[:, 1:, None].astype(jnp.int32), axis=-1
            )
            return -chosen.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(config.steps):
        windows = sample_windows(library.train, rng, config.batch_size, config.sequence_length)
        params, state, value = step(params, state, windows)
        losses.append(float(value))
    np.testing.assert_allclose(run.training_losses, losses, rtol=2e-4)
    shadow = zip(jax.tree.leaves(run.shadow), jax.tree.leaves(state[1][0].nu), strict=True)
    for ours, theirs in shadow:
        np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=1e-9)


def test_validation_steps_are_spread_evenly_and_end_with_the_last():
    assert TrainConfig(steps=100, validation_points=4).validation_steps() == [25, 50, 75, 100]
    assert TrainConfig(steps=3).validation_steps() == [1, 2, 3]


class AdamState(NamedTuple):
    mu: Any
    nu: Any


def test_mass_counts_from_the_last_reset():
    nu = SimpleNamespace(age=jnp.int32(3), mass=jnp.float32(0.5))
    state = (optax.EmptyState(), (AdamState(None, nu), optax.EmptyState()))
    assert _train.second_moment_mass(state, 0.5) == 1 - 0.5**3 * 0.5


@pytest.mark.parametrize(
    ("storage", "reset", "expected"),
    [
        pytest.param("fp8", None, pytest.approx(1 / 0.9 - 1, abs=0.01), id="fp8"),
        pytest.param("fp32", None, None, id="nothing-quantized"),
        pytest.param("fp8", "every step", None, id="just-reset"),
    ],
)
def test_bias_compares_the_stored_moment_with_its_shadow(storage, reset, expected):
    policy = qstate.every(1) if reset else None
    params = {"w": jnp.zeros((32, 128))}
    tx = qstate.adamw(1e-3, storage=storage, reset=policy, key=0)
    grads = {"w": jax.random.normal(jax.random.key(0), (32, 128))}
    _, state = tx.update(grads, tx.init(params), params)
    # A shadow of nine tenths of what it should be: the stored average is a ninth above it.
    shadow = {"w": 0.9 * 0.001 * grads["w"] ** 2}
    assert _train.second_moment_bias(state, shadow, TrainConfig(steps=1)) == expected


# Command


def test_the_demo_prints_a_table_and_writes_its_numbers_and_a_picture(tiny, tmp_path, capsys):
    written, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--storage", "fp8", "--steps", "8", "--seed", "3"]
    assert cli.main(["demo", *arguments, "--json", str(written), "--plot", str(picture)]) == 0

    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line.split() for line in captured.out.splitlines()]
    table = {line[0]: line[1:] for line in lines if line and line[0] in _demo.STORAGES}
    assert list(table) == ["fp32", "fp8"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    report = json.loads(written.read_text())
    assert report["validation_steps"] == [3, 6, 8]
    assert report["training"]["seed"] == 3
    fp32, fp8 = report["storages"]
    for row in (fp32, fp8):
        shown = table[row["storage"]]
        assert shown[0] == f"{row['validation_loss']:.4f}"
        assert len(row["training_losses"]) == 8
        assert row["validation_losses"][-1] == row["validation_loss"]
        assert row["training_losses"][-1] < row["training_losses"][0]
        assert row["seconds_per_step"] > 0
    assert fp8["training_losses"][0] == fp32["training_losses"][0]  # the same start and batch
    assert fp8["training_losses"] != fp32["training_losses"]
    assert (fp32["difference"], fp32["bias_v"], fp32["time_ratio"]) == (0, None, 1)
    assert fp32["bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert 2.06 < fp8["bytes_per_parameter"] < 2.2
    assert abs(fp8["bias_v"]) < 0.02
    assert fp32["stalled_v"] < fp8["stalled_v"] < 1
    assert 0 < fp8["predicted_v"] < 1


@pytest.mark.filterwarnings("ignore:a second moment in .* nearest:UserWarning")
@pytest.mark.parametrize("rounding", [None, *_demo.ROUNDINGS])
@pytest.mark.parametrize("reset", _demo.RESETS)
@pytest.mark.parametrize("storage", ["fp32", "fp8", "fp4"])
def test_every_choice_makes_an_optimizer(storage, reset, rounding):
    storages = _demo._storages(storage, rounding)
    tx = _demo._optimizer(storage, storages, reset, TrainConfig())
    state = _train.find_adam_state(jax.eval_shape(tx.init, {"w": jnp.zeros((32, 128))}))
    assert (state.mu.storage, state.nu.storage) == storages
    if storage != "fp32":
        assert state.nu.storage.rounding == (rounding or "stochastic")


def test_a_reset_that_a_storage_has_not_is_refused(capsys):
    assert cli.main(["demo", "--storage", "int8", "--reset", "paper"]) == 2
    assert "paper" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--steps", "4"], "--steps must be at least 5, got 4", id="steps"),
        pytest.param(["--seed", "-1"], "--seed must be at least 0", id="seed"),
        pytest.param(["--data", "absent"], "--data absent: no such file", id="data"),
        pytest.param(["--json", "absent/out.json"], "--json absent", id="json"),
        pytest.param(["--plot", "."], "--plot .: not a file", id="plot-directory"),
        pytest.param(["--plot", "out.xyz"], "--plot out.xyz: must end in", id="plot-kind"),
    ],
)
def test_arguments_that_will_not_do_are_refused_at_once(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize("arguments", [["--storage", "fp2"], ["--steps", "many"], ["--reset", "x"]])
def test_argparse_refuses_unknown_words(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", *arguments])
    assert stop.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_too_little_text_is_refused(tmp_path, capsys):
    write(tmp_path, {"a": b"text " * 50})
    assert cli.main(["demo", "--data", str(tmp_path / "a")]) == 2
    assert "too little text" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["flax", "rich", "matplotlib"])
def test_a_missing_package_is_named_with_its_remedy(package, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert cli.main(["demo", "--plot", "out.png"]) == 2
    message = capsys.readouterr().err
    assert f"needs {package}" in message
    assert 'pip install "qstate[demo]"' in message


def test_plan_and_help_do_not_load_flax():
    code = (
        "import sys; from qstate import cli; cli.main(['plan', '--format', 'e4m3'])\n"
        "assert not {'flax', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version_and_missing_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("qstate ")
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2


def test_a_corpus_names_its_source(library):
    assert isinstance(library, Corpus)
    assert "standard library" in library.source
