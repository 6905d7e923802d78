"""Iterations until the state at the cut repeats (DESIGN: Steady state)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from teraio.contracts.table import IntArray
from teraio.simulator.compilation import compiled_and_cached
from teraio.simulator.engine import run_iteration
from teraio.simulator.state import DONE, Engine, RecordArray


class Iteration(NamedTuple):
    """Sums over one simulated iteration: a record of ``state.ACCOUNT``, per channel picoseconds
    busy and bytes moved, the lowest overflow room on the host, and records of ``state.EVENT``.
    """

    account: RecordArray
    busy: IntArray
    moved_bytes: IntArray
    lowest_host_room: int | None
    events: RecordArray


class Cycle(NamedTuple):
    """The iterations to report: one turn of the cycle, or if not steady the second half of all."""

    iterations: list[Iteration]
    cold: Iteration
    is_steady: bool


@compiled_and_cached
def run_one_iteration(engine: Engine) -> int:
    """Entry point of the compiled engine: DONE, or why the iteration cannot end."""
    return run_iteration(engine)


def find_cycle(
    engine: Engine,
    max_iterations: int,
    on_failure: Callable[[Engine, int], Exception],
    progress: Callable[[int], None] | None,
    *,
    keeps_events: bool = True,
) -> Cycle:
    """Simulate until the state at a cut is one that was there before, at most so many iterations.

    Without ``keeps_events`` the last iteration alone has its events. Raises what ``on_failure``
    makes of an engine that stopped and its failure code.
    """
    iterations: list[Iteration] = []
    seen = {state_at_cut(engine): 0}
    while len(iterations) < max_iterations:
        if iterations:
            # They are still the engine's own, which the next iteration writes over.
            events = iterations[-1].events
            events = events.copy() if keeps_events else events[:0]
            iterations[-1] = iterations[-1]._replace(events=events)
        clear_sums(engine)
        failure = run_one_iteration(engine)
        if failure != DONE:
            raise on_failure(engine, failure)
        iterations.append(_sums(engine))
        if progress is not None:
            progress(len(iterations))
        state = state_at_cut(engine)
        if state in seen:
            return Cycle(iterations[seen[state] :], iterations[0], is_steady=True)
        seen[state] = len(iterations)
    return Cycle(iterations[len(iterations) // 2 :], iterations[0], is_steady=False)


def state_at_cut(engine: Engine) -> bytes:
    """All that decides what comes next, bit by bit.

    Queue positions are relative to the iteration, times to the cut. Left out: sums, the log, the
    start of a transfer under way (history), and what follows from the rest (heap, room, bytes).
    """
    columns = {
        "channels": "phase purpose move storage anchor finish remaining rate after_stop suspended "
        "served",
        "storages": "status is_fresh num_leaving overflow_device overflow_offset",
        "copies": "is_valid",
        "moves": "num_issued is_accepted",
    }
    errands = [
        engine.demand[number, channel["demand_head"] : channel["demand_end"]].tobytes()
        for number, channel in enumerate(engine.channels)
        if channel["demand_end"] > channel["demand_head"]
    ]
    return b"".join(
        getattr(engine, table)[name].tobytes()
        for table, names in columns.items()
        for name in names.split()
    ) + b"|".join(errands)


def clear_sums(engine: Engine) -> None:
    """Begin the account of an iteration."""
    engine.account.fill(0)
    engine.channels["busy"] = 0
    engine.channels["moved_bytes"] = 0
    engine.devices["lowest_room"] = engine.devices["room"]
    engine.stream["num_events"] = 0


def _sums(engine: Engine) -> Iteration:
    num_events = int(engine.stream["num_events"][0])
    return Iteration(
        account=engine.account.copy(),
        busy=engine.channels["busy"].copy(),
        moved_bytes=engine.channels["moved_bytes"].copy(),
        lowest_host_room=int(engine.devices["lowest_room"][0]) if len(engine.devices) else None,
        events=engine.log[:num_events],
    )
