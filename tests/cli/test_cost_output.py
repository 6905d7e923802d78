"""``plan`` and ``compare``: what training costs, how long SSDs last, and SSDs that must last."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from teraio.cli.tables import dollars, years
from teraio.contracts.hardware import SECONDS_PER_YEAR, Hardware
from teraio.traces.trace import Trace

MB = 10**6
TIGHT = ("--gpu-memory", "110MB", "--planner", "greedy")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.074712, "$0.0747"),
        (1234.5, "$1,234"),
        (2.0, "$2.00"),
        (0.0, "$0"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_dollars(amount: float | None, text: str) -> None:
    assert dollars(amount) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (4.2, "4.20 years"),
        (1234.5, "1,234 years"),
        (0.1, "36.5 days"),
        (math.inf, "for ever"),
        (None, "-"),
        (float("nan"), "-"),
    ],
)
def test_years(count: float | None, text: str) -> None:
    assert years(count) == text


@pytest.fixture
def priced(folder: Path, small_trace: Trace) -> tuple[str, ...]:
    """Options for a machine of 5 x SECONDS_PER_YEAR dollars, 1 $ per second, whose SSD is faster
    than its host and may be written 1 TB; the trace has 1,000 tokens.
    """
    hardware = Hardware.preset("g10")
    price: dict[str, Any] = {"price_dollars": SECONDS_PER_YEAR}
    rates = [f"{duplex}{way}_rate" for duplex in ("", "duplex_") for way in ("read", "write")]
    slow: dict[str, Any] = dict.fromkeys(rates, 5e9)
    fast: dict[str, Any] = dict.fromkeys(rates, 15e9)
    parts: dict[str, Any] = {
        "gpu": (replace(hardware.gpu[0], **price),),
        "host": replace(hardware.host, **price, **slow),
        "ssd": (replace(hardware.ssd[0], **price, **fast, endurance_bytes=10**12),),
        "server_price_dollars": 2 * SECONDS_PER_YEAR,
    }
    replace(hardware, **parts).save(folder / "priced.toml")
    metadata = replace(small_trace.metadata, tokens=1000)
    replace(small_trace, metadata=metadata).save(folder / "small.trace")
    return ("small.trace", "--hardware", "priced.toml", *TIGHT)


def test_plan_tells_cost_and_endurance(
    priced: tuple[str, ...], teraio: Callable[..., Result], teraio_json: Callable[..., Any]
) -> None:
    data = teraio_json("plan", *priced)
    assert data["dollars_per_million_tokens"] == pytest.approx(1000 * data["predicted_seconds"])
    per_second = data["ssd_bytes_written"] / data["predicted_seconds"]
    assert per_second > 0
    assert data["ssd_years"] == pytest.approx(1e12 / per_second / SECONDS_PER_YEAR)
    shown = teraio("plan", *priced).stdout
    assert f"cost of a million tokens      {dollars(data['dollars_per_million_tokens'])}" in shown
    assert f"SSDs last                     {years(data['ssd_years'])}" in shown


def test_an_ssd_that_must_last_is_written_less(
    priced: tuple[str, ...], teraio: Callable[..., Result], teraio_json: Callable[..., Any]
) -> None:
    """The host takes it; where there is none, the answer is no."""
    assert teraio_json("plan", *priced)["ssd_years"] < 1
    long = teraio_json("plan", *priced, "--ssd-years", "100")
    assert (long["ssd_bytes_written"], long["ssd_years"]) == (0, None)
    assert long["peak_host_bytes"] > 0
    refused = teraio("plan", *priced, "--ssd-years", "100", "--host-memory", "0")
    assert refused.exit_code == 1
    assert "ssd: the plan of greedy would write " in refused.stderr
    unknown = teraio("plan", "small.trace", "--hardware", "g10", "--ssd-years", "1")
    assert unknown.exit_code == 2
    assert "the endurance of ssd ssd is unknown" in unknown.stderr


def test_comparison_has_both_columns(
    priced: tuple[str, ...], teraio: Callable[..., Result], teraio_json: Callable[..., Any]
) -> None:
    trace, *machine = priced[:-2]
    options = (trace, *machine, "--planners", "ideal,greedy", "--ssd-years", "0.001")
    ideal, greedy = teraio_json("compare", *options)["rows"]
    assert (ideal["dollars_per_million_tokens"], ideal["ssd_years"]) == (None, None)
    assert greedy["dollars_per_million_tokens"] > 0
    assert greedy["ssd_years"] is None or greedy["ssd_years"] >= 0.001
    shown = teraio("compare", *options).stdout
    assert "SSD lasts" in shown
    assert dollars(greedy["dollars_per_million_tokens"]) in shown
