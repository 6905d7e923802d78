"""One GPU, one model, every way to train it in less memory: one command, one table.

    python benchmarks/h200.py                              # fp32, everything: over half an hour
    python benchmarks/h200.py --rows ideal,teraio --budgets 0.8,0.6 --exact --steps 17
    python benchmarks/h200.py --rows teraio --budgets 0.5 --transforms optimizer-in-backward
    python benchmarks/h200.py --dtype bf16 --compiled --rows ideal,empty-plan,teraio --budgets 0.7
    python benchmarks/h200.py --rows torchao,fsdp2,deepspeed-cpu --timeout 500
    python benchmarks/h200.py --merge FILE                 # rows measured on another machine
    python benchmarks/h200.py --render-only                # the page again, from the rows
    python benchmarks/h200.py --smoke                      # toy size on the CPU, under a minute

teraio's rows share a process that times the training without a plan first, records its trace
(kept in ``--output-folder`` with hardware and plans; ``--plans-from`` uses them again), measures
the machine, and prints each plan's bound before it executes the plan. Every baseline has a process
of its own, so that one that crashes or hangs takes nothing along; its ideal is measured in the same
run. Rows are added to ``--output`` as they come, and what is there already is not measured again
(``--again`` does), so that a run can be split into commands of a few minutes each. Planning needs
no GPU: ``--until trace`` leaves trace and hardware in the folder, ``--until plan --plans-from`` it
makes the plans on any machine, and a last command with ``--plans-from`` executes them.

Baselines that are not part of PyTorch are needed only for their rows: torchao 0.18.0, deepspeed
0.19.8 and, for its NVMe row, libaio. For a machine without a network, fetch them elsewhere:

    mkdir wheels && cd wheels
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --abi cp312 --abi abi3 --abi none --platform manylinux_2_28_x86_64 \\
        --platform manylinux2014_x86_64 --platform any torchao==0.18.0 hjson==3.1.0 \\
        pydantic==2.14.4 pydantic_core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \\
        py-cpuinfo==9.0.0 einops msgpack ninja
    DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation deepspeed==0.19.8
    apt-get download libaio-dev libaio1        # DeepSpeed's asynchronous files

and there ``pip install --no-index --no-deps --target SITE wheels/*.whl``, SITE on PYTHONPATH, and
``for deb in wheels/*.deb; do dpkg -x $deb OUTPUT_FOLDER/libaio; done``. DeepSpeed compiles its
operators on first use (nvcc and ninja, a minute or two) into OUTPUT_FOLDER/torch_extensions.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_rows import (
        SWAP_FOLDER,
        Contender,
        Row,
        Setting,
        add_row,
        is_of,
        load_rows,
        run_apart,
        save_rows,
    )
    from benchmarks.h200_tables import TITLES, page
    from benchmarks.paper_document import ROOT
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import (
        SWAP_FOLDER,
        Contender,
        Row,
        Setting,
        add_row,
        is_of,
        load_rows,
        run_apart,
        save_rows,
    )
    from h200_tables import TITLES, page
    from paper_document import ROOT

HERE = Path(__file__).resolve().parent
OUTPUT = ROOT / "benchmarks" / "reports" / "h200.json"
OURS = ("empty-plan", "teraio", "fake-trace")
SMOKE_ROWS = ("ideal", "empty-plan", "teraio", "save-on-cpu", "checkpointing", "fsdp2")
DEFAULT_BUDGETS = (0.8, 0.6, 0.5, 0.4)
DEFAULT_TRANSFORMS = (None, "optimizer-in-backward")
_PLANNED = ("teraio", "fake-trace")


def main() -> None:
    """Measure what is missing, row by row, and write the page."""
    options = parse_options()
    book = Book(options)
    if options.merge is not None:
        for row in load_rows(options.merge):
            book.add(row)
    if not options.render_only and options.merge is None:
        measure_all(options, book)
    if book.rows:
        text = page(book.rows)
        print(text)
        options.output.with_suffix(".md").write_text(text)
    sys.exit(1 if book.num_failed else 0)


class Book:
    """The rows of the file, kept up to date with every row that is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.rows = load_rows(options.output)
        self.num_failed = 0

    def add(self, row: Row) -> None:
        """Add a whole row and save."""
        self.rows = add_row(self.rows, row)
        self.num_failed += "failed" in row
        save_rows(self.rows, self._options.output)

    def add_found(self, contender: Contender, found: Mapping[str, Any]) -> None:
        """Add what a process measured."""
        options = self._options
        made = {"made_on": platform.machine(), "commit": commit()}
        asked = {"run": options.run, "options": options.asked}
        self.add(contender.key(options.setting.as_key()) | made | asked | dict(found))

    def lacks(self, contender: Contender) -> bool:
        """Whether it is still to be measured; what failed is not tried again by itself."""
        key = contender.key(self._options.setting.as_key())
        return self._options.again or not any(is_of(row, key) for row in self.rows)


def measure_all(options: argparse.Namespace, book: Book) -> None:
    """teraio's rows in one process, then each baseline in its own, after an ideal."""
    wanted = [contender for contender in contenders(options) if book.lacks(contender)]
    ours = [contender for contender in wanted if contender.name in OURS]
    others = [c for c in wanted if c.name not in (*OURS, "ideal")]
    ideal = Contender("ideal")
    is_ideal_wanted = ideal in wanted
    if ours or (is_ideal_wanted and not others):
        measure_ours(options, book, [ideal] * is_ideal_wanted + ours)
    if not others or options.until != "run":
        return
    found: list[Row] = []
    measure_baseline(options, book, ideal, found, adds=is_ideal_wanted and not ours)
    ideal_seconds = found[0].get("step_seconds") if found else None
    for contender in others:
        measure_baseline(options, book, contender, [], ideal_seconds=ideal_seconds)


def measure_ours(options: argparse.Namespace, book: Book, wanted: list[Contender]) -> None:
    """Rows of teraio and the ideal; those that its process did not come to have failed."""
    print(f"teraio: {', '.join(c.label for c in wanted)}", flush=True)
    left = list(wanted)

    def add(contender: Contender, found: Row) -> None:
        left.remove(contender)
        book.add_found(contender, found)

    order = {
        "setting": options.setting.as_key(),
        "contenders": [list(contender) for contender in wanted],
        "folder": str(options.output_folder),
        "until": options.until,
        "plans_from": None if options.plans_from is None else str(options.plans_from),
        "hardware": options.hardware,
        "probe": options.probe,
        "host_memory": options.host_memory,
        "spare_host": options.spare_host,
        "time_kernels": options.time_kernels,
        "time_limit": options.time_limit,
        "planner": options.planner,
        "warm_up": options.warm_up,
        "steps": options.steps,
    }
    script = HERE / "h200_teraio.py"
    reason = run_apart(script, order, timeout_seconds=options.timeout, on_row=add)
    # A limit of time is no verdict: what was not reached may be measured by the next command.
    if left and reason is not None and not reason.startswith("stopped"):
        book.add_found(left[0], {"failed": reason[:500]})
    elif left and options.until == "run":
        print(f"not measured: {', '.join(c.label for c in left)} ({reason})", flush=True)


def measure_baseline(
    options: argparse.Namespace,
    book: Book,
    contender: Contender,
    results: list[Row],
    *,
    ideal_seconds: float | None = None,
    adds: bool = True,
) -> None:
    """One contender in a process of its own; its row also goes to ``results``."""
    print(f"{contender.label}:", flush=True)

    def add(_: Contender, found: Row) -> None:
        if ideal_seconds is not None:
            found["ideal_seconds"] = ideal_seconds
            found["share_of_ideal"] = ideal_seconds / found["step_seconds"]
        results.append(found)
        if adds:
            book.add_found(contender, found)

    order = {
        "setting": options.setting.as_key(),
        "contender": list(contender),
        "folder": str(options.output_folder),
        "warm_up": options.baseline_warm_up,
        "steps": options.baseline_steps,
    }
    script = HERE / "h200_baselines.py"
    reason = run_apart(script, order, timeout_seconds=options.timeout, on_row=add)
    shutil.rmtree(options.output_folder / SWAP_FOLDER, ignore_errors=True)
    if reason is not None:
        print(f"{contender.label}: FAILED, {reason}", flush=True)
        if not results and adds:
            book.add_found(contender, {"failed": reason[:500]})


def contenders(options: argparse.Namespace) -> list[Contender]:
    """All rows asked for; budgets in the order given, of each the training unchanged first."""
    found = []
    for name in options.rows:
        if name in _PLANNED:
            found += [
                Contender(name, share, transform)
                for share, transform in itertools.product(options.budgets, options.transforms)
            ]
        else:
            found.append(Contender(name))
    return found


def parse_options() -> argparse.Namespace:
    """The command line, with the setting that it describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_what(parser)
    _add_how(parser)
    options = parser.parse_args()
    for name in options.rows or ():
        if name not in TITLES:
            parser.error(f"--rows: {name!r} is not one of {', '.join(TITLES)}")
    options.asked = {name: str(value) for name, value in vars(options).items()}
    options.run = time.strftime("%Y-%m-%dT%H:%M:%S")
    _complete(options)
    return options


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_names, help=f"of {','.join(TITLES)} [default: all]")
    parser.add_argument(
        "--budgets", type=_shares, help="shares of the peak [default: 0.8,0.6,0.5,0.4]"
    )
    parser.add_argument(
        "--transforms",
        type=_transforms,
        help="variants of the plans [default: none,optimizer-in-backward]",
    )
    parser.add_argument("--model", default="bench-3.4b")
    parser.add_argument("--dtype", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--micro-batch-size", type=int, help="[default: 3, in bf16 6]")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument(
        "--optimizer",
        choices=("foreach", "fused", "for-loop"),
        help="AdamW's implementation [default: foreach, in bf16 fused]",
    )
    parser.add_argument("--compiled", action="store_true", help="compile each block")
    parser.add_argument(
        "--exact", action="store_true", help="deterministic algorithms; losses compared bit by bit"
    )
    parser.add_argument("--smoke", action="store_true", help="toy size on the CPU")


def _add_how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="timed of a plan [default: 10, exact 17]")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--baseline-steps", type=int, default=5, help="timed of a baseline")
    parser.add_argument("--baseline-warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--hardware", help="file or preset [default: measure this machine]")
    parser.add_argument("--probe", choices=("quick", "full"), default="quick")
    parser.add_argument("--host-memory", default="90GB", help="what plans may use")
    parser.add_argument("--spare-host", default="2GB", help="pinned beyond what a plan needs")
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--time-limit", type=float, help="seconds, for the planner")
    parser.add_argument(
        "--time-kernels", action="store_true", help="price the trace made without the GPU by them"
    )
    parser.add_argument(
        "--output-folder", type=Path, default=Path("h200-output"), help="for traces and plans"
    )
    parser.add_argument("--plans-from", type=Path, help="an earlier output folder, used again")
    parser.add_argument(
        "--until",
        choices=("trace", "plan", "run"),
        default="run",
        help="stop teraio's rows before planning, or before execution",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each process")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of the rows")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    parser.add_argument("--merge", type=Path, help="measure nothing, add the rows of this file")
    parser.add_argument("--render-only", action="store_true", help="measure nothing")


def _complete(options: argparse.Namespace) -> None:
    """Fill in what depends on other options."""
    is_bf16 = options.dtype == "bf16"
    given: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "micro_batch_size": options.micro_batch_size or (6 if is_bf16 else 3),
        "sequence": options.sequence,
        "optimizer": options.optimizer or ("fused" if is_bf16 else "foreach"),
        "compiled": options.compiled,
        "exact": options.exact,
    }
    if options.smoke:
        given |= {"model": "tiny-llama", "sequence": 64, "device": "cpu"}
        options.host_memory, options.spare_host = "200MB", "20MB"
        options.budgets, options.transforms = options.budgets or (0.8,), (None,)
        options.baseline_steps = options.steps = options.steps or 3
    options.rows = options.rows or (SMOKE_ROWS if options.smoke else tuple(TITLES))
    options.budgets = options.budgets or DEFAULT_BUDGETS
    options.transforms = options.transforms or DEFAULT_TRANSFORMS
    options.setting = Setting(**given)
    options.steps = options.steps or (17 if options.exact else 10)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _transforms(text: str) -> tuple[str | None, ...]:
    return tuple(None if part == "none" else part for part in text.split(","))


def commit() -> str:
    """Short hash of the commit that is checked out, where git tells it."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("TERAIO_COMMIT", "unknown")


if __name__ == "__main__":
    main()
