"""What never_fits.py predicts a step with: a machine, and the times of kernels on this one."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.h200_rows import say
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import say

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.profiler import time_kernels
from teraio.traces.trace import Trace
from teraio.units import format_seconds

SMOKE_BOUNCE_BYTES = 2**18


def timed(options: argparse.Namespace, trace: Trace) -> Trace:
    """The trace with the times of its kernels on this GPU, where that was asked for."""
    if not options.time_kernels:
        return trace
    began = time.perf_counter()
    timings = time_kernels(trace, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        untimed = Path(folder) / "untimed.trace"
        trace.save(untimed)
        result = teraio.trace(untimed, gpu="h200", timings=timings)
    say(
        f"kernels timed in {time.perf_counter() - began:.0f} s: ideal "
        f"{format_seconds(result.ideal_seconds)}, by the table "
        f"{format_seconds(trace.ideal_seconds)}"
    )
    return result


def machine_of(options: argparse.Namespace) -> Hardware:
    """The hardware that was given, or this machine as measured."""
    if options.hardware == "probe":
        machine = teraio.probe(
            device=options.device, directory=options.ssd_path, quick=True, progress=say
        )
    else:
        machine = Hardware.load(options.hardware)
    # A file system that is filled to the last block is slow, and others may need some of it.
    room_bytes = shutil.disk_usage(options.ssd_path).free * 9 // 10
    is_this_one = options.until == "run" or options.hardware == "probe"
    ssds = [
        replace(ssd, capacity_bytes=min(ssd.capacity_bytes, room_bytes)) if is_this_one else ssd
        for ssd in machine.ssd
    ]
    if options.smoke:
        bounce, io = SMOKE_BOUNCE_BYTES, SMOKE_BOUNCE_BYTES // 4
        ssds = [replace(ssd, bounce_bytes=bounce, preferred_io_bytes=io) for ssd in ssds]
    return replace(machine, ssd=tuple(ssds))


def predicted_seconds(trace: Trace, plan: Plan, machine: Hardware) -> float:
    """Of a step, by a machine that need not be the one that was planned for."""
    budgets = plan.metadata.gpu_memory_bytes, plan.metadata.host_memory_bytes
    machine = machine.with_budgets(*budgets)
    return teraio.simulate(trace, plan, machine, record=False).iteration_seconds
