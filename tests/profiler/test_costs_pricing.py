"""Prices: each kernel of a trace gets its call's time, from a timing file or by the roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from teraio.contracts.table import MISSING
from teraio.errors import InputError
from teraio.profiler.costs.gpus import GPUS
from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.roofline import roofline_seconds
from teraio.profiler.costs.timings import TimedMachine, Timing, Timings, timing_key
from teraio.traces.trace import Calls, Trace

PRODUCT = '{"args":[{"tensor":["float32",[64,64],[64,1],0]}],"kwargs":{}}'
CALLS = Calls.from_rows(
    [
        (0, "aten.mm.default", PRODUCT, 2 * 10**9, 10**6, 10**6),
        (1, "aten.add.Tensor", PRODUCT, 0, 2 * 10**8, 10**8),
        (2, "aten.empty.memory_format", '{"args":[[4]],"kwargs":{}}', 0, 0, 0),
    ]
)
CALL = np.array([0, 1, 2, 1, 0, 1, 1, 2])


@pytest.fixture
def trace(small_trace: Trace) -> Trace:
    """The small trace with three calls behind its eight kernels."""
    kernels = replace(small_trace.kernels, op=CALLS.op[CALL], call=CALL)
    return replace(small_trace, kernels=kernels, calls=CALLS)


def timings(*rows: tuple[int, float, float, int], pace: float = 0.0) -> Timings:
    """Timings of calls: row, seconds, host seconds, workspace bytes."""
    entries = []
    for row, seconds, host_seconds, workspace_bytes in rows:
        op, arguments, precision = timing_key(CALLS.op[row], CALLS.arguments[row], "fp32")
        entries.append(
            Timing(
                op=op,
                arguments=arguments,
                precision=precision,
                seconds=seconds,
                host_seconds=host_seconds,
                workspace_bytes=workspace_bytes,
            )
        )
    machine = TimedMachine(gpu="GPU X", torch_version="2.11", host_seconds_per_kernel=pace)
    return Timings(machine, tuple(entries))


def test_without_timings_the_roofline_prices_all_and_no_gaps_are_left(trace: Trace) -> None:
    priced = price(trace, gpu="h200", precision="fp32")
    of_call = roofline_seconds(CALLS, GPUS["h200"], "fp32")
    assert priced.kernels.duration_seconds.tolist() == of_call[CALL].tolist()
    assert not priced.kernels.gap_before_seconds.any()
    assert of_call[0] > of_call[2] == 0
    note = priced.metadata.known_differences[-1]
    assert priced.metadata.precision == "fp32"
    assert note.startswith("times: 8 kernels of 3 calls")
    assert note.endswith("by the roofline of h200")


def test_everything_but_times_is_kept(trace: Trace) -> None:
    priced = price(trace, gpu="h200", precision="fp32")
    assert priced.storages.equals(trace.storages)
    assert priced.accesses.equals(trace.accesses)
    assert priced.calls.equals(trace.calls)
    assert priced.kernels.workspace_bytes.tolist() == trace.kernels.workspace_bytes.tolist()


def test_a_saved_trace_and_a_spec_of_ones_own_are_priced_alike(
    trace: Trace, tmp_path: Path
) -> None:
    trace.save(tmp_path / "small.trace")
    spec = replace(GPUS["h200"], launch_seconds=1.0)
    priced = price(tmp_path / "small.trace", gpu=spec, precision="fp32")
    assert priced.kernels.duration_seconds[0] > 1.0


def test_timings_come_first_and_the_roofline_fills_in(trace: Trace, tmp_path: Path) -> None:
    known = timings((1, 0.25, 0.0, 4096))
    known.save(tmp_path / "x.timings")
    for given in (known, tmp_path / "x.timings"):
        priced = price(trace, gpu="h200", precision="fp32", timings=given)
        of_call = roofline_seconds(CALLS, GPUS["h200"], "fp32")
        expected = np.where(CALL == 1, 0.25, of_call[CALL])
        assert priced.kernels.duration_seconds.tolist() == expected.tolist()
        workspace = np.where(CALL == 1, 4096, trace.kernels.workspace_bytes)
        assert priced.kernels.workspace_bytes.tolist() == workspace.tolist()
        note = priced.metadata.known_differences[-1]
        assert "4 kernels of 1 calls (1 s) measured on GPU X (torch 2.11)" in note
        assert "4 kernels of 2 calls" in note


def test_timings_of_another_precision_price_no_products(trace: Trace) -> None:
    known = timings((0, 7.0, 0.0, 0), (1, 0.25, 0.0, 0))
    priced = price(trace, gpu="h200", precision="tf32", timings=known)
    assert priced.kernels.duration_seconds[0] < 1.0
    assert priced.kernels.duration_seconds[1] == 0.25


def test_a_device_that_waits_for_its_host_has_gaps(trace: Trace) -> None:
    slow_host = timings((0, 1.0, 2.0, 0), (1, 1.0, 2.0, 0), (2, 0.0, 2.0, 0))
    gaps = price(trace, gpu="h200", precision="fp32", timings=slow_host).kernels.gap_before_seconds
    # Every kernel takes the host 2 s; those that take the device 1 s leave it idle for another.
    assert gaps[1:].tolist() == [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    quick_host = timings((0, 1.0, 0.01, 0), (1, 1.0, 0.01, 0), (2, 0.0, 0.01, 0))
    assert not price(
        trace, gpu="h200", precision="fp32", timings=quick_host
    ).kernels.gap_before_seconds.any()


def test_the_pace_of_the_host_counts_what_lies_between_launches(trace: Trace) -> None:
    rows = ((0, 1.0, 0.5, 0), (1, 1.0, 0.5, 0), (2, 0.0, 0.5, 0))
    priced = price(trace, gpu="h200", precision="fp32", timings=timings(*rows, pace=3.0))
    assert priced.ideal_seconds == pytest.approx(8 * 3.0)


def test_kernels_without_a_call_keep_their_times(trace: Trace) -> None:
    call = np.where(CALL == 0, MISSING, CALL)
    partly = replace(trace, kernels=replace(trace.kernels, call=call))
    priced = price(partly, gpu="h200", precision="fp32", timings=timings((1, 0.25, 0.0, 0)))
    assert priced.kernels.duration_seconds[0] == trace.kernels.duration_seconds[0]
    assert "2 kernels of 1 calls (0.002 s) as recorded" in priced.metadata.known_differences[-1]


def test_pricing_again_replaces_times_and_their_note(trace: Trace) -> None:
    once = price(trace, gpu="a100-80", precision="fp32")
    twice = price(once, gpu="h200", precision="fp32")
    assert twice.hash == price(trace, gpu="h200", precision="fp32").hash
    assert len(twice.metadata.known_differences) == 1


def test_what_cannot_be_priced_is_refused(small_trace: Trace, trace: Trace) -> None:
    with pytest.raises(InputError, match="calls are missing"):
        price(small_trace, gpu="h200", precision="fp32")
    with pytest.raises(InputError, match="precision: 'int8' is not one of fp32, tf32, bf16"):
        price(trace, gpu="h200", precision="int8")
    with pytest.raises(InputError, match="gpu: 'b200'"):
        price(trace, gpu="b200", precision="fp32")


def test_what_libraries_keep_is_in_a_fake_trace_once(trace: Trace) -> None:
    fake = replace(trace, metadata=replace(trace.metadata, source="fake"))
    once = price(fake, gpu="a100-80", precision="fp32")
    twice = price(once, gpu="h200", precision="fp32")
    for priced, gpu in ((once, "a100-80"), (twice, "h200")):
        last = priced.storages.take(np.array([len(priced.storages) - 1]))
        assert len(priced.storages) == len(fake.storages) + 1
        assert last.name.tolist() == ["untracked"]
        assert last.nbytes.tolist() == [GPUS[gpu].library_bytes]
        assert not last.resizable.any()
