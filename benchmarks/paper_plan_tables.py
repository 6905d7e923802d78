"""The rows of benchmarks/paper_planning.py as the measured blocks of docs/paper.md, section 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from teraio.contracts.hardware import Hardware
from teraio.units import format_bytes, format_rate, format_seconds, parse_bytes

if TYPE_CHECKING:
    from benchmarks.paper_document import percent, table
    from benchmarks.paper_plan_runs import MODELS
else:  # A script's own folder is on its path, the repository's root is not.
    from paper_document import percent, table
    from paper_plan_runs import MODELS

Row = Mapping[str, Any]

BLOCKS = ("plans", "plan-times", "plan-robustness", "plan-setting")
"""The measured blocks of the document's section 2."""

PAPER_FRACTIONS = {"70b": 0.597}
PAPER_PLANNING_SECONDS = {"8b": 31.2, "granite": 37.9, "70b": 396.6}
"""What the paper reports: its fraction for Llama3-70B, and its Table 1."""

_TITLES = {
    "greedy": "the paper's greedy",
    "zero-infinity": "ZeRO-Infinity",
    "zero-offload": "ZeRO-Offload",
    "g10": "G10",
    "flashneuron": "FlashNeuron",
    "activation-only": "activations only",
    "recompute-only": "recomputation only",
    "on-demand": "on demand",
}
"""Planners beside teraio's, in the order of the columns."""

_PRODUCTS = {"fp32": "fp32", "tf32": "TF32"}


class Setting(NamedTuple):
    """What a line of the tables is about."""

    model: str
    dtype: str
    host_memory: str
    micro_batches: int
    gpu_memory: str | None

    def cells(self) -> tuple[str, str, str]:
        """Model, precision of matrix products, tiers."""
        tiers = "SSD and host" if parse_bytes(self.host_memory, "host_memory") else "SSD"
        return MODELS[self.model].title, _PRODUCTS[self.dtype], tiers


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The text of each block by name; those of which nothing was measured are left out."""
    made = {
        "plans": plans_table(rows),
        "plan-times": times_table(rows),
        "plan-robustness": robustness_table(rows),
        "plan-setting": setting_lines(rows),
    }
    return {name: text for name, text in made.items() if text}


def plans_table(rows: Sequence[Row]) -> str:
    """Fractions of ideal of each planner, the bound, and the paper's figures; a line a setting."""
    settings = _settings(rows)
    found = {_key(row): row for row in rows if _is_plain(row)}
    others = [name for name in _TITLES if any(key[1] == name for key in found)]
    limited = _limited(rows)
    headings = ["model", "products", "tiers", "ideal", "no plan is above", "teraio", "gap"]
    headings += [f"{what}, {limit:g} s" for limit in limited for what in ("teraio", "gap")]
    headings += [*(_TITLES[name] for name in others), "the paper measured"]
    lines: list[Sequence[str]] = []
    for setting in settings:
        ours = found.get((setting, "optimal"), {})
        ideal = _ideal_seconds(setting, found.values())
        bound = ours.get("lower_bound_seconds")
        highest = None if ideal is None or bound is None else ideal / bound
        figures = [
            "-" if ideal is None else format_seconds(ideal),
            _fraction(highest),
            _fraction_of(ours),
            _points(ours.get("gap")),
        ]
        for of_limit in limited.values():
            row = of_limit.get(setting, {})
            figures += [_fraction_of(row), _points(row.get("gap"))]
        figures += [_fraction_of(found.get((setting, name), {})) for name in others]
        lines.append((*setting.cells(), *figures, _papers(setting)))
    return table(headings, lines) if lines else ""


def times_table(rows: Sequence[Row]) -> str:
    """How long planning and proving take, and what an emitted plan does off plan."""
    headings = ["model", "products", "tiers", "first plan", "planning", "CPU", "bound"]
    headings += ["proved in", "CPU", "greedy", "the paper's planning", "moves"]
    headings += ["on-demand evictions"]
    found = {_key(row): row for row in rows if _is_plain(row)}
    lines = []
    for setting in _settings(rows):
        row = found.get((setting, "optimal"))
        if row is None or "no_plan" in row:
            continue
        greedy = found.get((setting, "greedy"), {})
        paper = PAPER_PLANNING_SECONDS if setting.dtype == "fp32" else {}
        planning = ("first_plan_seconds", "planning_seconds", "planning_cpu_seconds")
        bounding = ("bound_seconds", "bound_cpu_seconds")
        figures = [_seconds(row[name]) for name in planning] + [row["bound_kind"]]
        figures += [_seconds(row[name]) for name in bounding]
        figures.append(_seconds(greedy.get("planning_seconds")))
        figures.append(_seconds(paper.get(setting.model)))
        lines.append((*setting.cells(), *figures, f"{row['moves']:,}", str(row["evictions"])))
    return table(headings, lines) if lines else ""


def robustness_table(rows: Sequence[Row]) -> str:
    """The gap under noise, and what slower channels than planned cost; a line a setting."""
    plain = {_key(row): row for row in rows if _is_plain(row) and row["planner"] == "optimal"}
    noisy = {_key(row): row for row in rows if row["jitter"] and "gap" in row}
    slow = {(_key(row)[0], row["bandwidth_share"]): row for row in rows if "slower_seconds" in row}
    settings = [s for s in _settings(rows) if (s, "optimal") in noisy or (s, 1.0) in slow]
    headings = ["model", "products", "tiers", "gap", "with noise", "more by"]
    headings += ["of ideal, planned for all rates", "planned for 90 %"]
    headings += ["at 90 % of the rates, planned for all, it loses", "planned for 90 %, it loses"]
    lines = []
    for setting in settings:
        before, after = (of.get((setting, "optimal"), {}).get("gap") for of in (plain, noisy))
        growth = "-" if before is None or after is None else f"{100 * (after - before):+.2f} points"
        shares = [slow.get((setting, share), {}) for share in (1.0, 0.9)]
        figures = [_points(before), _points(after), growth]
        figures += [_fraction_of(row) for row in shares] + [_loss(row) for row in shares]
        lines.append((*setting.cells(), *figures))
    return table(headings, lines) if lines else ""


def setting_lines(rows: Sequence[Row]) -> str:
    """Hardware planned for, and machine, versions and options that the rows were made with."""
    if not rows:
        return ""
    hardware = Hardware.preset("paper")
    ssd, link = hardware.ssd[0], hardware.link[0]
    made_on = {
        where: ", ".join(dict.fromkeys(r["commit"] for r in rows if r["made_on"] == where))
        for where in dict.fromkeys(row["made_on"] for row in rows)
    }
    planned_for = (
        f"- Planned for: {format_bytes(hardware.gpu[0].memory_bytes)} of GPU memory, SSDs of "
        f"{format_rate(ssd.read_rate)} in each direction (latency "
        f"{format_seconds(ssd.latency_seconds)}), a link of {format_rate(link.read_rate)} in each; "
        f"with host, {format_bytes(hardware.host.memory_bytes)} of it (preset `paper`)."
    )
    lines = [
        planned_for,
        *(f"- Planned on: {where} (commit {commits})." for where, commits in made_on.items()),
    ]
    return "\n".join(lines) + "\n"


def _settings(rows: Iterable[Row]) -> list[Setting]:
    """All settings in the order of models, precisions and tiers."""
    order = list(MODELS)
    return sorted(
        {_key(row)[0] for row in rows},
        key=lambda s: (
            order.index(s.model),
            s.dtype,
            parse_bytes(s.host_memory, "host_memory"),
            s.micro_batches,
        ),
    )


def _key(row: Row) -> tuple[Setting, str]:
    return Setting(*(row[name] for name in Setting._fields)), row["planner"]


def _is_plain(row: Row) -> bool:
    """Whether a row belongs into the comparison: no noise, no time limit, rates as planned."""
    is_unchanged = not row["jitter"] and row["bandwidth_share"] == row["real_bandwidth"] == 1
    return is_unchanged and row["time_limit"] is None


def _limited(rows: Iterable[Row]) -> dict[float, dict[Setting, Row]]:
    """Rows of teraio's planner under a time limit, by limit and setting."""
    found: dict[float, dict[Setting, Row]] = {}
    for row in rows:
        limit = row["time_limit"]
        if limit is not None and _is_plain({**row, "time_limit": None}):
            found.setdefault(limit, {})[_key(row)[0]] = row
    return dict(sorted(found.items()))


def _ideal_seconds(setting: Setting, rows: Iterable[Row]) -> float | None:
    """None if every planner was stopped before it could tell."""
    known = [row.get("ideal_seconds") for row in rows if _key(row)[0] == setting]
    return next((seconds for seconds in known if seconds is not None), None)


def _papers(setting: Setting) -> str:
    if setting.dtype != "fp32":
        return ""
    return percent(PAPER_FRACTIONS[setting.model], 1) if setting.model in PAPER_FRACTIONS else ""


def _fraction_of(row: Row) -> str:
    """``98.0 %``, or why there is none; in brackets what was evicted on demand, if the plan did."""
    if "fraction_of_ideal" not in row:
        return _why_not(row)
    evicted = f" ({row['evictions']} evictions)"
    may_tell = row["evictions"] and row["planner"] != "on-demand"
    return _fraction(row["fraction_of_ideal"]) + (evicted if may_tell else "")


def _why_not(row: Row) -> str:
    """A few words on why there is no plan (the row's note has all); a dash if nobody tried."""
    if "no_plan" not in row:
        return "-"
    note = str(row["note"])
    if row["no_plan"] == "timeout":
        return note
    return "GPU too small" if "of GPU memory" in note else "host or SSD too small"


def _fraction(value: float | None) -> str:
    return percent(value, 1)


def _points(value: float | None) -> str:
    return percent(value, 2)


def _loss(row: Row) -> str:
    """What slower channels cost against the plan's own prediction at full rates."""
    if "slower_seconds" not in row:
        return _why_not(row)
    return percent(row["slower_seconds"] / row["predicted_seconds"] - 1, 2)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
