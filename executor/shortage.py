"""What an error says when the GPU's budget does not hold what a kernel needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from teraio.executor.holding import Holding
from teraio.units import format_bytes

if TYPE_CHECKING:
    from teraio.executor.residency import Residency


def why_no_room(residency: Residency, need_bytes: int, protected: Collection[Holding]) -> str:
    """One line: how much is missing, and what of the budget cannot leave."""
    resident = [h for h in residency.holdings() if h.is_resident]
    fixed_bytes = sum(h.allocated_bytes for h in resident if h.is_fixed)
    in_use_bytes = sum(h.allocated_bytes for h in protected if h.is_resident)
    # What the allocator holds besides: workspaces of libraries, tensors that no kernel has touched.
    unknown_bytes = residency.used_bytes - sum(h.allocated_bytes for h in resident)
    return (
        f"kernel {residency.kernel} needs {format_bytes(need_bytes)} more, but of the GPU budget "
        f"of {format_bytes(residency.capacity_bytes)} {format_bytes(residency.used_bytes)} cannot "
        f"leave ({format_bytes(in_use_bytes)} used by it, {format_bytes(fixed_bytes)} pinned down "
        f"by NumPy, pointers or communication, {format_bytes(max(0, unknown_bytes))} of nothing "
        "that the run has used: libraries' workspaces, other models); raise --gpu-memory"
    )
