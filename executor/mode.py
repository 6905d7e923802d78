"""The executor's dispatch mode: residency before every operator, the plan's moves around them.

Results never depend on the plan. Before an operator runs, every storage that it touches is made
resident; what the plan got wrong is fetched on demand. The plan only decides what leaves early and
what comes back ahead of need. Three states: *cold* until the first iteration boundary at which the
plan's storages exist; *following* while kernels match the plan, a few extra ones among them aside;
*adrift* after too many did not, until the stream of kernels is recognised again or the iteration
ends. Where a run has other kernels than the plan in every iteration, the plan is rewritten in the
run's own (:mod:`landing`), and followed as if it had been made so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from teraio.contracts.plan import Plan
from teraio.errors import DriftError
from teraio.executor.adaptation import Adaptation
from teraio.executor.binding import Binding
from teraio.executor.eviction_order import least_recently_used
from teraio.executor.holding import Holding
from teraio.executor.iteration_log import IterationLog
from teraio.executor.landing import Landing
from teraio.executor.output_sizes import OutputSizes
from teraio.executor.placement import Placement
from teraio.executor.plan_position import PlanPosition, RunState
from teraio.executor.planned_moves import PlannedMoves
from teraio.executor.quiet_collector import QuietCollector
from teraio.executor.residency import Residency
from teraio.executor.schedule import prepare_schedule
from teraio.profiler.dispatch import WRITE, KernelCall, KernelMode
from teraio.profiler.operators import Operator
from teraio.profiler.storages import StorageState


class ExecutorMode(KernelMode):
    """Executes a plan whose structure was checked over a residency; see the module's docstring.

    ``lock`` is held from the moment at which a kernel's storages are made resident until it has
    run, so that other threads (saves, :mod:`thread_guard`) see and move storages between kernels.
    ``interrupt`` is a Ctrl-C that waits for the lock to be free (:mod:`interrupt_guard`).
    """

    def __init__(
        self,
        plan: Plan,
        residency: Residency,
        *,
        device_type: str,
        stops_on_drift: bool = False,
    ) -> None:
        self.residency = residency
        self.lock = threading.RLock()
        self.is_running = False
        self.interrupt: Callable[[], None] | None = None
        super().__init__(
            device_type=device_type,
            optimizer_steps=max(plan.metadata.optimizer_steps, 1),
            bucket_bytes=plan.metadata.bucket_bytes,
        )
        self.schedule = prepare_schedule(plan)
        self.placement = Placement(plan)
        self.position = PlanPosition(self.schedule)
        self.adaptation = Adaptation(plan)
        self.log = IterationLog(device_type)
        self.collector = QuietCollector(is_wanted=device_type == "cuda")
        self._sizes = OutputSizes(plan.metadata.allocator_rounding_bytes)
        self._stops_on_drift = stops_on_drift
        self.binding = Binding(self.schedule, self.placement)
        self._moves = PlannedMoves(self.schedule, residency, self.binding)
        self._thread = threading.get_ident()
        self._has_begun = False
        self.is_aside = False
        self._clock = 0
        residency.victim_key = least_recently_used

    def start(self) -> None:
        """Begin the run: cold where the optimizer has no state yet, else by the plan at once."""
        with self.lock:
            self.log.restart_clock(self.residency)
            self.take_places(must_start=False)
            # Libraries take their workspaces with the first kernels: only the account has them yet.
            self._settle_books(self.residency.used_bytes)

    # Moments of KernelMode

    def _view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.lock:
            super()._view(args, kwargs)
        if self.interrupt is not None:
            self.deliver_interrupt()

    def _run(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self.lock:
            result = super()._run(func, operator, args, kwargs)
        if self.interrupt is not None:
            self.deliver_interrupt()
        return result

    def on_view(self, state: StorageState) -> None:
        self._begin_kernel()
        holding = self._holding(state)
        if self._moves.late_prefetches:
            self._moves.before_view(holding)
        self.residency.require((holding,))

    def before_kernel(self, call: KernelCall) -> None:
        self._begin_kernel()
        if self._moves.late_prefetches:
            self._moves.retry_prefetches()
        self._compare_with_plan(call)
        self._clock += 1
        holdings = [state.attachment or self.residency.adopt(state) for state in call.flags]
        operator = call.operator
        if operator.may_resize:
            holdings += self._storage_arguments(call)
        if self._planned_kernel in self.schedule.row_of_first_touch and self.position.is_planned:
            self.binding.bind_first_touches(self._planned_kernel, holdings)
        self._make_ready(call, holdings)
        residency = self.residency
        for holding, flags in zip(holdings, call.flags.values(), strict=False):
            holding.last_use = self._clock
            if flags & WRITE and holding.slot is not None:
                residency.written(holding)
        residency.memory.note_uses(holdings, call.args)
        if operator.may_resize:
            for holding in holdings:
                residency.settle(holding)
        if operator.is_collective:
            self.on_collective(holdings)
        if residency.order.is_kept:
            for holding in holdings:
                residency.order.note_use(holding)

    def on_collective(self, holdings: list[Holding]) -> None:
        """Asynchronous communication may use them after the call has returned."""
        for holding in holdings:
            holding.is_fixed = True

    def run_kernel(self, call: KernelCall) -> Any:
        began = self.log.begin_kernel()
        was_running, self.is_running = self.is_running, True
        try:
            result = call.func(*call.args, **call.kwargs)
        finally:
            self.is_running = was_running
        self.log.end_kernel(self._planned_kernel, began)
        return result

    def after_kernel(self, call: KernelCall) -> None:
        residency, position = self.residency, self.position
        is_planned, kernel = position.is_planned, self.kernel + position.shift
        for state in call.born:
            holding = self._holding(state)
            holding.last_use = self._clock
            if is_planned:
                self.binding.bind_birth(kernel, state, holding)
                residency.order.note_use(holding)  # Its next use is known now.
        residency.note_peak(self.placement.workspace_bytes[kernel] if is_planned else 0)
        self.log.memory(residency.used_bytes)
        if is_planned:
            self._moves.after_kernel(kernel)
        if self.adaptation.observation is not None:
            self.adaptation.observation.note(call, in_optimizer=self.in_optimizer)
        position.end_kernel()
        self._has_begun = False

    def on_death(self, state: StorageState) -> None:
        self.residency.note_death(state)

    def on_iteration_end(self) -> None:
        with self.lock:
            self._close_iteration()
        self.collector.end_iteration()
        self.deliver_interrupt()

    def _close_iteration(self) -> None:
        residency, log, state = self.residency, self.log, self.position.state
        residency.bury()
        is_clean = state is RunState.FOLLOWING and self._planned_kernel == self.schedule.num_kernels
        if state is RunState.FOLLOWING and not is_clean:
            log.drift(self.kernel, "the iteration ended early")
        log.end_iteration(residency, is_warm_up=state is RunState.COLD)
        self.position.begin_iteration()
        self._has_begun = False
        if not log.last.traffic.evictions:
            residency.order.forget()
        is_on_plan = is_clean and log.last.is_on_plan
        log.last.moves_found = self._moves.end_iteration(is_on_plan=is_on_plan)
        self._adapt(is_cold=state is RunState.COLD, is_clean=is_clean and not log.last.drift)
        if not is_on_plan:
            self.take_places(must_start=True)
        self._settle_books()

    def _adapt(self, *, is_cold: bool, is_clean: bool) -> None:
        """Learn from the iteration that has ended, if it was not the planned one."""
        if not is_clean:
            self.bind_names()
        landing = self.adaptation.end_iteration(is_cold=is_cold, is_clean=is_clean)
        if landing is not None:
            self._follow(landing)
        elif self._stops_on_drift and self.adaptation.num_unlearnt > 1:
            what = self.log.last.first_drift
            raise DriftError(f"{what}; the run no longer follows its trace")

    def _follow(self, landing: Landing) -> None:
        """Go on by another schedule for the same plan."""
        self.schedule = self._moves.schedule = prepare_schedule(landing.plan)
        self.placement = Placement(landing.plan)
        self.position = PlanPosition(self.schedule, self.position.state)
        self.binding.follow(self.schedule, self.placement, landing.row_of)
        self.residency.order.forget()

    def _settle_books(self, at_least_bytes: int = 0) -> None:
        if self.registry.device_type == "cuda":
            self.log.note_reserved(self.residency.settle_books(at_least_bytes))

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        # Optimizer hooks are the process's: a step in another thread ends no iteration of this run.
        if threading.get_ident() == self._thread:
            super()._optimizer_ends(optimizer, *arguments)

    def _module_begins(self, module: torch.nn.Module, *arguments: Any) -> None:
        known = len(self.names.models)
        super()._module_begins(module, *arguments)
        if len(self.names.models) != known and not self.is_idle:
            # Noticed just now: what it holds counts from here on, not from its first use.
            with self.lock:
                self.bind_names()
            self.deliver_interrupt()

    def lock_is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def deliver_interrupt(self) -> None:
        """Let an interrupt that has waited take effect in the training thread."""
        interrupt = self.interrupt
        if interrupt is not None and threading.current_thread() is threading.main_thread():
            self.interrupt = None
            interrupt()

    # Others beside the training thread's operators

    def compute_stream(self) -> AbstractContextManager[Any]:
        """Inside, memory moves in the order of the run's stream."""
        return nullcontext()

    def visit(self, touched: Iterable[tuple[torch.Tensor, bool]]) -> list[Holding]:
        """Make known storages resident for work that is no kernel of this run: (tensor, whether it
        is written). Their holdings.
        """
        holdings: dict[Holding, bool] = {}
        for tensor, is_written in touched:
            state = self.registry.find(tensor)
            if state is not None and state.attachment is not None:
                holdings[state.attachment] = holdings.get(state.attachment, False) or is_written
        self.residency.require(holdings)
        for holding, is_written in holdings.items():
            if is_written:
                self.residency.written(holding)
        self.residency.memory.note_uses(holdings)
        return list(holdings)

    @contextmanager
    def holding_back(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keep the storages of tensors, which may be written, on the GPU inside the block."""
        is_running, self.is_running = self.is_running, True
        held = [
            holding
            for holding in self.visit((tensor, True) for tensor in tensors)
            if not holding.is_held
        ]
        try:
            for holding in held:
                holding.is_held = True
            yield
        finally:
            self.is_running = is_running
            for holding in held:
                holding.is_held = False
                self.residency.order.note_use(holding)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Kernels inside belong to no iteration: they make a model, or load one."""
        kernel, state, observation = self.kernel, self.position.state, self.adaptation.observation
        self.position.state, self.adaptation.observation, self.is_aside = RunState.COLD, None, True
        try:
            yield
        finally:
            self.kernel, self.position.state, self.is_aside = kernel, state, False
            self.adaptation.observation, self._viewed, self._has_begun = observation, {}, False

    # Identity

    def take_places(self, *, must_start: bool) -> None:
        """Bind named storages to the plan's rows and put everything where kernel 0 expects it.

        Called where a run begins (which stays cold if the optimizer has no state yet), and at the
        end of an iteration that did not go by the plan (``must_start``).
        """
        start = time.perf_counter()
        if self.bind_names() or must_start:
            self.residency.victim_key = self._by_next_use
            with torch._C._DisableTorchDispatch():
                self.placement.establish(self.residency, self.binding.holding_of_row)
            self.residency.memory.begin()
            self.position.state = RunState.FOLLOWING
            self.residency.order.forget()
            self.log.cold_start_seconds += time.perf_counter() - start
            self.log.restart_clock(self.residency)

    def bind_names(self) -> bool:
        """Bind what has a name by now; whether all that the plan knows by name exists."""
        return self.binding.bind_names(self.names, self.registry, self._holding)

    def _holding(self, state: StorageState) -> Holding:
        return state.attachment or self.residency.adopt(state)

    def _storage_arguments(self, call: KernelCall) -> list[Holding]:
        """Of ``set_(storage)``, whose storage no tensor argument shows."""
        states = [
            self.registry.find_address(argument._cdata)
            for argument in call.args
            if isinstance(argument, torch.UntypedStorage)
        ]
        return [self._holding(state) for state in states if state is not None]

    # Following the plan

    @property
    def _planned_kernel(self) -> int:
        return self.kernel + self.position.shift

    def _begin_kernel(self) -> None:
        """The boundary before a kernel, once: frees, then prefetches (DESIGN: Semantics)."""
        if self._has_begun:
            return
        self._has_begun = True
        self.residency.bury()
        if self._moves.late_offloads:
            self._moves.issue_late_offloads()
        kernel = self.residency.kernel = self._planned_kernel
        if self.position.state is RunState.FOLLOWING and kernel < self.schedule.num_kernels:
            self._moves.before_kernel(kernel)

    def _make_ready(self, call: KernelCall, holdings: list[Holding]) -> None:
        """Storages resident, and room for what the kernel creates."""
        position, is_guess = self.position, False
        if is_known := position.is_planned and not position.shape_differs:
            kernel = self.kernel + position.shift
            need_bytes = self.schedule.need_bytes[kernel]
            # Storages first seen among the arguments exist already and are accounted for.
            for state in call.born:
                if (kernel, state.birth_ordinal) in self.schedule.row_of_birth:
                    need_bytes -= self._holding(state).allocated_bytes
            if self._sizes.depends_on_scalars(call.operator):
                need_bytes = max(need_bytes, self._sizes.predict(call).nbytes)
        else:
            need_bytes, is_guess, _ = self._sizes.predict(call)
            # What was only viewed since the last kernel may leave again, if there is no room.
            flags = list(call.flags.values())
            holdings = [h for i, h in enumerate(holdings) if i >= len(flags) or flags[i]]
        self.residency.require(holdings, need_bytes if need_bytes > 0 else 0, is_guess=is_guess)
        if not is_known:
            self.residency.memory.prepare_unplanned(self._sizes.predict(call).sizes)

    def _by_next_use(self, holding: Holding) -> float:
        """Position of the next use in kernels since the run began, so that it does not age."""
        if self.position.state is not RunState.FOLLOWING:
            return least_recently_used(holding)
        kernel, num_kernels = self._planned_kernel, self.schedule.num_kernels
        here = self.iteration * num_kernels + kernel
        if holding.row < 0:
            return here + num_kernels / 2
        return here + self.schedule.distance_to_next_use(holding.row, kernel)

    # Drift

    def _compare_with_plan(self, call: KernelCall) -> None:
        position = self.position
        state, kernel = position.state, self.kernel + position.shift
        what = position.compare(self.kernel, call.operator.name, call.signature)
        if position.state is not state:
            # Eviction goes by another key from here on.
            self.residency.order.forget()
        if what:
            self.log.drift(kernel, what)
            if self._stops_on_drift and self.adaptation.is_settled:
                raise DriftError(f"kernel {kernel}: {what}; the run no longer follows its trace")
