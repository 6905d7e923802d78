"""Replays: exact moves, stalls where the simulator has them, and bytes that are compared."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import teraio
from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.contracts.plan import Accesses, Moves, Plan
from teraio.contracts.timeline import Timeline
from teraio.errors import CapacityError, InputError, OffloadWarning, StoreError
from teraio.executor.probing import limits
from teraio.executor.replaying import room
from teraio.executor.replaying.plan_replay import Replay
from teraio.executor.stores.host import HostStore
from teraio.executor.stores.queues import Await, ThreadQueues, ThreadTransfer
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.evict_everything import evict_everything
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

MB = 10**6
KERNEL_SECONDS = 0.005


def layers(kernel_seconds: float = KERNEL_SECONDS, unit: int = MB) -> Trace:
    """Three layers of 4 MB activations over a 2 MB weight: 14 MB live at the turn, kernels 2, 3.

    ``unit``: bytes that take the place of a MB.
    """
    phases = ["forward"] * 3 + ["backward"] * 3 + ["optimizer"]
    kernels = [
        (k, f"op{k}", "", phase, 0, kernel_seconds, 0.0, 0, k, 0, "", None, None)
        for k, phase in enumerate(phases)
    ]
    storages: list[tuple[object, ...]] = [
        (0, 2 * unit, 2 * unit, "parameter", "weight", None, None, None, "", True)
    ]
    storages += [
        (i, 4 * unit, 4 * unit, "activation", "", i - 1, 0, 6 - i, "", True) for i in (1, 2, 3)
    ]
    accesses = [(0, 0, True, False), (0, 1, False, True)]
    accesses += [(1, 1, True, False), (1, 2, False, True), (2, 2, True, False), (2, 3, False, True)]
    accesses += [(3, 3, True, False), (4, 2, True, False), (5, 1, True, False), (6, 0, True, True)]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="imported", model="three layers"),
    )


def machine(rate: float = 1e9, gpu_memory: int = 20 * MB) -> Hardware:
    """Host memory and a disk, both at ``rate``, bytes per second."""
    return Hardware(
        name="test",
        gpu=(Gpu(name="gpu", memory_bytes=gpu_memory, link="bus"),),
        link=(Link(name="bus", read_rate=rate, write_rate=rate),),
        host=Host(memory_bytes=100 * MB, read_rate=rate, write_rate=rate),
        ssd=(Ssd(name="disk", read_rate=rate, write_rate=rate, capacity_bytes=100 * MB, gds=True),),
    )


def play(trace: Trace, plan: Plan | None, **options: Any) -> Replay:
    """A replay whose warnings about plans that do not fit are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        return teraio.replay(trace, plan, **{"iterations": 2, **options})


def transfers(replay: Replay) -> Counter[tuple[int, str]]:
    """(storage, cause) of every transfer of the timeline."""
    events = replay.timeline.events
    is_transfer = events.what == "transfer"
    rows = zip(events.storage[is_transfer].tolist(), events.cause[is_transfer], strict=True)
    return Counter(rows)


def demand_fetches(timeline: Timeline) -> set[tuple[int, int]]:
    """(kernel, storage) of every demand fetch."""
    events = timeline.events
    rows = events.take(events.cause == "demand_fetch")
    return set(zip(rows.kernel.tolist(), rows.storage.tolist(), strict=True))


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let host stores carry at most ``rate`` bytes per second, both ways."""

    def slow_down(rate: float) -> None:
        move_in_chunks = ThreadQueues._move_in_chunks

        def slower(queues: ThreadQueues, transfer: ThreadTransfer, waits: list[Await]) -> None:
            begun = time.perf_counter()
            move_in_chunks(queues, transfer, waits)
            time.sleep(max(begun + transfer.nbytes / rate - time.perf_counter(), 0.0))

        monkeypatch.setattr(ThreadQueues, "_move_in_chunks", slower)

    return slow_down


def test_every_planned_move_happens_and_nothing_else() -> None:
    """Offloads that write and prefetches, storage by storage, as the plan lists them."""
    trace = layers()
    plan = evict_everything(trace, machine())
    replay = play(trace, plan)
    moves = plan.moves
    expected = Counter((row, "offload") for row in moves.storage[moves.writes].tolist())
    expected += Counter((row, "prefetch") for row in moves.storage[moves.prefetch_start >= 0])
    assert transfers(replay) == expected
    assert replay.moves_found == replay.moves_planned == len(moves)
    metadata = replay.timeline.metadata
    assert (metadata.demand_fetches, metadata.evictions) == (0, 0)
    assert metadata.steady


def test_every_prefetch_is_compared() -> None:
    """In each iteration, the warm-up too."""
    trace = layers()
    plan = evict_everything(trace, machine())
    for check in ("sampled", "full"):
        replay = play(trace, plan, verify=check)
        assert replay.transfers_checked == 3 * int((plan.moves.prefetch_start >= 0).sum())
    assert play(trace, plan, verify="off").transfers_checked == 0


def test_an_iteration_without_moves_takes_its_kernels_time() -> None:
    """Never less, and all of it is kernels."""
    trace = layers()
    replay = play(trace, build_plan(trace, Moves.empty(), machine(), planner="none"))
    assert replay.predicted_seconds == pytest.approx(trace.ideal_seconds)
    assert trace.ideal_seconds <= replay.iteration_seconds < trace.ideal_seconds + 5
    account = replay.timeline.account
    assert account["stall_read"] == account["stall_memory"] == 0
    assert sum(account.values()) == pytest.approx(replay.timeline.iteration_seconds, rel=1e-6)


def test_gaps_and_dispatch_are_played() -> None:
    """As idle time: a gap is a gap, what executing adds is the host's stall."""
    trace = layers(0.001, unit=1000)
    kernels = replace(trace.kernels, gap_before_seconds=np.full(7, 0.004))
    trace = replace(
        trace, kernels=kernels, metadata=replace(trace.metadata, dispatch_seconds=0.003)
    )
    plan = build_plan(trace, Moves.empty(), machine(), planner="none")
    replay = play(trace, plan)
    assert replay.predicted_seconds == pytest.approx(7 * 0.008)
    assert replay.iteration_seconds >= 7 * 0.008
    metadata = replay.timeline.metadata
    assert metadata.gap_seconds <= 7 * 0.004 + 1e-9
    idle = metadata.gap_seconds + metadata.stall_host_seconds
    assert idle + metadata.compute_alone_seconds >= 7 * 0.008


def test_a_slow_link_stalls_as_predicted(slow_host: Callable[[float], None]) -> None:
    """Five times slower transfers: the iteration is the stalls, and about as long as simulated."""
    trace, slow = layers(), 40e6
    fast = play(trace, evict_everything(trace, machine(1e9)))
    slow_host(slow)
    replay = play(trace, evict_everything(trace, machine(slow)))
    predicted = replay.predicted.stall_seconds
    measured = replay.timeline.stall_seconds
    assert predicted["read"] + predicted["memory"] > 5 * trace.ideal_seconds
    assert replay.iteration_seconds > 0.8 * replay.predicted_seconds
    assert replay.iteration_seconds < 3 * replay.predicted_seconds + 1
    for cause in ("read", "memory"):
        assert measured[cause] > 0.3 * predicted[cause]
    assert fast.iteration_seconds < replay.iteration_seconds


def test_a_transfer_behind_kernels_does_not_stall(slow_host: Callable[[float], None]) -> None:
    """The same bytes leave, once with two kernels' time to do so and once with none."""
    trace, rate = layers(0.05), 80e6
    slow_host(rate)
    moves = evict_everything(trace, machine(rate)).moves
    at_once = moves.take(np.flatnonzero(moves.storage == 1))
    behind = replace(at_once, free_by=np.array([4]), prefetch_start=np.array([5]))
    plans = [build_plan(trace, m, machine(rate), planner="test") for m in (at_once, behind)]
    # A busy machine holds up the one or the other, but hardly five times in a row.
    for _ in range(5):
        stalled, hidden = (play(trace, plan, iterations=1) for plan in plans)
        memory = [replay.timeline.stall_seconds["memory"] for replay in (stalled, hidden)]
        if memory[0] > memory[1] + 0.03:
            break
    assert stalled.predicted.stall_seconds["memory"] > 0.04
    assert hidden.predicted.stall_seconds["memory"] < 0.01
    assert memory[0] > memory[1] + 0.03


def test_all_kinds_of_moves(small_trace: Trace, small_plan: Plan, tmp_path: Path) -> None:
    """Clean copies, tails, periods over the cut, two tiers, a storage that cannot move."""
    replay = play(small_trace, small_plan, ssd_path=tmp_path, verify="full")
    assert replay.moves_found == len(small_plan.moves)
    metadata = replay.timeline.metadata
    assert (metadata.demand_fetches, metadata.evictions) == (0, 0)
    assert metadata.peak_gpu_bytes <= small_plan.metadata.gpu_memory_bytes
    expected = Counter((row, "prefetch") for row in (0, 1, 1, 1, 2, 3, 4))
    expected += Counter((row, "offload") for row in (1, 2, 3, 4, 5))
    assert transfers(replay) == expected
    assert set(metadata.channel_bytes) == {"host read", "host write", "near read", "near write"}


def test_the_disk_tier(tmp_path: Path) -> None:
    """All moves through files, in two folders; what served them is reported."""
    trace = layers()
    plan = evict_everything(trace, machine(), tiers="ssd")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    replay = play(trace, plan, ssd_path=folders, ssd_backend="file")
    assert set(replay.timeline.metadata.channel_bytes) == {"disk read", "disk write"}
    assert replay.transfers_checked > 0
    assert [use.path for use in replay.ssd_files] == [str(folder) for folder in folders]
    assert all(use.backend.startswith("file") for use in replay.ssd_files)
    written = int(plan.moves.nbytes[plan.moves.writes].sum())
    assert sum(use.write_bytes for use in replay.ssd_files) >= 3 * written


def test_bounce_buffers_count_as_host_memory(tmp_path: Path) -> None:
    """Where an SSD has no direct path, a plan without host memory needs some all the same."""
    trace, hardware = layers(), machine()
    bouncing = replace(hardware, ssd=(replace(hardware.ssd[0], gds=False, bounce_bytes=MB),))
    plan = evict_everything(trace, bouncing, tiers="ssd")
    assert play(trace, plan, ssd_path=tmp_path, host_memory=MB).transfers_checked > 0
    with pytest.raises(InputError, match="host_memory: the plan needs 1000000 bytes"):
        play(trace, plan, ssd_path=tmp_path, host_memory=0)


def test_on_demand_without_a_plan() -> None:
    """The same fetches and evictions as the simulator's, within the budget."""
    trace = layers()
    replay = play(trace, None, hardware=machine(gpu_memory=9 * MB))
    measured, predicted = replay.timeline.metadata, replay.predicted.metadata
    assert predicted.evictions > 0
    assert measured.evictions == predicted.evictions
    assert measured.demand_fetches == predicted.demand_fetches
    assert measured.peak_gpu_bytes <= 9 * MB
    assert replay.transfers_checked >= 3 * predicted.demand_fetches
    assert replay.moves_planned == 0


def test_on_demand_the_storage_needed_last_leaves(case: Any, machine: Any) -> None:
    """What has just been created goes by its next use too: nothing comes back that the simulator
    would have kept.
    """
    trace = case().trace()
    hardware = machine(gpu_memory=int(0.6 * trace.peak_allocated_bytes))
    replay = play(trace, None, hardware=hardware, iterations=3)
    simulated = teraio.simulate(trace, None, hardware)
    assert demand_fetches(replay.timeline)
    assert demand_fetches(replay.timeline) <= demand_fetches(simulated)


def test_a_plan_that_does_not_fit_is_helped_on_demand() -> None:
    """A smaller budget than planned: what is too much leaves, and comes back when needed."""
    trace = layers()
    plan = build_plan(trace, Moves.empty(), machine(), planner="none")
    with pytest.warns(OffloadWarning, match="does not fit"):
        replay = teraio.replay(trace, plan, gpu_memory=9 * MB, iterations=1)
    assert replay.timeline.metadata.evictions > 0
    assert replay.timeline.metadata.peak_gpu_bytes <= 9 * MB


def test_a_real_trace_with_everything_evicted(case: Any, machine: Any, tmp_path: Path) -> None:
    """A small Llama on host and disk at once; every move found its storage."""
    trace = case().trace()
    plan = evict_everything(trace, machine(), tiers="both")
    replay = play(trace, plan, ssd_path=tmp_path, iterations=1)
    assert replay.moves_found == len(plan.moves)
    assert replay.timeline.metadata.demand_fetches == 0
    assert replay.timeline.metadata.peak_gpu_bytes <= plan.metadata.peak_gpu_bytes


def test_plans_with_a_transform(case: Any, machine: Any) -> None:
    """The transformed trace is played; the ideal stays that of the recorded one."""
    trace = case().trace()
    plan = teraio.plan(
        trace, machine(), planner="greedy", transform="recompute", gpu_memory="0.9MB"
    )
    replay = play(trace, plan, iterations=1)
    assert replay.timeline.metadata.ideal_seconds == trace.ideal_seconds
    events = replay.timeline.events
    assert int((events.what == "kernel").sum()) == len(plan.kernels) != trace.num_kernels


def test_only_memory_traffic_is_slowed_down_by_transfers() -> None:
    """A stand-in that only lets time pass is not, so the prediction leaves the slowdown out."""
    trace = layers()
    slowing = replace(machine(), slowdown=Slowdown(read=2.0, write=2.0, both=2.0))
    moves = evict_everything(trace, slowing).moves
    behind = replace(moves.take(np.flatnonzero(moves.storage == 1)), free_by=np.array([4]))
    plan = build_plan(trace, behind, slowing, planner="test")
    passing, copying = (play(trace, plan, memory_traffic=copies) for copies in (False, True))
    assert passing.predicted_seconds < copying.predicted_seconds
    assert copying.moves_found == 1
    assert copying.iteration_seconds >= trace.ideal_seconds


def test_an_interrupt_leaves_nothing_behind(store_threads: Any) -> None:
    """Stores are closed, whatever ends a replay; the progress counts iterations."""
    seen: list[int] = []

    def interrupt(iteration: int) -> None:
        seen.append(iteration)
        if iteration == 1:
            raise KeyboardInterrupt

    trace = layers()
    with pytest.raises(KeyboardInterrupt):
        play(trace, evict_everything(trace, machine()), progress=interrupt)
    assert seen == [0, 1]
    assert store_threads() == []


# Bytes that are wrong


class Corrupting:
    """The move of a host store, with one byte of every read changed."""

    def __init__(self, store: HostStore, position: int) -> None:
        self._move = store._queues._move  # type: ignore[attr-defined]
        self._position = position

    def __call__(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        self._move(transfer, begin, end)
        if not transfer.is_write:
            transfer.buffer[self._position] ^= 1


@pytest.fixture
def corrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[HostStore], Any]], None]:
    """Put another move in place of every host store's."""

    def wrap(make: Callable[[HostStore], Any]) -> None:
        class Wrapped(HostStore):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self._queues._move = make(self)  # type: ignore[attr-defined]

        monkeypatch.setattr("teraio.executor.tiers.HostStore", Wrapped)

    return wrap


@pytest.mark.parametrize("position", [0, 12_345, -1])
def test_one_changed_byte_is_found(corrupt: Any, position: int, store_threads: Any) -> None:
    """Wherever it lies, if all bytes are compared; no thread is left behind."""
    corrupt(lambda store: Corrupting(store, position))
    trace = layers()
    with pytest.raises(StoreError, match=r"storage \d came back .* for kernel \d"):
        play(trace, evict_everything(trace, machine()), verify="full")
    assert store_threads() == []


def test_the_last_byte_is_always_among_those_compared(corrupt: Any) -> None:
    """A transfer that fell short is seen by the samples."""
    corrupt(lambda store: Corrupting(store, -1))
    trace = layers()
    with pytest.raises(StoreError, match="came back"):
        play(trace, evict_everything(trace, machine()), verify="sampled")


def test_an_older_content_is_found(corrupt: Any) -> None:
    """A store that writes each place once only: the next iteration reads stale bytes."""
    written: set[int] = set()

    def lazy(store: HostStore) -> Any:
        move = store._queues._move  # type: ignore[attr-defined]

        def once(transfer: ThreadTransfer, begin: int, end: int) -> None:
            if not transfer.is_write or transfer.offset_bytes + begin not in written:
                move(transfer, begin, end)
            if transfer.is_write:
                written.add(transfer.offset_bytes + begin)

        return once

    corrupt(lazy)
    trace = layers()
    with pytest.raises(StoreError, match="came back"):
        play(trace, evict_everything(trace, machine()))


def test_unchecked_bytes_are_not_looked_at(corrupt: Any) -> None:
    """``off`` is what a timing run without disturbance is."""
    corrupt(lambda store: Corrupting(store, 0))
    trace = layers()
    assert play(trace, evict_everything(trace, machine()), verify="off").transfers_checked == 0


# Scale


def test_scale_shrinks_sizes_durations_and_budgets() -> None:
    """By the same factor: ideal, bytes moved and peak."""
    trace = layers()
    plan = evict_everything(trace, machine(gpu_memory=20 * MB))
    whole, small = play(trace, plan), play(trace, plan, scale=0.25)
    assert small.timeline.metadata.ideal_seconds == pytest.approx(trace.ideal_seconds / 4)
    assert small.predicted_seconds == pytest.approx(whole.predicted_seconds / 4, rel=0.01)
    for channel, num_bytes in whole.timeline.metadata.channel_bytes.items():
        assert small.timeline.metadata.channel_bytes[channel] == num_bytes / 4
    assert small.timeline.metadata.peak_gpu_bytes == whole.timeline.metadata.peak_gpu_bytes / 4
    assert small.timeline.metadata.capacity_bytes < 6 * MB
    assert small.scale == 0.25


# Refusals


def test_a_plan_of_another_trace_is_refused() -> None:
    """Even where all sizes are the same."""
    plan = evict_everything(layers(), machine())
    with pytest.raises(InputError, match="another trace"):
        teraio.replay(layers(2 * KERNEL_SECONDS), plan)


def test_an_invalid_plan_is_refused() -> None:
    """With the first violation."""
    trace = layers()
    plan = evict_everything(trace, machine())
    moves = replace(plan.moves, nbytes=plan.moves.nbytes + 1)
    with pytest.raises(InputError, match=r"violations; not replayed"):
        teraio.replay(trace, replace(plan, moves=moves))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device"),
        ({"iterations": 0}, "iterations"),
        ({"iterations": True}, "iterations"),
        ({"scale": 0.0}, "scale"),
        ({"scale": 2.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"verify": "some"}, "verify"),
        ({"ssd_backend": "tape"}, "ssd_backend"),
        ({"host_memory": "1MB"}, "host_memory"),  # The plan's slots need more.
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    trace = layers()
    with pytest.raises(InputError, match=message):
        play(trace, evict_everything(trace, machine()), **options)


def test_hardware_is_needed_without_a_plan() -> None:
    with pytest.raises(InputError, match="hardware"):
        teraio.replay(layers())


def test_too_little_memory_is_said_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy."""
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 10 * MB)
    monkeypatch.setattr(room, "available_memory_bytes", lambda: 10 * MB)
    monkeypatch.setattr(limits, "_GROWING_SECONDS", 0.0)
    trace = layers()
    with pytest.raises(InputError, match=r"needs .* has .* --scale"):
        teraio.replay(trace, evict_everything(trace, machine()))


def test_no_tier_with_room_is_an_error(store_threads: Any) -> None:
    """On demand, and nowhere to go; nothing hangs and no thread is left."""
    hardware = machine(gpu_memory=9 * MB).with_budgets(host_memory="1MB")
    with pytest.raises(CapacityError, match="room"):
        teraio.replay(layers(), hardware=replace(hardware, ssd=()))
    assert store_threads() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    trace = layers()
    with pytest.raises(InputError, match="no GPU here"):
        teraio.replay(trace, evict_everything(trace, machine()), device="cuda")


def test_summary_has_the_keys_of_simulate_and_its_own() -> None:
    trace = layers()
    data = play(trace, evict_everything(trace, machine())).summary()
    for key in ("iteration_seconds", "stall_seconds", "channel_utilisation", "peak_gpu_bytes"):
        assert key in data
    assert data["error"] == pytest.approx(data["iteration_seconds"] / data["predicted_seconds"] - 1)
    assert data["predicted_stall_seconds"].keys() == data["stall_seconds"].keys()


# On a GPU


@pytest.mark.gpu
class TestGpu:
    """The same on a GPU, whose kernels and transfers are put into streams."""

    def test_moves_and_bytes(self) -> None:
        """Every move, all bytes compared on the device."""
        trace = layers()
        plan = evict_everything(trace, machine(50e9))
        replay = play(trace, plan, device="cuda", verify="full")
        assert replay.moves_found == len(plan.moves)
        assert replay.transfers_checked > 0
        assert replay.timeline.metadata.demand_fetches == 0

    def test_stand_in_kernels_take_their_time(self) -> None:
        """In all, within a twentieth; and the iteration is theirs where nothing moves."""
        trace = layers()
        plan = build_plan(trace, Moves.empty(), machine(50e9), planner="none")
        replay = play(trace, plan, device="cuda")
        assert abs(replay.kernel_error) < 0.05
        assert replay.iteration_seconds == pytest.approx(trace.ideal_seconds, rel=0.1)

    def test_short_kernels_take_their_time_together(self) -> None:
        """Each is shorter than a launch."""
        trace = layers(1e-6)
        plan = build_plan(trace, Moves.empty(), machine(50e9), planner="none")
        assert play(trace, plan, device="cuda").iteration_seconds < 5e-3

    def test_stalls_have_causes(self) -> None:
        """Transfers at the last moment: the compute stream waits, for memory and for reads."""
        trace = layers(1e-3, unit=32 * MB)
        plan = evict_everything(
            trace, machine(50e9, gpu_memory=1000 * MB).with_budgets(None, "1GB")
        )
        replay = play(trace, plan, device="cuda", host_memory="1GB")
        stalls = replay.timeline.stall_seconds
        assert stalls["read"] > 1e-3
        assert stalls["memory"] > 1e-3
        assert sum(replay.timeline.account.values()) == pytest.approx(
            replay.timeline.iteration_seconds, rel=0.05
        )

    def test_wrong_bytes_are_an_error_at_the_end(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Seen on the device, without the host waiting for each; files have threads there too."""
        move_in_chunks = ThreadQueues._move_in_chunks

        def spoil(queues: ThreadQueues, transfer: ThreadTransfer, waits: list[Await]) -> None:
            move_in_chunks(queues, transfer, waits)
            if not transfer.is_write:
                for wait in waits:
                    wait()
                transfer.buffer.fill_(1)
                torch.cuda.synchronize()

        monkeypatch.setattr(ThreadQueues, "_move_in_chunks", spoil)
        trace = layers()
        plan = evict_everything(trace, machine(), tiers="ssd")
        with pytest.raises(StoreError, match="storages in all"):
            play(trace, plan, device="cuda", ssd_path=tmp_path, verify="sampled")

    @pytest.mark.parametrize("tier", ["host", "ssd"])
    def test_memory_traffic(self, tier: Any, tmp_path: Path) -> None:
        """Stand-in kernels that copy still take about their time."""
        trace = layers()
        plan = evict_everything(trace, machine(50e9), tiers=tier)
        replay = play(trace, plan, device="cuda", ssd_path=tmp_path, memory_traffic=True)
        assert abs(replay.kernel_error) < 0.3
