"""The rows of benchmarks/h200.py as a page of Markdown: benchmarks/reports/h200.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from teraio.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from benchmarks.h200_rows import Setting
    from benchmarks.paper_document import percent, table
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import Setting
    from paper_document import percent, table

Row = Mapping[str, Any]

TITLES = {
    "ideal": "no offloading (ideal)",
    "empty-plan": "teraio, a plan without moves",
    "teraio": "teraio",
    "fake-trace": "teraio, planned without the GPU",
    "checkpointing": "activation checkpointing",
    "save-on-cpu": "save_on_cpu",
    "torchao": "torchao CPUOffloadOptimizer",
    "fsdp2": "FSDP2 CPUOffloadPolicy",
    "deepspeed-cpu": "DeepSpeed ZeRO-3, CPU",
    "deepspeed-nvme": "DeepSpeed ZeRO-3, optimizer on NVMe",
}
"""Contenders by name, in the order of the lines."""

_HEAD = """# One H200: what offloading costs

Made by `python benchmarks/h200.py`, whose help says how; the rows with everything measured are in
[a file](h200.json). A step is the median of those timed, issued back to back. The *ideal* of a row
was measured on its machine since that was started. *Allocated* and *reserved* are peaks of
PyTorch's allocator while training. *Predicted* is teraio's simulator with the probed hardware,
*error* that over measured minus one. No plan is faster than the *bound*; both were printed before
the plan was executed. *Losses* are compared bit by bit with those of plain training, over so many
steps.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page: a section for each setting, with its table and how it was measured."""
    sections = [_HEAD]
    for setting, of_setting in _by_setting(rows):
        ordered = sorted(of_setting, key=_order)
        sections += [f"\n## {setting.title}\n\n", results_table(ordered)]
        behaviour = behaviour_table(ordered)
        if behaviour:
            sections += ["\nHow the plans ran:\n\n", behaviour]
        sections += [f"\n{line}\n" for line in _remarks(ordered)]
        sections += ["\n", setting_lines(ordered)]
    return "".join(sections)


def results_table(rows: Iterable[Row]) -> str:
    """Step, share of ideal, memory, and for plans what was predicted and proved."""
    headings = ["", "step", "ideal", "of ideal", "allocated", "reserved", "budget"]
    headings += ["predicted", "error", "bound", "of bound", "host memory"]
    return table(headings, [_result(row) for row in rows])


def _result(row: Row) -> Sequence[str]:
    if "failed" in row:
        return [_title(row), "failed", *["-"] * 10]
    return [
        _title(row),
        format_seconds(row["step_seconds"]),
        _seconds(row.get("ideal_seconds")),
        percent(row.get("share_of_ideal"), 1),
        *(_bytes(row.get(f"max_memory_{what}")) for what in ("allocated", "reserved")),
        _bytes(row.get("budget_bytes")),
        _seconds(row.get("simulated_seconds")),
        _signed(row.get("prediction_error")),
        _seconds(row.get("lower_bound_seconds")),
        percent(row.get("share_of_bound"), 1),
        _bytes(row.get("host_bytes")),
    ]


def behaviour_table(rows: Iterable[Row]) -> str:
    """Whether plans were followed, what they moved, and whether the training stayed the same."""
    headings = ["", "moves found", "drift", "demand fetches", "evictions", "dropped prefetches"]
    headings += ["offloaded a step", "host arena", "reserved as predicted"]
    headings += ["planning", "bound", "cold start", "losses"]
    plans = [row for row in rows if "moves" in row]
    return table(headings, [_behaviour(row) for row in plans]) if plans else ""


def _behaviour(row: Row) -> Sequence[str]:
    counts = ("drift", "demand_fetches", "evictions", "dropped_prefetches")
    return [
        _title(row),
        f"{row['moves_found']} of {row['moves_planned']}",
        *(str(row[name]) for name in counts),
        format_bytes(row["offloaded_bytes"]),
        format_bytes(row["arena_bytes"].get("host", 0)),
        _bytes(row.get("predicted_reserved_bytes")),
        _seconds(row["planning_seconds"]),
        _seconds(row["bound_seconds"]),
        _seconds(row["opening_seconds"] + row["cold_start_seconds"]),
        _identity(row),
    ]


def _identity(row: Row) -> str:
    text = _IDENTITY[row["bit_identical"]]
    return text if row["bit_identical"] is None else f"{text}, {row['compared_steps']} steps"


_IDENTITY = {True: "identical", False: "DIFFERENT", None: "not compared"}


def _remarks(rows: Iterable[Row]) -> list[str]:
    """What the tables have no column for."""
    rows = list(rows)
    remarks = [*_errors(rows), *_probed(rows)]
    for row in rows:
        if "failed" in row:
            remarks.append(f"{_title(row)} failed: `{row['failed']}`.")
        elif row["contender"] == "ideal" and row.get("runs_agree") is not None:
            agree = "agree" if row["runs_agree"] else "do NOT agree"
            remarks.append(f"Two runs without a plan {agree} bit for bit.")
    return remarks


def _errors(rows: Iterable[Row]) -> list[str]:
    """How far off the simulator was over all plans of a table that move something."""
    planned = [row for row in rows if row["contender"] != "empty-plan"]
    errors = [abs(row["prediction_error"]) for row in planned if "prediction_error" in row]
    if not errors:
        return []
    median, worst = statistics.median(errors), max(errors)
    both = f"median {percent(median, 1)}, worst {percent(worst, 1)}"
    return [f"Error of the prediction over {len(errors)} plans: {both}."]


def _probed(rows: Iterable[Row]) -> list[str]:
    """The host tier that plans counted on, once for each measurement of it."""
    lines = []
    for row in rows:
        if "probed" not in row:
            continue
        probed = row["probed"]
        one, both = (
            " and ".join(format_rate(probed[f"{prefix}{way}_rate"]) for way in ("read", "write"))
            for prefix in ("", "duplex_")
        )
        latency = format_seconds(probed["latency_seconds"])
        lines.append(f"Probed, host tier: reads and writes {one}, at once {both}; {latency} each.")
    return list(dict.fromkeys(lines))


def setting_lines(rows: Iterable[Row]) -> str:
    """Machines, versions and commits that the rows were measured with, and the hardware."""
    made: dict[str, list[str]] = {}
    for row in rows:
        made.setdefault(f"{row['made_on']} (commit {row['commit']})", []).append(_title(row))
    lines = [f"- {where}: {', '.join(dict.fromkeys(titles))}." for where, titles in made.items()]
    return "\n".join(lines) + "\n"


def _by_setting(rows: Iterable[Row]) -> list[tuple[Setting, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(json.dumps(row["setting"], sort_keys=True), []).append(row)
    return [(Setting(**json.loads(key)), of) for key, of in found.items()]


def _order(row: Row) -> tuple[int, str, float]:
    names = list(TITLES)
    return names.index(row["contender"]), row["transform"] or "", -(row["budget_share"] or 0)


def _title(row: Row) -> str:
    share = row["budget_share"]
    parts = [TITLES[row["contender"]]]
    parts += [] if share is None else [f"{100 * share:g} % of the peak"]
    parts += [row["transform"]] if row["transform"] else []
    return ", ".join(parts)


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _signed(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:+.1f} %"
