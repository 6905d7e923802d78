"""The recorder over fake tensors: the same kernels and storages, no times, every call described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from teraio.profiler.costs.calls import CallBook

from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.recorder import Recorder


class FakeRecorder(Recorder):
    """Records fake CPU tensors as those of a ``cuda`` device, and numbers the distinct calls."""

    source = "fake"

    @property
    def device_label(self) -> str:
        """The device that the fake tensors stand for."""
        return "cuda"

    def __init__(
        self,
        *,
        bucket_bytes: int = AUTOMATIC_BUCKETS,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(device_type="cpu", bucket_bytes=bucket_bytes, progress=progress)
        self.calls = CallBook()
        self.recording.give_up_workspace()

    def _find_births(self, call: KernelCall, result: Any) -> None:
        super()._find_births(call, result)
        self._segment.calls.append(self.calls.number(call, result))
