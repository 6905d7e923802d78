"""One GPU, one model, every way to train it in less memory: one command, one table.

    python benchmarks/h200.py                              # fp32, everything: over half an hour
    python benchmarks/h200.py --rows ideal,empty-plan,teraio --budgets 0.8,0.6,0.5 \\
        --transforms none --exact-steps 20 --warm-up 1 --steps 5
    python benchmarks/h200.py --rows teraio,fake-trace --fake-budgets 0.8:none \\
        --budgets 0.5:optimizer-in-backward,0.4:none --exact-steps 5
    python benchmarks/h200.py --dtype bf16 --compiled --rows ideal,empty-plan,teraio --budgets 0.7
    python benchmarks/h200.py --rows torchao,fsdp2,deepspeed-cpu --timeout 500
    python benchmarks/h200.py --merge FILE                 # rows measured on another machine
    python benchmarks/h200.py --render-only                # the page again, from the rows
    python benchmarks/h200.py --smoke                      # toy size on the CPU, under a minute

teraio's rows share a process that traces the training, measures the machine, times the training
without a plan, and prints each plan's bound before it executes the plan. With ``--exact-steps`` a
row begins with so many deterministic iterations, whose losses are compared bit by bit with those of
plain training; the timed ones follow in the same run. Every baseline has a process of its own, so
that one that crashes or hangs takes nothing along. Rows are added to ``--output`` as they come, and
what is there already is not measured again (``--again`` does), so that a run can be split into
commands of a few minutes each, and a command that is killed loses only the row under way.

``--output-folder`` keeps trace, hardware, plans and what plain training gave, and ``--plans-from``
uses them again: the same folder in every command does each only once. The ideal of a machine is
measured once after its start; its bits serve other machines of the same kind too. Planning needs
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
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_options import HERE, OURS, parse_options
    from benchmarks.h200_rows import (
        SWAP_FOLDER,
        Contender,
        Row,
        add_row,
        boot_id,
        is_of,
        kept_ideal,
        load_rows,
        run_apart,
        save_rows,
    )
    from benchmarks.h200_tables import page
    from benchmarks.paper_document import ROOT
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_options import HERE, OURS, parse_options
    from h200_rows import (
        SWAP_FOLDER,
        Contender,
        Row,
        add_row,
        boot_id,
        is_of,
        kept_ideal,
        load_rows,
        run_apart,
        save_rows,
    )
    from h200_tables import page
    from paper_document import ROOT


def main() -> None:
    """Measure what is missing, row by row, and write the page."""
    options = parse_options(__doc__ or "")
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
        made = {"made_on": platform.machine(), "commit": commit(), "boot": boot_id()}
        asked = {"run": options.run, "options": options.asked}
        self.add(contender.key(options.setting.as_key()) | made | asked | dict(found))

    def ideal_of_this_machine(self) -> float | None:
        """Seconds of a step without offloading, if measured since this machine was started."""
        options = self._options
        key = Contender("ideal").key(options.setting.as_key())
        for row in self.rows:
            if is_of(row, key) and row.get("boot") == boot_id() and "failed" not in row:
                return float(row["step_seconds"])
        if options.plans_from is None:
            return None
        return kept_ideal(options.plans_from / f"{options.setting.name}-plain.json")

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
    ideal_seconds = book.ideal_of_this_machine()
    if ideal_seconds is None:
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
        "headroom": options.headroom,
        "time_kernels": options.time_kernels,
        "time_limit": options.time_limit,
        "planner": options.planner,
        "exact_steps": options.exact_steps,
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
    """All rows asked for; budgets in the order given, of each the transforms in theirs."""
    found = []
    for name in options.rows:
        if name in ("teraio", "fake-trace"):
            found += [
                Contender(name, share, transform)
                for share, own in (options.budgets if name == "teraio" else options.fake_budgets)
                for transform in (options.transforms if own is None else own)
            ]
        else:
            found.append(Contender(name))
    return found


def commit() -> str:
    """Short hash of the commit that is checked out: TERAIO_COMMIT, for a copy of a checkout, or
    what git says.
    """
    given = os.environ.get("TERAIO_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
