"""What training costs: dollars per token, and how long the SSDs last (docs/cost.md).

    dollars per second = ranks x (price of the node / GPUs of the node / life
                                  + watts per GPU / 1000 x dollars per kWh / 3600)
    dollars per million tokens = dollars per second x seconds per iteration
                                 / tokens per iteration x 10^6
    years of an SSD = endurance / (bytes written per iteration / seconds per iteration)
                      / seconds per year

The price is written off evenly over the life, in which the machine trains without a pause. All
ranks are taken to be as fast, and to write as much, as the one that was planned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from teraio.contracts.hardware import SECONDS_PER_YEAR
from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.errors import CapacityError, InputError
from teraio.traces.trace import Trace
from teraio.units import format_bytes

LIFE_YEARS = 5.0
"""In which the price of a machine is written off, unless told otherwise."""

_BYTES_OF_INTEGER = {"int64": 8, "int32": 4}


def dollars_per_million_tokens(
    plan: Plan,
    *,
    life_years: float = LIFE_YEARS,
    watts_per_gpu: float = 0.0,
    dollars_per_kilowatt_hour: float = 0.0,
) -> float | None:
    """What a million tokens cost on the plan's machine, by the module's formula.

    ``life_years`` is what the price is spread over. ``watts_per_gpu``, the whole node's power
    divided by its GPUs, times ``dollars_per_kilowatt_hour`` adds electricity; both are 0 unless
    given. None where prices or tokens are unknown, and for the ideal, which no machine can run.
    Raises InputError for a life that is not above 0, and for a negative power or price of it.
    """
    if not 0 < life_years < math.inf:
        raise InputError(f"life_years: must be above 0 and finite, got {life_years}")
    power = {
        "watts_per_gpu": watts_per_gpu,
        "dollars_per_kilowatt_hour": dollars_per_kilowatt_hour,
    }
    for name, value in power.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name}: must be finite and not negative, got {value}")
    metadata, hardware = plan.metadata, plan.hardware
    price_dollars = hardware.price_dollars
    if price_dollars is None or not metadata.tokens or metadata.planner == "ideal":
        return None
    capital = price_dollars / len(hardware.gpu) / (life_years * SECONDS_PER_YEAR)
    electricity = watts_per_gpu / 1000 * dollars_per_kilowatt_hour / 3600
    per_second = metadata.world_size * (capital + electricity)
    return per_second * plan.predicted_seconds / metadata.tokens * 1e6


def years_of_ssds(plan: Plan) -> float | None:
    """Years until the first SSD has been written as often as it may be, training without a pause.

    Infinite if nothing is written; None if the endurance of an SSD that is written is unknown.
    """
    years = math.inf
    hardware = plan.hardware
    for ssd in hardware.ssd:
        written = plan.metadata.ssd_bytes_written.get(ssd.name, 0)
        written *= min(plan.metadata.world_size, hardware.num_gpus_of_ssd(ssd))
        if not written:
            continue
        if ssd.endurance_bytes is None:
            return None
        iterations = ssd.endurance_bytes / written
        years = min(years, iterations * plan.predicted_seconds / SECONDS_PER_YEAR)
    return years


class ExcessWrites(NamedTuple):
    """Bytes per iteration that a plan writes to an SSD, and the fewer that its budget allows."""

    ssd: str
    written_bytes: int
    allowed_bytes: int

    def error(self, planner: str) -> CapacityError:
        """What to raise for a plan of ``planner``."""
        return CapacityError(
            f"{self.ssd}: the plan of {planner} would write {self.written_bytes} bytes "
            f"({format_bytes(self.written_bytes)}) to it per iteration, but its write budget "
            f"allows {self.allowed_bytes} ({format_bytes(self.allowed_bytes)}); ask for fewer "
            "ssd_years, or give more host memory"
        )


def excess_writes(plan: Plan) -> ExcessWrites | None:
    """The first SSD to which the plan writes more than its write budget allows, if there is one."""
    metadata = plan.metadata
    for name, bytes_per_second in plan.hardware.write_budgets(metadata.rank).items():
        allowed = int(bytes_per_second * plan.predicted_seconds)
        written = metadata.ssd_bytes_written.get(name, 0)
        if written > allowed:
            return ExcessWrites(name, written, allowed)
    return None


def check_endurance(plan: Plan) -> None:
    """Raise CapacityError for a plan that writes more to an SSD than its write budget allows."""
    excess = excess_writes(plan)
    if excess is not None:
        raise excess.error(plan.metadata.planner)


def tokens_of(trace: Trace) -> int | None:
    """Tokens that all ranks together train on in one iteration; None where that is unknown.

    As the trace's metadata says, or else the integers that embeddings look up: of each input of
    theirs, every element once, times the ranks if they are replicas. Ranks that exchange anything
    but sends and receives (collectives) are taken for replicas, others for stages of one pipeline.
    """
    if trace.metadata.tokens is not None:
        return trace.metadata.tokens
    looked_up = _looked_up_inputs(trace)
    storages = trace.storages
    per_micro_batch: dict[int, int] = {}
    for storage, micro_batch in looked_up:
        size = _BYTES_OF_INTEGER.get(str(storages.dtype[storage]))
        if size is None:
            return None
        # Tokens, their positions and their types are as many: the longest counts.
        count = int(storages.nbytes[storage]) // size
        per_micro_batch[micro_batch] = max(per_micro_batch.get(micro_batch, 0), count)
    tokens = sum(per_micro_batch.values())
    kernels = trace.kernels
    is_replica = bool(((kernels.group != "") & (kernels.peer_rank == MISSING)).any())
    return tokens * (trace.metadata.world_size if is_replica else 1) or None


def _looked_up_inputs(trace: Trace) -> list[tuple[int, int]]:
    """Inputs that embeddings of the forward pass read, each with the micro-batch."""
    kernels, accesses = trace.kernels, trace.accesses
    is_input = (trace.storages.kind == "input").astype(bool)
    rows = np.flatnonzero(is_input[accesses.storage] & accesses.reads)
    pairs = {
        (storage, int(kernels.micro_batch[kernel]))
        for storage, kernel in zip(
            accesses.storage[rows].tolist(), accesses.kernel[rows].tolist(), strict=True
        )
        if kernels.op[kernel].startswith("aten.embedding.")
    }
    return sorted(pairs)
