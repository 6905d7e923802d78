"""The mixed-integer program: the best plan of an instance under DESIGN's semantics (section 7).

Sets and data: steps k = 0..K-1 with duration d_k and gap g_k before it; periods p with last access
a_p and end e_p (unrolled steps), relief m_p; devices v with transfer times w_pv (offload) and r_pv
(prefetch); N_k units that must be away in step k.

Variables: T, the iteration time, to be least. S_k, start of step k in the iteration that begins
with S_0 = 0; it ends at S_k + d_k. B_k, when the memory of step k is free for use. For period p,
unrolled like it: start W_p of its offload and R_p of its prefetch. Booleans: x_pv, p goes to v;
o_pj, f_pj, b_pj, its offload_start, free_by and prefetch_start are j (written o_p, f_p, b_p below);
u_pv, it writes its copy; c_pv, after p the latest move of the version is on v. Step j + hK starts
hT after step j.

    (1) S_{k+1} >= S_k + d_k + g_{k+1}, and T >= S_{K-1} + d_{K-1} + g_0
    (2) sum_v x_pv <= 1; each of o, f, b has one value if p leaves, a_p <= o_p < f_p < b_p <= e_p
        (tail: b_p = e_p)
    (3) sum of m_p over p with f_p <= k < b_p is at least N_k
    (4) c_pv = x_pv, or c_qv of the period q before p in its version if p stays; u_pv = x_pv unless
        c_qv or the storage is never written
    (5) a write starts after step o_p has ended, and ends before the memory of step f_p is free:
        W_p >= S_{o_p} + d_{o_p}, B_{f_p} >= W_p + w_p
    (6) B_k >= S_{k-1} + d_{k-1}, S_k >= B_k; a prefetch follows: R_p >= B_{b_p}, and step e_p
        follows it: S_{e_p} >= R_p + r_p
    (7) a channel serves in static order: for p, q on one channel there is an h such that p comes
        before the q of h iterations later, and that one before the next p, both in the order of
        (o, a, row) for offloads, (b, e, row) for prefetches, and in time
    (8) slots on each device fit at every step, by their sum
    (9) T is no less than the time in which a device may be written what is written to it

(7) makes rows a choice only where the other two are equal. Of T implied, but helpful: no channel
works longer than T. T need not be a whole number of ticks for a plan: it is rounded up.

Least T is the mean iteration time of the best plan, whatever the length of its steady cycle: waits
of a fixed plan are a (max, +)-linear system, whose mean cycle time is the largest ratio of a loop's
length to the iterations that it spans, and which has a schedule that repeats after just that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from teraio.planner.milp.choice import STAYS, Choice
from teraio.planner.milp.instance import NONE, Instance
from teraio.planner.milp.slots import limit_slots


class Program:
    """The program of an instance in CP-SAT; can be solved again after cuts are added."""

    def __init__(self, instance: Instance, most_ticks: int) -> None:
        from ortools.sat.python import cp_model

        self.instance = instance
        self.num_cuts = 0
        self.model = cp_model.CpModel()
        self.total = self.model.new_int_var(min(instance.ideal, most_ticks), most_ticks, "T")
        steps, periods = range(instance.num_steps), range(len(instance.periods))
        self.start = [self.model.new_int_var(0, most_ticks, f"S{k}") for k in steps]
        self.open = [self.model.new_int_var(-most_ticks, most_ticks, f"B{k}") for k in steps]
        self.write_start = [self.model.new_int_var(0, 3 * most_ticks, f"W{p}") for p in periods]
        self.read_start = [self.model.new_int_var(0, 3 * most_ticks, f"R{p}") for p in periods]
        self.on = [self._booleans(instance.devices, f"x{p},") for p in periods]
        self.writes = [self._booleans(instance.devices, f"u{p},") for p in periods]
        self.latest = [self._booleans(instance.devices, f"c{p},") for p in periods]
        self.offload, self.free, self.back = self._windows()
        self.row_before: dict[tuple[int, int], Any] = {}
        self._order_steps()
        self._require_memory()
        self._reuse_copies()
        self._time_transfers()
        self._order_channels()
        self._limit_channels()
        limit_slots(self)
        self.model.minimize(self.total)

    def _booleans(self, names: list[str], prefix: str) -> list[Any]:
        return [self.model.new_bool_var(prefix + name) for name in names]

    def end_of(self, step: int) -> Any:
        """When an unrolled step ends, as an expression."""
        lap, k = divmod(step, self.instance.num_steps)
        return self.start[k] + int(self.instance.duration[k]) + lap * self.total

    def at(self, times: list[Any], step: int) -> Any:
        """The time of an unrolled step in ``start`` or ``open``, as an expression."""
        lap, k = divmod(step, self.instance.num_steps)
        return times[k] + lap * self.total

    def _order_steps(self) -> None:
        """(1), and (6) of steps."""
        instance = self.instance
        self.model.add(self.start[0] == 0)
        for k in range(instance.num_steps):
            before = self.end_of(k - 1)
            self.model.add(self.start[k] >= before + int(instance.gap[k]))
            self.model.add(self.open[k] >= before)
            self.model.add(self.start[k] >= self.open[k])

    def _windows(self) -> tuple[list[dict[int, Any]], ...]:
        """(2)."""
        offload, free, back = [], [], []
        periods, model = self.instance.periods, self.model
        for p in range(len(periods)):
            after, end, is_tail = int(periods.after[p]), int(periods.end[p]), periods.is_tail[p]
            leaves = sum(self.on[p])
            steps = {
                "o": range(after, end - 1),
                "f": range(after + 1, end),
                "b": range(end, end + 1) if is_tail else range(after + 2, end + 1),
            }
            literals = [
                {j: model.new_bool_var(f"{name}{p},{j}") for j in values}
                for name, values in steps.items()
            ]
            for values in literals:
                model.add(sum(values.values()) == leaves)
            for early, late in pairwise(literals):
                model.add(_value(early) + leaves <= _value(late))
            model.add_at_most_one(self.on[p])
            offload.append(literals[0])
            free.append(literals[1])
            back.append(literals[2])
        return offload, free, back

    def _require_memory(self) -> None:
        """(3)."""
        instance = self.instance
        for k in np.flatnonzero(instance.needed).tolist():
            relief = [int(instance.relief[p]) * self.is_away(p, j) for p, j in self.candidates(k)]
            self.model.add(sum(relief) >= int(instance.needed[k]))

    def candidates(self, k: int) -> Iterator[tuple[int, int]]:
        """Periods that may be away in step k, and that step unrolled from each."""
        periods, num_steps = self.instance.periods, self.instance.num_steps
        for p in range(len(periods)):
            for j in range(k, int(periods.end[p]), num_steps):
                if j > periods.after[p]:
                    yield p, j

    def is_away(self, p: int, step: int) -> Any:
        """1 if period p is away in the unrolled step, as an expression."""
        left = sum(literal for j, literal in self.free[p].items() if j <= step)
        return left - sum(literal for j, literal in self.back[p].items() if j <= step)

    def _reuse_copies(self) -> None:
        """(4)."""
        periods, model = self.instance.periods, self.model
        for p in range(len(periods)):
            q = int(periods.previous[p])
            for v, is_on in enumerate(self.on[p]):
                latest, writes = self.latest[p][v], self.writes[p][v]
                if q == NONE or periods.is_unwritten[p]:
                    model.add(latest == is_on)
                    model.add(writes == (0 if periods.is_unwritten[p] else is_on))
                    continue
                before = self.latest[q][v]
                model.add_implication(is_on, latest)
                model.add(latest <= is_on + before)
                model.add(latest <= is_on + 1 - sum(self.on[p]))
                model.add(latest >= before - sum(self.on[p]))
                model.add_implication(writes, is_on)
                model.add_implication(writes, before.Not())
                model.add(writes >= is_on - before)

    def write_time(self, p: int) -> Any:
        """Ticks of the offload of p, 0 if it needs none, as an expression."""
        return sum(
            int(t) * u for t, u in zip(self.instance.offload[p], self.writes[p], strict=True)
        )

    def read_time(self, p: int) -> Any:
        """Ticks of the prefetch of p, as an expression."""
        return sum(int(t) * x for t, x in zip(self.instance.prefetch[p], self.on[p], strict=True))

    def _time_transfers(self) -> None:
        """(5) and (6) of transfers."""
        periods, model = self.instance.periods, self.model
        for p in range(len(periods)):
            written = self.write_start[p] + self.write_time(p)
            for j, literal in self.offload[p].items():
                model.add(self.write_start[p] >= self.end_of(j)).only_enforce_if(literal)
            for j, literal in self.free[p].items():
                for writes in self.writes[p]:
                    opens = model.add(self.at(self.open, j) >= written)
                    opens.only_enforce_if(literal, writes)
            if periods.is_tail[p]:
                continue
            for j, literal in self.back[p].items():
                model.add(self.read_start[p] >= self.at(self.open, j)).only_enforce_if(literal)
            back = self.read_start[p] + self.read_time(p)
            for is_on in self.on[p]:
                needed = model.add(self.at(self.start, int(periods.end[p])) >= back)
                needed.only_enforce_if(is_on)

    def _order_channels(self) -> None:
        """(7)."""
        periods = self.instance.periods
        reads = [p for p in range(len(periods)) if not periods.is_tail[p]]
        writing = [p for p in range(len(periods)) if not periods.is_unwritten[p]]
        for p, q in combinations(writing, 2):
            keys = self.offload, periods.after
            self._order_pair(p, q, self.writes, keys, self.write_start, self.write_time)
        for p, q in combinations(reads, 2):
            self._order_pair(
                p, q, self.on, (self.back, periods.end), self.read_start, self.read_time
            )
        self._order_rows()

    def _order_pair(
        self, p: int, q: int, users: Any, keys: Any, starts: list[Any], time_of: Any
    ) -> None:
        model, num_steps = self.model, self.instance.num_steps
        literals, ends = keys
        shares = model.new_bool_var("")
        for one, other in zip(users[p], users[q], strict=True):
            model.add_bool_or(one.Not(), other.Not(), shares)
        first = num_steps * _value(literals[p]) + int(ends[p])
        second = num_steps * _value(literals[q]) + int(ends[q])
        lap = num_steps * (num_steps + 1)
        is_first: Any = 1
        if (ends[p] - ends[q]) % num_steps == 0:
            is_first = self._row_before(p, q)
        laps = []
        least = (min(literals[p]) - max(literals[q])) // num_steps
        most = (max(literals[p]) - min(literals[q])) // num_steps + 1
        for h in range(least, most + 1):
            chosen = model.new_bool_var("")
            laps.append(chosen)
            rules = (
                # Equal keys leave the order to the rows.
                second + h * lap >= first + 1 - is_first,
                first + lap >= second + h * lap + is_first,
                starts[q] + h * self.total >= starts[p] + time_of(p),
                starts[p] + self.total >= starts[q] + h * self.total + time_of(q),
            )
            for rule in rules:
                model.add(rule).only_enforce_if(chosen)
        model.add(sum(laps) == shares)

    def _row_before(self, p: int, q: int) -> Any:
        if (p, q) not in self.row_before:
            self.row_before[p, q] = self.model.new_bool_var(f"row{p}<{q}")
        return self.row_before[p, q]

    def _order_rows(self) -> None:
        """One order of rows for all channels."""
        count = len(self.instance.periods)
        involved = sorted({p for pair in self.row_before for p in pair})
        self.rank = {p: self.model.new_int_var(0, count, f"rank{p}") for p in involved}
        for (p, q), before in self.row_before.items():
            rule = self.model.add(self.rank[p] + 1 <= self.rank[q])
            rule.only_enforce_if(before)
            rule = self.model.add(self.rank[q] + 1 <= self.rank[p])
            rule.only_enforce_if(before.Not())

    def _limit_channels(self) -> None:
        """T is no less than what a channel does in an iteration, and (9)."""
        instance = self.instance
        # More than the longest iteration excludes a write, and keeps sums small.
        wear = np.minimum(instance.wear, instance.longest + 1)
        periods = range(len(instance.periods))
        for v in range(len(instance.devices)):
            written = sum(int(instance.offload[p, v]) * self.writes[p][v] for p in periods)
            read = sum(
                int(instance.prefetch[p, v]) * self.on[p][v]
                for p in periods
                if not instance.periods.is_tail[p]
            )
            worn = sum(int(wear[p, v]) * self.writes[p][v] for p in periods)
            for least in (written, read, worn):
                self.model.add(self.total >= least)

    def forbid_away(self, k: int, away: set[int]) -> None:
        """Step k is short of memory with just these periods away: some other one must be, too."""
        others = [self.is_away(p, j) for p, j in self.candidates(k) if p not in away]
        self.model.add(sum(others) >= 1)
        self.num_cuts += 1

    def suggest(self, choice: Choice) -> None:
        """Let the solver look at a choice first."""
        for p, v in enumerate(choice.device.tolist()):
            for device, literal in enumerate(self.on[p]):
                self.model.add_hint(literal, device == v)
            windows = (
                (self.offload[p], choice.offload_start[p]),
                (self.free[p], choice.free_by[p]),
                (self.back[p], choice.prefetch_start[p]),
            )
            for literals, step in windows:
                for j, literal in literals.items():
                    self.model.add_hint(literal, v != STAYS and j == step)

    def forbid(self, choice: Choice) -> None:
        """Exclude one choice."""
        literals = []
        for p, v in enumerate(choice.device.tolist()):
            if v == STAYS:
                literals += self.on[p]
                continue
            chosen = (
                self.on[p][v],
                self.offload[p][int(choice.offload_start[p])],
                self.free[p][int(choice.free_by[p])],
                self.back[p][int(choice.prefetch_start[p])],
            )
            literals += [literal.Not() for literal in chosen]
        for (p, q), before in self.row_before.items():
            is_before = choice.rank[p] < choice.rank[q]
            literals.append(before.Not() if is_before else before)
        self.model.add_bool_or(literals)
        self.num_cuts += 1


def _value(literals: dict[int, Any]) -> Any:
    return sum(j * literal for j, literal in literals.items())
