"""Write budgets of the SSDs: so many bytes per second of iteration, and no more.

The guide gets them as a constraint. A choice keeps to them version by version: all moves of one
version go to one device, so that it is written once, and the versions that are away longest for
each byte written are written first. What is left over goes to the host, or stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from teraio.contracts.hardware import HOST
from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.fluid.formulation import FluidProgram
from teraio.planner.fluid.slots import Slots
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.repairing import repair
from teraio.planner.optimal.repetition import Repeated
from teraio.planner.optimal.tier_fitting import fit_tiers

_GUIDE_SHARE = 0.98
"""Of a budget that the guide may use: rounding and repair need some."""

_ROUNDING = 1e-9


def limit_guide(
    fluid: FluidProgram, problem: Problem, slots: Slots, repeated: Repeated | None
) -> FluidProgram:
    """The guide's program with (10) of :mod:`teraio.planner.fluid.formulation` for each SSD with a
    budget; slots of the repeated turn count as often as it stands for.
    """
    budgets = problem.hardware.write_budgets(problem.trace.metadata.rank)
    weight = np.ones(len(slots))
    if repeated is not None:
        weight[repeated.first_slot : repeated.end_slot] = repeated.times
    for tier, columns in zip(fluid.tiers, fluid.tier_columns, strict=True):
        if tier.name in budgets:
            rate = _GUIDE_SHARE * budgets[tier.name] * fluid.second_unit / fluid.byte_unit
            most = rate * float(weight @ slots.seconds) / fluid.second_unit
            entries = np.r_[columns.written, fluid.stalls], np.r_[weight, -rate * weight]
            fluid = _with_row(fluid, *entries, most)
    return fluid


def _with_row(
    fluid: FluidProgram, columns: IntArray, values: FloatArray, upper: float
) -> FluidProgram:
    program = fluid.program
    order = np.argsort(columns)
    row = np.full(len(columns), len(program.row_lower))
    longer = replace(
        program,
        row_lower=np.r_[program.row_lower, -np.inf],
        row_upper=np.r_[program.row_upper, upper],
        rows=np.r_[program.rows, row],
        columns=np.r_[program.columns, columns[order]],
        values=np.r_[program.values, values[order]],
    )
    return replace(fluid, program=longer)


def repair_within_budgets(problem: Problem, device: IntArray, seconds: float) -> IntArray | None:
    """The choice with further rows until it fits, also the tiers, and within the budgets of an
    iteration of ``seconds``; None if no such choice is found.
    """
    repaired = repair(problem, device)
    if repaired is None:
        return None
    fitted = fit_tiers(problem, repaired) if problem.is_small else repaired
    if keeps_to_budgets(problem, fitted, seconds):
        return fitted
    if keeps_to_budgets(problem, repaired, seconds):
        return repaired
    kept = _worth_writing(problem, repaired, seconds)
    limited = _limited_devices(problem)
    capacity_bytes = problem.machine.capacity_bytes.copy()
    capacity_bytes[list(limited)] = 0
    is_open = bool((capacity_bytes > 0).any())
    closed = replace(problem, machine=problem.machine._replace(capacity_bytes=capacity_bytes))
    further = repair(closed, kept)
    if further is None or (not is_open and (further != kept).any()):
        return None
    result = _on_one_device(problem, further, kept)
    return result if keeps_to_budgets(problem, result, seconds) else None


def keeps_to_budgets(problem: Problem, device: IntArray, seconds: float) -> bool:
    """Whether a choice writes no more to each SSD than it may in an iteration of ``seconds``."""
    limited = _limited_devices(problem)
    if not limited:
        return True
    written = _bytes_written(problem, device)
    return all(
        written[index] <= rate * seconds * (1 - _ROUNDING) for index, rate in limited.items()
    )


def _limited_devices(problem: Problem) -> dict[int, float]:
    """Bytes per second by index of the device."""
    budgets = problem.hardware.write_budgets(problem.trace.metadata.rank)
    return {problem.machine.devices.index(name): rate for name, rate in budgets.items()}


def _bytes_written(problem: Problem, device: IntArray) -> IntArray:
    """Per device, int64 (devices,)."""
    rows = np.flatnonzero(problem.writes(device))
    result: IntArray = np.zeros(len(problem.machine.devices), dtype=np.int64)
    np.add.at(result, device[rows], problem.num_bytes[rows])
    return result


def _versions(problem: Problem) -> IntArray:
    """Number of each row's version, int64 (rows,)."""
    result: IntArray = np.empty(len(problem.period), dtype=np.int64)
    result[problem.by_version] = np.cumsum(problem.begins_version) - 1
    return result


def _worth_writing(problem: Problem, device: IntArray, seconds: float) -> IntArray:
    """The choice with only those versions on limited SSDs for which their budgets last: longest
    away per byte written first. The others go to the host if there is one, else they stay.
    """
    version = _versions(problem)
    num_versions = int(version.max(initial=-1)) + 1
    elsewhere = problem.machine.devices.index(HOST) if problem.hardware.host.memory_bytes else STAYS
    result = device.copy()
    for index, rate in _limited_devices(problem).items():
        rows = np.flatnonzero(device == index)
        away = np.bincount(version[rows], weights=problem.seconds[rows], minlength=num_versions)
        size = np.zeros(num_versions)
        size[version[rows]] = np.where(problem.is_unwritten[rows], 0, problem.num_bytes[rows])
        order = np.argsort(-away, kind="stable")
        is_kept = np.zeros(num_versions, dtype=bool)
        is_kept[order] = np.cumsum(size[order]) <= rate * seconds * (1 - _ROUNDING)
        result[rows[~is_kept[version[rows]]]] = elsewhere
    return _on_one_device(problem, result, result)


def _on_one_device(problem: Problem, device: IntArray, home: IntArray) -> IntArray:
    """The choice with all rows of a version on the limited SSD that some row has in ``home``."""
    version = _versions(problem)
    result = device.copy()
    for index in _limited_devices(problem):
        has_home = np.zeros(int(version.max(initial=-1)) + 1, dtype=bool)
        has_home[version[home == index]] = True
        result[has_home[version] & (device != STAYS)] = index
    return result
