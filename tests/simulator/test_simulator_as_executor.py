"""Off plan the simulator decides as the executor does: who leaves, in which order, and where to.

Random traces under random plans, which may be wrong in every way but their windows, in less memory
than they need. On the one side the executor's own residency, moves and overflow places play them
with real memory, over stores that are done at once; on the other the engine, at any speed of its
devices. Sizes are different powers of two, so held bytes tell who is on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from teraio.contracts.hardware import HOST
from teraio.errors import CapacityError
from teraio.executor.holding import Holding
from teraio.executor.homes import Homes
from teraio.executor.plan_position import RunState
from teraio.executor.planned_places import planned_bytes_per_device
from teraio.executor.replaying.patterns import Patterns
from teraio.executor.replaying.player import Player
from teraio.executor.replaying.unplanned import plan_without_moves
from teraio.executor.residency import Residency
from teraio.executor.tiers import Slot, Tiers
from teraio.simulator.engine_setup import build_engine
from teraio.simulator.machine_arrays import machine_arrays
from teraio.simulator.state import (
    AWAY,
    DEMAND_FETCH,
    DONE,
    EVICTION,
    MEMORY_EVENT,
    RESIDENT,
    TRANSFER_EVENT,
    Engine,
)
from teraio.simulator.steady_state import clear_sums, run_one_iteration
from teraio.simulator.trace_arrays import residency
from teraio.traces.lifetimes import inactive_periods

CaseBuilder = Callable[..., Any]

DEVICES = (HOST, "ssd", "ssd1")
ITERATIONS = 3
BLOCK_BYTES = 512
SIZES = [512 << power for power in range(7)]
"""Three are small (:data:`teraio.simulator.eviction_rule.SMALL_BYTES`), four are not."""


@dataclass
class Decisions:
    """Of one iteration: bytes held while each kernel runs; (kernel, storage, device) of what was
    written to make room, in order; of what was fetched on demand, sorted; whether it failed.
    """

    held_bytes: list[int] = field(default_factory=list)
    evictions: list[tuple[int, int, str]] = field(default_factory=list)
    fetches: list[tuple[int, int, str]] = field(default_factory=list)
    has_failed: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Callable[[CaseBuilder], Any]:
    """Builds a case with a random trace, and with moves whose places may meet."""
    num_kernels = draw(st.integers(3, 9))
    sizes = draw(st.permutations(SIZES))[: draw(st.integers(2, 7))]
    rate = draw(st.sampled_from([200, 2000, 10**6, 10**12]))
    rooms = draw(st.lists(st.sampled_from([0, 512, 1536, 10**6]), min_size=3, max_size=3))
    random = draw(st.randoms(use_true_random=False))
    density, places = draw(st.sampled_from([0.25, 0.6])), draw(st.sampled_from([1, 8, 40]))
    has_moves = draw(st.sampled_from([True, True, False]))

    def build(builder: CaseBuilder) -> Any:
        rates = {"read_rate": rate, "write_rate": rate}
        ssd = rates | {"alignment_bytes": BLOCK_BYTES}
        case = builder(host=dict(rates), ssd=dict(ssd), more_ssds=[{"name": "ssd1", **ssd}])
        add_trace(case, num_kernels, sizes, density, random)
        if has_moves:
            add_moves(case, places, random)
        case.arena_bytes = planned_bytes_per_device(case.plan, case.hardware)
        parts = (case.host, case.ssd, case.more_ssds[0])
        for name, part, room in zip(DEVICES, parts, rooms, strict=True):
            key = "memory_bytes" if name == HOST else "capacity_bytes"
            part[key] = case.arena_bytes.get(name, 0) + room
        return case

    return build


def add_trace(case: Any, num_kernels: int, sizes: list[int], density: float, random: Any) -> None:
    """Lives in the order of their births, as a profiler numbers them."""
    births = [-1 if random.random() < 0.5 else random.randrange(num_kernels) for _ in sizes]
    lives = []
    for index, (nbytes, birth) in enumerate(zip(sizes, sorted(births), strict=True)):
        span = random.randrange(num_kernels)
        is_written = random.random() < 0.5
        lives.append((birth, num_kernels if birth < 0 else span, is_written))
        ends = {} if birth < 0 else {"birth": birth, "death": (birth + span) % num_kernels}
        case.storage(f"s{index}", nbytes, **ends)
    for kernel in range(num_kernels):
        used: tuple[list[str], list[str]] = ([], [])
        for index, (birth, span, is_written) in enumerate(lives):
            is_born = kernel == birth
            is_alive = birth < 0 or (kernel - birth) % num_kernels <= span
            if is_born or (is_alive and random.random() < density):
                used[is_born or (is_written and random.random() < 0.6)].append(f"s{index}")
        case.kernel(*used[0], writes=used[1], workspace=random.choice([0, 0, 300]))


def add_moves(case: Any, num_places: int, random: Any) -> None:
    """Windows are right; places, and whether a copy needs to be written, are anyone's guess."""
    periods, num_kernels = inactive_periods(case.trace), case.trace.num_kernels
    for row in range(len(periods)):
        after, end = int(periods.after_kernel[row]), int(periods.end_kernel[row])
        is_tail = bool(periods.is_tail[row])
        if random.random() < 0.3 or end - after < (1 if is_tail else 2):
            continue
        offload = random.randint(after, end - (1 if is_tail else 2))
        free = random.randint(offload + 1, end - (0 if is_tail else 1))
        case.move(
            f"s{periods.storage[row]}",
            after,
            None if is_tail else end % num_kernels,
            offload=offload % num_kernels,
            free=free % num_kernels,
            prefetch=None if is_tail else random.randint(free + 1, end) % num_kernels,
            device=random.choice(DEVICES),
            offset=BLOCK_BYTES * random.randrange(num_places),
            writes=is_tail or random.random() < 0.6,
        )


@settings(max_examples=100, deadline=None)
@given(build=cases(), tightness=st.floats(0, 1))
def test_same_victims_in_the_same_order(
    case: CaseBuilder, build: Callable[[CaseBuilder], Any], tightness: float
) -> None:
    """And the same fetches on demand, the same places, the same bytes held at every kernel."""
    c = build(case)
    required = int(residency(c.trace).required_bytes.max())
    c.gpu_bytes = required + round(tightness * (c.trace.peak_allocated_bytes - required))
    engine = engine_of(c)
    assume(engine is not None)
    assert engine is not None
    compare(c, engine)


def roomy_case(case: CaseBuilder, gpu_bytes: int) -> Any:
    """Devices that take whatever leaves."""
    ssd = {"capacity_bytes": 4096, "alignment_bytes": BLOCK_BYTES}
    return case(
        gpu_bytes=gpu_bytes,
        host={"memory_bytes": 32768},
        ssd=ssd,
        more_ssds=[{"name": "ssd1", **ssd}],
        arena_bytes={"ssd": 4096},
    )


def evictions_of_both(c: Any) -> list[list[tuple[int, int, str]]]:
    """What both sides write to make room, by iteration."""
    engine = engine_of(c)
    assert engine is not None
    return [decided.evictions for decided in compare(c, engine)]


def test_what_was_fetched_ahead_leaves_last_on_both_sides(case: CaseBuilder) -> None:
    """Random cases meet this rarely: x is back for k6 when k4 needs the memory of x or y."""
    c = roomy_case(case, 3 * 4096)
    c.storage("x", 4096).storage("y", 4096).storage("u", 8192, birth=4, death=4)
    c.kernel(writes=["x"]).kernel(writes=["y"]).kernels(2).kernel(writes=["u"])
    c.kernel("y").kernel("x")
    c.move("x", 0, 6, offload=0, free=2, prefetch=3)
    assert evictions_of_both(c) == [[(4, 1, HOST)]] * ITERATIONS


def test_what_is_not_used_again_is_equal_on_both_sides(case: CaseBuilder) -> None:
    """At k4 neither t is needed any more: the younger one leaves, though the other was used later.

    The eviction at k1 sees to it that the order of eviction is kept while they are used.
    """
    c = roomy_case(case, 2 * 4096)
    c.storage("p", 4096).storage("t0", 4096, birth=0, death=5).storage("t1", 4096, birth=1, death=5)
    c.storage("u", 4096, birth=4, death=4)
    c.kernel(writes=["t0"]).kernel(writes=["t1"]).kernel("t1").kernel("t0").kernel(writes=["u"])
    c.kernel(writes=["p"])
    assert evictions_of_both(c) == [[(1, 0, HOST), (4, 2, HOST)]] * ITERATIONS


def engine_of(c: Any) -> Engine | None:
    """The engine before kernel 0; None if all fits, or nothing can begin so."""
    plan = c.plan if c._moves else None
    try:
        engine = build_engine(c.trace, plan, machine_arrays(c.hardware, 0), record=True)
    except CapacityError:
        return None
    is_usable = engine.stream["is_paged"][0] and has_one_copy_each(engine)
    return engine if is_usable else None


def compare(c: Any, engine: Engine) -> list[Decisions]:
    """Play a case on both sides from the same start; what both decide, by iteration."""
    player = ExecutorSide(c, engine)
    both = []
    for _ in range(ITERATIONS):
        expected, simulated = player.iteration(), simulated_iteration(engine)
        assert simulated == expected
        both.append(simulated)
        if simulated.has_failed:
            break
    return both


def has_one_copy_each(engine: Engine) -> bool:
    """Let the start be one that can be: copies of storages on the GPU go where several are, or lie
    in another's place; False if what is away lies in one.
    """
    storages, taken = engine.storages, []
    for number in range(len(storages) - 1):
        rows = range(storages["first_copy"][number], storages["first_copy"][number + 1])
        valid = [row for row in rows if engine.copies["is_valid"][row]]
        engine.copies["is_valid"][valid[1:]] = False
        taken += [(storages["status"][number] != AWAY, number, row) for row in valid[:1]]
    kept: list[Any] = []
    for is_on_gpu, _, row in sorted(taken):
        copy = engine.copies[row]
        meets = any(
            copy["device"] == other["device"]
            and copy["begin"] < other["end"]
            and other["begin"] < copy["end"]
            for other in kept
        )
        if meets and not is_on_gpu:
            return False
        engine.copies["is_valid"][row] = not meets
        if not meets:
            kept.append(copy)
    return True


def simulated_iteration(engine: Engine) -> Decisions:
    """The engine's next iteration."""
    clear_sums(engine)
    code = run_one_iteration(engine)
    log = engine.log[: engine.stream["num_events"][0]]
    result = Decisions(has_failed=code != DONE)
    held = log[log["what"] == MEMORY_EVENT]
    workspace = engine.kernels["workspace_bytes"][held["kernel"]]
    result.held_bytes = (held["nbytes"] - workspace).tolist()
    for cause, found in ((EVICTION, result.evictions), (DEMAND_FETCH, result.fetches)):
        rows = log[(log["what"] == TRANSFER_EVENT) & (log["cause"] == cause)]
        for event in rows:
            device = DEVICES[event["channel"] // 2]
            found.append((int(event["kernel"]), int(event["storage"]), device))
    result.fetches.sort()
    return result


class Done:
    """A transfer that is over."""

    start_seconds = end_seconds = 0.0
    done = True

    def __init__(self, offset_bytes: int, nbytes: int, *, is_write: bool) -> None:
        self.offset_bytes, self.nbytes, self.is_write = offset_bytes, nbytes, is_write

    def wait(self) -> None:
        """It has ended."""

    def make_stream_wait(self, stream: Any = None) -> None:
        """It has ended."""


class MemoryStore:
    """A store whose transfers are done when they are issued."""

    pinned_bytes = 0
    alignment_bytes = BLOCK_BYTES

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = self.reserved_bytes = capacity_bytes
        self._bytes = torch.zeros(capacity_bytes, dtype=torch.uint8)

    def _part(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        assert offset_bytes % BLOCK_BYTES == 0
        assert offset_bytes + nbytes <= self.capacity_bytes
        return self._bytes[offset_bytes : offset_bytes + nbytes]

    def write(self, storage: Any, offset_bytes: int, nbytes: int, *, urgent: bool) -> Done:
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._part(offset_bytes, nbytes).copy_(data)
        return Done(offset_bytes, nbytes, is_write=True)

    def read(self, storage: Any, offset_bytes: int, nbytes: int, *, urgent: bool) -> Done:
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        data.copy_(self._part(offset_bytes, nbytes))
        return Done(offset_bytes, nbytes, is_write=False)


class NoTime:
    """Stand-in kernels that take none."""

    def begin_iteration(self) -> None:
        """Nothing to do."""

    def idle(self, seconds: float) -> None:
        """Nothing to do."""

    def run(self, kernel: int, seconds: float, nbytes: float, waits: Any, work: Any) -> Any:
        work()
        return 0.0, 0.0


class ExecutorSide:
    """The executor's own code, from the state in which an engine begins."""

    def __init__(self, c: Any, engine: Engine) -> None:
        plan = c.plan if c._moves else plan_without_moves(c.trace, c.hardware)
        hardware = c.hardware
        capacities = [hardware.host.memory_bytes, *(ssd.capacity_bytes for ssd in hardware.ssd)]
        stores: Any = {
            name: MemoryStore(name, capacity)
            for name, capacity in zip(DEVICES, capacities, strict=True)
            if capacity > 0
        }
        self.tiers = Tiers(stores, c.arena_bytes)
        self.residency = Residency(self.tiers, c.gpu_bytes)
        self.patterns = Patterns(len(c.trace.storages), "cpu", "full")
        self.player = Player(c.trace, plan, self.residency, NoTime(), self.patterns, "cpu")
        mode: Any = SimpleNamespace(
            residency=self.residency, position=SimpleNamespace(state=RunState.FOLLOWING)
        )
        self.residency.find_slot = Homes(mode, plan, c.arena_bytes).find_slot
        self._begin_as(engine)

    def _begin_as(self, engine: Engine) -> None:
        storages = engine.storages[:-1]
        alive = np.flatnonzero((storages["status"] == RESIDENT) | (storages["status"] == AWAY))
        for row in sorted(alive.tolist(), key=lambda row: int(storages["serial"][row])):
            holding = self.player._storages.create(row, self.player._binding)
            self.patterns.write(row)
            slot = self._slot_at_start(engine, row, holding)
            if slot is not None:
                self.residency.offload(holding, slot)
            if storages["status"][row] == AWAY:
                self.residency.release(holding)
        self.player.log.restart_clock(self.residency)

    def _slot_at_start(self, engine: Engine, row: int, holding: Holding) -> Slot | None:
        storage, nbytes = engine.storages[row], holding.state.nbytes
        if storage["overflow_device"] >= 0:
            return self.tiers.slot_in(DEVICES[storage["overflow_device"]], nbytes)
        for number in range(storage["first_copy"], engine.storages[row + 1]["first_copy"]):
            copy = engine.copies[number]
            if copy["is_valid"]:
                store = self.tiers.stores[DEVICES[copy["device"]]]
                return Slot(store, int(copy["begin"]), nbytes, is_overflow=False)
        return None

    def iteration(self) -> Decisions:
        """The next iteration; every read is compared with what was written."""
        result = Decisions()
        try:
            self.player.play_iteration(is_warm_up=False)
            records = self.player.log.last.traffic.transfers
        except CapacityError:
            result.has_failed = True
            records = self.residency.traffic.transfers
        result.held_bytes = self.player.memory_bytes
        for record in records:
            found = {"eviction": result.evictions, "demand_fetch": result.fetches}
            if record.cause in found:
                found[record.cause].append((record.kernel, record.row, record.device))
        result.fetches.sort()
        return result
