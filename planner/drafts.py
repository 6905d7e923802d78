"""Drafts of moves: what a planner decides, before slots and clean copies are worked out."""

from __future__ import annotations

import numpy as np

from teraio.contracts.hardware import HOST
from teraio.contracts.plan import Moves
from teraio.contracts.table import MISSING, IntArray, TextArray
from teraio.traces.lifetimes import InactivePeriods
from teraio.traces.trace import Trace

ANY_SSD = ""
"""Device of a draft move that may go to whichever SSD has the least to do."""


def draft_moves(
    trace: Trace,
    periods: InactivePeriods,
    rows: IntArray,
    *,
    offload_start: IntArray,
    free_by: IntArray,
    prefetch_start: IntArray,
    device: TextArray,
) -> Moves:
    """A draft of moves for the periods ``rows``, in which slots and clean copies are still open.

    Kernel indices may be unrolled; prefetch_start of tails is not read. ``device`` is ``host``, an
    SSD's name, or ANY_SSD.
    """
    num_kernels = trace.num_kernels
    is_tail = periods.is_tail[rows]
    before = periods.before_kernel[rows]
    storage = periods.storage[rows]
    return Moves(
        storage=storage,
        after_kernel=periods.after_kernel[rows],
        before_kernel=np.where(is_tail, MISSING, before % num_kernels),
        offload_start=offload_start % num_kernels,
        free_by=free_by % num_kernels,
        prefetch_start=np.where(is_tail, MISSING, prefetch_start % num_kernels),
        tier=np.where(device == HOST, HOST, "ssd"),
        device=device,
        tier_offset_bytes=np.zeros(len(rows), dtype=np.int64),
        nbytes=trace.storages.nbytes[storage],
        writes=np.ones(len(rows), dtype=bool),
    )
