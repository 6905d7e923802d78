"""Hand-solved cases of plans that fit. Kernels last 1 s, devices move 10 bytes/s; # shows time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CaseBuilder = Callable[..., Any]


def test_without_pressure_the_iteration_is_ideal(case: CaseBuilder) -> None:
    """No plan, everything fits: durations and gaps, nothing else."""
    c = case().storage("x", 10)
    c.kernel("x", seconds=2, gap=0.5).kernel("x", gap=0.25)
    s = c.simulate()
    # 0   0.5       2.5  2.75    3.75
    # |gap| k0       |gap | k1    |
    assert s.seconds == 3.75
    assert s.kernel_starts == [0.5, 2.75]
    assert s.account == {"compute_alone": 3.0, "gap": 0.75}
    assert s.transfers == []


def test_transfers_overlap_kernels(case: CaseBuilder) -> None:
    """Offload and prefetch of one second each hide behind kernels."""
    c = case().storage("x", 10)
    c.kernel("x").kernels(3).kernel("x")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    s = c.simulate()
    # compute  k0 k1 k2 k3 k4
    # write       x
    # read              x
    assert s.seconds == 5
    assert s.transfers == [
        ("x", "ssd write", "offload", 1, 2),
        ("x", "ssd read", "prefetch", 3, 4),
    ]
    assert s.account == {"compute_alone": 3, "compute_overlapped": 2}
    assert s.held_bytes == [10, 10, 0, 10, 10]
    utilisation = {"host read": 0, "host write": 0, "ssd read": 0.2, "ssd write": 0.2}
    assert s.timeline.metadata.channel_utilisation == utilisation
    assert s.timeline.metadata.channel_bytes["ssd write"] == 10


def test_memory_stall_and_read_stall(case: CaseBuilder) -> None:
    """No room to hide: the kernel waits for the offload, the next for the prefetch."""
    c = case().storage("x", 10)
    c.kernel("x").kernel().kernel("x")
    c.move("x", 0, 2, offload=0, free=1, prefetch=2)
    s = c.simulate()
    # 0    1         2    3        4    5
    # | k0 | x out   | k1 | x in   | k2 |
    assert s.seconds == 5
    assert s.stalls == [(1, "memory", "x", 1, 2), (2, "read", "x", 3, 4)]
    assert s.kernel_starts == [0, 2, 4]
    assert s.account == {"compute_alone": 3, "stall_read": 1, "stall_memory": 1}


def test_gap_hides_waits(case: CaseBuilder) -> None:
    """A gap runs while moves leave and is counted whole; only what exceeds it is a stall."""
    c = case().storage("x", 10)
    c.kernel("x").kernel(gap=0.75).kernel("x", gap=1)
    c.move("x", 0, 2, offload=0, free=1, prefetch=2)
    s = c.simulate()
    # 0    1      1.75  2    3       4    5
    # | k0 | gap .75 |  | k1 | gap 1 | k2 |
    #      | x out .... |    | x in  |
    assert s.seconds == 5
    assert s.stalls == [(1, "memory", "x", 1.75, 2)]
    assert s.account == {"compute_alone": 3, "stall_memory": 0.25, "gap": 1.75}


def test_wait_for_memory_turns_into_wait_for_read(case: CaseBuilder) -> None:
    """While a move has not left it is a memory stall, whatever else is awaited; then a read."""
    c = case().storage("x", 10).storage("y", 10)
    c.kernel("y").kernel().kernel("x").kernel("y")
    c.move("x", 2, 2, offload=2, free=3, prefetch=1, device="host")
    c.move("y", 0, 3, offload=0, free=1, prefetch=3)
    s = c.simulate()
    # k0 [0,1); y out [1,2), k1 waits, free at 2: x in [2,3) from boundary 1 on; k1 [2,3);
    # k2 [3,4); x out [4,5), k3 waits, free at 5: y in [5,6), k3 [6,7)
    assert s.seconds == 7
    assert s.stalls == [
        (1, "memory", "y", 1, 2),
        (3, "memory", "x", 4, 5),
        (3, "read", "y", 5, 6),
    ]


@pytest.mark.parametrize(
    ("first", "seconds", "stalls"),
    [
        # write    x x y          x blocks the head of the queue: y leaves at 4, k2 waits for it
        # compute  k0 k1 . . k2 k3 k4 k5 . k6
        ("x", 10, [(2, "memory", "y", 2, 4), (6, "read", "x", 8, 9)]),
        # write    y x x          y first: it has left at 2
        # compute  k0 k1 k2 k3 k4 k5 . k6
        ("y", 8, [(6, "read", "x", 6, 7)]),
    ],
)
def test_queue_order_is_strict(
    case: CaseBuilder, first: str, seconds: float, stalls: list[Any]
) -> None:
    """Two offloads triggered by one kernel: row order decides, and the head blocks the line."""
    c = case().storage("x", 20).storage("y", 10)
    c.kernel("x", "y").kernels(5).kernel("x", "y")
    moves = {
        "x": {"offload": 0, "free": 4, "prefetch": 5, "offset": 0},
        "y": {"offload": 0, "free": 2, "prefetch": 3, "offset": 32},
    }
    for name in (first, "y" if first == "x" else "x"):
        c.move(name, 0, 6, **moves[name])
    s = c.simulate()
    assert s.seconds == seconds
    assert s.stalls == stalls


def test_prefetch_over_the_cut(case: CaseBuilder) -> None:
    """A period that wraps: out in one iteration, in again in the next."""
    c = case().storage("x", 10)
    c.kernel().kernel("x").kernel("x").kernels(2)
    c.move("x", 2, 1, offload=2, free=4, prefetch=0)
    s = c.simulate()
    # compute  k0 k1 k2 k3 k4 | k0 k1
    # read     x              | x
    # write             x     |
    assert s.seconds == 5
    assert s.transfers == [
        ("x", "ssd read", "prefetch", 0, 1),
        ("x", "ssd write", "offload", 3, 4),
    ]
    assert s.held_bytes == [10, 10, 10, 10, 0]
    assert s.timeline.metadata.cycle_iterations == 1


def test_transfer_under_way_at_the_cut(case: CaseBuilder) -> None:
    """An offload that begins in one iteration ends in the next, where it is reported."""
    c = case().storage("x", 20)
    c.kernels(2).kernel("x").kernel()
    c.move("x", 2, 2, offload=2, free=1, prefetch=2)
    s = c.simulate()
    #         -1 0    1    2         4    5    6
    # compute  | k0 | k1 |          | k2 | k3 |
    # write   x x    |    |          |    | x ..
    # read           |    | x   x    |
    assert s.seconds == 6
    assert s.transfers == [
        ("x", "ssd write", "offload", -1, 1),
        ("x", "ssd read", "prefetch", 2, 4),
    ]
    assert s.account == {"compute_alone": 2, "compute_overlapped": 2, "stall_read": 2}
    assert s.timeline.metadata.channel_utilisation["ssd write"] == 2 / 6


def test_cold_start_is_placed_and_reported_apart(case: CaseBuilder) -> None:
    """At the start x has left already; in the steady cycle kernel 0 waits for it to leave."""
    c = case().storage("x", 10)
    c.kernel().kernel("x").kernel()
    c.move("x", 1, 1, offload=2, free=0, prefetch=1)
    s = c.simulate()
    # cold    k0 [0,1)  x in [1,2)  k1 [2,3)  k2 [3,4)
    # steady  x out [0,1)  k0 [1,2)  x in [2,3)  k1 [3,4)  k2 [4,5)
    assert s.timeline.metadata.cold_start_seconds == 4
    assert s.seconds == 5
    assert s.stalls == [(0, "memory", "x", 0, 1), (1, "read", "x", 2, 3)]


def test_tail_is_written_and_never_read(case: CaseBuilder) -> None:
    """After its last access an activation leaves, until it dies."""
    c = case().storage("t", 10, birth=0, death=4)
    c.kernel(writes=["t"]).kernel("t").kernels(3)
    c.move("t", 1, None, offload=1, free=3)
    s = c.simulate()
    assert s.seconds == 5
    assert s.transfers == [("t", "ssd write", "offload", 2, 3)]
    assert s.held_bytes == [10, 10, 10, 0, 0]


@pytest.mark.parametrize(
    ("writes", "seconds", "written"),
    [
        # compute  k0 k1 k2 k3 k4 k5 k6 k7
        # write       x                      the second time x leaves at no cost, at once
        # read              x        x
        (False, 8, 10),
        # compute  k0 k1 k2 k3 k4 .  k5 k6 k7
        # write       x           x
        (True, 9, 20),
    ],
)
def test_clean_copy_leaves_at_no_cost(
    case: CaseBuilder, writes: bool, seconds: float, written: int
) -> None:
    """A move without a write has left at the end of the kernel after which it is issued."""
    c = case().storage("x", 10)
    c.kernel(writes=["x"]).kernels(3).kernel("x").kernels(2).kernel("x")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    c.move("x", 4, 7, offload=4, free=5, prefetch=6, writes=writes)
    s = c.simulate()
    assert s.seconds == seconds
    assert s.timeline.metadata.channel_bytes == {
        "host read": 0,
        "host write": 0,
        "ssd read": 20,
        "ssd write": written,
    }


def test_link_is_shared_equally(case: CaseBuilder) -> None:
    """Two devices of 10 behind a link of 10: 5 each, until one has done and leaves 10."""
    c = case(link={"read_rate": 10, "write_rate": 10}).storage("x", 10).storage("y", 20)
    c.kernel("x", "y").kernels(7).kernel("x", "y")
    c.move("x", 0, 8, offload=0, free=4, prefetch=5, device="host")
    c.move("y", 0, 8, offload=0, free=4, prefetch=5)
    s = c.simulate()
    # write  x 5 5 .   from 1: x has 10 bytes at 5 -> 3; y has 10 left at 10 -> 4
    #        y 5 5 10
    # read   the same from 5
    assert s.seconds == 9
    assert s.transfers == [
        ("x", "host write", "offload", 1, 3),
        ("y", "ssd write", "offload", 1, 4),
        ("x", "host read", "prefetch", 5, 7),
        ("y", "ssd read", "prefetch", 5, 8),
    ]


def test_link_share_is_max_min_fair(case: CaseBuilder) -> None:
    """An SSD of 4 behind a link of 10 leaves 6 to the host."""
    ssd = {"read_rate": 4, "write_rate": 4}
    c = case(link={"read_rate": 10, "write_rate": 10}, ssd=ssd).storage("x", 12).storage("y", 8)
    c.kernel("x", "y").kernels(5).kernel("x", "y")
    c.move("x", 0, 6, offload=0, free=3, prefetch=4, device="host")
    c.move("y", 0, 6, offload=0, free=3, prefetch=4)
    s = c.simulate()
    assert s.seconds == 7
    assert s.transfers == [
        ("x", "host write", "offload", 1, 3),
        ("y", "ssd write", "offload", 1, 3),
        ("x", "host read", "prefetch", 4, 6),
        ("y", "ssd read", "prefetch", 4, 6),
    ]


def test_duplex_rates_hold_while_both_directions_move(case: CaseBuilder) -> None:
    """5 bytes/s while both directions are active, 10 while one is."""
    ssd = {"duplex_read_rate": 5, "duplex_write_rate": 5}
    c = case(ssd=ssd).storage("x", 10).storage("y", 5)
    c.kernel("x").kernels(2).kernel("y").kernels(2).kernel("x").kernel()
    c.move("x", 0, 6, offload=0, free=3, prefetch=4)
    c.move("y", 3, 3, offload=3, free=6, prefetch=1)
    s = c.simulate()
    # from 1: x out and y in at 5: y is in at 2; x has 5 left at 10 -> 2.5
    # from 4: y out and x in at 5: y is out at 5; x has 5 left at 10 -> 5.5
    assert s.seconds == 8
    assert s.transfers == [
        ("x", "ssd write", "offload", 1, 2.5),
        ("y", "ssd read", "prefetch", 1, 2),
        ("x", "ssd read", "prefetch", 4, 5.5),
        ("y", "ssd write", "offload", 4, 5),
    ]
    assert s.account == {"compute_alone": 5, "compute_overlapped": 3}


def test_duplex_limit_of_the_link(case: CaseBuilder) -> None:
    """The link's duplex rates count over all devices: host in and SSD out disturb each other."""
    link = {"read_rate": 10, "write_rate": 10, "duplex_read_rate": 5, "duplex_write_rate": 10}
    c = case(link=link).storage("x", 20).storage("y", 10)
    c.kernel("x").kernels(4).kernel("y").kernel("x").kernel()
    c.move("x", 0, 6, offload=0, free=4, prefetch=5)
    c.move("y", 5, 5, offload=6, free=0, prefetch=1, device="host")
    s = c.simulate()
    # from 1: x out at 10 -> 3, y in at 5 (the link's duplex rate) -> 3
    # k5 waits for nothing; boundary 5 at 5: x in at 10 -> 7, k6 waits 1 s
    # k6 ends at 8: y out at 10 -> 9 = end of k7, so that free before kernel 0 holds
    assert s.seconds == 9
    assert s.transfers == [
        ("x", "ssd write", "offload", 1, 3),
        ("y", "host read", "prefetch", 1, 3),
        ("x", "ssd read", "prefetch", 5, 7),
        ("y", "host write", "offload", 8, 9),
    ]


def test_latency_is_paid_once_and_holds_the_channel(case: CaseBuilder) -> None:
    """A quarter of a second of the device and one of the link; no bytes move meanwhile."""
    c = case(ssd={"latency_seconds": 0.25}, link={"latency_seconds": 0.25})
    c.storage("x", 10).storage("y", 5)
    c.kernel("x", "y").kernels(5).kernel("x", "y")
    c.move("x", 0, 6, offload=0, free=4, prefetch=5)
    c.move("y", 0, 6, offload=0, free=4, prefetch=5)
    s = c.simulate()
    # write  [1, 1.5) latency, [1.5, 2.5) x, [2.5, 3) latency, [3, 3.5) y
    # read   the same from 5; y is in at 7.5, k6 waits from 6
    assert s.transfers == [
        ("x", "ssd write", "offload", 1, 2.5),
        ("y", "ssd write", "offload", 2.5, 3.5),
        ("x", "ssd read", "prefetch", 5, 6.5),
        ("y", "ssd read", "prefetch", 6.5, 7.5),
    ]
    assert s.seconds == 8.5
    # k5 [5, 6) overlaps bytes in [5.5, 6) only.
    assert s.account == {"compute_alone": 5, "compute_overlapped": 2, "stall_read": 1.5}
    assert s.timeline.metadata.channel_utilisation["ssd read"] == 2.5 / 8.5


@pytest.mark.parametrize(("gds", "seconds_each"), [(False, 2), (True, 1)])
def test_host_memory_rate_counts_bounces_twice(
    case: CaseBuilder, gds: bool, seconds_each: float
) -> None:
    """Host memory of 15: host and bouncing SSD get r + 2 r = 15, hence 5 each; with GDS 10 each."""
    c = case(host={"memory_rate": 15}, ssd={"gds": gds}).storage("x", 10).storage("y", 10)
    c.kernel("x", "y").kernels(5).kernel("x", "y")
    c.move("x", 0, 6, offload=0, free=3, prefetch=4, device="host")
    c.move("y", 0, 6, offload=0, free=3, prefetch=4)
    s = c.simulate()
    assert s.seconds == 7
    assert [(name, end - start) for name, _, _, start, end in s.transfers] == [
        ("x", seconds_each),
        ("y", seconds_each),
        ("x", seconds_each),
        ("y", seconds_each),
    ]


def test_kernels_slow_down_under_transfers(case: CaseBuilder) -> None:
    """Twice as slow while writing, four times while reading; work is kept across changes."""
    c = case(slowdown={"write": 2, "read": 4}).storage("x", 10)
    c.kernel("x").kernels(3).kernel("x")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    s = c.simulate()
    # k1 [1, 2.5): x out in [1, 2) does half of it; k2 [2.5, 3.5)
    # k3 [3.5, 5.25): x in in [3.5, 4.5) does a quarter of it; k4 [5.25, 6.25)
    assert s.kernel_starts == [0, 1, 2.5, 3.5, 5.25]
    assert s.seconds == 6.25
    assert s.account == {"compute_alone": 4.25, "compute_overlapped": 2}


def test_several_ssds_have_queues_of_their_own(case: CaseBuilder) -> None:
    """Two SSDs move two storages at once; each direction of each is a channel."""
    c = case(more_ssds=[{"name": "ssd1"}]).storage("x", 10).storage("y", 10)
    c.kernel("x", "y").kernels(3).kernel("x", "y")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    c.move("y", 0, 4, offload=0, free=2, prefetch=3, device="ssd1")
    s = c.simulate()
    assert s.seconds == 5
    assert [(name, channel, start) for name, channel, _, start, _ in s.transfers] == [
        ("x", "ssd write", 1),
        ("y", "ssd1 write", 1),
        ("x", "ssd read", 3),
        ("y", "ssd1 read", 3),
    ]


def test_n_ssds_behind_one_link_give_no_more_than_the_link(case: CaseBuilder) -> None:
    """Four SSDs of 6.5 behind a link of 10 move 10 bytes/s together."""
    rates = {"read_rate": 6.5, "write_rate": 6.5}
    names = ["ssd", "ssd1", "ssd2", "ssd3"]
    more = [{"name": name, **rates} for name in names[1:]]
    c = case(link={"read_rate": 10, "write_rate": 10}, ssd=rates, more_ssds=more)
    for name in names:
        c.storage(f"on {name}", 10)
    everything = [f"on {name}" for name in names]
    c.kernel(*everything).kernels(10).kernel(*everything)
    for name in names:
        c.move(f"on {name}", 0, 11, offload=0, free=5, prefetch=7, device=name)
    s = c.simulate()
    assert s.seconds == 12
    assert {(start, end) for _, _, _, start, end in s.transfers} == {(1, 5), (7, 11)}


def test_more_channels_than_the_rate_table_holds(case: CaseBuilder) -> None:
    """Seven SSDs and the host are sixteen channels: rates are computed, not looked up."""
    names = [f"ssd{i}" for i in range(1, 7)]
    c = case(link={"read_rate": 70, "write_rate": 35}, more_ssds=[{"name": n} for n in names])
    names = ["ssd", *names]
    everything = [f"on {name}" for name in names]
    for name in everything:
        c.storage(name, 10)
    c.kernel(*everything).kernels(5).kernel(*everything)
    for name in names:
        c.move(f"on {name}", 0, 6, offload=0, free=3, prefetch=5, device=name)
    s = c.simulate()
    # 7 x 10 bytes at 35 bytes/s out: 2 s; at 70 in: 1 s
    assert s.seconds == 7
    assert {(start, end) for _, _, _, start, end in s.transfers} == {(1, 3), (5, 6)}


def test_nothing_takes_no_time(case: CaseBuilder) -> None:
    """Empty storages and kernels of no duration pass in order, and the simulation ends."""
    c = case().storage("x", 0)
    c.kernel("x", seconds=0).kernel(seconds=0).kernel("x", seconds=0).kernel()
    c.move("x", 0, 2, offload=0, free=1, prefetch=2)
    s = c.simulate()
    assert s.seconds == 1
    assert s.transfers == [
        ("x", "ssd write", "offload", 0, 0),
        ("x", "ssd read", "prefetch", 0, 0),
    ]


def test_iteration_of_no_time_has_no_utilisation(case: CaseBuilder) -> None:
    """A trace without durations is not divided by."""
    s = case().storage("x", 1).kernel("x", seconds=0).simulate()
    assert s.seconds == 0
    assert set(s.timeline.metadata.channel_utilisation.values()) == {0.0}


def test_record_false_leaves_events_out_and_changes_nothing_else(case: CaseBuilder) -> None:
    """The summary is the same with and without events."""
    c = case().storage("x", 10)
    c.kernel("x").kernel().kernel("x")
    c.move("x", 0, 2, offload=0, free=1, prefetch=2)
    with_events, without = c.simulate(), c.simulate(record=False)
    assert len(without.timeline.events) == 0
    assert len(with_events.timeline.events) == 10
    assert without.account == with_events.account


def test_progress_is_told_of_every_iteration(case: CaseBuilder) -> None:
    """Numbers of iterations simulated so far."""
    c = case().storage("x", 10)
    c.kernel().kernel("x").kernel()
    c.move("x", 1, 1, offload=2, free=0, prefetch=1)
    seen: list[int] = []
    c.simulate(progress=seen.append)
    assert seen == [1, 2]


def test_not_steady_in_time_reports_the_second_half(case: CaseBuilder) -> None:
    """One iteration from a cold start shows no repetition, and says so."""
    c = case().storage("x", 10)
    c.kernel().kernel("x").kernel()
    c.move("x", 1, 1, offload=2, free=0, prefetch=1)
    s = c.simulate(max_iterations=1)
    assert not s.timeline.metadata.steady
    assert s.seconds == 4
