"""The recorder: a dispatch mode that watches iterations until one of them can stand for all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from teraio.profiler.announcements import take_announced_transfer
from teraio.profiler.clocks import make_clock
from teraio.profiler.collectives import describe_collective
from teraio.profiler.context import CallContext
from teraio.profiler.costs.calls import CallBook
from teraio.profiler.dispatch import KernelCall, KernelMode
from teraio.profiler.operators import AUTOMATIC_BUCKETS, nested_tensors
from teraio.profiler.pace import UnwatchedPace
from teraio.profiler.recording import Recording
from teraio.profiler.segments import Segment, StorageRecord
from teraio.profiler.storages import StorageState, storage_of
from teraio.profiler.workspace import WorkspaceMeter, start_workspace_meter
from teraio.traces.trace import Calls

MAX_RECORDS = 500_000
"""Storages remembered of a loop that does not become steady; then the dead ones are forgotten."""


@dataclass(frozen=True, slots=True)
class UnseenTensor:
    """A named tensor on the device that no kernel has touched; it takes memory all the same."""

    name: str
    kind: str
    dtype: torch.dtype
    nbytes: int
    resizable: bool


class Recorder(KernelMode):
    """Records every segment; ``recording.is_complete`` says when it has seen enough.

    Then it steps aside. It changes no numerics and draws no random numbers. ``progress`` is called
    with a line of text after each optimizer step that was recorded, ``when_complete`` once.
    ``describe_calls``: so that each distinct one can be timed on another GPU.
    """

    source = "measured"

    def __init__(
        self,
        *,
        device_type: str | None = None,
        bucket_bytes: int = AUTOMATIC_BUCKETS,
        progress: Callable[[str], None] | None = None,
        when_complete: Callable[[], None] | None = None,
        describe_calls: bool = False,
    ) -> None:
        self._is_device_given = device_type is not None
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device_type=device_type, optimizer_steps=1, bucket_bytes=bucket_bytes)
        self.recording = Recording()
        self.records: dict[int, StorageRecord] = {}
        self.unseen: list[UnseenTensor] = []
        self.untracked_bytes = 0
        self._progress = progress
        self._when_complete = when_complete
        self._book = CallBook() if describe_calls else None
        self.pace = UnwatchedPace(device_type)
        self._clock = make_clock(device_type)
        self._context = CallContext(self.names)
        self._segment = Segment(0)
        self._meter: WorkspaceMeter | None = None
        self._optimizer = 0
        self._began = self._ended = 0.0
        self._segment_began = perf_counter()
        self._is_running = False
        self._has_left = False

    @property
    def has_ended(self) -> bool:
        """Whether it watches nothing any more."""
        return self.is_idle

    @property
    def is_complete(self) -> bool:
        """Whether further iterations would add nothing."""
        recording = self.recording
        return recording.is_complete and (recording.steady is None or self.pace.is_complete)

    @property
    def has_optimizer_steps(self) -> bool:
        """Whether iterations end with an optimizer's step, or where the loop says so."""
        return self._has_seen_optimizer

    @property
    def device_type(self) -> str:
        """Type of the device whose storages are recorded."""
        return self.registry.device_type

    @property
    def device_label(self) -> str:
        """What the trace calls the device."""
        return self.device_type

    def call_table(self) -> Calls:
        """The distinct calls behind the kernels, where they are described."""
        return Calls.empty() if self._book is None else self._book.table()

    # Stepping aside

    def __exit__(self, *exception: Any) -> None:
        self.stop_recording()
        if self._has_left:
            self._leave()
        else:
            super().__exit__(*exception)

    def stop_recording(self) -> None:
        """Watch nothing any more, and leave the dispatch at once where that is possible.

        Hooks stay until the end of the block: this may run inside one of them.
        """
        if self.is_idle:
            return
        self.is_idle = True
        self.unseen = self._find_unseen()
        self.untracked_bytes = self._untracked_bytes()
        if self._meter is not None:
            self._meter.abort()
            self._meter = None
        # A backward pass restores the modes that were active when it began.
        is_in_backward = torch._C._current_graph_task_id() != -1
        if _get_current_dispatch_mode() is self and not is_in_backward:
            TorchDispatchMode.__exit__(self, None, None, None)
            self._has_left = True

    def forget(self) -> None:
        """Give up what was recorded, which takes much more memory than the trace made of it, and
        let go the model and the optimizer.
        """
        self.recording.forget()
        self.records.clear()
        self.names.forget()

    # Kernels

    def _view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = perf_counter()
        super()._view(args, kwargs)
        self._context.note_nodes()
        self._clock.pass_view()
        self._clock.exclude(perf_counter() - began)

    def _run(self, func: Any, operator: Any, args: Any, kwargs: Any) -> Any:
        self._began = perf_counter()
        result = super()._run(func, operator, args, kwargs)
        self._clock.exclude(perf_counter() - self._ended)
        return result

    def run_kernel(self, call: KernelCall) -> Any:
        """Run the operator between two readings of the clock."""
        clock = self._clock
        self._is_running = True
        clock.exclude(perf_counter() - self._began)
        clock.start(self._kind(call))
        try:
            if self._meter is None:
                result = call.func(*call.args, **call.kwargs)
            else:
                with self._meter.around_kernel():
                    result = call.func(*call.args, **call.kwargs)
        except BaseException:
            clock.cancel()
            raise
        finally:
            self._is_running = False
        self._ended = clock.stop()
        return result

    def _kind(self, call: KernelCall) -> Hashable:
        """Kernels of one kind do the same work: same operator, shapes, dtypes and layouts."""
        if self.device_type != "cuda":
            return None
        tensors = nested_tensors((*call.args, *call.kwargs.values()))
        return call.signature, *(t.stride() for t in tensors if t.layout is torch.strided)

    def _find_births(self, call: KernelCall, result: Any) -> None:
        super()._find_births(call, result)
        if self._book is not None:
            self._segment.calls.append(self._book.number(call, result))

    def after_kernel(self, call: KernelCall) -> None:
        """Append the kernel to the segment under way."""
        segment, context = self._segment, self._context
        phase, module = context.phase_and_module(
            requires_grad=call.requires_grad, in_optimizer=self.in_optimizer
        )
        if phase != "optimizer":
            context.note_nodes()
        micro_batch = context.micro_batch(phase)
        if call.operator.is_collective:
            collective = describe_collective(call.operator, call.args, call.kwargs)
            if collective is not None:
                segment.collectives[self.kernel] = collective
                phase, micro_batch = _announced_transfer(call) or (phase, micro_batch)
        segment.operators.append(call.operator.name)
        segment.signatures.append(call.signature)
        segment.touched.append(call.flags)
        segment.modules.append(module)
        segment.phases.append(phase)
        segment.micro_batches.append(micro_batch)
        segment.streams.append(self._clock.stream)
        output_bytes = 0
        for state in call.born:
            record = self._record_of(state)
            record.birth_segment, record.birth_kernel = state.birth_iteration, state.birth_kernel
            record.birth_phase = phase
            segment.births.append(record)
            if self._meter is not None and not state.is_foreign:
                output_bytes += self.allocated_bytes(state.nbytes)
        if self._meter is not None:
            self._meter.kernel_ended(output_bytes)

    def allocated_bytes(self, nbytes: int) -> int:
        """Bytes that the device's allocator takes for a request."""
        rounding = self.allocator_rounding_bytes
        return -(-nbytes // rounding) * rounding

    @property
    def allocator_rounding_bytes(self) -> int:
        """The caching allocator of CUDA rounds up to this; others are taken at their word."""
        return 512 if self.device_label == "cuda" else 1

    # Storages

    def _record_of(self, state: StorageState) -> StorageRecord:
        record: StorageRecord | None = state.attachment
        if record is None:
            record = state.attachment = self.records[state.serial] = StorageRecord(state)
        return record

    def on_death(self, state: StorageState) -> None:
        """Remember after which kernel the memory was freed; inside a kernel that is this one."""
        if self.is_idle:
            return
        record = self._record_of(state)
        record.death_segment = self.iteration
        record.death_kernel = self.kernel if self._is_running else self.kernel - 1

    def _forget_dead(self) -> None:
        oldest = self.recording.oldest_kept
        self.records = {
            serial: record
            for serial, record in self.records.items()
            if record.is_alive or record.death_segment >= oldest
        }

    def _name_storages(self) -> None:
        for address, (name, kind) in self.names.names().items():
            state = self.registry.find_address(address)
            if state is not None:
                record = self._record_of(state)
                record.name, record.kind = name, kind

    def _find_unseen(self) -> list[UnseenTensor]:
        unseen = []
        addresses = set()
        for tensor, name, kind in self.names.tensors():
            storage = storage_of(tensor) if tensor.device.type == self.device_type else None
            if storage is None or storage._cdata in addresses:
                continue
            addresses.add(storage._cdata)
            if self.registry.find_address(storage._cdata) is None:
                size, resizable = storage.nbytes(), storage.resizable()
                unseen.append(UnseenTensor(name, kind, tensor.dtype, size, resizable))
        return unseen

    def _untracked_bytes(self) -> int:
        """What the caching allocator holds beyond all known storages (cuBLAS workspaces)."""
        if self.device_type != "cuda":
            return 0
        known = sum(self.allocated_bytes(state.nbytes) for state in self.registry.alive())
        known += sum(self.allocated_bytes(tensor.nbytes) for tensor in self.unseen)
        return max(0, torch.cuda.memory_allocated() - known)

    # Iterations, modules, optimizers

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self.is_idle:
            return
        began = perf_counter()
        super()._optimizer_begins(optimizer, *arguments)
        self._choose_device(optimizer)
        self._name_storages()
        self._clock.exclude(perf_counter() - began)

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self.is_idle:
            self._note_unwatched_step()
            return
        self._optimizer = id(optimizer)
        super()._optimizer_ends(optimizer, *arguments)

    def _choose_device(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the first optimizer's parameters if the caller did not name a device."""
        if self._is_device_given:
            return
        self._is_device_given = True
        parameter = next((p for g in optimizer.param_groups for p in g["params"]), None)
        if parameter is not None and parameter.device.type != self.device_type:
            self.registry.device_type = parameter.device.type
            self._clock = make_clock(parameter.device.type)
            self.pace = UnwatchedPace(parameter.device.type)
            self._segment = Segment(self.iteration)
            self.kernel = 0

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if self.is_idle:
            return
        began = perf_counter()
        super()._module_begins(module, inputs)
        self._context.enter_module(module)
        self._clock.exclude(perf_counter() - began)

    def _module_ends(self, module: torch.nn.Module, *arguments: Any) -> None:
        if not self.is_idle:
            super()._module_ends(module, *arguments)
            self._context.leave_module()

    def step(self) -> None:
        """See :meth:`KernelMode.step`."""
        if not self.is_idle:
            super().step()
        elif not self._has_seen_optimizer:
            self._note_unwatched_step()

    def _note_unwatched_step(self) -> None:
        self.pace.note_step()
        if self._when_complete is not None and self.is_complete:
            self._when_complete()

    def on_iteration_end(self) -> None:
        """Close the segment and decide what the next one is for."""
        began = perf_counter()
        self._segment.watched_seconds = began - self._segment_began
        self._name_storages()
        self._segment.close(self._clock.take(), self._optimizer)
        self._add_segment()
        self._segment = Segment(self.iteration + 1)
        self._context.begin_segment()
        self._segment_began = perf_counter()
        self._clock.exclude(self._segment_began - began)
        if self._progress is not None:
            self._progress(self.recording.describe())
        if self._when_complete is not None and self.is_complete:
            self._when_complete()

    def _add_segment(self) -> None:
        recording, meter = self.recording, self._meter
        workspace_bytes = None
        if meter is not None and recording.ends_group_next:
            workspace_bytes, self._meter = meter.stop(), None
        recording.add(self._segment, workspace_bytes, is_metered=meter is not None)
        if self._meter is not None and recording.steady is None:
            self._meter.abort()
            self._meter = None
        if recording.steady is not None and recording.awaited_optimizers is None:
            recording.awaited_optimizers = self._concerned_optimizers()
        if len(self.records) > MAX_RECORDS and recording.steady is None:
            self._forget_dead()
        if recording.is_complete:
            self.stop_recording()
            if recording.steady is not None:
                self.pace.start(recording.steady.period)
        elif self._meter is None and recording.wants_workspace:
            self._meter = start_workspace_meter(self.device_type)
            if self._meter is None:
                recording.give_up_workspace()

    def _concerned_optimizers(self) -> set[int]:
        """Ids of the optimizers of parameters that kernels have used: they may be about to step."""
        # isinstance would ask every object for its class, and some answer with a warning.
        living = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
        return {id(optimizer) for optimizer in living if self._has_used(optimizer)}

    def _has_used(self, optimizer: torch.optim.Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(self.registry.find(parameter) is not None for parameter in parameters)


def _announced_transfer(call: KernelCall) -> tuple[str, int] | None:
    """Phase and micro-batch of a send or receive, if the loop has announced it."""
    tensor = next(nested_tensors(call.args), None)
    return None if tensor is None else take_announced_transfer(tensor)
