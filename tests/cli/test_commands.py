"""Each command that needs no PyTorch, on a trace that can be checked by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.traces.trace import Trace

MB = 10**6
IDEAL_SECONDS = 0.07
TIGHT = ("--hardware", "g10", "--gpu-memory", "110MB")
"""30 MB less than the 140 MB that the small trace holds at its turn, 10 MB above one kernel."""


@pytest.fixture
def planned(folder: Path, teraio: Callable[..., Result]) -> Path:
    """The folder, with ``small.plan`` beside ``small.trace``."""
    result = teraio("plan", "small.trace", *TIGHT, "-o", "small.plan", "-q")
    assert (result.exit_code, result.output) == (0, "")
    return folder


def test_show_reports_the_characteristics(folder: Path, teraio_json: Callable[..., Any]) -> None:
    data = teraio_json("show", "small.trace", "--hardware", "g10")
    assert (data["kernels"], data["storages"], data["accesses"]) == (7, 4, 10)
    assert data["inactive_periods"] == 3  # the weight, and the two activations that wait
    assert data["ideal_seconds"] == pytest.approx(IDEAL_SECONDS)
    assert data["peak_live_bytes"] == data["peak_allocated_bytes"] == 140 * MB
    kernel_megabytes = 60 + 80 + 80 + 40 + 40 + 40 + 20
    assert data["active_mean_bytes"] == pytest.approx(kernel_megabytes / 7 * MB)
    assert data["active_mean_fraction_of_gpu"] == pytest.approx(
        kernel_megabytes / 7 * MB / (40 * 2**30)
    )
    assert data["kind_bytes_at_peak"] == {"parameter": 20 * MB, "activation": 120 * MB}
    assert sum(row["storages"] for row in data["storage_sizes"]["rows"]) == 4
    assert data["active_max_bytes"] == 80 * MB
    assert data["active_max_kernel"] == 1
    assert data["active_max_fraction_of_gpu"] == pytest.approx(80 * MB / (40 * 2**30))


def test_show_tells_how_long_large_storages_lie_idle(
    folder: Path, teraio_json: Callable[..., Any]
) -> None:
    """All four hold 20 or 40 MB; kernels take 10 ms each."""
    large = teraio_json("show", "small.trace")["large_storages"]
    assert (large["from_bytes"], large["to_bytes"]) == (10 * MB, 1000 * MB)
    assert (large["storages"], large["storage_fraction"]) == (4, 1.0)
    assert large["long_idle_storages"] == large["long_periods"] == large["periods"] == 3
    assert large["long_idle_storage_fraction"] == 0.75


def test_show_for_people_and_picture(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("show", "small.trace", "--plot", "memory.png")
    assert result.exit_code == 0
    assert "140 MB at kernel 2" in result.stdout
    assert "Inactive periods by length" in result.stdout
    assert "75.0 % of them, 100.0 % of their periods" in result.stdout
    assert (folder / "memory.png").stat().st_size > 5000


def test_plan_fits_and_is_saved(folder: Path, teraio_json: Callable[..., Any]) -> None:
    data = teraio_json("plan", "small.trace", *TIGHT, "-o", "small.plan")
    assert data["planner"] == "optimal"
    assert data["ideal_seconds"] == pytest.approx(IDEAL_SECONDS)
    assert data["lower_bound_seconds"] <= data["predicted_seconds"]
    assert data["fraction_of_ideal"] == pytest.approx(IDEAL_SECONDS / data["predicted_seconds"])
    assert 0 < data["peak_gpu_bytes"] <= 110 * MB
    saved = Plan.load(folder / "small.plan")
    assert saved.predicted_seconds == data["predicted_seconds"]
    assert len(saved.moves) == data["moves"] > 0


def test_plan_keys_are_those_that_were_promised(
    folder: Path, teraio_json: Callable[..., Any]
) -> None:
    promised = (
        "planner predicted_seconds ideal_seconds lower_bound_seconds bound_kind gap "
        "fraction_of_ideal peak_gpu_bytes peak_host_bytes ssd_bytes_written planning_seconds "
        "bound_seconds value_of_gb value_of_gb_per_second dollars_per_million_tokens ssd_years"
    )
    assert set(promised.split()) <= set(teraio_json("plan", "small.trace", *TIGHT))


def test_plan_with_a_proved_bound(
    folder: Path, teraio_json: Callable[..., Any], teraio: Callable[..., Result]
) -> None:
    """The JSON has what more would be worth, the table what would help."""
    data = teraio_json("plan", "small.trace", *TIGHT, "--bound")
    assert data["ideal_seconds"] < data["lower_bound_seconds"] <= data["predicted_seconds"]
    assert (data["bound_kind"], data["bound_seconds"] > 0) == ("dual", True)
    assert data["value_of_gb"]["gpu"] > 0
    assert any(data["value_of_gb_per_second"].values())
    shown = teraio("plan", "small.trace", *TIGHT, "--bound").stdout
    assert "1 GB more of gpu" in shown


def test_plan_for_people(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("plan", "small.trace", *TIGHT)
    assert result.exit_code == 0
    for text in ("not saved (no -o)", "predicted iteration", "gap to the bound", "of 110 MB"):
        assert text in result.stdout


def test_plan_that_no_planner_can_make_is_exit_code_1(
    folder: Path, teraio: Callable[..., Result]
) -> None:
    """Kernels 1 and 2 access 80 MB each."""
    result = teraio(
        "plan", "small.trace", "--hardware", "g10", "--gpu-memory", "70MB", "-o", "small.plan"
    )
    assert result.exit_code == 1
    assert result.stderr.startswith("teraio: error: kernel 1 (op1) needs 80000000 bytes")
    assert "70000000 bytes (70.0 MB) are available" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "small.plan").exists()


def test_plan_in_next_to_no_time_says_what_was_proved(
    folder: Path, teraio_json: Callable[..., Any], teraio: Callable[..., Result]
) -> None:
    """A valid plan, and a bound of the kind that it is."""
    words = ("plan", "small.trace", *TIGHT, "--time-limit", "0.05")
    data = teraio_json(*words, "-o", "small.plan")
    assert data["moves"] > 0
    assert data["bound_kind"] in ("ideal", "dual")
    proved_more = data["lower_bound_seconds"] > data["ideal_seconds"] * (1 + 1e-9)
    assert proved_more == (data["bound_kind"] != "ideal")
    verdict = teraio_json("verify", "small.trace", "small.plan")
    assert verdict["valid"]
    assert verdict["fits"]
    shown = teraio(*words).stdout
    assert "gap to the bound" in shown
    assert "(ideal)" in shown or "(dual)" in shown


def test_unknown_planner_is_bad_usage(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("plan", "small.trace", *TIGHT, "--planner", "oracle")
    assert result.exit_code == 2
    assert "oracle" in result.stderr


def test_unknown_hardware_is_bad_usage(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("plan", "small.trace", "--hardware", "abacus")
    assert result.exit_code == 2
    assert "neither a hardware file nor one of the presets" in result.stderr


def test_verify_accepts_the_plan(planned: Path, teraio_json: Callable[..., Any]) -> None:
    data = teraio_json("verify", "small.trace", "small.plan")
    assert data == {"valid": True, "fits": True, "violations": [], "num_violations": 0}


def test_verify_of_a_plan_that_does_not_fit_is_exit_code_1(
    planned: Path, teraio: Callable[..., Result], teraio_json: Callable[..., Any]
) -> None:
    """No plan fits 79 MB: kernels 1 and 2 access 80 MB each."""
    (planned / "smaller.toml").write_text(
        Plan.load("small.plan").hardware.with_budgets(gpu_memory=79 * MB).to_toml()
    )
    words = ("verify", "small.trace", "small.plan", "--hardware", "smaller.toml")
    data = teraio_json(*words, exit_code=1)
    assert (data["valid"], data["fits"]) == (True, False)
    assert set(data["violations"][0]) == {"table", "row", "rule", "message"}
    shown = teraio(*words)
    assert shown.exit_code == 1
    assert "gpu_memory" in shown.stdout


def test_verify_of_a_plan_for_another_trace_is_exit_code_1(
    planned: Path, small_trace: Trace, teraio_json: Callable[..., Any]
) -> None:
    other = replace(small_trace, metadata=replace(small_trace.metadata, model="other"))
    other.save(planned / "other.trace")
    assert teraio_json("verify", "other.trace", "small.plan", exit_code=1)["valid"] is False


def test_simulate_agrees_with_the_plan(planned: Path, teraio_json: Callable[..., Any]) -> None:
    data = teraio_json("simulate", "small.trace", "small.plan")
    assert data["iteration_seconds"] == pytest.approx(Plan.load("small.plan").predicted_seconds)
    parts = (
        sum(data["stall_seconds"].values())
        + data["compute_alone_seconds"]
        + data["compute_overlapped_seconds"]
        + data["gap_seconds"]
    )
    assert data["iteration_seconds"] == pytest.approx(parts)
    assert set(data["stall_seconds"]) == {"read", "memory", "host"}
    assert data["peak_gpu_bytes"] <= 110 * MB
    promised = "cycle_iterations ideal_seconds channel_utilisation simulating_seconds"
    assert set(promised.split()) <= set(data)


def test_simulate_without_a_plan_fetches_on_demand(
    folder: Path, teraio_json: Callable[..., Any]
) -> None:
    data = teraio_json("simulate", "small.trace", *TIGHT)
    assert data["demand_fetches"] > 0
    assert data["iteration_seconds"] > IDEAL_SECONDS


def test_simulate_without_plan_and_hardware_is_bad_usage(
    folder: Path, teraio: Callable[..., Result]
) -> None:
    result = teraio("simulate", "small.trace")
    assert result.exit_code == 2
    assert "without PLAN, --hardware is needed" in result.stderr


def test_simulate_writes_pictures_and_timelines(
    planned: Path, teraio: Callable[..., Result]
) -> None:
    words = ("simulate", "small.trace", "small.plan")
    result = teraio(*words, "--timeline", "t.json", "--plot", "t.svg")
    assert result.exit_code == 0
    assert "Where the iteration goes" in result.stdout
    names = {event["name"] for event in json.loads((planned / "t.json").read_text())["traceEvents"]}
    assert {"op3", "GPU memory"} <= names
    assert (planned / "t.svg").stat().st_size > 5000
    assert teraio(*words, "--timeline", "t.timeline", "-q").output == ""
    assert Timeline.load(planned / "t.timeline").iteration_seconds > 0


def test_compare_is_one_table_and_one_picture(
    folder: Path, teraio_json: Callable[..., Any]
) -> None:
    words = ("compare", "small.trace", *TIGHT, "--planners", "ideal, greedy,on-demand")
    data = teraio_json(*words, "--plot", "compare.png")
    rows = {row["planner"]: row for row in data["rows"]}
    assert list(rows) == ["ideal", "greedy", "on-demand"]
    assert rows["ideal"]["iteration_seconds"] == pytest.approx(IDEAL_SECONDS)
    assert rows["greedy"]["iteration_seconds"] <= rows["on-demand"]["iteration_seconds"]
    assert (folder / "compare.png").stat().st_size > 5000


def test_compare_for_people(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("compare", "small.trace", *TIGHT)
    assert result.exit_code == 0
    assert "on-demand" in result.stdout
    assert "100.0 %" in result.stdout


def _write_g10(file: Path) -> None:
    """A weight, an activation made by kernel 0 and read by the loss, kernels of 1 ms."""
    content = {
        "model": "Tiny",
        "batch": 8,
        "clock_hz": 1_200_000_000,
        "tensors": [[0, 4096, 1, 0, 2], [1, 8192, 0, 0, 2]],
        "kernels": [
            [0, "Linear_Forward", 1.0, 0, 0, [0], [1], -1],
            [1, "makeLoss", 1.0, 0, 0, [1], [0], -1],
        ],
    }
    file.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_import_g10(folder: Path, teraio_json: Callable[..., Any]) -> None:
    _write_g10(folder / "tiny.json.gz")
    data = teraio_json("import", "g10", "tiny.json.gz", "-o", "tiny.trace")
    assert (data["kernels"], data["storages"], data["accesses"]) == (2, 2, 4)
    assert data["ideal_seconds"] == pytest.approx(0.002)
    assert data["peak_live_bytes"] == 4096 + 8192
    assert any("no optimizer state" in warning for warning in data["warnings"])
    assert Trace.load(folder / "tiny.trace").metadata.model == "Tiny-8"


def test_import_for_people(folder: Path, teraio: Callable[..., Result]) -> None:
    _write_g10(folder / "tiny.json.gz")
    result = teraio("import", "g10", "tiny.json.gz", "-o", "tiny.trace")
    assert result.exit_code == 0
    assert "12.3 kB" in result.stdout
    assert "no optimizer state" in result.stdout


def test_import_of_something_else_is_bad_input(folder: Path, teraio: Callable[..., Result]) -> None:
    (folder / "tiny.json.gz").write_text("{}")
    result = teraio("import", "g10", "tiny.json.gz", "-o", "tiny.trace")
    assert result.exit_code == 2
    assert result.stderr.startswith("teraio: error: tiny.json.gz")
    assert not (folder / "tiny.trace").exists()


def test_import_of_an_unknown_format_is_bad_usage(teraio: Callable[..., Result]) -> None:
    result = teraio("import", "onnx", "model.onnx", "-o", "t.trace")
    assert result.exit_code == 2
    assert "'onnx' is not" in result.stderr
