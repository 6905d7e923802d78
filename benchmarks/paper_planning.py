"""The paper's models planned by each planner, side by side: rewrites section 2 of docs/paper.md.

    python benchmarks/paper_planning.py                          # everything: hours, mostly greedy
    python benchmarks/paper_planning.py --models 8b --dtypes fp32 --host 0 --skip-greedy
    python benchmarks/paper_planning.py --jitter 0.1 --real-bandwidth 0.9 --planners optimal
    python benchmarks/paper_planning.py --render-only            # the tables again, from the rows

Stage 0 of 2 of Llama3-8B and Granite-code-base-8B (64 micro-batches of 2 sequences of 4096) and
Llama3-70B (64 of 4 of 2048), traced without a GPU (``--traces FOLDER`` keeps traces and uses them
again), planned for preset ``paper``. Each planner runs in a process of its own that has loaded its
machine code and the trace before the clock starts. Rows are appended to ``--output`` as they come;
what is there already is not run again (``--again`` does), so that a run can be split and resumed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import teraio
from teraio.planner import PLANNERS

if TYPE_CHECKING:
    from benchmarks.paper_document import DOCUMENT, ROOT, renew
    from benchmarks.paper_plan_runs import MODELS, Run, load_trace, measure_apart
    from benchmarks.paper_plan_tables import blocks
else:  # A script's own folder is on its path, the repository's root is not.
    from paper_document import DOCUMENT, ROOT, renew
    from paper_plan_runs import MODELS, Run, load_trace, measure_apart
    from paper_plan_tables import blocks

DEFAULT_PLANNERS = ("optimal", "greedy", "zero-infinity", "zero-offload", "on-demand")
_DTYPES = ("fp32", "tf32")
_PACKAGES = ("numpy", "numba", "ortools")
_OUTPUT = ROOT / "benchmarks" / "reports" / "paper_planning.json"


def main() -> None:
    """Run what is missing, print a line for each, and write tables into the documentation."""
    options = _options()
    rows: list[dict[str, Any]] = []
    if options.output.exists():
        rows = json.loads(options.output.read_text())["rows"]
    failed = 0
    for run in _runs(options):
        key = asdict(run)
        is_known = any(_is_of(row, key) for row in rows)
        if options.render_only or (is_known and not options.again):
            continue
        try:
            found = _measure(run, options)
        except RuntimeError as error:
            failed += 1
            print(f"{_name(run)}: FAILED, {error}", flush=True)
            continue
        rows = [row for row in rows if not _is_of(row, key)]
        rows.append(key | {"made_on": _made_on(), "commit": _commit()} | found)
        _save(rows, options.output)
        print(f"{_name(run)}: {_outcome(found)}", flush=True)
    texts = blocks(rows)
    for name, text in texts.items():
        print(f"\n{name}\n{text}", end="")
    if not options.print_only:
        renew(texts, options.document)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=tuple(MODELS), help="of 8b,granite,70b", type=_several)
    parser.add_argument("--dtypes", default=_DTYPES, help="of fp32,tf32", type=_several)
    parser.add_argument(
        "--host", default=("0", "512GB"), help="host memory, 0,512GB", type=_several
    )
    parser.add_argument("--planners", default=DEFAULT_PLANNERS, help="names", type=_several)
    parser.add_argument("--skip-greedy", action="store_true", help="minutes on Llama3-70B")
    parser.add_argument("--micro-batches", type=int, default=64, help="the paper's are 64")
    parser.add_argument("--gpu-memory", default=None, help="in place of the preset's 94 GB")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds, for optimal")
    parser.add_argument("--jitter", type=float, default=0.0, help="also with this noise: 0.1")
    parser.add_argument("--real-bandwidth", type=float, default=1.0, help="also at this: 0.9")
    parser.add_argument("--planner-timeout", type=float, default=600, help="seconds per process")
    parser.add_argument("--traces", type=Path, default=None, help="folder that keeps the traces")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help="file of the rows")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="whose tables are renewed")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    parser.add_argument("--render-only", action="store_true", help="run nothing")
    parser.add_argument("--print-only", action="store_true", help="leave the document as it is")
    options = parser.parse_args()
    for name, known in (("models", MODELS), ("planners", PLANNERS), ("dtypes", _DTYPES)):
        for value in getattr(options, name):
            if value not in known:
                parser.error(f"--{name}: {value!r} is not one of {', '.join(known)}")
    return options


def _several(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(text.split(","))


def _runs(options: argparse.Namespace) -> Iterator[Run]:
    """The runs asked for, setting by setting, the slow greedy last in each."""
    for model, dtype, host in itertools.product(options.models, options.dtypes, options.host):
        setting = {
            "model": model,
            "dtype": dtype,
            "host_memory": host,
            "micro_batches": options.micro_batches,
            "gpu_memory": options.gpu_memory,
        }
        for planner in sorted(options.planners, key=lambda name: name == "greedy"):
            if planner == "optimal":
                setting["time_limit"] = options.time_limit
                yield from _robustness_runs(setting, options)
            if not (planner == "greedy" and options.skip_greedy):
                yield Run(**setting, planner=planner)
            setting.pop("time_limit", None)


def _robustness_runs(setting: dict[str, Any], options: argparse.Namespace) -> Iterator[Run]:
    """With noise, and planned for all rates and for the real ones, simulated at the latter."""
    if options.jitter:
        yield Run(**setting, planner="optimal", jitter=options.jitter)
    real = options.real_bandwidth
    if real != 1:
        for share in (1.0, real):
            yield Run(**setting, planner="optimal", bandwidth_share=share, real_bandwidth=real)


def _measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Make the trace first if it is to be kept, so that no planner's process spends its time."""
    if options.traces is not None:
        name = f"{run.model}-{run.dtype}-{run.micro_batches}.trace"
        if not (options.traces / name).exists():
            print(f"tracing {name}", flush=True)
            load_trace(run, options.traces)
    return measure_apart(run, options.traces, options.planner_timeout)


def _is_of(row: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in key.items())


def _save(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    temporary.replace(path)


def _name(run: Run) -> str:
    changed = {
        "jitter": run.jitter,
        "share": run.bandwidth_share % 1,
        "real": run.real_bandwidth % 1,
    }
    more = "".join(f" {name}={value:g}" for name, value in changed.items() if value)
    return f"{run.model} {run.dtype} host {run.host_memory} {run.planner}{more}"


def _outcome(found: dict[str, Any]) -> str:
    if "no_plan" in found:
        return str(found["note"])
    return (
        f"{found['fraction_of_ideal']:.2%} of ideal, gap {found['gap']:.3%} "
        f"({found['bound_kind']}), planned in {found['planning_seconds']:.2f} s, "
        f"bounded in {found['bound_seconds']:.2f} s"
    )


def _made_on() -> str:
    """Processor, cores, system and versions, in one line."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"teraio {teraio.__version__}, {', '.join(versions)}"
    )


def _commit() -> str:
    """Short hash of the commit that is checked out, where git tells it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
