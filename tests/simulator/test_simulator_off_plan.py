"""Hand-solved cases without a plan, or with one that does not fit.

Kernels last 1 s, devices move 10 bytes/s; storages are on the GPU at the start as far as they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from teraio.errors import CapacityError, InfeasibleError

CaseBuilder = Callable[..., Any]

CHUNK = 256 * 10**6


def test_furthest_next_access_leaves_and_the_cycle_has_two_iterations(case: CaseBuilder) -> None:
    """Room for two of three storages; which two are there alternates from cut to cut."""
    c = case(gpu_bytes=20).storage("x", 10).storage("y", 10).storage("z", 10)
    c.kernel(writes=["x"]).kernel(writes=["y"]).kernel(writes=["z"]).kernel(writes=["x"])
    s = c.simulate()
    # Start: x and y on the GPU, in order of first access; z on the host.
    # even  k0 [0,1)  k1 [1,2)  y out (next access k5, x k3), z in  k2 [4,5)  k3 [5,6)
    # odd   k0 [0,1)  x out (k3, z k2), y in  k1 [3,4)  k2 [4,5)  z out (k6, y k5), x in  k3 [7,8)
    assert s.timeline.metadata.cycle_iterations == 2
    assert s.timeline.metadata.steady
    assert s.seconds == 7
    assert s.transfers == [
        ("y", "host write", "eviction", 2, 3),
        ("z", "host read", "demand_fetch", 3, 4),
        ("x", "host write", "eviction", 7, 8),
        ("y", "host read", "demand_fetch", 8, 9),
        ("z", "host write", "eviction", 11, 12),
        ("x", "host read", "demand_fetch", 12, 13),
    ]
    assert s.stalls == [
        (2, "memory", "y", 2, 3),
        (2, "read", "z", 3, 4),
        (1, "memory", "x", 7, 8),
        (1, "read", "y", 8, 9),
        (3, "memory", "z", 11, 12),
        (3, "read", "x", 12, 13),
    ]
    assert s.account == {"compute_alone": 4, "stall_read": 1.5, "stall_memory": 1.5}
    # Three of each in two iterations: means are rounded.
    assert s.timeline.metadata.evictions == round(3 / 2)
    assert s.timeline.metadata.demand_fetch_bytes == 15
    assert max(s.held_bytes) == 20


def test_storage_never_accessed_again_leaves_first(case: CaseBuilder) -> None:
    """Dead weight (last access past, death to come) is furthest of all."""
    c = case(gpu_bytes=30).storage("w", 10).storage("t", 10, birth=0, death=3)
    c.storage("u", 20, birth=2, death=2)
    c.kernel("w", writes=["t"]).kernel("t").kernel("w", writes=["u"]).kernel("w")
    s = c.simulate()
    # k2 needs 20 beside w and t: t out [2,3)
    assert s.transfers == [("t", "host write", "eviction", 2, 3)]
    assert s.stalls == [(2, "memory", "t", 2, 3)]
    assert s.seconds == 5
    assert s.held_bytes == [20, 20, 30, 10]


def test_storage_of_the_waiting_kernel_stays(case: CaseBuilder) -> None:
    """What the kernel accesses is not evicted for it, even if nothing else is used so late."""
    c = case(gpu_bytes=30).storage("x", 10).storage("y", 10).storage("u", 20, birth=1, death=1)
    c.kernel(writes=["y"]).kernel("x", writes=["u"]).kernel("y")
    s = c.simulate()
    # k1 accesses x (next: k4) and needs 20 more; y (next: k2) leaves all the same.
    assert s.transfers == [
        ("y", "host write", "eviction", 1, 2),
        ("y", "host read", "demand_fetch", 3, 4),
    ]
    assert s.seconds == 5


def test_workspace_needs_room_too(case: CaseBuilder) -> None:
    """Scratch of a kernel counts while it runs."""
    c = case(gpu_bytes=20).storage("x", 10).storage("y", 10)
    c.kernel(writes=["x"]).kernel("y", workspace=5).kernel("x")
    s = c.simulate()
    assert s.transfers == [
        ("x", "host write", "eviction", 1, 2),
        ("x", "host read", "demand_fetch", 3, 4),
    ]
    assert s.held_bytes == [20, 15, 20]
    assert s.timeline.metadata.peak_gpu_bytes == 20


def test_valid_copy_is_dropped_at_no_cost(case: CaseBuilder) -> None:
    """The plan has written x but keeps it until kernel 3; kernel 2 needs the room and takes it."""
    c = case(gpu_bytes=30).storage("x", 10).storage("w", 10).storage("u", 20, birth=2, death=2)
    c.kernel("x", "w").kernel("w").kernel(writes=["u"]).kernel("w").kernels(2).kernel("x")
    c.move("x", 0, 6, offload=0, free=3, prefetch=4)
    s = c.simulate()
    # compute  k0 k1 k2 k3 k4 k5 k6
    # write       x
    # read                 x
    assert s.seconds == 7
    assert s.held_bytes == [20, 20, 30, 10, 20, 20, 20]
    assert s.timeline.metadata.evictions == 1
    assert s.timeline.metadata.eviction_bytes == 0
    assert s.timeline.metadata.demand_fetches == 0


def test_eviction_before_the_planned_offload_leaves_the_prefetch(case: CaseBuilder) -> None:
    """x has to go before its offload's turn: it goes elsewhere, and comes back from there."""
    c = case(gpu_bytes=30).storage("x", 10).storage("w", 10).storage("u", 20, birth=1, death=1)
    c.kernel("w", writes=["x"]).kernel(writes=["u"]).kernel("w").kernels(2).kernel("x")
    c.move("x", 0, 5, offload=2, free=3, prefetch=4)
    s = c.simulate()
    # k1 needs 20 beside x and w: x (k5) goes before w (k2), to the host: [1,2)
    # k1 [2,3) k2 k3 k4 [5,6), meanwhile x in
    assert s.transfers == [
        ("x", "host write", "eviction", 1, 2),
        ("x", "host read", "prefetch", 5, 6),
    ]
    assert s.seconds == 7
    assert s.timeline.metadata.demand_fetches == 0


def test_prefetch_without_room_becomes_a_demand_fetch(case: CaseBuilder) -> None:
    """At kernel 3 there is no room for x without an eviction, so kernel 5 fetches it."""
    c = case(gpu_bytes=30).storage("x", 10).storage("w", 10).storage("u", 20, birth=2, death=3)
    c.kernel("x", "w").kernel("w").kernel(writes=["u"]).kernel("u").kernel("w").kernel("x")
    c.move("x", 0, 5, offload=0, free=2, prefetch=3)
    s = c.simulate()
    # k3 still holds u (20) and w (10): the prefetch is dropped; k5 [5,6) + fetch [5,6)
    assert s.transfers == [
        ("x", "ssd write", "offload", 1, 2),
        ("x", "ssd read", "demand_fetch", 5, 6),
    ]
    assert s.seconds == 7
    assert s.timeline.metadata.demand_fetches == 1
    assert s.timeline.metadata.demand_fetch_bytes == 10
    assert s.timeline.metadata.evictions == 0


def test_demand_fetch_comes_between_chunks(case: CaseBuilder) -> None:
    """It waits for the chunk under way, not for the transfer."""
    c = case(gpu_bytes=5 * CHUNK, host={"read_rate": CHUNK, "write_rate": CHUNK})
    c.storage("y", 3 * CHUNK).storage("x", CHUNK).storage("u", 5 * CHUNK, birth=4, death=4)
    c.kernel("y", writes=["x"]).kernels(3).kernel(writes=["u"]).kernel(seconds=0.5)
    c.kernel("x").kernel().kernel("y")
    c.move("y", 0, 8, offload=0, free=4, prefetch=5, device="host")
    s = c.simulate()
    # write    y y y [1,4)  x evicted [4,5)
    # compute  k0 k1 k2 k3 . k4 [5,6) k5 [6,6.5)  ........  k6 [8,9) k7 k8 [10,11)
    # read                            y [6,7)  x [7,8)  y [8,10)
    assert s.transfers == [
        ("y", "host write", "offload", 1, 4),
        ("x", "host write", "eviction", 4, 5),
        ("y", "host read", "prefetch", 6, 7),
        ("x", "host read", "demand_fetch", 7, 8),
        ("y", "host read", "prefetch", 8, 10),
    ]
    assert s.seconds == 11
    assert s.account["stall_read"] == 1.5
    assert s.timeline.metadata.channel_bytes["host read"] == 4 * CHUNK


def test_resumed_transfer_pays_no_second_latency(case: CaseBuilder) -> None:
    """The same with half a second of latency: y and x pay once each."""
    host = {"read_rate": CHUNK, "write_rate": CHUNK, "latency_seconds": 0.5}
    c = case(gpu_bytes=5 * CHUNK, host=host)
    c.storage("y", 3 * CHUNK).storage("x", CHUNK).storage("u", 5 * CHUNK, birth=5, death=5)
    c.kernel("y", writes=["x"]).kernels(4).kernel(writes=["u"]).kernel().kernel("x")
    c.kernels(2).kernel("y")
    c.move("y", 0, 10, offload=0, free=5, prefetch=6, device="host")
    s = c.simulate()
    # y out [1,4.5); k5 at 5: x out [5,6.5), k5 [6.5,7.5); y in from 7.5: latency, chunk [8,9)
    # k6 [7.5,8.5), k7 wants x at 8.5: x in [9,10.5); y on [10.5,12.5); k7 [10.5,11.5)
    assert [t for t in s.transfers if t[1] == "host read"] == [
        ("y", "host read", "prefetch", 7.5, 9),
        ("x", "host read", "demand_fetch", 9, 10.5),
        ("y", "host read", "prefetch", 10.5, 12.5),
    ]


def test_full_host_overflows_to_the_ssd_with_most_room(case: CaseBuilder) -> None:
    """The host takes what fits, then the emptier SSD."""
    c = case(
        gpu_bytes=20,
        host={"memory_bytes": 0},
        ssd={"capacity_bytes": 10},
        more_ssds=[{"name": "ssd1", "capacity_bytes": 20}],
    )
    c.storage("x", 10).storage("u", 20, birth=1, death=1)
    c.kernel(writes=["x"]).kernel(writes=["u"]).kernel("x")
    s = c.simulate()
    assert s.transfers == [
        ("x", "ssd1 write", "eviction", 1, 2),
        ("x", "ssd1 read", "demand_fetch", 3, 4),
    ]


def test_host_slots_are_whole_blocks(case: CaseBuilder) -> None:
    """10 bytes take 512 on the host; the peak says so."""
    c = case(gpu_bytes=20, host={"memory_bytes": 600}).storage("x", 10)
    c.storage("u", 20, birth=1, death=1)
    c.kernel(writes=["x"]).kernel(writes=["u"]).kernel("x")
    s = c.simulate()
    assert s.transfers[0] == ("x", "host write", "eviction", 1, 2)
    assert s.timeline.metadata.peak_host_bytes == 512


def test_planned_arena_is_not_overflow(case: CaseBuilder) -> None:
    """What the plan reserves on the host cannot take an eviction."""
    c = case(gpu_bytes=30, host={"memory_bytes": 1024}, arena_bytes={"host": 1024})
    c.storage("x", 10).storage("w", 10).storage("u", 20, birth=1, death=1)
    c.kernel("w", writes=["x"]).kernel(writes=["u"]).kernel("w").kernels(2).kernel("x")
    c.move("x", 0, 5, offload=2, free=4, prefetch=5, device="host")
    assert c.simulate().transfers[0] == ("x", "ssd write", "eviction", 1, 2)


def test_ssd_without_room_for_its_bounce_buffer_takes_no_overflow(case: CaseBuilder) -> None:
    """The host budget is too small for the first SSD's buffer, not for the second's."""
    c = case(
        gpu_bytes=20,
        host={"memory_bytes": 500},
        ssd={"gds": False, "bounce_bytes": 501},
        more_ssds=[{"name": "ssd1", "gds": False, "bounce_bytes": 400, "capacity_bytes": 20}],
    )
    c.storage("x", 10).storage("u", 20, birth=1, death=1)
    c.kernel(writes=["x"]).kernel(writes=["u"]).kernel("x")
    assert c.simulate().transfers[0] == ("x", "ssd1 write", "eviction", 1, 2)


def test_no_room_anywhere_is_a_capacity_error(case: CaseBuilder) -> None:
    """Neither host nor SSD can take x."""
    c = case(gpu_bytes=20, host={"memory_bytes": 0}, ssd={"capacity_bytes": 5}).storage("x", 10)
    c.storage("u", 20, birth=1, death=1)
    c.kernel("x").kernel(writes=["u"]).kernel("x")
    with pytest.raises(CapacityError, match=r"kernel 1 \(op1\): storage 0 must leave the GPU"):
        c.simulate()


def test_no_room_before_the_first_kernel_is_a_capacity_error(case: CaseBuilder) -> None:
    """x and y do not fit the GPU at the start, and y fits nowhere else."""
    c = case(gpu_bytes=10, host={"memory_bytes": 0}, ssd={"capacity_bytes": 5})
    c.storage("x", 10).storage("y", 10).kernel("x").kernel("y")
    with pytest.raises(CapacityError, match=r"storage 1 .* before the first kernel"):
        c.simulate()


def test_kernel_larger_than_the_gpu_is_infeasible(case: CaseBuilder) -> None:
    """The message names kernel, operator, needed and available bytes."""
    c = case(gpu_bytes=25).storage("x", 10).storage("y", 10)
    c.kernel("x").kernel("x", "y", workspace=10)
    with pytest.raises(InfeasibleError, match=r"kernel 1 \(op1\) needs 30 bytes .* but 25 bytes"):
        c.simulate()


def test_fixed_storage_counts_for_every_kernel(case: CaseBuilder) -> None:
    """A storage whose memory cannot be given back is part of what a kernel needs."""
    c = case(gpu_bytes=25).storage("fixed", 10, resizable=False).storage("y", 20)
    c.kernel("fixed").kernel("y")
    with pytest.raises(InfeasibleError, match=r"kernel 1 \(op1\) needs 30 bytes"):
        c.simulate()


def test_budgets_given_here_come_before_the_plans(case: CaseBuilder) -> None:
    """A plan made for plenty is paged at 20 bytes, and follows itself at its own budget."""
    c = case().storage("x", 10).storage("y", 20)
    c.kernel("x").kernels(2).kernel("y").kernel("x")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    assert c.simulate().timeline.metadata.demand_fetches == 0
    tight = c.simulate(gpu_memory=20).timeline.metadata
    assert tight.capacity_bytes == 20
    assert tight.demand_fetches > 0
    assert c.simulate(gpu_memory="20B").timeline.metadata.capacity_bytes == 20


def test_stale_clean_copy_is_written_not_trusted(case: CaseBuilder) -> None:
    """x is evicted before the first move, so the second has no copy in its place to rely on."""
    c = case(gpu_bytes=30).storage("x", 10).storage("w", 10).storage("u", 20, birth=1, death=1)
    c.kernel("w", writes=["x"]).kernel(writes=["u"]).kernel("w").kernel().kernel("x")
    c.kernels(3).kernel("x")
    c.move("x", 0, 4, offload=2, free=3, prefetch=4)
    c.move("x", 4, 8, offload=4, free=6, prefetch=7, writes=False)
    s = c.simulate()
    # x out at k1 [1,2); k4 [5,6) waits for nothing: its prefetch is due before it, [5,6), k4 [6,7)
    assert s.transfers == [
        ("x", "host write", "eviction", 1, 2),
        ("x", "host read", "prefetch", 5, 6),
        ("x", "ssd write", "offload", 7, 8),
        ("x", "ssd read", "prefetch", 9, 10),
    ]
    assert s.held_bytes[6] == 10


def test_copy_of_an_eviction_lasts_until_the_storage_is_written(case: CaseBuilder) -> None:
    """Parameters that are only read are written once, before the iterations that are reported."""
    c = case(gpu_bytes=20).storage("x", 10).storage("u", 20, birth=1, death=1)
    c.kernel("x").kernel(writes=["u"]).kernel("x")
    s = c.simulate()
    assert s.transfers == [("x", "host read", "demand_fetch", 2, 3)]
    assert s.timeline.metadata.evictions == 1
    assert s.timeline.metadata.eviction_bytes == 0
    assert s.seconds == 4
    assert s.timeline.metadata.cold_start_seconds == 5


def test_small_storages_leave_last(case: CaseBuilder) -> None:
    """4095 bytes stay although they are used again later than 4096."""
    c = case(gpu_bytes=12288).storage("small", 4095).storage("large", 4096)
    c.storage("u", 8192, birth=1, death=1)
    c.kernel(writes=["small", "large"]).kernel(writes=["u"]).kernel("large").kernel("small")
    evicted = [t[0] for t in c.simulate().transfers if t[2] == "eviction"]
    assert evicted == ["large"]


def test_small_storages_leave_if_no_larger_one_is_left(case: CaseBuilder) -> None:
    """Room for one of the three."""
    c = case(gpu_bytes=12288).storage("small", 4095).storage("large", 4096)
    c.storage("u", 12288, birth=1, death=1)
    c.kernel(writes=["small", "large"]).kernel(writes=["u"]).kernel("large").kernel("small")
    evicted = [t[0] for t in c.simulate().transfers if t[2] == "eviction"]
    assert evicted == ["large", "small"]


def test_youngest_of_equals_leaves_first(case: CaseBuilder) -> None:
    """x and t are used again by the same kernel; t is the younger one."""
    c = case(gpu_bytes=30).storage("t", 10, birth=0, death=2).storage("x", 10)
    c.storage("u", 20, birth=1, death=1)
    c.kernel(writes=["t", "x"]).kernel(writes=["u"]).kernel("t", "x")
    assert c.simulate().transfers[0][:3] == ("t", "host write", "eviction")


def test_what_was_fetched_ahead_leaves_last(case: CaseBuilder) -> None:
    """x came for k6 and stays; y, used earlier, leaves at k4."""
    c = case(gpu_bytes=30).storage("x", 10).storage("y", 10).storage("u", 20, birth=4, death=4)
    c.kernel(writes=["x"]).kernel(writes=["y"]).kernels(2).kernel(writes=["u"])
    c.kernel("y").kernel("x")
    c.move("x", 0, 6, offload=0, free=2, prefetch=3)
    assert [t[:3] for t in c.simulate().transfers] == [
        ("x", "ssd write", "offload"),
        ("x", "ssd read", "prefetch"),
        ("y", "host write", "eviction"),
        ("y", "host read", "demand_fetch"),
    ]


def test_memory_waits_for_a_planned_write_that_is_queued(case: CaseBuilder) -> None:
    """k1 needs the room of x, whose offload is under way until 3: nothing is written twice."""
    c = case(gpu_bytes=40).storage("x", 20).storage("w", 10).storage("u", 20, birth=1, death=1)
    c.kernel("w", writes=["x"]).kernel(writes=["u"]).kernel("w").kernels(2).kernel("x")
    c.move("x", 0, 5, offload=0, free=3, prefetch=4)
    s = c.simulate()
    assert s.transfers == [("x", "ssd write", "offload", 1, 3), ("x", "ssd read", "prefetch", 6, 8)]
    assert s.stalls[0] == (1, "memory", "x", 1, 3)
    assert s.timeline.metadata.evictions == 1
    assert s.timeline.metadata.eviction_bytes == 0


def arena_case(case: CaseBuilder, *, z_offset: int) -> Any:
    """Nothing has room but the host's arena, where z has its place; k1 needs the memory of x."""
    c = case(gpu_bytes=3 * 512, host={"memory_bytes": 1024}, ssd={"capacity_bytes": 0})
    c.arena_bytes = {"host": 1024}
    c.storage("x", 512).storage("z", 512).storage("u", 1024, birth=1, death=1)
    c.kernel("z", writes=["x"]).kernel(writes=["u"]).kernel("z").kernels(3).kernel("x", "z")
    return c.move("z", 2, 6, offload=2, free=4, prefetch=5, device="host", offset=z_offset)


def test_gap_of_an_arena_is_the_last_resort(case: CaseBuilder) -> None:
    """x takes the lowest place that is free, and z still finds its own."""
    s = arena_case(case, z_offset=512).simulate()
    assert [t[:3] for t in s.transfers] == [
        ("x", "host write", "eviction"),
        ("z", "host write", "offload"),
        ("z", "host read", "prefetch"),
        ("x", "host read", "demand_fetch"),
    ]
    assert s.held_bytes[4] == 0


def test_only_copy_in_a_gap_keeps_a_planned_write_away(case: CaseBuilder) -> None:
    """z's place holds x while x is away: z is not written, and stays on the GPU."""
    s = arena_case(case, z_offset=0).simulate()
    assert [t[:3] for t in s.transfers] == [
        ("x", "host write", "eviction"),
        ("x", "host read", "demand_fetch"),
    ]
    assert s.held_bytes[4] == 512


def test_smaller_victim_goes_where_the_first_finds_no_room(case: CaseBuilder) -> None:
    """x (k4) does not fit the host, y (k3) does."""
    c = case(gpu_bytes=2048, host={"memory_bytes": 512}, ssd={"capacity_bytes": 0})
    c.storage("x", 1024).storage("y", 512).storage("u", 1024, birth=1, death=1)
    c.kernel(writes=["x", "y"]).kernel(writes=["u"]).kernel().kernel("y").kernel("x")
    assert [t[:3] for t in c.simulate().transfers] == [
        ("y", "host write", "eviction"),
        ("y", "host read", "demand_fetch"),
    ]
