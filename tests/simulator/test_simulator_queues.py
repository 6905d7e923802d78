"""Static order and requirements of channels, on unrolled indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from teraio.simulator.machine_arrays import machine_arrays
from teraio.simulator.plan_arrays import Queues, build_queues, returned_at_cut
from teraio.simulator.plan_checks import check_moves
from teraio.simulator.state import NEVER

CaseBuilder = Callable[..., Any]

SSD_READ, SSD_WRITE = 2, 3


def queues_of(c: Any) -> Queues:
    """The queues of a case's plan."""
    machine = machine_arrays(c.hardware, 0)
    moves = check_moves(c.trace, c.plan, machine)
    return build_queues(moves, c.trace.num_kernels, len(machine.channel_names))


def storages_in(queues: Queues, channel: int) -> list[int]:
    """Storages in the order of a channel."""
    rows = slice(queues.first[channel], queues.first[channel + 1])
    stored: list[int] = queues.entries["storage"][rows].tolist()
    return stored


def test_ties_of_offload_start_go_to_the_earlier_after_kernel(case: CaseBuilder) -> None:
    """A period that began in the iteration before is older than one that began in this."""
    c = case().storage("new", 1).storage("old", 1)
    c.kernel("new").kernels(3).kernel("old").kernels(3)
    c.move("new", 0, 0, offload=1, free=3, prefetch=7)
    c.move("old", 4, 4, offload=1, free=2, prefetch=4, offset=1)
    queues = queues_of(c)
    # old: after 4, offload_start 1 + 8; relative to this iteration after = 4 - 8 < 0.
    assert storages_in(queues, SSD_WRITE) == [1, 0]


def test_ties_of_prefetch_start_go_to_the_earlier_before_kernel(case: CaseBuilder) -> None:
    """Soonest deadline first, across the cut as well."""
    c = case().storage("late", 1).storage("soon", 1)
    c.kernel("late").kernel("soon").kernels(6)
    c.move("late", 0, 0, offload=0, free=2, prefetch=7)
    c.move("soon", 1, 1, offload=1, free=2, prefetch=7, offset=1)
    queues = queues_of(c)
    assert storages_in(queues, SSD_READ) == [0, 1]


def test_requirements_count_entries_of_the_right_iteration(case: CaseBuilder) -> None:
    """A move triggered late and needed after the cut is required of the iteration before."""
    c = case().storage("x", 1).storage("y", 1)
    c.kernel("y").kernels(2).kernel("x").kernels(2)
    c.move("x", 3, 3, offload=4, free=1, prefetch=2)
    c.move("y", 0, 0, offload=1, free=3, prefetch=5, offset=1)
    queues = queues_of(c)
    assert storages_in(queues, SSD_WRITE) == [1, 0]
    # y, first of two, before kernel 3 of its iteration; x, second, before kernel 1 of the next.
    assert queues.required[:, SSD_WRITE].tolist() == [-NEVER, 0, -NEVER, 1, -NEVER, -NEVER]
    assert storages_in(queues, SSD_READ) == [0, 1]
    assert queues.required[:, SSD_READ].tolist() == [0, -NEVER, -NEVER, 1, -NEVER, -NEVER]


def test_prefetch_at_the_cut_is_there_on_a_cold_start(case: CaseBuilder) -> None:
    """prefetch_start 0: placed on the GPU, so its first prefetch is not issued."""
    c = case().storage("x", 1)
    c.kernel().kernel("x").kernels(3)
    c.move("x", 1, 1, offload=1, free=3, prefetch=0)
    assert returned_at_cut(queues_of(c)).tolist() == [0, 0, 1, 0]
