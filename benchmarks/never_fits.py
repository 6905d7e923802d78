"""Train a model whose state fits in no GPU memory that it is given, from its first weight on.

    python benchmarks/never_fits.py --ssd-path /mnt/nvme
    python benchmarks/never_fits.py --model bench-3.4b --gpu-memory 18GB --host-memory 30GB \
        --ssd-path /mnt/nvme --reference
    python benchmarks/never_fits.py --kept FOLDER --hardware FILE --until plan    # without a GPU
    python benchmarks/never_fits.py --kept FOLDER --output never_fits.json
    python benchmarks/never_fits.py --kept FOLDER --output never_fits.json --until plan \
        --hardware PROBED      # the prediction again, by what the machine turned out to be
    python benchmarks/never_fits.py --kept FOLDER --hardware PROBED --time-kernels --watch-disk 3

The model is traced without a GPU, planned for the machine at hand, built inside the run, every
parameter in its tier, and trained; with --reference also without any offloading, and the losses are
compared bit for bit (with deterministic algorithms, which take longer). Prints one JSON object at
the end. --kept is a folder for trace and plan, made once, so that planning and running can be done
apart. --time-kernels: the step is predicted with what the model's kernels take on this GPU, as
`teraio time` finds out, and not with what the trace's table of GPUs says. --watch-disk N: and with
what the disk does between the steps, measured anew after every N of them; virtual disks were a
fifth faster or slower a minute later. --output gets what is known after every step; a run or a
reference that is whole there is not repeated. --smoke is a run of seconds on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.disk_watch import DiskWatch, with_disk
    from benchmarks.h200_rows import Setting, say
    from benchmarks.h200_training import (
        HostMemory,
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_told,
        setup_of,
        synchronize,
    )
    from benchmarks.never_fits_options import arguments, subject_of
    from benchmarks.never_fits_prediction import machine_of, predicted_seconds, timed
    from benchmarks.partial_results import Findings, kept
else:  # A script's own folder is on its path, the repository's root is not.
    from disk_watch import DiskWatch, with_disk
    from h200_rows import Setting, say
    from h200_training import (
        HostMemory,
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_told,
        setup_of,
        synchronize,
    )
    from never_fits_options import arguments, subject_of
    from never_fits_prediction import machine_of, predicted_seconds, timed
    from partial_results import Findings, kept

from torch import Tensor, nn

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor import Execution
from teraio.executor.stores import FileUse
from teraio.traces.trace import Trace
from teraio.units import format_bytes, format_rate, format_seconds, parse_bytes

WARM_UP = 4
"""Steps before those that count: the first has no moves yet, and memory settles after it."""

REPORTED = (
    "moves_planned",
    "moves_found",
    "substituted_kernels",
    "first_substituted",
    "drift",
    "first_drift",
    "demand_fetches",
    "evictions",
    "dropped_prefetches",
    "peak_bytes",
    "cold_start_seconds",
)


def main() -> None:
    """Plan or take a plan, train under it, compare, print."""
    options = arguments(__doc__)
    setting = _setting(options)
    prepare_process(setting)
    trace = kept(_kept(options, "trace"), Trace.load, lambda: _trace(options, setting))
    if options.smoke:
        _fit_to_toy(options, trace)
    plan = _plan(options, trace)
    findings = Findings(options.output, subject_of(options))
    here = timed(options, trace)
    machine = plan.hardware if options.hardware == "probe" else machine_of(options)
    if options.watch_disk is not None and len(machine.ssd) != 1:
        raise SystemExit(f"--watch-disk: is for one SSD, the machine has {len(machine.ssd)}")
    for name, value in _figures(options, here, plan).items():
        findings.add(name, value)
    if options.until == "run":
        _predict(findings, here, plan, machine)
        findings.find("run", lambda: _train(options, setting, plan, findings))
        if options.reference:
            findings.find("reference", lambda: _train_plainly(options, setting))
    _predict(findings, here, plan, machine)
    _compare(findings)
    print(json.dumps(findings.values, indent=1, default=str))


def _predict(findings: Findings, trace: Trace, plan: Plan, machine: Hardware) -> None:
    """With the disk as it was between the steps, as far as that was measured."""
    disks = findings["run"]["disks"] if "run" in findings else []
    machine = with_disk(machine, disks) if disks else machine
    findings.add("predicted_seconds", predicted_seconds(trace, plan, machine))
    say(f"predicted {format_seconds(findings['predicted_seconds'])} a step")


def _compare(findings: Findings) -> None:
    """What the runs that there are say of the prediction and of each other."""
    if "run" not in findings:
        return
    run = findings["run"]
    findings.add("made_on", run["made_on"])
    findings.add("prediction_error", findings["predicted_seconds"] / run["step_seconds"] - 1)
    if "reference" in findings:
        findings.add("same_losses", findings["reference"]["losses"] == run["losses"])


def _kept(options: argparse.Namespace, what: str) -> Path | None:
    """Where the trace or the plan is kept."""
    if options.kept is None:
        return None
    names = ["model", "micro_batch_size", "sequence", "checkpoint", "optimizer"]
    if what == "plan":
        names += ["transform", "gpu_memory", "spare_gpu", "host_memory"]
    parts = [str(getattr(options, name)) for name in names if getattr(options, name) is not None]
    folder: Path = options.kept
    return folder / f"never-fits-{'-'.join(parts)}.{what}"


def _setting(options: argparse.Namespace) -> Setting:
    return Setting(
        model=options.model,
        micro_batch_size=options.micro_batch_size,
        sequence=options.sequence,
        optimizer=options.optimizer,
        exact=options.reference,
        device=options.device,
    )


def _trace(options: argparse.Namespace, setting: Setting) -> Trace:
    setup = setup_of(setting, checkpoint=options.checkpoint)
    began = time.perf_counter()
    trace = teraio.trace(
        setup.model,
        sequence=setup.sequence,
        micro_batch_size=setup.micro_batch_size,
        dtype=setup.dtype,
        optimizer_implementation=setup.optimizer_implementation,
        checkpoint=setup.checkpoint,
        gpu="h200",
    )
    say(
        f"traced without a GPU in {time.perf_counter() - began:.0f} s: "
        f"{trace.num_kernels} kernels, ideal {format_seconds(trace.ideal_seconds)}, peak "
        f"{format_bytes(trace.peak_allocated_bytes)}, state {format_bytes(_state_bytes(trace))}"
    )
    return trace


def _state_bytes(trace: Trace) -> int:
    """Parameters, as many gradients, and the two moments of AdamW."""
    return 4 * int(trace.storages.nbytes[trace.storages.kind == "parameter"].sum())


def _fit_to_toy(options: argparse.Namespace, trace: Trace) -> None:
    """Budgets of a smoke run: of two thirds of the state some has no room in memory either."""
    state_bytes = _state_bytes(trace)
    options.gpu_memory = trace.peak_allocated_bytes - state_bytes * 2 // 3
    options.host_memory = state_bytes * 2 // 5


def _plan(options: argparse.Namespace, trace: Trace) -> Plan:
    path = _kept(options, "plan")
    plan = kept(path, Plan.load, lambda: _made_plan(options, trace))
    if plan.metadata.trace_hash != trace.hash:
        raise SystemExit(f"{path}: is of another training; remove it or name another folder")
    return plan


def _made_plan(options: argparse.Namespace, trace: Trace) -> Plan:
    began = time.perf_counter()
    plan = teraio.plan(
        trace,
        machine_of(options),
        planner=options.planner,
        gpu_memory=_budget_bytes(options),
        host_memory=options.host_memory,
        transform=options.transform,
        time_limit=options.time_limit,
        bound=options.planner == "optimal",
    )
    say(f"planned in {time.perf_counter() - began:.0f} s: {plan}")
    return plan


def _budget_bytes(options: argparse.Namespace) -> int:
    """What the plan may use of the GPU."""
    spare_bytes = 0 if options.smoke else parse_bytes(options.spare_gpu, "spare_gpu")
    return parse_bytes(options.gpu_memory, "gpu_memory") - spare_bytes


def _figures(options: argparse.Namespace, trace: Trace, plan: Plan) -> dict[str, Any]:
    metadata = plan.metadata
    return {
        "model": options.model,
        "tokens": [options.micro_batch_size, options.sequence],
        "checkpoint": options.checkpoint,
        "optimizer": options.optimizer,
        "transform": metadata.transform,
        "state_bytes": _state_bytes(trace),
        "trace_peak_allocated_bytes": trace.peak_allocated_bytes,
        "gpu_memory": options.gpu_memory,
        "gpu_memory_bytes": metadata.gpu_memory_bytes,
        "host_memory_bytes": metadata.host_memory_bytes,
        "arena_bytes": metadata.arena_bytes,
        "ssd_bytes_written": metadata.ssd_bytes_written,
        "planner": metadata.planner,
        "ideal_seconds": trace.ideal_seconds,
        "kernels_timed": options.time_kernels,
        "lower_bound_seconds": metadata.lower_bound_seconds,
    }


def _train(
    options: argparse.Namespace, setting: Setting, plan: Plan, findings: Findings
) -> dict[str, Any]:
    """Build the model within the budget and train it: seconds of each step, the first one cold."""
    forget_memory(options.device)
    host = HostMemory()
    marks = [time.perf_counter()]
    execution = teraio.execute(
        plan,
        ssd_path=options.ssd_path,
        host_memory=None if options.smoke else parse_bytes(options.host_memory, "host_memory"),
        device=options.device,
        on_exit="discard",
    )
    made: list[Trainee] = []

    def make() -> nn.Module:
        made.append(Trainee(setting, checkpoint=options.checkpoint))
        return made[0].model

    figures: dict[str, Any] = {}
    with _watch(options, plan.hardware) as watch, execution as run:
        marks.append(time.perf_counter())
        say(f"host memory and files made ready in {marks[1] - marks[0]:.0f} s")
        run.build(make)
        synchronize(options.device)
        marks.append(time.perf_counter())
        say(f"built in its tiers in {marks[2] - marks[1]:.0f} s")
        rates = None if watch is None else functools.partial(_told_rates, watch, run)
        figures |= _steps(options, made[0], findings, rates)
        figures |= peaks(options.device) | host.as_row()
        if options.save is not None:
            began = time.perf_counter()
            run.save(options.save)
            figures["saving_seconds"] = time.perf_counter() - began
    figures["losses"] = [float(loss) for loss in figures["losses"]]
    figures["opening_seconds"], figures["building_seconds"] = (
        marks[1] - marks[0],
        marks[2] - marks[1],
    )
    if options.watch_disk is None:  # Else its own clock has the pauses in it.
        figures["measured_seconds"] = run.report.measured_seconds
        figures["recent"] = [asdict(each) for each in run.report.recent]
    if options.timeline is not None:
        run.report.timeline.save(options.timeline)
    figures["ssd_files"] = [vars(use) for use in run.report.ssd_files]
    _say_rates(run.report.ssd_files, plan.hardware)
    figures["made_on"] = made_on(options.device)
    return figures | {name: getattr(run.report, name) for name in REPORTED}


@contextmanager
def _watch(options: argparse.Namespace, hardware: Hardware) -> Iterator[DiskWatch | None]:
    if options.watch_disk is None:
        yield None
        return
    amounts = {"half_bytes": 2**20, "num_transfers": 8} if options.smoke else {}
    with DiskWatch(hardware.ssd[0], options.ssd_path, **amounts) as watch:
        yield watch


def _say_rates(uses: Sequence[FileUse], hardware: Hardware) -> None:
    """What the files did, beside what the hardware that was planned for says."""
    planned = {ssd.name: ssd for ssd in hardware.ssd}
    for use in uses:
        ssd = planned[use.device]
        pairs = {
            "read": (use.read_rate, ssd.read_rate),
            "written": (use.write_rate, ssd.write_rate),
        }
        for verb, (of_run, of_plan) in pairs.items():
            if of_run is not None:
                rates = f"{format_rate(of_run)}, planned with {format_rate(of_plan)}"
                say(f"{use.device} in {use.path} {verb} at {rates}")


def _train_plainly(options: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    forget_memory(options.device)
    figures = _steps(options, Trainee(setting, checkpoint=options.checkpoint))
    figures["losses"] = [float(loss) for loss in figures["losses"]]
    return figures | peaks(options.device)


def _steps(
    options: argparse.Namespace,
    trainee: Trainee,
    findings: Findings | None = None,
    rates: Callable[[], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Losses stay tensors: what reads them inside a run would be one more kernel.

    With ``rates``, of the disk, the training pauses for them now and then; the first step after a
    pause does not count.
    """
    losses: list[Tensor] = []
    told: list[float] = []
    counted: list[float] = []
    disks: list[dict[str, float]] = []

    def tell(_: int, seconds: float) -> None:
        say(f"step {len(told)}: {format_seconds(seconds)}")
        told.append(seconds)
        if findings is not None:
            findings.add("seconds_so_far", told)

    for begin, end in _stretches(options.steps, None if rates is None else options.watch_disk):
        if rates is not None and begin > 0:
            disks.append(rates())
        step = functools.partial(_step, trainee, begin)
        found, seconds = run_told(step, end - begin, options.device, tell)
        losses += found
        counted += seconds[1:] if begin > 0 else []
    if rates is None:
        counted = told[WARM_UP:]
    else:
        disks.append(rates())
    return {
        "losses": losses,
        "all_step_seconds": told,
        "step_seconds": statistics.median(counted or told[2:] or told),
        "disks": disks,
    }


def _step(trainee: Trainee, begin: int, number: int) -> Tensor:
    return trainee.step(begin + number)


def _stretches(num_steps: int, length: int | None) -> list[tuple[int, int]]:
    """Begin and end of steps without a pause: all, or those that do not count and then ``length``
    each.
    """
    begins = [0] if length is None else [0, *range(WARM_UP, num_steps, length)]
    return list(pairwise([*begins, num_steps]))


def _told_rates(watch: DiskWatch, run: Execution) -> dict[str, float]:
    rates = watch.rates(lambda: run.report.ssd_files)
    say("disk now: " + ", ".join(f"{kind} {format_rate(rate)}" for kind, rate in rates.items()))
    return rates


if __name__ == "__main__":
    main()
