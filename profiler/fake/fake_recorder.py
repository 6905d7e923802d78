"""The recorder over fake tensors: the same kernels and storages, but no times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from teraio.profiler.clocks import NoClock
from teraio.profiler.dispatch import KernelCall
from teraio.profiler.fake.refusals import SCALAR, Place, Refusals, current_line
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.recorder import Recorder


class FakeRecorder(Recorder):
    """Records fake CPU tensors as those of a ``cuda`` device, and describes the distinct calls."""

    source = "fake"

    def __init__(
        self,
        *,
        bucket_bytes: int = AUTOMATIC_BUCKETS,
        progress: Callable[[str], None] | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        super().__init__(
            device_type="cpu", bucket_bytes=bucket_bytes, progress=progress, describe_calls=True
        )
        self.recording.give_up_workspace()
        self._clock = NoClock()
        self._refusals = refusals or Refusals()

    @property
    def device_label(self) -> str:
        """The device that the fake tensors stand for."""
        return "cuda"

    def _view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A constant (torch.tensor(1.0)) becomes fake when it is lifted: its real storage is no part
        # of the iteration.
        if isinstance(args[0], FakeTensor):
            super()._view(args, kwargs)

    def run_kernel(self, call: KernelCall) -> Any:
        """See :class:`Recorder`; the value of a tensor may be assumed."""
        if call.func is SCALAR:
            call.func = self._assume
        return super().run_kernel(call)

    def _assume(self, tensor: torch.Tensor) -> Any:
        return self._refusals.scalar(tensor, self._place(SCALAR))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            self._refusals.check_device(kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            self._refusals.note(error, self._place(func))
            raise

    def _place(self, func: Any) -> Place:
        phase, module = self._context.phase_and_module(
            requires_grad=True, in_optimizer=self.in_optimizer
        )
        return Place(str(func), module, phase, current_line())
