"""What ZeRO-Offload and ZeRO-Infinity share: an optimizer step on the host, and moves around it.

A gradient has left the GPU before the first host kernel that uses it, and an updated parameter
comes back after the last: both follow from the kernels at which memory is given back and taken.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teraio.contracts.hardware import HOST, Hardware, Ssd
from teraio.contracts.plan import Plan
from teraio.contracts.table import BoolArray, IntArray
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.plan_building import plan_of_original
from teraio.planner.retiming import Windows
from teraio.traces.lifetimes import InactivePeriods, inactive_periods
from teraio.traces.trace import Trace
from teraio.traces.transforms.cpu_optimizer import (
    CPU_ADAM_RATE,
    cpu_optimizer,
    find_host_step,
)
from teraio.traces.transforms.recompute import with_recomputation
from teraio.units import format_bytes

TRANSFORM = "cpu-optimizer"
_MODEL = ("parameter", "gradient")


@dataclass(frozen=True)
class HostStepTrace:
    """A trace with its optimizer step on the host, and what planning needs to know of the step.

    ``first_host`` and ``last_host`` int64 (S,) are the host kernels that use each storage, -1
    where none does. ``state_bytes`` of optimizer state never come to the GPU, of which
    ``written_bytes`` (with updated parameters, if those are streamed) are written per iteration.
    """

    original: Trace
    trace: Trace
    options: dict[str, Any]
    first_host: IntArray
    last_host: IntArray
    periods: InactivePeriods
    state_bytes: int
    written_bytes: int

    @property
    def rows(self) -> IntArray:
        """Periods of storages that can leave."""
        storages = self.trace.storages
        can_leave = storages.resizable & (storages.nbytes > 0)
        return np.flatnonzero(can_leave[self.periods.storage])

    def is_kind(self, rows: IntArray, kind: str) -> BoolArray:
        """Which of these periods belong to storages of a kind."""
        result: BoolArray = (self.trace.storages.kind[self.periods.storage[rows]] == kind).astype(
            bool
        )
        return result

    def spans_step(self, rows: IntArray) -> BoolArray:
        """Which of these periods hold all host kernels that use their storage."""
        first, last = self._host_kernels(rows)
        end = self.periods.end_kernel[rows] + self.periods.is_tail[rows]
        result: BoolArray = (first >= 0) & (first <= last) & (last < end)
        return result

    def limited(self, rows: IntArray, wanted: Windows) -> Windows:
        """The windows, cut so that gradients have left before the host kernels that use them and
        parameters are not taken back before these have run.
        """
        first, last = self._host_kernels(rows)
        spans = self.spans_step(rows)
        return Windows(
            np.where(spans, np.minimum(wanted.free_by, first), wanted.free_by),
            np.where(spans, np.maximum(wanted.prefetch_start, last + 1), wanted.prefetch_start),
        )

    def finish(self, plan: Plan, hardware: Hardware, state_device: str, started: float) -> Plan:
        """The plan for the original trace, with the state that never moves in its account.

        ``started`` is the ``time.perf_counter()`` at which planning began.
        """
        metadata = plan.metadata
        arena, written = dict(metadata.arena_bytes), dict(metadata.ssd_bytes_written)
        arena[state_device] = arena.get(state_device, 0) + self.state_bytes
        if state_device != HOST:
            written[state_device] = written.get(state_device, 0) + self.written_bytes
        metadata = replace(
            metadata,
            hardware=hardware.to_toml(),
            host_memory_bytes=hardware.host.memory_bytes,
            arena_bytes=arena,
            peak_host_bytes=arena.get(HOST, 0),
            ssd_bytes_written=written,
            planning_seconds=time.perf_counter() - started,
        )
        whole = replace(plan, metadata=metadata)
        return plan_of_original(whole, self.original, TRANSFORM, self.options)

    def _host_kernels(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """First and last host kernel of each period's storage, unrolled; -1 where none is."""
        num_kernels = self.trace.num_kernels
        storage, begin = self.periods.storage[rows], self.periods.after_kernel[rows] + 1
        first, last = self.first_host[storage], self.last_host[storage]
        return (
            np.where(first < 0, -1, begin + (first - begin) % num_kernels),
            np.where(last < 0, -1, begin + (last - begin) % num_kernels),
        )


def begin_host_step(
    trace: Trace,
    hardware: Hardware,
    *,
    recompute_layers: int = 0,
    streamed: tuple[str, ...] = (),
    ssd: Ssd | None = None,
) -> HostStepTrace:
    """Transform the trace; storages of ``streamed`` kinds lie on ``ssd`` between two steps.

    GPUs of one node share its memory, so each has its share of the host's rate. Raises
    InfeasibleError if the trace has no optimizer kernels.
    """
    with_activations = with_recomputation(trace, recompute_layers)
    step = find_host_step(with_activations)
    if not step.is_host.any():
        raise InfeasibleError(
            "the trace has no kernels of phase optimizer, so there is no step that the host could "
            "take; ZeRO-Offload and ZeRO-Infinity do not apply to it"
        )
    options = _transform_options(hardware, recompute_layers, streamed, ssd)
    changed = cpu_optimizer(trace, options)
    before, after = with_activations.storages, changed.storages
    # Every parameter and gradient is kept, in the same order.
    number = np.full(len(before), -1, dtype=np.int64)
    number[np.isin(before.kind, _MODEL)] = np.flatnonzero(np.isin(after.kind, _MODEL))
    first, last = (np.full(len(after), -1, dtype=np.int64) for _ in range(2))
    kept = number[step.storage] >= 0
    first[number[step.storage[kept]]] = step.first[kept]
    last[number[step.storage[kept]]] = step.last[kept]
    state_bytes = _bytes_of(trace, "optimizer_state") - _bytes_of(changed, "optimizer_state")
    is_written = step.writes & np.isin(
        before.kind[step.storage], [kind for kind in streamed if kind != "gradient"]
    )
    return HostStepTrace(
        original=trace,
        trace=changed,
        options=options,
        first_host=first,
        last_host=last,
        periods=inactive_periods(changed),
        state_bytes=state_bytes,
        written_bytes=int(before.nbytes[step.storage[is_written]].sum()),
    )


def _transform_options(
    hardware: Hardware, recompute_layers: int, streamed: tuple[str, ...], ssd: Ssd | None
) -> dict[str, Any]:
    host_rate = min(CPU_ADAM_RATE, hardware.host.memory_rate or CPU_ADAM_RATE)
    options: dict[str, Any] = {"host_rate": host_rate / len(hardware.gpu)}
    if recompute_layers:
        options["recompute_layers"] = recompute_layers
    if streamed:
        assert ssd is not None, "without an SSD every class is on the host"
        options |= {
            "streamed": list(streamed),
            "stream_read_rate": ssd.duplex_read_rate,
            "stream_write_rate": ssd.duplex_write_rate,
        }
    return options


def without_state(hardware: Hardware, device: str, state_bytes: int, policy: str) -> Hardware:
    """The machine less what the optimizer state takes of a device. Raises CapacityError."""
    room = {HOST: hardware.host.memory_bytes} | {s.name: s.capacity_bytes for s in hardware.ssd}
    left = room[device] - state_bytes
    if left < 0:
        raise CapacityError(
            f"the optimizer state takes {state_bytes} bytes ({format_bytes(state_bytes)}) of "
            f"{device} under {policy}, but {room[device]} are available"
        )
    if device == HOST:
        return hardware.with_budgets(host_memory=left)
    ssds = [replace(s, capacity_bytes=left) if s.name == device else s for s in hardware.ssd]
    return replace(hardware, ssd=tuple(ssds))


def _bytes_of(trace: Trace, kind: str) -> int:
    storages = trace.storages
    return int(storages.nbytes[(storages.kind == kind).astype(bool)].sum())
