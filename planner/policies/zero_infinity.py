"""ZeRO-Infinity: everything streams layer by layer, with a fixed look-ahead; the CPU steps.

Source: ZeRO-Infinity (SC 2021): its offload engine for model states, its offload of activations and
its overlap-centric design; DeepSpeed's ZeRO stage 3 with ``offload_param`` and
``offload_optimizer``, for one GPU. Memory-centric tiling is not in it.

Modelled on visits (:mod:`teraio.traces.layers`: a layer's kernels of one phase and micro-batch):

1. Parameters live on their tier. A layer's are fetched when the visit ``look_ahead_layers`` before
   its own begins, and released when its visit ends, with nothing to write; a parameter needed
   again within the look-ahead stays, and so does one of at most 100,000 elements (DeepSpeed's
   ``stage3_param_persistence_threshold``) except over the optimizer step, which changes it.
2. Gradients leave as the backward pass produces them, while the next visit runs. With several
   micro-batches the sum so far is fetched as in (1), added to on the GPU, and written again
   (DeepSpeed's ``stage3.py``, partition of gradients).
3. Saved activations leave after their last use in their layer's forward visit, while the next one
   runs, and come back as in (1). ``activations="checkpoint"`` is the paper's own way: every layer
   is recomputed (transform ``recompute``), and only the layers' inputs leave; ``"stay"`` moves
   none.
4. The optimizer step is a transform (``cpu-optimizer``): the CPU steps each bucket at
   DeepSpeed's speed or the host's memory rate. What of its state, parameters and gradients lies on
   the SSD streams through the host meanwhile, reading and writing at once.
5. Tiers, class by class as in DeepSpeed's configuration: activations, gradients, parameters,
   optimizer state, in this order, go to the host if it can hold all of the class beside the ones
   before, else to the first SSD.

Where memory is short, transfers overlap less than asked for, last the soonest needed: in the
extreme they do not overlap at all (:mod:`teraio.planner.policies.windows`).

Limits: no partition over ranks (a rank's traced collectives stay), precision is the trace's, no
delayed step; the pinned buffers through which all of it passes neither limit it nor count against
the host's budget; DeepSpeed's own overheads (its NVMe engine, Python hooks) are not in it. So it is
faster than the real system.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError, InputError
from teraio.planner.drafts import draft_moves
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.host_step import (
    HostStepTrace,
    begin_host_step,
    without_state,
)
from teraio.planner.policies.windows import fit_windows
from teraio.planner.residency import cyclic_sum
from teraio.planner.retiming import Windows
from teraio.planner.slot_packing import align_up
from teraio.traces.layers import Visits, layer_visits
from teraio.traces.trace import Trace
from teraio.traces.transforms.recompute import num_layers

NAME = "zero-infinity"
PERSISTENT_ELEMENTS = 100_000
"""Parameters of so many elements at most stay on the GPU (DeepSpeed's default)."""

MOVING = ("activation", "gradient", "parameter")
"""Classes that move, in the order in which they may have the host; optimizer state comes last."""

Activations = Literal["offload", "checkpoint", "stay"]

_STAYING = "all but parameters, gradients and saved activations"

_PACKING_MARGINS = (1.0, 1.1, 1.3)
"""Host room set aside per class, in units of its bytes, in turn, until packing leaves no hole."""


class _Choice(NamedTuple):
    """Period rows that leave, int64 (rows,), and the windows asked for."""

    rows: IntArray
    wanted: Windows


def plan_zero_infinity(
    trace: Trace,
    hardware: Hardware,
    *,
    bandwidth_share: float = 1.0,
    look_ahead_layers: int = 1,
    activations: Activations = "offload",
) -> Plan:
    """The plan for ``trace``; ``hardware`` holds the budgets.

    ``bandwidth_share`` changes nothing: what moves when does not depend on rates. Raises
    CapacityError if what stays does not fit the GPU, or what leaves the tiers; InfeasibleError for
    a trace without optimizer kernels; InputError for wrong arguments.
    """
    if look_ahead_layers < 1:
        raise InputError(f"look_ahead_layers: must be at least 1, got {look_ahead_layers}")
    if activations not in get_args(Activations):
        known = ", ".join(get_args(Activations))
        raise InputError(f"activations: must be one of {known}, got {activations!r}")
    options = {
        "bandwidth_share": bandwidth_share,
        "look_ahead_layers": look_ahead_layers,
        "activations": activations,
    }
    error: CapacityError | None = None
    for margin in _PACKING_MARGINS:
        try:
            return _plan(trace, hardware, options, margin)
        except CapacityError as caught:
            if error is not None and str(caught) == str(error):
                break
            error = caught
    assert error is not None, "every margin ends in a plan or in an error"
    raise error


def _plan(trace: Trace, hardware: Hardware, options: dict[str, Any], margin: float) -> Plan:
    started = time.perf_counter()
    ssds = hardware.ssds_of_rank(trace.metadata.rank)
    ssd = ssds[0] if ssds else None
    layers = num_layers(trace) if options["activations"] == "checkpoint" else 0
    hosted = begin_host_step(trace, hardware, recompute_layers=layers)
    choice = _choose(hosted, layer_visits(hosted.trace), options)
    tiers = _tiers(hosted, choice.rows, hardware, margin)
    streamed = tuple(
        kind for kind in ("optimizer_state", "parameter", "gradient") if tiers[kind] != HOST
    )
    if streamed:
        hosted = begin_host_step(
            trace, hardware, recompute_layers=layers, streamed=streamed, ssd=ssd
        )
    left = without_state(hardware, tiers["optimizer_state"], hosted.state_bytes, NAME)
    changed, periods, rows = hosted.trace, hosted.periods, choice.rows
    windows = fit_windows(
        changed, periods, rows, choice.wanted, hardware, policy=NAME, staying=_STAYING
    )
    kinds = changed.storages.kind[periods.storage[rows]]
    moves = draft_moves(
        changed,
        periods,
        rows,
        offload_start=periods.after_kernel[rows],
        free_by=windows.free_by,
        prefetch_start=windows.prefetch_start,
        device=np.array([tiers[kind] for kind in kinds], dtype=object),
    )
    options = options | {"tiers": tiers}
    made = build_plan(changed, moves, left, planner=NAME, options=options)
    return hosted.finish(made, hardware, tiers["optimizer_state"], started)


def _choose(hosted: HostStepTrace, visits: Visits, options: dict[str, Any]) -> _Choice:
    """(1 to 3) Which periods leave, and when."""
    periods, storages, rows = hosted.periods, hosted.trace.storages, hosted.rows
    look_ahead = options["look_ahead_layers"]
    offloads = MOVING[1:] if options["activations"] == "stay" else MOVING
    rows = rows[np.isin(storages.kind[periods.storage[rows]], offloads)]
    after, end = periods.after_kernel[rows], periods.end_kernel[rows]
    is_parameter, is_tail = hosted.is_kind(rows, "parameter"), periods.is_tail[rows]
    spans = hosted.spans_step(rows)
    back = visits.start(visits.of(end) - look_ahead)
    # Parameters have nothing to write, so the end of the visit gives their memory back.
    free = visits.start(visits.of(after) + np.where(is_parameter, 1, 2))
    is_long = is_tail | (free < back)
    is_small = _elements(hosted.trace, periods.storage[rows]) <= PERSISTENT_ELEMENTS
    leaves = spans | (is_long & ~(is_parameter & is_small))
    wanted = hosted.limited(rows, Windows(free, back))
    return _Choice(rows[leaves], Windows(*(column[leaves] for column in wanted)))


def _elements(trace: Trace, storage: IntArray) -> IntArray:
    """Elements of each storage; unknown types count as four bytes."""
    sizes = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
    item = np.array([sizes.get(dtype, 4) for dtype in trace.storages.dtype[storage]])
    result: IntArray = trace.storages.nbytes[storage] // item
    return result


def _tiers(
    hosted: HostStepTrace, rows: IntArray, hardware: Hardware, margin: float
) -> dict[str, str]:
    """(5) The device of each class."""
    ssds = hardware.ssds_of_rank(hosted.trace.metadata.rank)
    room = hardware.host.memory_bytes
    room -= sum(0 if ssd.gds else ssd.bounce_bytes for ssd in ssds[:1])
    tiers = {}
    for kind in (*MOVING, "optimizer_state"):
        needed = hosted.state_bytes
        if kind != "optimizer_state":
            of_kind = rows[hosted.is_kind(rows, kind)]
            needed = int(margin * _slot_bytes(hosted, of_kind, kind == "parameter"))
        to_host = needed <= room or not ssds
        tiers[kind] = HOST if to_host else ssds[0].name
        room -= needed if to_host else 0
    return tiers


def _slot_bytes(hosted: HostStepTrace, rows: IntArray, is_permanent: bool) -> int:
    """The most bytes that copies of these periods take at once on the host."""
    periods, trace = hosted.periods, hosted.trace
    storage = periods.storage[rows]
    if is_permanent:
        storage = np.unique(storage)
        return int(align_up(trace.storages.nbytes[storage], 512).sum())
    sizes = align_up(trace.storages.nbytes[storage], 512)
    start, end = periods.after_kernel[rows], periods.end_kernel[rows]
    return int(cyclic_sum(start, end, sizes, trace.num_kernels).max(initial=0))
