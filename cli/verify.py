"""``teraio verify``: the independent checker."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import INPUT_PATH, optional_hardware_option, trace_argument
from teraio.cli.result import Result
from teraio.cli.tables import facts, grid

if TYPE_CHECKING:
    from rich.console import Console

MAX_SHOWN = 20
"""Violations shown to people; --json has them all."""


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
    data = {"valid": found.valid, "fits": found.fits, "violations": violations}
    exit_code = 0 if found.valid and found.fits else 1
    return Result(data, lambda console: _show(console, str(plan), data), exit_code)


def _show(console: Console, title: str, data: dict[str, Any]) -> None:
    answer = {True: "[green]yes[/green]", False: "[red]no[/red]"}
    rows = [("valid", answer[data["valid"]]), ("fits", answer[data["fits"]])]
    console.print(facts(title, rows))
    violations = data["violations"]
    if not violations:
        return
    shown = [
        (str(v["table"]), str(v["row"]), str(v["rule"]), str(v["message"]))
        for v in violations[:MAX_SHOWN]
    ]
    table = grid(
        f"{len(violations):,} violations", ("table", "row", "rule", "what is wrong"), shown
    )
    for column in table.columns[2:]:
        column.justify = "left"
    console.print(table)
    if len(violations) > MAX_SHOWN:
        console.print(f"{len(violations) - MAX_SHOWN:,} more: see --json")
