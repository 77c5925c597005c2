"""What a demo shows of its runs: a table with a guide to it, a JSON file, a picture."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import qstate
from qstate.cli._model import ModelConfig
from qstate.cli._precision import Precision
from qstate.cli._train import Run, TrainConfig, find_adam_state, skipped_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = (  # curves lie on top of each other, so each has a color, a dash and a width of its own
    ("#555555", "-", 4.0),
    ("#1f77b4", "-", 2.0),
    ("#d95f02", "--", 1.8),
    ("#1b9e77", ":", 2.2),
    ("#7570b3", "-.", 1.6),
    ("#e7298a", (0, (5, 1, 1, 1)), 1.6),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """All that is reported of one storage; losses in nats a byte, fractions of one."""

    storage: str
    mu_storage: str
    nu_storage: str
    parameters: int
    validation_loss: float
    difference: float
    """Validation loss over that of fp32."""
    bytes_per_parameter: float
    """Of both moments together."""
    weight_bytes_per_parameter: float
    """Of a parameter and its master weight."""
    skipped_steps: int
    stalled_m: float
    stalled_v: float
    predicted_v: float
    """The stalled fraction of v in closed form, at the ages where it was measured."""
    bias_v: float | None
    """Relative error of the stored v's sum; None where there is nothing to compare."""
    seconds_per_step: float
    time_ratio: float
    validation_losses: list[float]
    training_losses: list[float]


def summarize(
    name: str, run: Run, reference: Run, storage: tuple[Any, Any], config: TrainConfig
) -> Row:
    """Turns what was measured of one run into what is reported.

    Args:
      name: the storage's name.
      run: what was measured.
      reference: the same of the run in float32.
      storage: how m and v were stored.
      config: the training's settings.

    Returns:
      The row of the table.
    """
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    loss, seconds = run.validation_losses[-1], run.median_seconds()
    mu_storage, nu_storage = storage
    moments = qstate.nbytes(find_adam_state(run.opt_state))
    held = qstate.nbytes((run.params, run.opt_state))
    # The stalled fraction grows while v fills up: predict it for the ages it was measured at.
    ages = [max(1, round(math.log1p(-mass) / math.log(config.b2))) for mass in run.masses]
    predicted = [
        qstate.theory.stall_probability(nu_storage, config.b2, nu_storage.rounding, age)
        for age in ages
    ]
    return Row(
        storage=name,
        mu_storage=str(mu_storage),
        nu_storage=str(nu_storage),
        parameters=parameters,
        validation_loss=loss,
        difference=loss - reference.validation_losses[-1],
        bytes_per_parameter=moments / parameters,
        weight_bytes_per_parameter=(held - moments) / parameters,
        skipped_steps=skipped_steps(run.opt_state),
        stalled_m=run.mean_stalled("mu"),
        stalled_v=run.mean_stalled("nu"),
        predicted_v=sum(predicted) / len(predicted),
        bias_v=run.bias,
        seconds_per_step=seconds,
        time_ratio=seconds / reference.median_seconds(),
        validation_losses=run.validation_losses,
        training_losses=run.training_losses,
    )


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "held-out\nloss": lambda row: f"{row.validation_loss:.4f}",
    "over\nfp32": lambda row: f"{row.difference:+.4f}",
    "bytes/\nparam": lambda row: f"{row.bytes_per_parameter:.2f}",
    "stalled\nm": lambda row: f"{row.stalled_m:.1%}",
    "stalled\nv": lambda row: f"{row.stalled_v:.1%}",
    "theory\nv": lambda row: f"{row.predicted_v:.1%}",
    "bias\nof v": lambda row: "-" if row.bias_v is None else f"{row.bias_v:+.1%}",
    "time a\nstep": lambda row: f"{row.time_ratio:.2f} x",
}
# What mixed precision adds takes the place of two others: a terminal has 80 columns.
_MIXED_COLUMNS = {
    **{name: text for name, text in _COLUMNS.items() if name not in ("stalled\nm", "theory\nv")},
    "bytes/\nweight": lambda row: f"{row.weight_bytes_per_parameter:.2f}",
    "steps\nskipped": lambda row: str(row.skipped_steps),
}


def print_report(
    rows: Sequence[Row], config: TrainConfig, source: str, seconds: float, precision: Precision
) -> None:
    """Prints the table and how to read it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("\nstorage", no_wrap=True)
    columns = _MIXED_COLUMNS if precision.mixed else _COLUMNS
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.storage, *(text(row) for text in columns.values()))
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, 100)
    console.print(
        f"\n{rows[0].parameters:,} parameters, {config.steps} steps of {config.batch_size} x "
        f"{config.sequence_length} bytes of {source}, {seconds:.0f} s in all; a step in fp32 takes "
        f"{rows[0].seconds_per_step * 1e3:.0f} ms.\n"
    )
    console.print(table)
    console.print("\n" + _guide(config, precision))


def _guide(config: TrainConfig, precision: Precision) -> str:
    measured = min(config.stall_steps, config.steps)
    theory = "Theory: its closed form for v at that age. "
    mixed = (
        f"\n\nAll but the fp32 run: {precision}. Bytes a weight: the parameter and its master "
        "weight. Steps skipped: those with infinite or NaN gradients."
    )
    return (
        "Loss: nats a byte of held-out text; differences of 0.02 are within what another --seed "
        "changes. Stalled: the share of stored numbers that a step left as they were, in the last "
        f"{measured} steps; in fp32 these belong to bytes that never occurred. "
        + ("" if precision.mixed else theory)
        + "Bias: the sum of the stored v against a float32 average of the same squared gradients. "
        "Near zero, v is right in the mean however much of it stalls, which is what stochastic "
        "rounding is for; far from zero, as with --rounding nearest, the optimizer divides by a "
        "wrong number." + (mixed if precision.mixed else "")
    )


def write_json(
    path: Path,
    rows: Sequence[Row],
    *,
    source: str,
    reset: str,
    precision: Precision,
    config: TrainConfig,
    model_config: ModelConfig,
) -> None:
    """Writes every number and curve; numbers that are not finite become null."""
    report = {
        "data": source,
        "reset": reset,
        "precision": str(precision),
        "model": dataclasses.asdict(model_config),
        "training": dataclasses.asdict(config),
        "validation_steps": config.validation_steps(),
        "storages": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(_finite(report), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(rows: Sequence[Row], config: TrainConfig) -> "Figure":
    """Draws the loss curves, and beside them how much of each state stalls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_curves(curves, rows, config)
    _draw_bars(bars, rows)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#e5e5e5")
    return figure


def _draw_curves(axes: "Axes", rows: Sequence[Row], config: TrainConfig) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = config.validation_steps()
    for row, (color, dash, width) in zip(rows, _STYLES, strict=False):
        label = f"{row.storage}  {row.validation_loss:.3f}"
        axes.plot(steps, row.validation_losses, color=color, ls=dash, lw=width, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Loss on held-out text", xlabel="step", ylabel="nats a byte")
    axes.legend(title="storage, last loss", frameon=False)


def _draw_bars(axes: "Axes", rows: Sequence[Row]) -> None:
    width = 0.38
    left = [place - width / 2 for place in range(len(rows))]
    right = [place + width / 2 for place in range(len(rows))]
    first = axes.bar(left, [100 * row.stalled_m for row in rows], width, color="#bdbdbd")
    second = axes.bar(right, [100 * row.stalled_v for row in rows], width, color="#1f77b4")
    theory = axes.scatter(
        right,
        [100 * row.predicted_v for row in rows],
        s=36,
        marker="D",
        color="white",
        edgecolor="black",
        zorder=3,
        clip_on=False,  # that of fp32 lies on the axis
    )
    labels = [f"{row.storage}\n{row.bytes_per_parameter:.2f} B" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_yticks(range(0, 101, 20))
    axes.set(
        title="Stored numbers that a step leaves as they were",
        xlabel="storage, and its bytes a parameter for m and v",
        ylabel="% of elements",
        ylim=(0, 115),  # room for the legend above bars that reach 100
    )
    names = ["m", "v", "v in theory"]
    axes.legend([first, second, theory], names, ncols=3, frameon=False, loc="upper left")
