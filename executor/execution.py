"""Executing a plan in real training: the context manager around a loop, and unmodified scripts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from teraio.contracts.hardware import HOST
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.errors import InputError
from teraio.executor.compiled_regions import CompiledRegionGuard
from teraio.executor.executable import check_executable
from teraio.executor.gpu_memory import memory_for
from teraio.executor.homes import Homes
from teraio.executor.host_room import host_bytes_to_take
from teraio.executor.interrupt_guard import InterruptGuard
from teraio.executor.leaving import ON_EXIT
from teraio.executor.mode import ExecutorMode
from teraio.executor.optimizer_in_backward import OptimizerInBackward
from teraio.executor.parallel_mode import ParallelMode
from teraio.executor.planned_places import planned_bytes_per_device, verifying
from teraio.executor.ranks import (
    PlanChoice,
    check_device,
    check_rank,
    current_rank,
    is_parallel,
    name_rank,
    plan_of_this_rank,
)
from teraio.executor.raw_pointers import RawPointerGuard
from teraio.executor.read_guard import ReadGuard
from teraio.executor.report import RunReport as RunReport
from teraio.executor.report import make_report
from teraio.executor.residency import Residency
from teraio.executor.run_contents import RunContents
from teraio.executor.run_handle import RunHandle
from teraio.executor.stepping_order import SteppingOrder
from teraio.executor.stores.ssd import check_backend
from teraio.executor.stores.striped_space import Directories
from teraio.executor.thread_guard import ForkGuard, ThreadGuard
from teraio.executor.tiers import Tiers, open_tiers
from teraio.profiler.allocator_settings import exact_blocks
from teraio.profiler.scripts import run_script as run_training_script
from teraio.profiler.scripts import use_device_of_rank
from teraio.profiler.torch_version import check_torch_version
from teraio.units import parse_bytes

ON_DRIFT = ("fetch", "stop")


class _Guard(Protocol):
    """What is active for the time of a run."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Execution(RunContents):
    """A training loop under a plan; made by :func:`execute`.

    Inside the ``with`` block every operator finds its storages on the GPU, whatever the plan says.
    Leaving it brings everything back, so that the model can be used and saved as ever. A run is
    entered once, and one run is active in a process at a time (else InputError).

    Limits. Memory that other threads' operators and compiled regions create is counted once the
    training thread has touched it; outputs whose size depends on data (``nonzero``) and scratch of
    operators that are not in the plan may exceed the budget until the next kernel. A storage whose
    pointer was taken (``numpy``, ``data_ptr``, DLPack, shared memory) stays on the GPU for good
    (else: :func:`teraio.executor.guard`). Threads that ran before the block was entered are not
    seen: they must not touch tensors of the training. Saves and forks bring everything back while
    they last.
    """

    def __init__(
        self,
        plan: Plan,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        gpu_memory: int | str | None,
        host_memory: int | str | None,
        ssd_path: Directories | None,
        on_drift: str,
        device: str | torch.device | None,
        ssd_backend: str,
        verify_transfers: bool,
        on_exit: str = "restore",
    ) -> None:
        if on_drift not in ON_DRIFT:
            raise InputError(f"on_drift: must be one of {ON_DRIFT}, got {on_drift!r}")
        if on_exit not in ON_EXIT:
            raise InputError(f"on_exit: must be one of {ON_EXIT}, got {on_exit!r}")
        metadata = plan.metadata
        self.plan = plan
        self._models, self._optimizers = models, optimizers
        self.budget_bytes = _budget(gpu_memory, metadata.gpu_memory_bytes, "gpu_memory")
        self._host_bytes = _budget(host_memory, metadata.host_memory_bytes, "host_memory")
        self._host_is_given = host_memory is not None
        check_backend(ssd_backend)
        self._ssd_path, self._ssd_backend = ssd_path, ssd_backend
        self._verify = verifying(plan) if verify_transfers else None
        self._stops_on_drift = on_drift == "stop"
        self._discards = on_exit == "discard"
        self._device_type = _device_type(plan, models, device)
        self._stack = ExitStack()
        self._mode: ExecutorMode | None = None
        self._report: RunReport | None = None
        self._iteration_seconds: list[float] = []
        self._is_over = False
        check_executable(plan)

    def __enter__(self) -> Self:
        if self._mode is not None or self._is_over:
            raise InputError("execute: a run is entered once; call teraio.execute again")
        check_torch_version()
        check_rank(self.plan, *current_rank())
        check_device(self._models)
        try:
            self._begin()
        except BaseException:
            self._forget_mode()
            raise
        return self

    def _begin(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(exact_blocks(self._device_type))
            tiers = self._open_tiers()
            stack.callback(tiers.close)
            residency = self._residency(tiers)
            mode = self._make_mode(residency)
            stack.enter_context(mode)
            self._mode = mode
            handle = RunHandle(mode)
            guards: list[_Guard] = [
                mode.collector,
                ReadGuard(handle),
                RawPointerGuard(mode),
                ThreadGuard(mode),
                ForkGuard(mode, handle.bring_back),
                CompiledRegionGuard(mode),
                InterruptGuard(mode),
                *self._stepping(mode),
            ]
            for guard in guards:
                stack.callback(guard.stop)
                guard.start()
            stack.callback(handle.end, discards=self._discards)
            mode.start()
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        if isinstance(exception[1], Exception):
            name_rank(exception[1])
        try:
            self._stack.__exit__(*exception)
        except BaseException:
            self._close_books(is_failing=True)
            raise
        self._close_books(is_failing=exception[1] is not None)

    def step(self) -> None:
        """Mark the end of a loop's iteration; needed only where no ``torch.optim`` one steps."""
        if self._mode is not None:
            self._mode.step()

    def restore_all(self) -> None:
        """Bring everything back to the GPU now, over the budget if need be; saves do it themselves.

        The run goes on under its plan with the next kernel.
        """
        if self._mode is not None:
            RunHandle(self._mode).restore()

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
        return self._mode.log.seconds() if self._mode else list(self._iteration_seconds)

    def _close_books(self, *, is_failing: bool) -> None:
        """Make the report. Who keeps that does not mean to keep the model, and its memory."""
        self._is_over = True
        try:
            self._report = self._make_report()
            self._iteration_seconds = self.iteration_seconds
        except Exception:
            # After an error of the GPU it cannot be asked any more, and that error matters more.
            if not is_failing:
                raise
        finally:
            self._forget_mode()
            self._models = self._optimizers = ()
            self._stack = ExitStack()

    def _forget_mode(self) -> None:
        if self._mode is not None:
            self._mode.names.forget()
            self._mode = None

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
                f"host_memory: the plan needs {planned_bytes.get(HOST, 0) + bounce_bytes} bytes, "
                f"the budget is {self._host_bytes}; plan again for this budget"
            )
        return open_tiers(
            hardware,
            metadata.rank,
            planned_bytes,
            host_memory_bytes=host_bytes_to_take(
                max(host_bytes, 0), planned_bytes.get(HOST, 0), is_given=self._host_is_given
            ),
            ssd_path=self._ssd_path,
            device_type=self._device_type,
            ssd_backend=self._ssd_backend,
            verify=self._verify,
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
        mode = (ParallelMode if is_parallel() else ExecutorMode)(
            self.plan,
            residency,
            device_type=self._device_type,
            stops_on_drift=self._stops_on_drift,
        )
        arenas = planned_bytes_per_device(self.plan, self.plan.hardware)
        residency.memory = memory_for(self.plan, residency, self._device_type)
        residency.find_slot = Homes(mode, self.plan, arenas).find_slot
        for model in self._models:
            mode.names.add_model(model)
        for optimizer in self._optimizers:
            mode.names.add_optimizer(optimizer)
        return mode

    def _stepping(self, mode: ExecutorMode) -> list[OptimizerInBackward]:
        """What carries out the plan's transform of the training, if it has one."""
        if self.plan.metadata.transform is None:
            return []
        order, skip = SteppingOrder.of_plan(self.plan), mode.adaptation.skip_iteration
        return [OptimizerInBackward(mode, order, self._optimizers, when_late=skip)]

    def _make_report(self) -> RunReport:
        if self._mode is None:
            state = "ended by an error before it could report" if self._is_over else "has not begun"
            raise RuntimeError(f"the run {state}: enter the `with teraio.execute(...)` block")
        return make_report(
            self._mode.log,
            self.plan,
            self._mode.adaptation.landing,
            self._mode.residency.tiers,
            budget_bytes=self.budget_bytes,
            peak_bytes=self._mode.residency.peak_bytes,
        )


def execute(
    plan: PlanChoice,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ssd_path: Directories | None = None,
    on_drift: str = "fetch",
    device: str | torch.device | None = None,
    ssd_backend: str = "auto",
    verify_transfers: bool = False,
    on_exit: str = "restore",
) -> Execution:
    """Execute a plan in the training loop inside the ``with`` block; results stay bit-identical.

    Budgets default to the plan's, ``ssd_path`` to the plan's hardware, then a temporary folder;
    several folders hold one stripe each. ``ssd_backend``: ``gds`` (kvikio), ``file``, or ``auto``,
    the faster of the two. ``verify_transfers`` compares checksums of all that moves, and is slow.
    ``on_exit``: ``restore`` brings everything back to the GPU at the end of the block, ``discard``
    leaves what is away without memory (on the meta device): for models that do not fit.
    ``on_drift``: ``fetch`` goes on and fetches on demand, ``stop`` raises DriftError. Without
    ``model`` and ``optimizer`` both are noticed as they run. ``device`` is the one whose memory is
    planned: the model's, else the plan's. Of several ranks each executes its own ``plan``: a name
    with ``{rank}`` in it, a folder, or a list of all. Raises InputError for an invalid plan, for
    one of another rank, and for one of a GPU where there is none.
    """
    return Execution(
        plan_of_this_rank(plan),
        _as_list(model, torch.nn.Module),
        _as_list(optimizer, torch.optim.Optimizer),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        ssd_path=ssd_path,
        on_drift=on_drift,
        device=device,
        ssd_backend=ssd_backend,
        verify_transfers=verify_transfers,
        on_exit=on_exit,
    )


def run_script(
    plan: PlanChoice,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ssd_path: Directories | None = None,
    on_drift: str = "fetch",
    device: str | torch.device | None = None,
    ssd_backend: str = "auto",
    verify_transfers: bool = False,
) -> RunReport:
    """Run an unmodified training script under a plan; options as for :func:`execute`.

    The script's first step runs within the budget on demand, until its optimizer has a state.
    Started by a launcher (torchrun), the process first takes the GPU of its local rank.
    """
    use_device_of_rank()
    execution = execute(
        plan,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        ssd_path=ssd_path,
        on_drift=on_drift,
        device=device,
        ssd_backend=ssd_backend,
        verify_transfers=verify_transfers,
        # Nobody is left who could use what is away when the script has ended.
        on_exit="discard",
    )
    with execution:
        run_training_script(script, arguments)
    return execution.report


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


def _device_type(
    plan: Plan, models: Sequence[torch.nn.Module], device: str | torch.device | None
) -> str:
    if device is not None:
        return torch.device(device).type
    for model in models:
        for parameter in model.parameters():
            if not parameter.is_meta:
                return parameter.device.type
    planned = torch.device(plan.metadata.device or "cpu").type
    if planned == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device: the plan is for a GPU, and there is none here; to execute it on the CPU, say "
            "so: device='cpu' (--device cpu)"
        )
    return planned
