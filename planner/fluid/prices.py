"""What a little more of something would be worth: slopes of the fluid program's optimum."""

from __future__ import annotations

from teraio.contracts.hardware import HOST
from teraio.contracts.table import FloatArray
from teraio.planner.fluid.channels import channel_names, hull_of
from teraio.planner.fluid.formulation import FluidProgram, RateRow

GB = 1e9
_STEP = 1e-6


def prices_of_memory(fluid: FluidProgram, duals: FloatArray) -> dict[str, float]:
    """Seconds saved per further GB of the GPU and of each tier, by name."""
    per_gb = fluid.second_unit * GB / fluid.byte_unit
    result = {"gpu": max(0.0, float(duals[fluid.memory_rows].sum()) * per_gb)}
    for tier in fluid.tiers:
        rows = fluid.capacity_rows.get(tier.name)
        result[tier.name] = 0.0 if rows is None else max(0.0, -float(duals[rows].sum()) * per_gb)
    return result


def prices_of_rates(fluid: FluidProgram, duals: FloatArray, values: FloatArray) -> dict[str, float]:
    """Seconds saved per further GB/s of each channel and link direction, duplex rates alike."""
    result = {name: 0.0 for shared in fluid.shared for name in channel_names(shared)}
    for row in fluid.rate_rows:
        names = channel_names(row.shared)
        for name, slope in zip(names, _slopes(fluid, row, duals, values), strict=True):
            result[name] += max(0.0, slope)
    if len(fluid.host_memory_rows):
        result[f"{HOST} memory"] = _host_memory_slope(fluid, duals, values)
    return result


def _slopes(
    fluid: FluidProgram, row: RateRow, duals: FloatArray, values: FloatArray
) -> tuple[float, float]:
    """Per GB/s more of reading and of writing, by difference quotients of the face's coefficients.

    A row was divided by its largest seconds per byte, so its dual is per byte unit.
    """
    rates = row.shared.rates
    read, write = hull_of(rates)[row.face]
    scale = max(read, write)
    by_name = {t.name: c for t, c in zip(fluid.tiers, fluid.tier_columns, strict=True)}
    columns = [by_name[name] for name in row.shared.devices]
    weight = -duals[row.rows] / scale * fluid.second_unit
    bytes_read = sum(float(weight @ values[c.read]) for c in columns)
    bytes_written = sum(float(weight @ values[c.written]) for c in columns)
    slopes = []
    for step in (
        {"faster_reads": _STEP * rates.read_rate},
        {"faster_writes": _STEP * rates.write_rate},
    ):
        faces = hull_of(rates, **step)
        faster_read, faster_write = faces[min(row.face, len(faces) - 1)]
        saved = bytes_read * (read - faster_read) + bytes_written * (write - faster_write)
        slopes.append(saved / sum(step.values()) * GB)
    return slopes[0], slopes[1]


def _host_memory_slope(fluid: FluidProgram, duals: FloatArray, values: FloatArray) -> float:
    weight = -duals[fluid.host_memory_rows] * fluid.second_unit
    bytes_moved = 0.0
    for tier, columns in zip(fluid.tiers, fluid.tier_columns, strict=True):
        flow = values[columns.read] + values[columns.written]
        bytes_moved += tier.memory_weight * float(weight @ flow)
    return max(0.0, bytes_moved / fluid.host_memory_rate * GB)
