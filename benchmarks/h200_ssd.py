"""One GPU, the SSD tier alone: are stalls as predicted, is every byte right, is memory flat?

Training is timed plain, traced, and planned for a budget a little below its peak with no host tier,
so that a disk of some 2 GB/s can carry what must move. The plan runs twice: unchecked, for its time
beside the prediction, and with every transfer's checksum compared, for many steps, whose losses are
compared bit by bit. Prints lines for people and one JSON object.

    python benchmarks/h200_ssd.py --directory /mnt/nvme --share 0.95 --checked-steps 100
    python benchmarks/h200_ssd.py --kept FOLDER --output ssd.json     # in parts: goes on
    python benchmarks/h200_ssd.py --smoke

--kept is a folder for trace, hardware and plan, each made only if it is not there; --output gets
the plain run, the timed and the checked one as each ends, and what it has is not run again. Each
line says when it was written. Before the checked run the time that it needs is said; with
--checked-seconds it ends in time, and what has been checked by then counts.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from benchmarks.h200_rows import Setting
    from benchmarks.h200_training import (
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
    )
    from benchmarks.partial_results import Findings, kept
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import Setting
    from h200_training import (
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
    )
    from partial_results import Findings, kept

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.executor.report import RunReport
from teraio.traces.trace import Trace
from teraio.units import format_bytes, format_rate, format_seconds

BEGAN = time.perf_counter()
Made = TypeVar("Made")

WARM_UP = 4
SETTLED = 0.3
"""Share of the checked steps after which memory must no longer grow."""

TOLD_STEPS = 10
"""Of the checked run: after so many it says how it gets on."""

# Where the training thread had to wait for a disk it is not ahead of the GPU any more, and the many
# small kernels of the foreach implementation are over sooner than it issues them.
GPU = Setting(model="bench-0.7b", micro_batch_size=2, optimizer="fused", exact=True)
TOY = Setting(model="tiny-llama", micro_batch_size=2, sequence=16, exact=True, device="cpu")


SUBJECT = (
    *("smoke", "micro_batch_size", "share", "planner", "bandwidth_share", "ssd_backend"),
    *("timed_steps", "checked_steps", "plain_steps"),
)
"""Options that decide what is found."""


def say(text: str) -> None:
    """A line with the seconds since the script began."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


def clocked(what: str, make: Callable[[], Made]) -> Callable[[], Made]:
    """``make``, with a line before and one after it that says how long it took."""

    def made() -> Made:
        say(f"{what} begins")
        began = time.perf_counter()
        result = make()
        say(f"{what} took {time.perf_counter() - began:.1f} s")
        return result

    return made


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def traced(setting: Setting) -> Trace:
    """One steady iteration."""
    forget_memory(setting.device)
    trainee = Trainee(setting)
    with teraio.profile(trainee.model, trainee.optimizer) as profile:
        number = 0
        while not profile.done:
            trainee.step(number)
            profile.step()
            number += 1
    return profile.trace


def limited(trace: Trace, hardware: Hardware, options: argparse.Namespace) -> Hardware:
    """All that must move goes to disk: host memory is for bounce buffers only."""
    bounce_bytes = sum(ssd.bounce_bytes for ssd in hardware.ssd)
    return hardware.with_budgets(
        gpu_memory=int(options.share * trace.peak_allocated_bytes), host_memory=bounce_bytes
    )


def planned(trace: Trace, hardware: Hardware, options: argparse.Namespace) -> Plan:
    """The plan for the machine as probed."""
    return teraio.plan(
        trace,
        limited(trace, hardware, options),
        planner=options.planner,
        bandwidth_share=options.bandwidth_share,
        time_limit=options.time_limit,
    )


def execute(
    plan: Plan,
    setting: Setting,
    options: argparse.Namespace,
    use: Callable[[Callable[[int], Any]], Any],
    **more: Any,
) -> tuple[RunReport, Any]:
    """Run ``use`` with the step of a training under the plan."""
    forget_memory(setting.device)
    trainee = Trainee(setting)
    with teraio.execute(
        plan,
        trainee.model,
        trainee.optimizer,
        ssd_path=options.directory,
        ssd_backend=options.ssd_backend,
        **more,
    ) as run:
        used = use(trainee.step)
    return run.report, used


def plainly(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Without a plan: seconds of a step, and the losses of the first steps that are checked."""
    trainee = Trainee(setting)
    window = run_window(trainee.step, 0, options.plain_steps, setting.device)
    say(f"plain {format_seconds(window.step_seconds)}")
    return window.as_row()


def predict(plan: Plan, trace: Trace, hardware: Hardware, options: argparse.Namespace) -> Timeline:
    """By the machine as probed, and said before anything runs under the plan."""
    predicted = teraio.simulate(trace, plan, limited(trace, hardware, options))
    account = predicted.metadata
    say(f"{plan}; moves {account.channel_bytes}")
    for ssd in hardware.ssd:
        rates = " and ".join(format_rate(rate) for rate in (ssd.read_rate, ssd.write_rate))
        both = (ssd.duplex_read_rate, ssd.duplex_write_rate)
        at_once = " and ".join(format_rate(rate) for rate in both)
        latency = format_seconds(ssd.latency_seconds)
        say(f"{ssd.name} as probed: reads and writes {rates}, at once {at_once}, latency {latency}")
    say(
        f"predicted {format_seconds(predicted.iteration_seconds)} a step, of which stalled for "
        f"reads {format_seconds(account.stall_read_seconds)}, for memory "
        f"{format_seconds(account.stall_memory_seconds)}"
    )
    return predicted


def say_rates(report: RunReport, hardware: Hardware) -> None:
    """What the files of a run did, beside what the probe says of their device."""
    probed = {ssd.name: ssd for ssd in hardware.ssd}
    for use in report.ssd_files:
        ssd = probed[use.device]
        pairs = (use.read_rate, ssd.read_rate), (use.write_rate, ssd.write_rate)
        read, written = (
            f"{format_rate(of_run)} (probed {format_rate(of_probe)})" if of_run else "nothing"
            for of_run, of_probe in pairs
        )
        say(f"{use.device} in {use.path}, {use.backend}: read {read}, written {written}")


def timed(
    plan: Plan,
    predicted: Timeline,
    hardware: Hardware,
    setting: Setting,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Unchecked: its time and stalls beside those predicted, memory, what the files did."""
    report, window = execute(
        plan,
        setting,
        options,
        lambda step: run_window(step, WARM_UP, options.timed_steps, setting.device),
    )
    say_rates(report, hardware)
    measured, simulated = window.step_seconds, predicted.iteration_seconds
    say(
        f"measured {format_seconds(measured)}, simulated {format_seconds(simulated)}: error "
        f"{simulated / measured - 1:+.1%}"
    )
    account, expected = report.timeline.metadata, predicted.metadata
    return {
        "budget_bytes": report.budget_bytes,
        "simulated_seconds": simulated,
        "measured_seconds": measured,
        "prediction_error": simulated / measured - 1,
        "stall_seconds": {
            "read": [account.stall_read_seconds, expected.stall_read_seconds],
            "memory": [account.stall_memory_seconds, expected.stall_memory_seconds],
            "host": [account.stall_host_seconds, expected.stall_host_seconds],
        },
        "demand_fetches": report.demand_fetches,
        "evictions": report.evictions,
        "ssd_files": [vars(use) for use in report.ssd_files],
        "probed_ssds": [asdict(ssd) for ssd in hardware.ssd],
        **peaks(setting.device),
    }


def checked(
    plan: Plan, step_seconds: float, setting: Setting, options: argparse.Namespace
) -> dict[str, Any]:
    """Many steps with every transfer compared; memory is looked at along the way.

    ``step_seconds`` is what a step takes unchecked. Fewer steps if the time for them is over.
    """
    whole_seconds = options.checked_steps * step_seconds
    say(f"{options.checked_steps} checked steps need {whole_seconds:.0f} s and what checking takes")
    resident: list[int] = []

    def train(step: Callable[[int], Any]) -> list[float]:
        losses, began = [], time.perf_counter()
        for number in range(options.checked_steps):
            losses.append(step(number))
            resident.append(resident_bytes())
            spent_seconds = time.perf_counter() - began
            if spent_seconds >= options.checked_seconds:
                break
            if (number + 1) % TOLD_STEPS == 0:
                each = spent_seconds / (number + 1)
                to_come = (options.checked_steps - number - 1) * each
                say(f"{number + 1} checked steps, {each:.2f} s each; all need {to_come:.0f} s more")
        return [float(loss) for loss in losses]

    report, losses = execute(plan, setting, options, train, verify_transfers=True)
    return {
        "losses": losses,
        "verified_reads": report.verified_reads,
        "resident_grown_bytes": resident[-1] - resident[round(SETTLED * (len(resident) - 1))],
    }


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as far as an earlier run has not found them."""
    prepare_process(setting)
    findings = Findings(options.output, {name: getattr(options, name) for name in SUBJECT})

    def path(name: str) -> Path | None:
        return None if options.kept is None else options.kept / f"ssd-{setting.name}-{name}"

    plain = findings.find("plain", clocked("plain run", lambda: plainly(setting, options)))
    trace = kept(path("trace"), Trace.load, clocked("trace", lambda: traced(setting)))
    forget_memory(setting.device)
    probing = clocked("probe", lambda: probed(setting, options))
    hardware = kept(path("hardware.toml"), Hardware.load, probing)
    planning = clocked("planning", lambda: planned(trace, hardware, options))
    plan = kept(path(f"{options.share:g}.plan"), Plan.load, planning)
    predicted = predict(plan, trace, hardware, options)
    running = clocked("timed run", lambda: timed(plan, predicted, hardware, setting, options))
    run = findings.find("timed", running)
    step_seconds = run["measured_seconds"]
    checking = clocked("checked run", lambda: checked(plan, step_seconds, setting, options))
    proof = findings.find("checked", checking)
    compared_steps = min(len(proof["losses"]), len(plain["losses"]))
    result = {
        "made_on": made_on(setting.device),
        "setting": setting.title,
        "plain_seconds": plain["step_seconds"],
        "peak_allocated_bytes": trace.peak_allocated_bytes,
        "bytes_per_step": predicted.metadata.channel_bytes,
        **run,
        "checked_steps": len(proof["losses"]),
        "verified_reads": proof["verified_reads"],
        "compared_steps": compared_steps,
        "losses_identical": proof["losses"][:compared_steps] == plain["losses"][:compared_steps],
        "resident_grown_bytes": proof["resident_grown_bytes"],
    }
    findings.add("result", result)
    return result


def probed(setting: Setting, options: argparse.Namespace) -> Hardware:
    """This machine; its disk at the sizes that are moved, for long enough to be past its cache."""
    if options.hardware is not None:
        return Hardware.load(options.hardware)
    return teraio.probe(
        device=setting.device,
        directory=options.directory,
        quick=options.quick,
        sizes=options.sizes.split(",") if options.sizes else None,
        sustained=options.sustained,
        progress=say,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the files lie")
    parser.add_argument("--share", type=float, default=0.95, help="budget, of the plain peak")
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--bandwidth-share", type=float, default=0.9)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--ssd-backend", default="auto", choices=["auto", "gds", "file"])
    parser.add_argument("--micro-batch-size", type=int, help=f"[default: {GPU.micro_batch_size}]")
    parser.add_argument("--timed-steps", type=int, default=10)
    parser.add_argument("--checked-steps", type=int, default=100)
    parser.add_argument(
        "--checked-seconds", type=float, default=math.inf, help="after which no more are begun"
    )
    parser.add_argument(
        "--plain-steps", type=int, help="whose losses are compared [default: all that are checked]"
    )
    parser.add_argument("--hardware", help="file [default: probe]")
    parser.add_argument("--quick", action="store_true", help="probe in seconds, roughly")
    parser.add_argument("--sizes", help="of the probe's transfers, such as 16MiB,64MiB")
    parser.add_argument("--sustained", type=float, help="seconds for which the probe writes")
    parser.add_argument("--kept", type=Path, help="folder for trace, hardware and plan")
    parser.add_argument("--output", type=Path, help="file of what each part has found")
    parser.add_argument("--smoke", action="store_true", help="toy size on a CPU")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.smoke:
        options.quick, options.checked_steps, options.timed_steps = True, 20, 5
    options.plain_steps = min(options.plain_steps or math.inf, options.checked_steps)
    setting = TOY if options.smoke else GPU
    if options.micro_batch_size is not None:
        setting = replace(setting, micro_batch_size=options.micro_batch_size)
    found = measure(setting, options)
    print(json.dumps(found))
    grown = format_bytes(found["resident_grown_bytes"])
    say(
        f"error {found['prediction_error']:+.1%}, {found['checked_steps']} steps with "
        f"{found['verified_reads']} reads verified, losses of {found['compared_steps']} identical: "
        f"{found['losses_identical']}, grown by {grown}"
    )
    if not found["losses_identical"] or not found["verified_reads"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
