"""The recorder over fake tensors: the same kernels and storages, but no times."""

from __future__ import annotations

from collections.abc import Callable

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
    ) -> None:
        super().__init__(
            device_type="cpu", bucket_bytes=bucket_bytes, progress=progress, describe_calls=True
        )
        self.recording.give_up_workspace()

    @property
    def device_label(self) -> str:
        """The device that the fake tensors stand for."""
        return "cuda"
