"""The independent verifier: is a plan right for this trace, and can its promise be true?

Shares no code with any planner or with the simulator. Rules 1 to 16 judge the plan by itself and
stand in :mod:`teraio.contracts.plan_checks`. The rules here need the trace:

17. ``trace``: the plan carries this trace's hash, kernels, storages, accesses, rank and ideal time.
    If it names a transform, the tables are those of the transformed trace.
18. ``resizable``: no storage moves whose memory cannot be given back.
19. ``prediction``: predicted_seconds is not below the ideal (of the transformed trace, if there is
    one), nor below the lower bound, nor below the time that any channel (one direction of a
    device), link direction or the host's memory needs for the bytes of one iteration. Judged only
    if the plan is valid and fits: the moves of one that does not fit may be dropped at run time.
20. ``endurance``: the bytes that moves write to an SSD are within its write budget times
    predicted_seconds. A plan that breaks it is valid, but does not fit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from teraio.contracts.hardware import HOST, Hardware, Ssd, as_hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import find_violations
from teraio.contracts.table import MISSING, BoolArray, Table
from teraio.contracts.violations import Findings, Verification
from teraio.errors import InputError
from teraio.traces.trace import Trace, as_trace
from teraio.traces.transforms import trace_of_plan

RELATIVE_TOLERANCE = 1e-6
"""Room for rounding to integer picoseconds, kernel by kernel and transfer by transfer."""

_SAME_IN_BOTH = {
    "kernels": ("op", "signature", "phase", "module", "workspace_bytes"),
    "storages": (
        "name",
        "kind",
        "birth",
        "birth_ordinal",
        "death",
        "nbytes",
        "allocated_bytes",
    ),
    "accesses": ("kernel", "storage", "reads", "writes"),
}
_SAME_IN_METADATA = (
    "rank",
    "world_size",
    "micro_batches",
    "optimizer_steps",
    "bucket_bytes",
    "allocator_rounding_bytes",
)


def verify(
    trace: Trace | str | Path,
    plan: Plan | str | Path,
    hardware: Hardware | str | Path | None = None,
) -> Verification:
    """Judge ``plan`` for ``trace`` by rules 1 to 20; the first violations, and how many there are.

    ``trace`` is the one recorded, also for a plan that names a transform.
    ``hardware`` takes the place of the machine stored in the plan; budgets are then the smaller of
    the plan's and the machine's. A wrong plan is an answer, not an error: InputError is raised only
    for files that cannot be read.
    """
    trace = as_trace(trace)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    machine = None if hardware is None else as_hardware(hardware)
    findings = find_violations(plan, machine)
    _check_origin(trace, plan, findings)
    try:
        planned = trace_of_plan(trace, plan)
    except InputError as error:
        findings.add("metadata", None, "trace", str(error))
        return findings.verification()
    _check_tables(planned, plan, findings)
    _check_resizable(planned, plan, findings)
    verdict = findings.verification()
    if verdict.valid and verdict.fits:
        _check_prediction(planned, plan, machine or plan.hardware, findings)
    if verdict.valid:
        _check_endurance(plan, machine, findings)
    return findings.verification()


def _check_origin(trace: Trace, plan: Plan, findings: Findings) -> None:
    """Rule 17, what a plan keeps of the recorded trace."""
    metadata = plan.metadata
    if metadata.trace_hash != trace.hash:
        message = f"trace_hash: {metadata.trace_hash[:12]}... is not this trace's {trace.hash[:12]}"
        findings.add("metadata", None, "trace", message)
    if not np.isclose(metadata.ideal_seconds, trace.ideal_seconds, rtol=RELATIVE_TOLERANCE):
        message = f"ideal_seconds: the trace's is {trace.ideal_seconds}"
        findings.add("metadata", None, "trace", f"{message}, got {metadata.ideal_seconds}")


def _check_tables(planned: Trace, plan: Plan, findings: Findings) -> None:
    """Rule 17, what a plan keeps of the trace that its rows are about."""
    for name in _SAME_IN_METADATA:
        ours, theirs = getattr(plan.metadata, name), getattr(planned.metadata, name)
        if ours != theirs:
            findings.add("metadata", None, "trace", f"{name}: the trace has {theirs}, got {ours}")
    for table, columns in _SAME_IN_BOTH.items():
        _check_same(table, columns, getattr(planned, table), getattr(plan, table), findings)


def _check_same(
    name: str, columns: tuple[str, ...], expected: Table, actual: Table, findings: Findings
) -> None:
    if len(expected) != len(actual):
        message = f"the trace has {len(expected)} rows, got {len(actual)}"
        findings.add(name, None, "trace", message)
        return
    for column in columns:
        ours, theirs = getattr(actual, column), getattr(expected, column)
        differs: BoolArray = (ours != theirs).astype(bool)
        findings.refuse(
            differs,
            name,
            "trace",
            lambda row, column=column, ours=ours, theirs=theirs: (  # type: ignore[misc]
                f"{column}: the trace has {theirs[row]!s}, got {ours[row]!s}"
            ),
        )


def _check_resizable(trace: Trace, plan: Plan, findings: Findings) -> None:
    """Rule 18."""
    storage = plan.moves.storage
    known = (storage >= 0) & (storage < len(trace.storages))
    if not len(trace.storages):
        return
    fixed = known & ~trace.storages.resizable[np.where(known, storage, 0)]
    findings.refuse(
        fixed,
        "moves",
        "resizable",
        lambda row: f"the memory of storage {storage[row]} cannot be given back, so it never moves",
    )


def _check_prediction(trace: Trace, plan: Plan, machine: Hardware, findings: Findings) -> None:
    """Rule 19."""
    predicted = plan.metadata.predicted_seconds
    least = {
        "lower_bound_seconds": plan.metadata.lower_bound_seconds,
        "the ideal": trace.ideal_seconds,
    }
    for what, seconds in (least | least_transfer_seconds(plan, machine)).items():
        if predicted < seconds * (1 - RELATIVE_TOLERANCE):
            message = f"predicted_seconds: {predicted:.9g} is below {seconds:.9g} of {what}"
            findings.add("metadata", None, "prediction", message)


def _check_endurance(plan: Plan, machine: Hardware | None, findings: Findings) -> None:
    """Rule 20; of two budgets the smaller holds."""
    moves, seconds = plan.moves, plan.metadata.predicted_seconds
    for ssd in (*plan.hardware.ssd, *(machine.ssd if machine is not None else ())):
        if ssd.write_budget is None:
            continue
        written = int(moves.nbytes[moves.writes & (moves.device == ssd.name).astype(bool)].sum())
        allowed = ssd.write_budget * seconds
        if written > allowed * (1 + RELATIVE_TOLERANCE):
            message = f"{ssd.name}: {written} bytes per iteration are above {allowed:.9g}"
            findings.add("moves", None, "endurance", message)


def least_transfer_seconds(plan: Plan, machine: Hardware) -> dict[str, float]:
    """Seconds per iteration that each channel, link direction and the host's memory is busy at
    least: transfers x latency + bytes / solo rate (links and memory: bytes / rate alone).
    """
    moves, rank = plan.moves, plan.metadata.rank
    link = machine.link_of_rank(rank)
    directions = {"read": moves.prefetch_start != MISSING, "write": moves.writes}
    rates = {"read": link.read_rate, "write": link.write_rate}
    least: dict[str, float] = {}
    memory_bytes = 0
    for way, moving in directions.items():
        least[f"link {link.name} {way}"] = int(moves.nbytes[moving].sum()) / rates[way]
        for device in (machine.host, *machine.ssds_of_rank(rank)):
            name = device.name if isinstance(device, Ssd) else HOST
            mine = moving & (moves.device == name).astype(bool)
            num_bytes = int(moves.nbytes[mine].sum())
            solo_rate = device.read_rate if way == "read" else device.write_rate
            rate = min(solo_rate, rates[way])
            latency = device.latency_seconds + link.latency_seconds
            least[f"{name} {way}"] = int(mine.sum()) * latency + num_bytes / rate
            if not isinstance(device, Ssd):
                memory_bytes += num_bytes
            elif not device.gds:
                # It crosses host memory twice: into the bounce buffer, and out again.
                memory_bytes += 2 * num_bytes
    if machine.host.memory_rate is not None:
        least["host memory"] = memory_bytes / machine.host.memory_rate
    return least
