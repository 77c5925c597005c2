"""The closed forms, against the paper's tables and against numerical integration."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from qstate import theory


@dataclasses.dataclass(frozen=True)
class Grid:
    """All that the theory asks of a format."""

    epsilon: float


@dataclasses.dataclass(frozen=True)
class Stored:
    """All that the theory asks of a storage."""

    format: Grid


FORMATS = {"bf16": Grid(2**-7), "e4m3": Grid(2**-3), "ue2m2": Grid(2**-2)}
# The stalled fractions that the paper measured right after a reset.
FLOORS = {"bf16": 0.17, "e4m3": 0.53, "ue2m2": 0.97}


def grid_of_ratio(rho: float, decay: float) -> Grid:
    return Grid(rho * 2 * (1 - decay) / math.log(2))


# The paper's tables: decay 0.999.


@pytest.mark.parametrize(
    ("name", "printed", "digits"),
    [("bf16", 2.71, 2), ("e4m3", 43.3, 1), ("ue2m2", 86.6, 1)],
    ids=["bf16", "e4m3", "ue2m2"],
)
def test_precision_ratio_is_the_papers(name, printed, digits):
    assert round(theory.precision_ratio(FORMATS[name], 0.999), digits) == printed


@pytest.mark.parametrize(
    ("name", "rounding", "printed"),
    [
        pytest.param("bf16", "nearest", 0.946, id="bf16-nearest"),
        pytest.param("e4m3", "nearest", 1.000, id="e4m3-nearest"),
        pytest.param("ue2m2", "nearest", 1.000, id="ue2m2-nearest"),
        pytest.param("bf16", "stochastic", 0.825, id="bf16-stochastic"),
        pytest.param("e4m3", "stochastic", 0.989, id="e4m3-stochastic"),
        pytest.param("ue2m2", "stochastic", 0.994, id="ue2m2-stochastic"),
    ],
)
def test_steady_stall_probability_is_the_papers(name, rounding, printed):
    assert round(theory.stall_probability(FORMATS[name], 0.999, rounding), 3) == printed


@pytest.mark.parametrize(
    ("name", "tolerance", "printed"),
    [
        pytest.param(name, tolerance, period, id=f"{name}-{tolerance}")
        for name, periods in {
            "bf16": (1004, 1116, 1262),
            "e4m3": (295, 320, 351),
            "ue2m2": (206, 224, 246),
        }.items()
        for tolerance, period in zip((0.5, 0.6, 0.7), periods, strict=True)
    ],
)
def test_reset_period_is_the_papers(name, tolerance, printed):
    assert theory.reset_period(FORMATS[name], 0.999, tolerance) == printed


@pytest.mark.parametrize(
    ("name", "threshold", "printed"),
    [
        pytest.param(name, threshold, window, id=f"{name}-{threshold}")
        for name, windows in {
            # The paper prints 3044 for the last, from a rounded ratio; the closed form is 3042.
            "bf16": (76, 464, 1051, 3042),
            "e4m3": (0, 15, 36, 61),
            "ue2m2": (0, 0, 0, 0),
        }.items()
        for threshold, window in zip((0.5, 0.8, 0.9, 0.95), windows, strict=True)
    ],
)
def test_startup_window_is_the_papers(name, threshold, printed):
    assert theory.startup_window(FORMATS[name], 0.999, threshold, FLOORS[name]) == printed


def test_mean_abs_deviation_is_the_papers():
    assert round(theory.mean_abs_deviation, 4) == 0.9679
    integral = stats.chi2(1).expect(lambda z: abs(z - 1))
    assert theory.mean_abs_deviation == pytest.approx(integral, rel=1e-7)


# The closed forms against the integrals that define them, with SciPy's χ².


def stall_integral(rho: float, mass: float, rounding: str) -> float:
    """Pr[stall] as an integral over x, z = x²: the density of z is singular at 0, that of x not."""
    density = stats.norm.pdf
    radius = rho if rounding == "nearest" else 2 * rho
    low, high = max(0.0, 1 - radius) * mass, (1 + radius) * mass

    def integrand(x):
        kept = 1.0 if rounding == "nearest" else 1 - abs(x * x / mass - 1) / radius
        return 2 * density(x) * kept

    edges = [math.sqrt(low), math.sqrt(mass), min(math.sqrt(high), 40.0)]
    return sum(
        integrate.quad(integrand, start, stop, epsabs=0, epsrel=1e-11, limit=200)[0]
        for start, stop in itertools.pairwise(edges)
    )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("age", [1, 20, 700, None], ids=lambda age: f"age-{age}")
@pytest.mark.parametrize(
    "rho",
    [1e-6, 0.99e-5, 1.01e-5, 1e-3, 0.0099, 0.0101, 0.1, 0.4999, 0.5001, 0.9, 1.0, 2.71, 43.3, 1e3],
    ids=lambda rho: f"rho-{rho:g}",
)
def test_stall_probability_is_its_integral(rho, age, rounding):
    decay = 0.999
    mass = 1.0 if age is None else 1 - decay**age
    expected = stall_integral(rho, mass, rounding)
    actual = theory.stall_probability(grid_of_ratio(rho, decay), decay, rounding, age)
    assert actual == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("rho", [1.5, 2.71, 43.3, 86.6])
@pytest.mark.parametrize("age", [1, 50, 5000])
def test_above_one_only_the_upper_threshold_counts(rho, age):
    expected = stats.chi2(1).cdf((1 + rho) * (1 - 0.999**age))
    actual = theory.stall_probability(grid_of_ratio(rho, 0.999), 0.999, age=age)
    assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rho", [50, 1e3, 1e6, 1e12], ids=lambda rho: f"rho-{rho:g}")
def test_stochastic_stalling_of_a_coarse_grid(rho):
    moved = 1 - theory.stall_probability(grid_of_ratio(rho, 0.99), 0.99, "stochastic")
    assert moved == pytest.approx(theory.mean_abs_deviation / (2 * rho), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("rho", [1e-12, 1e-7], ids=lambda rho: f"rho-{rho:g}")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_stalling_of_a_fine_grid_is_the_density_at_one(rho, rounding):
    actual = theory.stall_probability(grid_of_ratio(rho, 0.999), 0.999, rounding)
    assert actual == pytest.approx(2 * rho * stats.chi2(1).pdf(1), rel=1e-9)


def test_startup_window_inverts_the_distribution():
    # φ* = F⁻¹(P₀)/(1+ρ) and j* = ⌈log(1-φ*)/log β⌉.
    for name, threshold in [("bf16", 0.5), ("bf16", 0.8), ("e4m3", 0.95), ("ue2m2", 0.999)]:
        rho = theory.precision_ratio(FORMATS[name], 0.999)
        mass = stats.chi2(1).ppf(threshold) / (1 + rho)
        expected = math.ceil(math.log1p(-mass) / math.log(0.999))
        assert theory.startup_window(FORMATS[name], 0.999, threshold) == expected


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.99, 0.9999], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_reset_period_is_the_first_crossing(name, decay):
    rho = theory.precision_ratio(FORMATS[name], decay)

    def stalled(mass):
        return stats.chi2.cdf((1 + rho) * mass, 1) - stats.chi2.cdf(max(0, 1 - rho) * mass, 1)

    def staleness(period):
        built_up = stalled(1 - decay ** np.arange(1, period + 1)) / stalled(1.0)
        return np.maximum(0, (built_up - 0.6) / (1 - 0.6)).mean()

    def averaging_error(period):
        # From the EMA's own weights: the effective sample size that a cycle still lacks.
        weights = decay ** np.arange(period)
        return 1 - weights.sum() ** 2 / (weights**2).sum() / ((1 + decay) / (1 - decay))

    period = theory.reset_period(FORMATS[name], decay)
    assert staleness(period) >= averaging_error(period)
    assert period == 1 or staleness(period - 1) < averaging_error(period - 1)


# How the quantities move.

RATIOS = [1e-6, 1e-5, 1e-3, 0.01, 0.3, 0.5, 0.99, 1.0, 1.01, 3.0, 40.0, 1e3]
AGES = [1, 2, 10, 100, 1000, 10_000, None]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("age", AGES, ids=lambda age: f"age-{age}")
def test_a_coarser_grid_stalls_more(age, rounding):
    stalled = [
        theory.stall_probability(grid_of_ratio(rho, 0.999), 0.999, rounding, age) for rho in RATIOS
    ]
    assert stalled == sorted(stalled)
    assert stalled[0] > 0
    assert stalled[-1] <= 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("rho", RATIOS, ids=lambda rho: f"rho-{rho:g}")
def test_an_older_average_stalls_more(rho, rounding):
    stalled = [
        theory.stall_probability(grid_of_ratio(rho, 0.999), 0.999, rounding, age) for age in AGES
    ]
    assert stalled == sorted(stalled)


@pytest.mark.parametrize("rho", RATIOS, ids=lambda rho: f"rho-{rho:g}")
def test_stochastic_rounding_stalls_less_on_a_coarse_grid_and_as_often_on_a_fine_one(rho):
    grid = grid_of_ratio(rho, 0.999)
    nearest = theory.stall_probability(grid, 0.999)
    stochastic = theory.stall_probability(grid, 0.999, "stochastic")
    if rho >= 1:
        assert stochastic < nearest
    elif rho <= 0.01:
        assert stochastic == pytest.approx(nearest, rel=1e-3)


@pytest.mark.parametrize("decay", [0.998, 0.999, 0.9999], ids=str)
def test_coarser_formats_stall_sooner_and_are_reset_sooner(decay):
    # Where ρ > 1: below, S(j) = P(j)/P(∞) no longer grows faster on a coarser grid.
    windows = [theory.startup_window(grid, decay, 0.8) or math.inf for grid in FORMATS.values()]
    periods = [theory.reset_period(grid, decay) for grid in FORMATS.values()]
    assert windows == sorted(windows, reverse=True)
    assert periods == sorted(periods, reverse=True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_higher_tolerance_resets_later(name):
    periods = [theory.reset_period(FORMATS[name], 0.999, s) for s in (0, 0.3, 0.6, 0.9, 0.999)]
    assert periods == sorted(set(periods))


# Effective decay.


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", FORMATS)
def test_effective_decay_counts_only_the_steps_taken(name, rounding):
    taken = 1 - theory.stall_probability(FORMATS[name], 0.999, rounding)
    effective = theory.effective_decay(FORMATS[name], 0.999, rounding)
    assert 1 - effective == pytest.approx(0.001 * taken, rel=1e-9, abs=1e-16)
    assert 0.999 < effective <= 1


def test_effective_decay_rounds_to_nearest_by_default():
    grid = FORMATS["bf16"]
    assert theory.effective_decay(grid, 0.999) == theory.effective_decay(grid, 0.999, "nearest")


def test_effective_decay_of_a_fine_grid_is_the_decay():
    assert theory.effective_decay(Grid(2**-23), 0.999) == pytest.approx(0.999, abs=1e-7)


# Where there is nothing to find.


@pytest.mark.parametrize("threshold", [0.17, 0.1, 1e-9], ids=str)
def test_a_threshold_within_the_floor_is_met_at_once(threshold):
    assert theory.startup_window(FORMATS["bf16"], 0.999, threshold, floor=0.17) == 0


def test_a_threshold_above_the_steady_state_is_never_met():
    assert theory.startup_window(FORMATS["bf16"], 0.999, 0.95) is None
    assert theory.startup_window(FORMATS["bf16"], 0.9, 0.5) is None


def test_a_threshold_that_the_first_step_meets():
    grid = FORMATS["bf16"]
    first = theory.stall_probability(grid, 0.999, age=1)
    assert theory.startup_window(grid, 0.999, first) == 1
    assert theory.startup_window(grid, 0.999, math.nextafter(first, 1)) == 2


# Formats, storages, and what is neither.


def test_a_storage_stands_for_its_format():
    grid = FORMATS["e4m3"]
    assert theory.precision_ratio(Stored(grid), 0.999) == theory.precision_ratio(grid, 0.999)
    assert theory.reset_period(Stored(grid), 0.999) == 320


@pytest.mark.parametrize(
    ("format", "error", "message"),
    [
        pytest.param("e4m3", TypeError, "'e4m3'", id="name"),
        pytest.param(None, TypeError, "None", id="none"),
        pytest.param(Stored("e4m3"), TypeError, "'e4m3'", id="storage-of-a-name"),
        pytest.param(Grid("fine"), TypeError, "'fine'", id="text"),
        pytest.param(Grid(0.0), ValueError, "0.0", id="zero"),
        pytest.param(Grid(-0.125), ValueError, "-0.125", id="negative"),
        pytest.param(Grid(math.inf), ValueError, "inf", id="infinite"),
        pytest.param(Grid(math.nan), ValueError, "nan", id="nan"),
    ],
)
def test_a_format_needs_a_spacing(format, error, message):
    with pytest.raises(error, match=message) as raised:
        theory.precision_ratio(format, 0.999)
    assert "epsilon" in str(raised.value)


@pytest.mark.parametrize("decay", [0, 0.0, 1, 1.0, -0.5, 999, math.nan, math.inf], ids=repr)
@pytest.mark.parametrize(
    "function",
    [
        theory.precision_ratio,
        theory.stall_probability,
        lambda grid, decay: theory.startup_window(grid, decay, 0.8),
        theory.reset_period,
        theory.effective_decay,
    ],
    ids=["precision_ratio", "stall_probability", "startup_window", "reset_period", "effective"],
)
def test_a_decay_lies_between_zero_and_one(function, decay):
    with pytest.raises(ValueError, match=rf"decay must lie in \(0, 1\), got {float(decay)}"):
        function(FORMATS["bf16"], decay)


@pytest.mark.parametrize("decay", ["0.999", None, True, 0.999j], ids=repr)
def test_a_decay_is_a_number(decay):
    with pytest.raises(TypeError, match="decay must be a Python number"):
        theory.reset_period(FORMATS["bf16"], decay)


@pytest.mark.parametrize("rounding", ["Nearest", "up", "", None], ids=repr)
def test_an_unknown_rounding(rounding):
    with pytest.raises(ValueError, match="'nearest' or 'stochastic'") as raised:
        theory.stall_probability(FORMATS["bf16"], 0.999, rounding)
    assert repr(rounding) in str(raised.value)


@pytest.mark.parametrize("age", [0, -3, 2.5, "1"], ids=repr)
def test_an_age_counts_steps_from_one(age):
    with pytest.raises(ValueError, match="age must be an integer of at least 1") as raised:
        theory.stall_probability(FORMATS["bf16"], 0.999, age=age)
    assert repr(age) in str(raised.value)


@pytest.mark.parametrize("threshold", [0, 1, -0.1, 80, math.nan], ids=repr)
def test_a_threshold_lies_between_zero_and_one(threshold):
    with pytest.raises(ValueError, match=r"threshold must lie in \(0, 1\), got"):
        theory.startup_window(FORMATS["bf16"], 0.999, threshold)


@pytest.mark.parametrize("floor", [1, -0.1, 17, math.nan], ids=repr)
def test_a_floor_may_be_zero_but_not_one(floor):
    with pytest.raises(ValueError, match=r"floor must lie in \[0, 1\), got"):
        theory.startup_window(FORMATS["bf16"], 0.999, 0.8, floor)


@pytest.mark.parametrize("tolerance", [1, -0.1, 60, math.nan], ids=repr)
def test_a_tolerance_may_be_zero_but_not_one(tolerance):
    with pytest.raises(ValueError, match=r"tolerance must lie in \[0, 1\), got"):
        theory.reset_period(FORMATS["bf16"], 0.999, tolerance)
    with pytest.raises(ValueError, match=r"tolerance must lie in \[0, 1\), got"):
        theory(tolerance)


# The module as a reset policy.


def test_the_module_called_is_a_reset_policy():
    assert theory() == theory.TheoryReset(tolerance=0.6, kind="hard")
    assert theory(kind="soft") == theory.TheoryReset(0.6, "soft")
    assert theory(0.7).period(FORMATS["e4m3"], 0.999) == 351
    assert theory().period(Stored(FORMATS["ue2m2"]), 0.999) == 224


def test_a_reset_policy_is_hashable_and_frozen():
    assert len({theory(), theory(0.6), theory(kind="soft")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        theory().tolerance = 0.5


@pytest.mark.parametrize("kind", ["Hard", "medium", None], ids=repr)
def test_an_unknown_kind_of_reset(kind):
    with pytest.raises(ValueError, match="kind must be 'hard' or 'soft', got") as raised:
        theory(kind=kind)
    assert repr(kind) in str(raised.value)
