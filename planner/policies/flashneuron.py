"""FlashNeuron: feature maps to the SSD, in forward order, back as memory allows.

Source: FlashNeuron (FAST 2021), its offloading scheduler and memory manager; for details that the
paper leaves open, the simulator of it in G10's artifact.

Modelled:

1. Only saved activations move (the paper: intermediate data of the forward pass), each in its
   longest inactive period, and only to SSDs. Everything else stays on the GPU.
2. Phase 1 of the scheduler, linear selection: in the order of the forward pass, from the first
   tensor on, as many as are needed for the rest to fit. Here the smallest number, the same in
   every micro-batch, with which every kernel fits: a micro-batch is an iteration to FlashNeuron.
3. An offload is issued at the tensor's last forward use; its memory is given back when the queue of
   offloads, first come first served on the ideal timeline, has written it.
4. From the beginning of its micro-batch's backward pass, tensors are prefetched in the order of
   their need, as early as memory allows.

Limits: phase 2 of the scheduler replaces tensors by ones that compress better when the link, not
memory, is short; compression changes no bytes here, so it selects nothing else. No allocator of two
ends, hence no fragmentation. If the rest does not fit, there is no plan: CapacityError.
"""

from __future__ import annotations

import time

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.contracts.table import FloatArray, IntArray
from teraio.errors import CapacityError
from teraio.planner.drafts import ANY_SSD, draft_moves
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.windows import fit_windows, longest_absence, movable_periods
from teraio.planner.residency import cyclic_sum, resident_bytes
from teraio.planner.retiming import Windows
from teraio.traces.lifetimes import InactivePeriods, inactive_periods, kernel_starts_seconds
from teraio.traces.trace import Trace

NAME = "flashneuron"


def plan_flashneuron(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The plan for ``trace``; ``hardware`` holds the budgets.

    ``bandwidth_share`` scales the write rate for which the queue of (3) is worked out. Raises
    CapacityError if there is no SSD, it is too small, or what stays does not fit the GPU.
    """
    started = time.perf_counter()
    ssds = hardware.ssds_of_rank(trace.metadata.rank)
    if not ssds:
        raise CapacityError(f"{NAME} offloads to an SSD, and this GPU reaches none")
    periods = inactive_periods(trace)
    rows, ordinal = _forward_order(trace, periods)
    count = _linear_selection(trace, periods, rows, ordinal, hardware)
    rows = rows[ordinal < count]
    write_rate = bandwidth_share * sum(ssd.write_rate for ssd in ssds)
    windows = fit_windows(
        trace,
        periods,
        rows,
        _wanted(trace, periods, rows, write_rate),
        hardware,
        policy=NAME,
        staying="all but saved activations",
    )
    moves = draft_moves(
        trace,
        periods,
        rows,
        offload_start=periods.after_kernel[rows],
        free_by=windows.free_by,
        prefetch_start=windows.prefetch_start,
        device=np.full(len(rows), ANY_SSD, dtype=object),
    )
    return build_plan(
        trace,
        moves,
        hardware,
        planner=NAME,
        options={"bandwidth_share": bandwidth_share, "tensors_per_micro_batch": count},
        planning_seconds=time.perf_counter() - started,
    )


def _forward_order(trace: Trace, periods: InactivePeriods) -> tuple[IntArray, IntArray]:
    """(1, 2) The longest period of each saved activation, and its number in its micro-batch."""
    storages = trace.storages
    rows = movable_periods(trace, periods)
    is_saved = (storages.kind[periods.storage[rows]] == "activation").astype(bool)
    rows = rows[is_saved & ~periods.is_tail[rows]]
    longest = rows[np.lexsort((-periods.seconds[rows], periods.storage[rows]))]
    rows = longest[np.unique(periods.storage[longest], return_index=True)[1]]
    storage = periods.storage[rows]
    micro_batch = trace.kernels.micro_batch[storages.birth[storage]]
    order = np.lexsort((storages.birth_ordinal[storage], storages.birth[storage], micro_batch))
    first = np.searchsorted(micro_batch[order], micro_batch[order])
    return rows[order], np.arange(len(rows)) - first


def _linear_selection(
    trace: Trace,
    periods: InactivePeriods,
    rows: IntArray,
    ordinal: IntArray,
    hardware: Hardware,
) -> int:
    """(2) The least number of tensors per micro-batch that must leave; all, if none is enough."""
    capacity = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes
    resident = resident_bytes(
        trace.storages, trace.kernels.workspace_bytes, Moves.empty(), trace.num_kernels
    )
    windows = longest_absence(periods, rows)
    size = trace.storages.allocated_bytes[periods.storage[rows]]

    def fits(count: int) -> bool:
        chosen = ordinal < count
        start, end = windows.free_by[chosen], windows.prefetch_start[chosen]
        shift = start // trace.num_kernels * trace.num_kernels
        away = cyclic_sum(start - shift, end - shift, size[chosen], trace.num_kernels)
        return bool((resident - away).max() <= capacity)

    too_few, enough = -1, int(ordinal.max(initial=-1)) + 1
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def _wanted(trace: Trace, periods: InactivePeriods, rows: IntArray, write_rate: float) -> Windows:
    """(3, 4) Away from the end of the queued offload until the backward pass begins."""
    starts, num_kernels = kernel_starts_seconds(trace), trace.num_kernels
    after, storage = periods.after_kernel[rows], periods.storage[rows]
    written = _queue_ends(starts[after + 1], trace.storages.nbytes[storage] / write_rate, after)
    cycle, within = np.divmod(written, starts[-1])
    free_by = cycle.astype(np.int64) * num_kernels + np.searchsorted(starts[:-1], within)
    micro_batch = trace.kernels.micro_batch[trace.storages.birth[storage]]
    backward = _first_backward(trace)
    begin = np.array([backward.get(int(number), 0) for number in micro_batch], dtype=np.int64)
    return Windows(free_by, after + 1 + (begin - after - 1) % num_kernels)


def _queue_ends(released: FloatArray, seconds: FloatArray, after: IntArray) -> FloatArray:
    """When each offload ends if they are written one after the other, in order of release."""
    order = np.argsort(after, kind="stable")
    spent = np.cumsum(seconds[order])
    ends = np.empty(len(order))
    ends[order] = spent + np.maximum.accumulate(released[order] - (spent - seconds[order]))
    return ends


def _first_backward(trace: Trace) -> dict[int, int]:
    """First kernel of each micro-batch's backward pass."""
    rows = np.flatnonzero((trace.kernels.phase == "backward").astype(bool))
    numbers, first = np.unique(trace.kernels.micro_batch[rows], return_index=True)
    return dict(zip(numbers.tolist(), rows[first].tolist(), strict=True))
