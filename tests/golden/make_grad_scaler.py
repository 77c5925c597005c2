"""Record trajectories of the real `torch.amp.GradScaler` on CPU into `grad_scaler.json`.

Each trajectory trains one float32 parameter with SGD through `scaler.scale(loss).backward()`,
`scaler.step(opt)` and `scaler.update()`; at chosen steps the loss carries a factor of inf or NaN,
so the gradient really is not finite. The fields are described in README.md beside this file.

To remake the file:

    pip install torch==2.13.0 && python tests/golden/make_grad_scaler.py

torch is needed for that alone, never by the package or its tests.
"""

import itertools
import json
import math
import pathlib
import random
import textwrap

import torch

OUT = pathlib.Path(__file__).with_name("grad_scaler.json")
FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5}


def record(init_scale, growth_interval, steps, fault):
    """Run GradScaler; `fault(step, scale)` names the step's gradient: "inf", "nan" or None."""
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_interval=growth_interval, **FACTORS
    )
    weight = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([weight], lr=1.0)
    scales, trackers, overflow, skipped = [], [], [], []
    after = init_scale
    for step in range(steps):
        scale = scaler.get_scale()
        assert scale == after  # what one step leaves is what the next one uses
        kind = fault(step, scale)
        opt.zero_grad()
        # The true gradient is 1, so every step taken lowers the weight by exactly 1.
        loss = weight.sum() * float(kind or 1.0)
        scaler.scale(loss).backward()
        # Compared as text, where nan equals nan.
        assert str(weight.grad.item()) == str(scale * float(kind or 1.0))
        before = weight.item()
        scaler.step(opt)
        scaler.update()
        assert weight.item() in (before, before - 1.0)
        if kind is not None:
            overflow.append([step, kind])
        if weight.item() == before:
            skipped.append(step)
        after = scaler.get_scale()
        scales.append(scale)
        trackers.append(scaler.state_dict()["_growth_tracker"])
    return {
        "config": {"init_scale": init_scale, **FACTORS, "growth_interval": growth_interval},
        "steps": steps,
        "overflow": overflow,
        "skipped": skipped,
        "scale": [[value, len(list(run))] for value, run in itertools.groupby(scales)],
        "final_scale": after,
        "tracker": climbs(trackers),
    }


def climbs(values):
    """Runs that climb by one a step, as [first value, length]."""
    runs = []
    for value in values:
        if runs and value == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs


def defaults():
    """torch's own settings: growths after steps 4000 and 6002."""
    faults = {
        0: "inf",  # the very first step
        2000: "nan",  # the tracker stands at 1999: one more clean step would have grown the scale
        4001: "inf",  # the first step at a grown scale
        4002: "nan",  # two in a row
        6300: "inf",  # midway
    }
    return record(2.0**16, 2000, 6500, lambda step, scale: faults.get(step))


def probing():
    """The scale feels for a drifting ceiling: a step overflows just when its scale exceeds it."""
    ceilings = [[step, round(2 ** (14 - 4 * math.cos(step / 700)))] for step in range(0, 6000, 100)]

    def fault(step, scale):
        return "inf" if scale > ceilings[step // 100][1] else None

    return {"ceiling": ceilings, **record(2.0**16, 50, 6000, fault)}


def short():
    """A short interval and overflows drawn at random."""
    draw = random.Random(0)
    faults = [draw.choice(["inf", "nan"]) if draw.random() < 0.2 else None for _ in range(300)]
    return record(4.0, 3, 300, lambda step, scale: faults[step])


def growing():
    """Every step doubles the scale, to 2^124."""
    return record(2.0**100, 1, 24, lambda step, scale: None)


def lines(value, indent=""):
    """JSON with one field a line, long lists folded."""
    if isinstance(value, dict):
        deeper = indent + "  "
        fields = (f"{deeper}{json.dumps(k)}: {lines(v, deeper)}" for k, v in value.items())
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if not isinstance(value, list):
        return json.dumps(value)
    items = ", ".join(json.dumps(item, separators=(",", ":")) for item in value)
    if len(items) < 80:
        return f"[{items}]"
    inner = indent + "  "
    folded = textwrap.fill(items, 98, initial_indent=inner, subsequent_indent=inner)
    return f"[\n{folded}\n{indent}]"


if __name__ == "__main__":
    torch.set_num_threads(1)
    recorded = {make.__name__: make() for make in (defaults, probing, short, growing)}
    version = torch.__version__.split("+")[0]
    OUT.write_text(lines({"torch": version, "trajectories": recorded}) + "\n", encoding="utf-8")
