"""`qstate plan`: its rows, its table, and how it refuses what it cannot plan."""

import dataclasses
import json

import pytest

from qstate import cli, theory
from qstate.cli._plan import plan_rows, plan_table
from qstate.numerics import FORMATS


@dataclasses.dataclass(frozen=True)
class Stub:
    """All that a plan asks of a format."""

    bits: int
    epsilon: float


STUBS = {"bf16": Stub(16, 2**-7), "e4m3": Stub(8, 2**-3), "ue2m2": Stub(4, 2**-2)}


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter", "rho", "nearest", "stochastic", "period"),
    [
        pytest.param("bf16", 2.0, 2.71, 0.946, 0.825, 1116, id="bf16"),
        pytest.param("e4m3", 1.0, 43.32, 1.0, 0.989, 320, id="e4m3"),
        pytest.param("ue2m2", 0.5, 86.64, 1.0, 0.994, 224, id="ue2m2"),
    ],
)
def test_a_row_has_the_papers_figures(name, bytes_per_parameter, rho, nearest, stochastic, period):
    (row,) = plan_rows({name: STUBS[name]}, b2=0.999)
    assert row.format == name
    assert row.bytes_per_parameter == bytes_per_parameter
    assert round(row.nu_precision_ratio, 2) == rho
    assert round(row.stalled_nearest, 3) == nearest
    assert round(row.stalled_stochastic, 3) == stochastic
    assert row.reset_period == period


def test_rows_follow_the_formats_and_the_arguments():
    rows = plan_rows(STUBS, b2=0.99, tolerance=0.7, b1=0.95)
    assert [row.format for row in rows] == list(STUBS)
    for row, stub in zip(rows, STUBS.values(), strict=True):
        assert row.bits == stub.bits
        assert row.mu_precision_ratio == theory.precision_ratio(stub, 0.95)
        assert row.nu_precision_ratio == theory.precision_ratio(stub, 0.99)
        assert row.effective_decay == theory.effective_decay(stub, 0.99)
        assert row.startup_window == theory.startup_window(stub, 0.99, 0.8)
        assert row.reset_period == theory.reset_period(stub, 0.99, 0.7)


def test_the_table_is_aligned():
    lines = plan_table(plan_rows(STUBS, b2=0.999)).splitlines()
    assert len(lines) == 3 + len(STUBS)
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[3].split()) == "bf16 16 2 0.0271 2.71 94.6% 82.5% 18,462 585 1,116"


def test_an_average_that_hardly_stalls_has_its_period_in_brackets():
    table = plan_table(plan_rows({"f32": Stub(32, 2**-23)}, b2=0.999))
    assert table.splitlines()[-1].split()[-3:] == ["1,000", "never", "(1,026)"]


def test_a_frozen_average_looks_back_without_end():
    table = plan_table(plan_rows({"ue2m2": STUBS["ue2m2"]}, b2=0.999))
    assert table.splitlines()[-1].split()[-3:] == [">1e6", "19", "224"]


def test_plan_prints_the_format_that_is_named(capsys):
    assert cli.main(["plan", "--format", "e4m3", "--b2", "0.999"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("e4m3 ")]
    assert " ".join(row.split()) == "e4m3 8 1 0.433 43.3 100.0% 98.9% >1e6 38 320"
    assert not any(line.startswith("bf16 ") for line in lines)


def test_plan_prints_every_format_where_none_is_named(capsys):
    assert cli.main(["plan"]) == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    first_words = [line.split()[0] for line in printed.splitlines() if line.strip()]
    assert [word for word in first_words if word in FORMATS] == list(FORMATS)


def test_plan_takes_a_format_in_capitals(capsys):
    assert cli.main(["plan", "--format", "UE2M2", "--tolerance", "0.7"]) == 0
    assert " 246\n" in capsys.readouterr().out


def test_plan_prints_json(capsys):
    assert cli.main(["plan", "--b1", "0.95", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    expected = plan_rows(FORMATS, b2=0.999, b1=0.95)
    assert rows == [dataclasses.asdict(row) for row in expected]


def test_plan_names_the_formats_where_one_is_unknown(capsys):
    assert cli.main(["plan", "--format", "e9m9"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'e9m9'" in captured.err
    assert all(name in captured.err for name in FORMATS)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        pytest.param("--b2", "1.0", "decay must lie in (0, 1), got 1.0", id="b2"),
        pytest.param("--b1", "-1", "decay must lie in (0, 1), got -1.0", id="b1"),
        pytest.param("--tolerance", "60", "tolerance must lie in [0, 1), got 60.0", id="tolerance"),
    ],
)
def test_plan_refuses_what_lies_outside_its_interval(option, value, message, capsys):
    assert cli.main(["plan", option, value]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
