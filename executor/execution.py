"""Executing a plan in real training: the context manager around a loop, and unmodified scripts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import find_violations
from teraio.contracts.timeline import Timeline
from teraio.errors import InputError, OffloadWarning
from teraio.executor.measured_timeline import build_timeline, median_seconds, steady_records
from teraio.executor.mode import ExecutorMode
from teraio.executor.placement import Placement
from teraio.executor.read_guard import ReadGuard
from teraio.executor.residency import Residency
from teraio.executor.schedule import prepare_schedule
from teraio.executor.tiers import Tiers, open_tiers
from teraio.profiler.allocator_settings import exact_blocks
from teraio.profiler.scripts import run_script as run_training_script
from teraio.units import parse_bytes

ON_DRIFT = ("fetch", "stop")


@dataclass(frozen=True)
class RunReport:
    """What an executed run did. Seconds, bytes; counts are totals after the warm-up.

    ``measured_seconds`` is the median length of its steady iterations, ``drift`` the number of
    kernels that were not the planned ones, ``first_drift`` says what the first of them was.
    """

    steps: int
    warm_up_steps: int
    measured_seconds: float
    peak_bytes: int
    budget_bytes: int
    drift: int
    first_drift: str
    demand_fetches: int
    demand_fetch_bytes: int
    evictions: int
    eviction_bytes: int
    dropped_prefetches: int
    cold_start_seconds: float
    timeline: Timeline


class Execution:
    """A training loop under a plan; made by :func:`execute`.

    Inside the ``with`` block every operator finds its storages on the GPU, whatever the plan says.
    Leaving it brings everything back, so that the model can be used and saved as ever.
    """

    def __init__(
        self,
        plan: Plan,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        gpu_memory: int | str | None,
        host_memory: int | str | None,
        ssd_path: str | Path | None,
        on_drift: str,
    ) -> None:
        if on_drift not in ON_DRIFT:
            raise InputError(f"on_drift: must be one of {ON_DRIFT}, got {on_drift!r}")
        metadata = plan.metadata
        self.plan = plan
        self._models, self._optimizers = models, optimizers
        self.budget_bytes = _budget(gpu_memory, metadata.gpu_memory_bytes, "gpu_memory")
        self._host_bytes = _budget(host_memory, metadata.host_memory_bytes, "host_memory")
        self._ssd_path = ssd_path
        self._stops_on_drift = on_drift == "stop"
        self._device_type = _device_type(plan, models)
        self._stack = ExitStack()
        self._mode: ExecutorMode | None = None
        self._report: RunReport | None = None
        check_executable(plan)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(exact_blocks(self._device_type))
            tiers = self._open_tiers()
            stack.callback(tiers.close)
            residency = self._residency(tiers)
            mode = self._mode = self._make_mode(residency)
            stack.enter_context(mode)
            guard = ReadGuard(self._require, lambda: _outside_dispatch(residency.bring_back)())
            stack.callback(guard.stop)
            stack.callback(_outside_dispatch(residency.bring_back))
            guard.start()
            mode.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._stack.__exit__(*exception)
        finally:
            self._report = self._make_report()

    def step(self) -> None:
        """Mark the end of a loop's iteration; needed only where no ``torch.optim`` one steps."""
        if self._mode is not None:
            self._mode.step()

    def restore_all(self) -> None:
        """Bring everything back to the GPU now, over the budget if need be; saves do it themselves.

        The run goes on under its plan with the next kernel.
        """
        if self._mode is not None:
            with torch._C._DisableTorchDispatch():
                self._mode.residency.bring_back()
            self._mode.residency.resume()

    @property
    def report(self) -> RunReport:
        """What the run has done so far."""
        return self._report or self._make_report()

    @property
    def timeline(self) -> Timeline:
        """The measured timeline, in the schema of the simulated one."""
        return self.report.timeline

    @property
    def iteration_seconds(self) -> list[float]:
        """Length of every complete iteration so far, warm-up included."""
        return [record.seconds for record in self._mode.log.records] if self._mode else []

    def _open_tiers(self) -> Tiers:
        hardware, metadata = self.plan.hardware, self.plan.metadata
        planned_bytes = planned_bytes_per_device(self.plan, hardware)
        bounce_bytes = sum(
            ssd.bounce_bytes
            for ssd in hardware.ssds_of_rank(metadata.rank)
            if planned_bytes.get(ssd.name, 0) and not ssd.gds
        )
        host_bytes = self._host_bytes - bounce_bytes
        if planned_bytes.get(HOST, 0) > host_bytes:
            raise InputError(
                f"host_memory: the plan needs {planned_bytes[HOST] + bounce_bytes} bytes, "
                f"the budget is {self._host_bytes}; plan again for this budget"
            )
        return open_tiers(
            hardware,
            metadata.rank,
            planned_bytes,
            host_memory_bytes=max(host_bytes, 0),
            ssd_path=self._ssd_path,
            device_type=self._device_type,
        )

    def _residency(self, tiers: Tiers) -> Residency:
        storages = self.plan.storages
        is_untracked = (storages.name == "untracked") & (storages.birth < 0)
        return Residency(
            tiers,
            self.budget_bytes,
            rounding_bytes=self.plan.metadata.allocator_rounding_bytes,
            untracked_bytes=int(storages.allocated_bytes[is_untracked].sum()),
        )

    def _make_mode(self, residency: Residency) -> ExecutorMode:
        metadata = self.plan.metadata
        mode = ExecutorMode(
            prepare_schedule(self.plan),
            residency,
            Placement(self.plan),
            device_type=self._device_type,
            optimizer_steps=max(metadata.optimizer_steps, 1),
            bucket_bytes=metadata.bucket_bytes,
            stops_on_drift=self._stops_on_drift,
        )
        for model in self._models:
            mode.names.add_model(model)
        for optimizer in self._optimizers:
            mode.names.add_optimizer(optimizer)
        return mode

    def _require(self, tensor: torch.Tensor, is_pointer: bool) -> None:
        mode = self._mode
        state = None if mode is None else mode.registry.find(tensor)
        if mode is None or state is None or state.attachment is None:
            return
        with torch._C._DisableTorchDispatch():
            mode.residency.require((state.attachment,))
        if is_pointer:
            state.attachment.is_fixed = True

    def _make_report(self) -> RunReport:
        if self._mode is None:
            raise RuntimeError("the run has not begun: enter the `with teraio.execute(...)` block")
        log, metadata = self._mode.log, self.plan.metadata
        warm = [r for r in log.records if not r.is_warm_up]
        records = [*warm, log.current]
        traffic = [r.traffic for r in warm]
        return RunReport(
            steps=len(log.records),
            warm_up_steps=len(log.records) - len(warm),
            measured_seconds=median_seconds(steady_records(log)),
            peak_bytes=max(
                (r.peak_bytes for r in log.records), default=self._mode.residency.peak_bytes
            ),
            budget_bytes=self.budget_bytes,
            drift=sum(r.drift for r in warm),
            first_drift=next((r.first_drift for r in records if r.first_drift), ""),
            demand_fetches=sum(t.demand_fetches for t in traffic),
            demand_fetch_bytes=sum(t.demand_fetch_bytes for t in traffic),
            evictions=sum(t.evictions for t in traffic),
            eviction_bytes=sum(t.eviction_bytes for t in traffic),
            dropped_prefetches=sum(t.dropped_prefetches for t in traffic),
            cold_start_seconds=log.cold_start_seconds,
            timeline=build_timeline(
                log,
                rank=metadata.rank,
                ideal_seconds=metadata.ideal_seconds,
                capacity_bytes=self.budget_bytes,
            ),
        )


def execute(
    plan: Plan | str | Path,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ssd_path: str | Path | None = None,
    on_drift: str = "fetch",
) -> Execution:
    """Execute a plan in the training loop inside the ``with`` block; results stay bit-identical.

    Budgets default to the plan's, ``ssd_path`` to the plan's hardware, then a temporary folder.
    ``on_drift``: ``fetch`` goes on and fetches on demand, ``stop`` raises DriftError. Without
    ``model`` and ``optimizer`` both are noticed as they run. Raises InputError for an invalid plan.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    return Execution(
        loaded,
        _as_list(model, torch.nn.Module),
        _as_list(optimizer, torch.optim.Optimizer),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        ssd_path=ssd_path,
        on_drift=on_drift,
    )


def run_script(
    plan: Plan | str | Path,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ssd_path: str | Path | None = None,
    on_drift: str = "fetch",
) -> RunReport:
    """Run an unmodified training script under a plan; options as for :func:`execute`.

    The script's first step runs within the budget on demand, until its optimizer has a state.
    """
    execution = execute(
        plan,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        ssd_path=ssd_path,
        on_drift=on_drift,
    )
    with execution:
        run_training_script(script, arguments)
    return execution.report


def check_executable(plan: Plan) -> None:
    """Raise InputError for a plan whose structure is wrong; warn of one that does not fit."""
    verdict = find_violations(plan).verification()
    if not verdict.valid:
        first = verdict.violations[0]
        raise InputError(f"plan: {first} ({verdict.num_violations} violations; not executed)")
    if not verdict.fits:
        message = "the plan does not fit its budgets; what is missing is moved on demand"
        warnings.warn(message, OffloadWarning, stacklevel=4)


def planned_bytes_per_device(plan: Plan, hardware: Hardware) -> dict[str, int]:
    """Bytes of each device that the plan's slots and copies occupy, from offset 0."""
    ends: dict[str, int] = {}
    moves, copies, storages = plan.moves, plan.copies, plan.storages
    rows = [
        *zip(moves.device, moves.tier_offset_bytes, moves.storage, strict=True),
        *zip(copies.device, copies.tier_offset_bytes, copies.storage, strict=True),
    ]
    for device, offset, storage in rows:
        alignment = hardware.alignment_bytes(device)
        size = -(-int(storages.nbytes[storage]) // alignment) * alignment
        ends[device] = max(ends.get(device, 0), int(offset) + size)
    return ends


def _outside_dispatch(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, with the executor's own tensor work hidden from every dispatch mode."""

    def hidden() -> Any:
        with torch._C._DisableTorchDispatch():
            return function()

    return hidden


def _budget(value: int | str | None, default: int, field: str) -> int:
    return default if value is None else parse_bytes(value, field)


def _as_list(value: Any, kind: type) -> list[Any]:
    if value is None:
        return []
    items = [value] if isinstance(value, kind) else list(value)
    for item in items:
        if not isinstance(item, kind):
            raise InputError(f"execute: expected {kind.__name__}, got {type(item).__name__}")
    return items


def _device_type(plan: Plan, models: Sequence[torch.nn.Module]) -> str:
    for model in models:
        for parameter in model.parameters():
            return parameter.device.type
    return torch.device(plan.metadata.device or "cpu").type
