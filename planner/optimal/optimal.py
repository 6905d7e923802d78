"""The optimal planner: near the best possible plan, and quickly (DESIGN: Planning).

1. The first plan: what is idle longest leaves (:mod:`repairing`), timed exactly (:mod:`timing`).
2. The guide (:mod:`guide`): a fluid program of the whole iteration, or of a folded one in which one
   turn stands for all that are alike. It decides which bytes go where, and where it is worth to
   wait; on small traces about large storages first (:mod:`whole_storages`). With all tiers, and
   with the host alone if that may do.
3. Rounding to whole storages (:mod:`rounding`), repair where rounding left too much on the GPU, on
   small traces also on a tier (:mod:`tier_fitting`), exact times on the guide's timeline, then on
   the simulated one (:mod:`search`). Of a folded trace, the choice of the repeated turn is made for
   every turn, and times and verdict are of the whole trace.
4. While time is left: the guide again with less memory, and with finer slots; then without moves
   that relieve nothing; then small changes (:mod:`local_search`), for which the guides leave half
   the time on small traces.
5. On traces of few kernels the greedy plan is made too, and the best of all is returned.

Anytime: with a time limit, what has not been tried when it is over is left out; the first plan is
always made.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError
from teraio.planner.drafts import draft_moves
from teraio.planner.greedy import plan_greedy
from teraio.planner.optimal.guiding import Guiding
from teraio.planner.optimal.local_search import search_locally
from teraio.planner.optimal.periods import Problem
from teraio.planner.optimal.search import SECONDS_PER_MOVE, Found, Search
from teraio.planner.optimal.slower_rates import with_rates
from teraio.planner.optimal.starting import choice_of_plan
from teraio.planner.plan_building import build_plan
from teraio.simulator import simulate
from teraio.simulator.engine_setup import check_feasible
from teraio.traces.trace import Trace
from teraio.units import format_bytes

_SETTINGS = 5
_SETTINGS_OF_LARGE = 1
"""How many settings of the guide are tried without a time limit, where its program is small, and
where it is not."""

_SETTINGS_AT_IDEAL = 2
"""How many are tried on small traces although the iteration is ideal already."""

_GUIDES_SHARE = 0.5
"""Of a time limit, on small traces: the rest is for the local search, which makes up for much of
what no guide foresees where a slow device is the limit."""

_MAX_CHANGES = 200
"""Of the local search without a time limit, on small traces."""

_TINY_KERNELS = 400
"""Traces with at most this many kernels get slots by layer, and slots of one kernel each."""

_SPARE_SHARE = 0.01
"""Of the GPU's memory, left out of some guides: about one tensor in flight."""

_HOST_MARGINS = (1.0, 0.97, 0.92, 0.85, 0.7)
"""Shares of the host budget to plan with, in turn, until packing leaves no hole too many."""

_WORTH_PACKING = 1.005
"""A plan is good enough if it takes so many times what the fastest choice would, which the tiers
had no room for."""

_CLOSE_TO_IDEAL = 1 + 1e-6

Progress = Callable[[str], None]


def plan_optimal(
    trace: Trace,
    hardware: Hardware,
    *,
    bandwidth_share: float = 1.0,
    time_limit: float | None = None,
    start: Plan | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan found; see the module's text.

    ``hardware`` holds the budgets. ``bandwidth_share`` scales the rates that choose and time the
    moves, not those that predict it. ``time_limit`` is in seconds; without one, the search ends
    when its steps are done. ``start`` is an earlier plan for the same trace, say for another
    budget: what it moves is tried, and without a time limit instead of any guide.

    Raises InputError for a ``start`` of another trace, InfeasibleError that names the kernel if one
    needs more than the GPU has, CapacityError if the tiers are too small.
    """
    started = time.monotonic()
    check_feasible(trace, hardware.gpu_of_rank(trace.metadata.rank).memory_bytes)
    deadline = None if time_limit is None else started + time_limit
    options: dict[str, Any] = {"bandwidth_share": bandwidth_share}
    if time_limit is not None:
        options["time_limit"] = time_limit
    report = progress or (lambda _: None)
    made = _search(trace, hardware, bandwidth_share, deadline, options, report, start)
    seconds = time.monotonic() - started
    return replace(made, metadata=replace(made.metadata, planning_seconds=seconds))


def _search(
    trace: Trace,
    hardware: Hardware,
    share: float,
    deadline: float | None,
    options: dict[str, Any],
    report: Progress,
    start: Plan | None,
) -> Plan:
    """Choices until steps or time are over, and the best of them as a plan; on small traces the
    greedy plan if that is faster.
    """
    best, error = None, None
    counted_on = with_rates(hardware, share)
    for margin in _HOST_MARGINS:
        usable = _without_bounce_buffers(counted_on, trace.metadata.rank, margin)
        problem = Problem.of(trace, usable)
        if problem.resident_bytes.max() <= problem.capacity_bytes:
            return build_plan(trace, Moves.empty(), hardware, planner="optimal", options=options)
        search = Search(problem, deadline)
        _run_steps(search, report, start)
        search.prefetch_earlier()
        made, caught = _fastest_plan(hardware, search, options)
        best, error = _faster(best, made), error or caught
        if caught is None or problem.hardware.host.memory_bytes == 0 or search.is_over():
            break
        if not search.found:
            # Nothing fits, or within the write budgets: with less of the host even less would.
            break
        if best is not None and best.predicted_seconds <= _WORTH_PACKING * _seconds_of(search):
            break
        if best is not None and not problem.is_small:
            break
    if best is not None and (not problem.is_small or search.is_over()):
        return best
    return _with_greedy(trace, hardware, share, options, best, error)


def _without_bounce_buffers(hardware: Hardware, rank: int, margin: float) -> Hardware:
    """The machine with a share of the host memory that its SSDs' bounce buffers leave; SSDs for
    whose buffers there is no room are left out.
    """
    left, ssds = hardware.host.memory_bytes, list(hardware.ssd)
    for ssd in hardware.ssds_of_rank(rank):
        bounce_bytes = 0 if ssd.gds else ssd.bounce_bytes
        if bounce_bytes <= left:
            left -= bounce_bytes
        else:
            ssds.remove(ssd)
    return replace(hardware, ssd=tuple(ssds)).with_budgets(host_memory=int(margin * left))


def _run_steps(search: Search, report: Progress, start: Plan | None) -> None:
    """Steps 1 to 4 of the module's text."""
    is_small = search.problem.is_small
    # One is enough where guides follow that have all the time they need.
    is_guided = not is_small and start is None and search.deadline is None
    max_rounds = 1 if is_guided else None
    search.try_longest_idle(max_rounds)
    if start is not None:
        search.try_choice(*choice_of_plan(search.problem, start), "an earlier plan")
        search.try_without_needless()
    is_done = _is_ideal(search) and not is_small
    if search.is_over() or is_done or (start is not None and search.deadline is None):
        return
    report("guiding")
    scopes = [_Scope(search, Guiding.of(search.problem))]
    on_host = scopes[0].with_host_alone()
    if on_host is not None:
        on_host.search.try_longest_idle(max_rounds)
        scopes.insert(0, on_host)
    num_found = len(search.found)
    search, guiding = _follow_guides(scopes)
    if is_guided and len(search.found) == num_found:
        search.try_longest_idle()
    search.try_without_needless()
    if (search.deadline is not None or is_small) and not _is_ideal(search):
        report("searching locally")
        most = None if search.deadline is not None else _MAX_CHANGES
        search_locally(search, guiding.folded_row, most)


class _Scope(NamedTuple):
    """Tiers that take part: a search and the guiding of the same problem."""

    search: Search
    guiding: Guiding

    def with_host_alone(self) -> _Scope | None:
        """Without SSDs, where the host may do: a slow device that holds a little holds all up."""
        search, guiding = self.search.with_host_alone(), self.guiding.with_host_alone()
        return None if search is None or guiding is None else _Scope(search, guiding)


def _follow_guides(scopes: list[_Scope]) -> _Scope:
    """Try what guides advise, setting by setting: the first one in all scopes, the others in the
    one that was fastest, which is returned.
    """
    until = _end_of_guides(scopes[0].search)
    for number, setting in enumerate(_settings(scopes[0])):
        seconds = []
        if number > 0 and until is not None and time.monotonic() >= until:
            break
        for search, guiding in scopes:
            if search.is_over() or (_is_ideal(search) and number >= _settings_at_ideal(search)):
                break
            deadline = search.deadline if number == 0 else until
            advice = guiding.advise(**setting._asdict(), deadline=deadline)
            found = None
            if advice is not None:
                found = search.try_choice(advice.device, advice.starts, str(setting))
            seconds.append(np.inf if found is None else found.cost)
        if len(seconds) < len(scopes):
            break
        scopes = [scopes[int(np.argmin(seconds))]]
    return scopes[0]


def _end_of_guides(search: Search) -> float | None:
    """When the guides must leave time to the local search, on the clock of ``search.deadline``: a
    large trace has none, since all time is short there.
    """
    if search.deadline is None or not search.problem.is_small:
        return search.deadline
    now = time.monotonic()
    return now + _GUIDES_SHARE * (search.deadline - now)


def _settings_at_ideal(search: Search) -> int:
    """Settings worth trying when the iteration is ideal already: their moves may be fewer."""
    return _SETTINGS_AT_IDEAL if search.problem.is_small else 0


class _Setting(NamedTuple):
    """Of a guide: seconds of its slots at most, spare bytes of the GPU; among equals, long gaps
    and large storages first.
    """

    slot_seconds: float
    spare_bytes: int
    unhurried: bool
    by_size: bool = False

    def __str__(self) -> str:
        spare = format_bytes(self.spare_bytes)
        order = ", long gaps first" if self.unhurried else ""
        order += ", large storages first" if self.by_size else ""
        return f"guide, slots of {self.slot_seconds:.3g} s, {spare} spare{order}"


def _settings(scope: _Scope) -> list[_Setting]:
    """What is worth trying, in that order; without a time limit, as many as take seconds.

    Whole tensors in flight take memory that a fluid does not, so less than all may plan better;
    and a program has many solutions of one value, of which some round better than others.
    """
    guiding, is_limited = scope.guiding, scope.search.deadline is not None
    spare_bytes = int(_SPARE_SHARE * guiding.problem.capacity_bytes)
    iteration = guiding.folded.trace.ideal_seconds
    if guiding.problem.num_kernels <= _TINY_KERNELS:
        settings = _products((iteration, 0.0), (True, False), (spare_bytes, 0))
        return [
            setting._replace(by_size=by_size) for by_size in (True, False) for setting in settings
        ]
    if guiding.problem.is_small:
        settings = _products((iteration / 100, iteration / 500), (True, False), (0, spare_bytes))
        large_first = [setting._replace(by_size=True) for setting in settings]
        return large_first + settings if is_limited else [*large_first[:_SETTINGS], settings[0]]
    # Of the paper's 70B, plans for an SSD are 0.3 % faster with long gaps first, those for an SSD
    # beside the host 0.3 to 1.4 % slower.
    has_host = guiding.problem.hardware.host.memory_bytes > 0
    settings = _products((iteration,), (not has_host, has_host), (spare_bytes, 0))
    settings.sort(key=lambda setting: -setting.spare_bytes)
    settings += _products((iteration / 500,), (False,), (0, spare_bytes))
    settings += _products((iteration,), (True, False), (2 * spare_bytes,))
    settings += _products((iteration / 1500,), (True,), (n * spare_bytes // 2 for n in range(1, 5)))
    if is_limited:
        return settings
    return settings[: _SETTINGS if guiding.is_quick else _SETTINGS_OF_LARGE]


def _products(
    slots: Iterable[float], unhurried: Iterable[bool], spare: Iterable[int]
) -> list[_Setting]:
    return [
        _Setting(seconds, spare_bytes, is_unhurried)
        for seconds, is_unhurried, spare_bytes in itertools.product(slots, unhurried, spare)
    ]


def _is_ideal(search: Search) -> bool:
    return _seconds_of(search) <= search.problem.trace.ideal_seconds * _CLOSE_TO_IDEAL


def _seconds_of(search: Search) -> float:
    """Of the fastest choice; infinite without any."""
    return np.inf if search.best is None else search.best.seconds


def _fastest_plan(
    hardware: Hardware, search: Search, options: dict[str, Any]
) -> tuple[Plan | None, CapacityError | None]:
    """The fastest choice that the tiers have room for, and why they have none for a faster one."""
    error = None
    for found in sorted(search.found, key=lambda found: found.cost):
        try:
            return _plan_of(hardware, search.problem, found, options), error
        except CapacityError as caught:
            error = error or caught
    return None, error or CapacityError(
        "no choice of periods fits: the tiers are too small, or too few can move"
    )


def _faster(best: Plan | None, other: Plan | None) -> Plan | None:
    if best is None or other is None:
        return best or other
    return min(best, other, key=lambda plan: plan.predicted_seconds)


def _with_greedy(
    trace: Trace,
    hardware: Hardware,
    share: float,
    options: dict[str, Any],
    best: Plan | None,
    error: CapacityError | None,
) -> Plan:
    """The best plan, or the greedy's if that is faster at the rates counted on or at all of them,
    what its moves cost included; raises CapacityError if there is neither.
    """
    best_seconds = np.inf if best is None else _seconds_at(trace, best, hardware, share)
    try:
        greedy = plan_greedy(trace, hardware, bandwidth_share=share)
    except CapacityError as caught:
        if best is not None:
            return best
        has_write_budgets = bool(hardware.write_budgets(trace.metadata.rank))
        # Only the greedy's error says what a write budget would have to be.
        raise (caught if has_write_budgets else error or caught) from None
    if best is None:
        return _named_optimal(greedy, options)
    handicap = SECONDS_PER_MOVE * (len(greedy.moves) - len(best.moves))
    is_faster = greedy.predicted_seconds + handicap < best.predicted_seconds
    is_better = _seconds_at(trace, greedy, hardware, share) + handicap < best_seconds
    return _named_optimal(greedy, options) if is_faster or is_better else best


def _seconds_at(trace: Trace, made: Plan, hardware: Hardware, share: float) -> float:
    """What an iteration takes at a share of the rates."""
    if share == 1:
        return made.predicted_seconds
    return simulate(trace, made, with_rates(hardware, share), record=False).iteration_seconds


def _named_optimal(greedy: Plan, options: dict[str, Any]) -> Plan:
    kept = options | {"origin": "greedy"}
    return replace(greedy, metadata=replace(greedy.metadata, planner="optimal", options=kept))


def _plan_of(hardware: Hardware, problem: Problem, found: Found, options: dict[str, Any]) -> Plan:
    trace, rows = problem.trace, found.timed.rows
    names = np.array(problem.machine.devices, dtype=object)
    moves = draft_moves(
        trace,
        problem.all_periods,
        problem.period[rows],
        offload_start=problem.after[rows],
        free_by=found.timed.windows.free_by,
        prefetch_start=found.timed.windows.prefetch_start,
        device=names[found.device[rows]],
    )
    return build_plan(
        trace, moves, hardware, planner="optimal", options=options | {"origin": found.origin}
    )
