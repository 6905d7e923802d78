"""ZeRO-Offload: parameters on the GPU, gradients and optimizer on the host.

Source: ZeRO-Offload (ATC 2021), section 4.1, single GPU: parameters stay on the GPU, gradients go
to the host as the backward pass produces them, the optimizer state never leaves the host, the CPU
runs the step, and updated parameters are copied back. With several micro-batches DeepSpeed
accumulates through the GPU (``stage_1_and_2.py``, ``async_accumulate_grad_in_cpu_via_gpu``): the
sum so far is read back, added to, and written again.

Modelled: transform ``cpu-optimizer`` with all state in host memory; every inactive period of a
gradient as a move to the host, written while the next layer's backward runs and read back one layer
ahead; every updated parameter read back after its host kernel. The step's speed is that of
DeepSpeed's CPU-Adam or the host's memory rate, whichever is less.

Limits: precision is the trace's (a trace in 32 bits has 32-bit gradients and parameters on the
link); no delayed parameter update; gradients go one by one, not in buckets; saved activations stay
on the GPU, for which there is no remedy here but recomputation by the user. What stays and does not
fit is a CapacityError.
"""

from __future__ import annotations

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.planner.drafts import draft_moves
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.host_step import (
    begin_host_step,
    gradient_windows,
    without_state,
)
from teraio.planner.policies.windows import fit_windows
from teraio.planner.retiming import Windows
from teraio.traces.layers import layer_visits
from teraio.traces.trace import Trace

NAME = "zero-offload"


def plan_zero_offload(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The plan for ``trace``; ``hardware`` holds the budgets.

    ``bandwidth_share`` changes nothing: what moves when does not depend on rates. Raises
    CapacityError if parameters and activations do not fit the GPU, or gradients, parameters and
    optimizer state the host; InputError if the trace has no optimizer kernels.
    """
    hosted = begin_host_step(trace, hardware)
    changed, periods = hosted.trace, hosted.periods
    left = without_state(hardware, HOST, hosted.state_bytes, NAME)
    rows = hosted.rows
    is_gradient, is_parameter = hosted.is_kind(rows, "gradient"), hosted.is_kind(rows, "parameter")
    rows = rows[is_gradient | (is_parameter & hosted.spans_step(rows))]
    asked = gradient_windows(periods, rows, layer_visits(changed), 1)
    is_parameter = hosted.is_kind(rows, "parameter")
    # A parameter's memory is kept until the host step, and taken back as soon as that is done.
    end = periods.end_kernel[rows]
    wanted = hosted.limited(
        rows,
        Windows(
            np.where(is_parameter, end - 1, asked.free_by),
            np.where(is_parameter, 0, asked.prefetch_start),
        ),
    )
    windows = fit_windows(
        changed,
        periods,
        rows,
        wanted,
        hardware,
        staying=f"{NAME}: parameters and saved activations",
    )
    moves = draft_moves(
        changed,
        periods,
        rows,
        offload_start=periods.after_kernel[rows],
        free_by=windows.free_by,
        prefetch_start=windows.prefetch_start,
        device=np.full(len(rows), HOST, dtype=object),
    )
    options = {"bandwidth_share": bandwidth_share}
    made = build_plan(changed, moves, left, planner=NAME, options=options)
    return hosted.finish(made, hardware, HOST)
