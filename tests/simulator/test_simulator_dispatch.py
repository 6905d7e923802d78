"""Where kernels run on the host's own clock, executing a plan costs the host time at each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teraio.planner import plan
from teraio.simulator import simulate
from teraio.traces.trace import Trace


def test_host_stalls_come_before_every_kernel(small_trace: Trace) -> None:
    """0.25 s at each kernel are stall_host; the ideal policy has no executor and no such stall."""
    dispatched = Trace(
        small_trace.kernels,
        small_trace.storages,
        small_trace.accesses,
        replace(small_trace.metadata, dispatch_seconds=0.25),
    )
    quick = simulate(small_trace, plan(small_trace, "paper"))
    slow = simulate(dispatched, plan(dispatched, "paper"))
    host_seconds = 0.25 * small_trace.num_kernels
    assert slow.metadata.stall_host_seconds == host_seconds
    assert slow.iteration_seconds == pytest.approx(quick.iteration_seconds + host_seconds)
    assert slow.metadata.gap_seconds == pytest.approx(quick.metadata.gap_seconds)
    assert sum(slow.account.values()) == pytest.approx(slow.iteration_seconds)
    assert slow.metadata.ideal_seconds == quick.metadata.ideal_seconds
    ideal = plan(dispatched, "paper", planner="ideal")
    assert simulate(dispatched, ideal).iteration_seconds == pytest.approx(
        small_trace.ideal_seconds, abs=1e-9
    )
