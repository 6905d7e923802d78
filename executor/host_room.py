"""How much host memory a run takes: its budget, as far as this machine has it.

All of it is taken and touched before training (an arena that grew would stall it), so a budget for
a larger machine, such as a preset's, would end in the kernel killing some process.
"""

from __future__ import annotations

from teraio.executor.probing.limits import available_memory_bytes, check_memory_by_touching
from teraio.executor.ranks import ranks_on_this_machine


def host_bytes_to_take(budget_bytes: int, planned_bytes: int, *, is_given: bool) -> int:
    """``budget_bytes``, or less if that is not there and nobody has asked for it (``is_given``),
    but at least ``planned_bytes``. Raises InputError, before anything is taken, where this machine
    does not have what it must be.
    """
    # What else runs, and the training itself, may want some soon; other ranks begin now as well.
    room_bytes = available_memory_bytes() * 9 // 10 // ranks_on_this_machine()
    if budget_bytes <= room_bytes:
        return budget_bytes
    needed_bytes = budget_bytes if is_given else planned_bytes
    if needed_bytes > room_bytes:
        check_memory_by_touching(needed_bytes)
    return max(needed_bytes, min(room_bytes, budget_bytes))
