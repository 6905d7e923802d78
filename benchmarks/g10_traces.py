"""G10's own traces: ours beside what its authors published, and how far from the best possible.

    python benchmarks/g10_traces.py                       # every model and batch of the data folder
    python benchmarks/g10_traces.py --planner g10         # G10's planner in our simulator
    python benchmarks/g10_traces.py --only BERT_Base-256  # one of them

For each trace of BERT, Inception and ResNet at the artifact's default machine (preset ``g10``):
the fraction of the ideal speed, G10's published fraction (policy ``prefetch_lru``, which is G10
itself), the difference, and the gap to the proven bound. Published fractions are of the artifact's
simulator of 4 KiB pages; ours are of whole storages in a static order. Prints a table, or with
``--json`` one object.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

from teraio.planner import PLANNERS, plan
from teraio.traces.importers.g10 import import_g10

_FOLDER = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "g10"
_DEFAULT = "optimal" if "optimal" in PLANNERS else "greedy"


def main() -> None:
    """Print one row per published run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="G10's traces and results")
    parser.add_argument("--planner", default=_DEFAULT, help=f"default: {_DEFAULT}")
    parser.add_argument("--policy", default="prefetch_lru", help="published policy to compare with")
    parser.add_argument("--only", default="", help="traces whose name begins so")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds, where it applies")
    parser.add_argument("--no-bound", action="store_true", help="leave the bound out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(_HEADER)
    for published in published_runs(options.folder, options.policy):
        if published["trace"].startswith(options.only):
            rows.append(measure(published, options))
            if not options.json:
                print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))


def published_runs(folder: Path, policy: str) -> list[dict[str, Any]]:
    """Name, file and published fraction of each run of ``policy`` at the default machine."""
    rows = csv.DictReader((folder / "expected_results.csv").read_text().splitlines())
    return [
        {
            "trace": f"{row['model']}-{row['batch']}",
            "file": str(folder / "derived" / f"{row['model']}-{row['batch']}.json.gz"),
            "published": float(row["frac_ideal"]),
        }
        for row in rows
        if row["source"] == "overall_batchsize" and row["policy"] == policy and row["frac_ideal"]
    ]


def measure(published: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Plan one trace, and prove a bound."""
    trace = import_g10(published["file"])
    begun = time.perf_counter()
    made = plan(
        trace,
        "g10",
        planner=options.planner,
        time_limit=options.time_limit,
        bound=not options.no_bound,
    )
    return {
        "trace": published["trace"],
        "planner": options.planner,
        "fraction_of_ideal": made.fraction_of_ideal,
        "published": published["published"],
        "difference": made.fraction_of_ideal - published["published"],
        "gap": made.gap,
        "bound_kind": made.metadata.bound_kind,
        "seconds": time.perf_counter() - begun,
    }


_HEADER = f"{'trace':<18} {'ours':>8} {'G10':>8} {'ours-G10':>9} {'gap':>8} {'bound':>6} {'s':>6}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['trace']:<18} {row['fraction_of_ideal']:8.4f} {row['published']:8.4f} "
        f"{row['difference']:+9.4f} {row['gap']:8.2%} {row['bound_kind']:>6} {row['seconds']:6.1f}"
    )


if __name__ == "__main__":
    main()
