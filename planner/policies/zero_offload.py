"""ZeRO-Offload: parameters on the GPU, gradients and optimizer on the host.

Source: ZeRO-Offload (ATC 2021), section 4.1, the single-GPU schedule: parameters stay on the GPU,
gradients go to the host as the backward pass produces them, the optimizer state never leaves the
host, the CPU runs the step, and updated parameters are copied back. With several micro-batches
DeepSpeed accumulates through the GPU (``stage_1_and_2.py``,
``async_accumulate_grad_in_cpu_via_gpu``): the sum so far is read back, added to, and written again.

Modelled: transform ``cpu-optimizer`` with all state in host memory; every inactive period of a
gradient as a move to the host, written while the next layer's backward runs and read back one layer
ahead; every updated parameter read back after its host kernel. The step's speed is that of
DeepSpeed's CPU-Adam or the host's memory rate, whichever is less.

Saved activations stay on the GPU. Where they do not fit beside the parameters, the fewest layers,
from the first on, are recomputed (transform ``recompute``), as DeepSpeed's ZeRO-Offload tutorial
does with ``--checkpoint-activations``; ``recompute_layers`` of the plan's options says how many.

Limits: precision is the trace's (a trace in 32 bits has 32-bit gradients and parameters on the
link); no delayed parameter update; gradients go one by one, not in buckets. What stays and does not
fit even so is a CapacityError.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError, InputError
from teraio.planner.drafts import draft_moves
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.host_step import HostStepTrace, begin_host_step, without_state
from teraio.planner.policies.windows import fit_windows
from teraio.planner.retiming import Windows
from teraio.traces.layers import layer_visits
from teraio.traces.trace import Trace
from teraio.traces.transforms.recompute import fewest_layers, num_layers

NAME = "zero-offload"
Activations = Literal["recompute", "stay"]
_STAYING = "parameters and saved activations"


def plan_zero_offload(
    trace: Trace,
    hardware: Hardware,
    *,
    bandwidth_share: float = 1.0,
    activations: Activations = "recompute",
) -> Plan:
    """The plan for ``trace``; ``hardware`` holds the budgets.

    ``bandwidth_share`` changes nothing: what moves when does not depend on rates. ``activations``
    says whether they may be recomputed where they do not fit, or stay. Raises CapacityError if what
    stays does not fit the GPU, or gradients, parameters and optimizer state the host;
    InfeasibleError for a trace without optimizer kernels; InputError for wrong arguments.
    """
    if activations not in ("recompute", "stay"):
        raise InputError(f"activations: must be recompute or stay, got {activations!r}")
    started = time.perf_counter()
    # Asked first, because it takes no time and no number of layers helps.
    without_state(hardware, HOST, begin_host_step(trace, hardware).state_bytes, NAME)
    layers = 0
    if activations == "recompute":
        layers = fewest_layers(num_layers(trace), lambda count: _fits(trace, hardware, count))
    hosted = begin_host_step(trace, hardware, recompute_layers=layers)
    changed, periods = hosted.trace, hosted.periods
    left = without_state(hardware, HOST, hosted.state_bytes, NAME)
    rows, wanted = _choose(hosted)
    windows = fit_windows(changed, periods, rows, wanted, hardware, policy=NAME, staying=_STAYING)
    moves = draft_moves(
        changed,
        periods,
        rows,
        offload_start=periods.after_kernel[rows],
        free_by=windows.free_by,
        prefetch_start=windows.prefetch_start,
        device=np.full(len(rows), HOST, dtype=object),
    )
    options = {"bandwidth_share": bandwidth_share, "recompute_layers": layers}
    made = build_plan(changed, moves, left, planner=NAME, options=options)
    return hosted.finish(made, hardware, HOST, started)


def _choose(hosted: HostStepTrace) -> tuple[IntArray, Windows]:
    """Rows of all periods of gradients, and of those of parameters that hold the host step."""
    periods, rows = hosted.periods, hosted.rows
    is_gradient, is_parameter = hosted.is_kind(rows, "gradient"), hosted.is_kind(rows, "parameter")
    rows = rows[is_gradient | (is_parameter & hosted.spans_step(rows))]
    after, end = periods.after_kernel[rows], periods.end_kernel[rows]
    visits = layer_visits(hosted.trace)
    is_parameter = hosted.is_kind(rows, "parameter")
    # A parameter's memory is kept until the host step, and taken back as soon as that is done.
    free = np.where(is_parameter, end - 1, visits.start(visits.of(after) + 2))
    back = np.where(is_parameter, after, visits.start(visits.of(end) - 1))
    return rows, hosted.limited(rows, Windows(free, back))


def _fits(trace: Trace, hardware: Hardware, layers: int) -> bool:
    """Whether it fits the GPU with so many layers recomputed."""
    hosted = begin_host_step(trace, hardware, recompute_layers=layers)
    rows, wanted = _choose(hosted)
    try:
        fit_windows(
            hosted.trace, hosted.periods, rows, wanted, hardware, policy=NAME, staying=_STAYING
        )
    except CapacityError:
        return False
    return True
