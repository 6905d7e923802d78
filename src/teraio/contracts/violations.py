"""What a check of a plan finds: violations by table and row, and the verdicts they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from teraio.contracts.table import BoolArray

MAX_VIOLATIONS = 100
"""How many violations are kept in words; all are counted."""

MAX_VIOLATIONS_PER_RULE = 25
"""So that one rule, broken everywhere, does not hide the others."""

FIT_RULES = frozenset({"gpu_memory", "tier_memory", "endurance"})
"""Rules about budgets: a plan that breaks only these is valid, but does not fit."""


_UNJUDGED = frozenset(
    {"tables", "metadata", "range", "order", "access", "repeat", "device", "offset"}
)
"""Rules without which memory cannot be counted: a plan that breaks one is not said to fit."""


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes: ``table`` moves | kernels | storages | accesses | copies | metadata; ``row`` its row
    there, None where the whole table is meant; ``rule`` a name from the numbered list in
    ``teraio.contracts.plan_checks`` or ``teraio.planner.verifier``; ``message`` one line.
    """

    table: str
    row: int | None
    rule: str
    message: str

    def __str__(self) -> str:
        where = self.table if self.row is None else f"{self.table} row {self.row}"
        return f"{where}: {self.message} [{self.rule}]"


@dataclass(frozen=True)
class Verification:
    """The verdict on a plan.

    Attributes: ``valid`` its structure is right; ``fits`` every budget holds in index space, which
    a plan with malformed moves is never said to do;
    ``violations`` the first of them; ``num_violations`` how many there are in all.
    """

    valid: bool
    fits: bool
    violations: tuple[Violation, ...]
    num_violations: int


@dataclass
class Findings:
    """Collects violations while rules are checked; keeps the first ones, counts all."""

    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, row: int | None, rule: str, message: str) -> None:
        """Record one violation."""
        seen = self.counts.get(rule, 0)
        self.counts[rule] = seen + 1
        if seen < MAX_VIOLATIONS_PER_RULE and len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(Violation(table, row, rule, message))

    def refuse(
        self, bad: BoolArray, table: str, rule: str, message: Callable[[int], str]
    ) -> BoolArray:
        """Record a violation for every row where ``bad`` is true; returns the rows that are good.

        ``message`` is asked only for rows that are kept, so that a plan broken everywhere is still
        checked quickly.
        """
        rows = np.flatnonzero(bad)
        for row in rows[:MAX_VIOLATIONS_PER_RULE].tolist():
            self.add(table, row, rule, message(row))
        unspoken = len(rows) - MAX_VIOLATIONS_PER_RULE
        if unspoken > 0:
            self.counts[rule] += unspoken
        good: BoolArray = ~bad
        return good

    def verification(self) -> Verification:
        """The two verdicts, and the violations that were kept."""
        broken = set(self.counts)
        return Verification(
            valid=broken <= FIT_RULES,
            fits=not broken & (FIT_RULES | _UNJUDGED),
            violations=tuple(self.violations),
            num_violations=sum(self.counts.values()),
        )
