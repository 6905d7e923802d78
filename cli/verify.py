"""``teraio verify``: the independent checker."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import INPUT_PATH, optional_hardware_option, trace_argument
from teraio.cli.result import Result
from teraio.cli.tables import facts, grid

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.violations import Verification

MAX_SHOWN = 20
"""Violations shown to people; --json has more."""


@command("verify", example="teraio verify bert.trace bert.plan")
@trace_argument
@click.argument("plan", metavar="PLAN", type=INPUT_PATH)
@optional_hardware_option
def verify(reporter: Reporter, trace: Path, plan: Path, hardware: str | None) -> Result:
    """Check a plan with code that no planner shares.

    Valid: its structure, order, windows, copies and slots are right. Fits: every kernel's memory
    stays within the budgets. Exit code 1 unless both. Without --hardware the plan's own is used.
    """
    from teraio.contracts.plan import Plan
    from teraio.planner import verify as check
    from teraio.traces.trace import Trace

    found = check(Trace.load(trace), Plan.load(plan), hardware)
    violations = [asdict(violation) for violation in found.violations]
    data = {
        "valid": found.valid,
        "fits": found.fits,
        "violations": violations,
        "num_violations": found.num_violations,
    }
    exit_code = 0 if found.valid and found.fits else 1
    return Result(data, lambda console: _show(console, str(plan), found), exit_code)


def _show(console: Console, title: str, found: Verification) -> None:
    from rich.text import Text

    answer = {True: Text("yes", style="green"), False: Text("no", style="red")}
    console.print(facts(title, [("valid", answer[found.valid]), ("fits", answer[found.fits])]))
    if not found.violations:
        return
    shown = found.violations[:MAX_SHOWN]
    rows = [(v.table, "" if v.row is None else str(v.row), v.rule, v.message) for v in shown]
    headings = ("table", "row", "rule", "what is wrong")
    table = grid(f"Violations: {found.num_violations:,}", headings, rows)
    for column in table.columns[2:]:
        column.justify = "left"
    console.print(table)
    if found.num_violations > len(shown):
        more = found.num_violations - len(shown)
        console.print(f"{more:,} more; --json has the first {len(found.violations)}")
