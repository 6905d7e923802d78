"""A page of the runs that are no rows of benchmarks/h200.py: benchmarks/reports/h200_other_runs.md.

    python benchmarks/h200_other_runs.py never_fits.json ssd.json two_gpus.rank0.json ...

The files are what never_fits.py, h200_ssd.py and two_gpus.py wrote to --output. Prints the page.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.paper_document import percent, table
else:  # A script's own folder is on its path, the repository's root is not.
    from paper_document import percent, table

from teraio.units import format_bytes, format_seconds

Found = Mapping[str, Any]

_HEAD = """# One and two H200: models that never fit, the SSD tier, several ranks

Made by `python benchmarks/h200_other_runs.py` from what `never_fits.py`, `h200_ssd.py` and
`two_gpus.py` measured. *Error* is what the simulator predicted, over measured minus one.
"""


def main() -> None:
    """Print the page of the files that are named."""
    print(page([json.loads(Path(name).read_text()) for name in sys.argv[1:]]), end="")


def page(files: Sequence[Found]) -> str:
    """Sections for what there is, in the order of :data:`SECTIONS`; of files in the order given."""
    sections = [_HEAD]
    for belongs, render in SECTIONS:
        chosen = [found for found in files if belongs(found)]
        if chosen:
            sections.append(render(chosen))
    return "\n".join(sections)


def never_fits(files: Sequence[Found]) -> str:
    """Models whose state does not fit the budget."""
    headings = ["model", "state", "budget", "host", "written to the SSD a step", "allocated"]
    headings += ["reserved", "steps", "predicted", "error", "losses of the reference"]
    rows = []
    for found in files:
        run = found["run"]
        same = {None: "not run", True: "the same", False: "DIFFERENT"}[found.get("same_losses")]
        rows.append(
            [
                f"{found['model']}, {' x '.join(map(str, found['tokens']))} tokens",
                format_bytes(found["state_bytes"]),
                str(found["gpu_memory"]),
                format_bytes(found["host_memory_bytes"]),
                format_bytes(sum(found["ssd_bytes_written"].values())),
                *_peaks(run),
                ", ".join(format_seconds(seconds) for seconds in run["all_step_seconds"]),
                format_seconds(found["predicted_seconds"]),
                _signed(found["prediction_error"]),
                same,
            ]
        )
    return _section("Models that never fit", headings, rows, files)


def ssd(files: Sequence[Found]) -> str:
    """The SSD tier alone."""
    headings = ["training", "plain", "read and written a step", "predicted", "measured", "error"]
    headings += ["stalls (predicted)", "steps checked", "reads verified", "losses", "grown"]
    rows = []
    for found in (found["result"] for found in files):
        moved = found["bytes_per_step"]
        stalls = zip(*found["stall_seconds"].values(), strict=True)
        measured, predicted = (format_seconds(sum(seconds)) for seconds in stalls)
        losses = "identical" if found["losses_identical"] else "DIFFERENT"
        rows.append(
            [
                found["setting"],
                format_seconds(found["plain_seconds"]),
                format_bytes(sum(moved.values())),
                format_seconds(found["simulated_seconds"]),
                format_seconds(found["measured_seconds"]),
                _signed(found["prediction_error"]),
                f"{measured} ({predicted})",
                str(found["checked_steps"]),
                str(found["verified_reads"]),
                f"{losses}, {found['compared_steps']} steps",
                format_bytes(found["resident_grown_bytes"]),
            ]
        )
    return _section("The SSD tier", headings, rows, [found["result"] for found in files])


def ranks(files: Sequence[Found]) -> str:
    """Two ranks under plans of their own."""
    headings = ["ranks", "rank", "plain", "executed", "of plain", "predicted", "error", "budget"]
    headings += ["allocated", "reserved", "moves found", "bits"]
    rows, found_all = [], []
    for way in ("ddp", "fsdp2", "pipeline"):
        for found in (found[way] for found in files if way in found):
            run = found["executed"]
            found_all.append(found)
            rows.append(
                [
                    way,
                    str(found["rank"]),
                    format_seconds(found["plain_seconds"]),
                    format_seconds(found["executed_seconds"]),
                    percent(found["fraction_of_plain"], 1),
                    format_seconds(found["predicted_seconds"]),
                    _signed(found["prediction_error"]),
                    format_bytes(found["budget_bytes"]),
                    *_peaks(run),
                    f"{run['moves_found']} of {run['moves_planned']}",
                    "identical" if found["bit_identical"] else "DIFFERENT",
                ]
            )
    return _section("Several ranks", headings, rows, found_all)


SECTIONS: tuple[tuple[Callable[[Found], bool], Callable[[Sequence[Found]], str]], ...] = (
    (lambda found: "state_bytes" in found and "run" in found, never_fits),
    (lambda found: "result" in found and "ssd_files" in found["result"], ssd),
    (lambda found: any(way in found for way in ("ddp", "fsdp2", "pipeline")), ranks),
)


def _section(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], files: Sequence[Found]
) -> str:
    errors = [abs(found["prediction_error"]) for found in files]
    median, worst = percent(statistics.median(errors), 1), percent(max(errors), 1)
    machines = "\n".join(dict.fromkeys(f"- {_made_on(found)}" for found in files))
    error = f"Error of the prediction: median {median}, worst {worst}."
    return f"## {title}\n\n{table(headings, rows)}\n{error}\n\n{machines}\n"


def _made_on(found: Found) -> str:
    if "made_on" in found:
        return str(found["made_on"])
    versions = ", ".join(f"{name} {found[name]}" for name in ("teraio", "torch"))
    return f"{found['world_size']} x {found['device']}, Python {found['python']}, {versions}"


def _peaks(run: Found) -> list[str]:
    names = ("max_memory_allocated", "max_memory_reserved")
    return [format_bytes(run[name]) if name in run else "-" for name in names]


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


if __name__ == "__main__":
    main()
