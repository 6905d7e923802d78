"""Queues that are CUDA streams: transfers between a GPU and pinned host memory.

Note: who waits for what
  copy stream     -> the point of the compute stream at issue: the source has been computed, and
                     earlier work is through with memory just given to a destination
  copy stream     -> transfers of other streams that touch the same bytes of the arena
  compute stream  -> a transfer's end, through make_stream_wait
The host waits for nothing. A transfer is kept, and with it its device memory, until its end event
has been seen, so PyTorch's allocator cannot hand the memory on under a copy.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from teraio.errors import StoreError
from teraio.executor.stores.in_flight import InFlight

_REBASE_SECONDS = 30.0
_ROUND_TRIPS = 10


class CudaClock:
    """Places CUDA events on the clock of ``time.perf_counter``.

    CUDA gives differences as float32 milliseconds; the base moves along with the run so that they
    stay short and a microsecond stays visible. The first base is known as well as the fastest of
    several round trips to the GPU allows, some ten microseconds.
    """

    def __init__(self) -> None:
        round_trips = [_timed_event() for _ in range(_ROUND_TRIPS)]
        began, ended, self._base = min(round_trips, key=lambda trip: trip[1] - trip[0])
        self._base_seconds = (began + ended) / 2

    def seconds(self, event: torch.cuda.Event) -> float:
        """When a completed event, recorded with timing, happened."""
        since_base: float = self._base.elapsed_time(event) / 1e3
        at = self._base_seconds + since_base
        if since_base > _REBASE_SECONDS:
            self._base, self._base_seconds = event, at
        return at


def _timed_event() -> tuple[float, float, torch.cuda.Event]:
    event = torch.cuda.Event(enable_timing=True)
    torch.cuda.current_stream().synchronize()
    began = time.perf_counter()
    event.record()
    event.synchronize()
    return began, time.perf_counter(), event


@dataclass(eq=False)
class StreamTransfer:
    """A transfer on a copy stream; see :class:`teraio.executor.stores.base.Transfer`."""

    is_write: bool
    offset_bytes: int
    nbytes: int
    clock: CudaClock
    start: torch.cuda.Event
    end: torch.cuda.Event
    buffer: torch.Tensor | None
    stream: torch.cuda.Stream
    _seconds: tuple[float, float] | None = field(default=None, init=False)

    @property
    def done(self) -> bool:
        """Whether its last byte has arrived."""
        if self._seconds is None and self.end.query():
            self._finish()
        return self._seconds is not None

    @property
    def start_seconds(self) -> float:
        """When its stream reached it; NaN until it is done."""
        return self._seconds[0] if self.done and self._seconds else float("nan")

    @property
    def end_seconds(self) -> float:
        """When its last byte arrived; NaN until it is done."""
        return self._seconds[1] if self.done and self._seconds else float("nan")

    def wait(self) -> None:
        """Block the host until its last byte has arrived."""
        if self._seconds is None:
            self.end.synchronize()
            self._finish()

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` wait; the host goes on.

        The buffer is let go: whoever gets its memory next gets it in the order of ``stream``, after
        the copy. Kept longer, it would hold memory back while the host runs ahead of the GPU.
        """
        if self._seconds is None:
            (stream or torch.cuda.current_stream()).wait_event(self.end)
            self.buffer = None

    def _finish(self) -> None:
        self._seconds = (self.clock.seconds(self.start), self.clock.seconds(self.end))
        self.buffer = None


class StreamQueues:
    """One copy stream per direction, and one of higher priority for urgent transfers of each."""

    def __init__(self, name: str, arena: torch.Tensor, clock: CudaClock | None = None) -> None:
        self._name = name
        self._arena = arena
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._clock = clock or CudaClock()
        self._streams = {
            (is_write, is_urgent): torch.cuda.Stream(priority=-1 if is_urgent else 0)
            for is_write in (False, True)
            for is_urgent in (False, True)
        }
        self._outstanding: dict[tuple[bool, bool], deque[StreamTransfer]] = {
            key: deque() for key in self._streams
        }
        self._in_flight: InFlight[StreamTransfer] = InFlight()
        self._is_closed = False

    def issue(
        self,
        buffer: torch.Tensor,
        offset_bytes: int,
        *,
        is_write: bool,
        is_urgent: bool,
        after: torch.cuda.Event | None,
    ) -> StreamTransfer:
        """Put a copy into its stream. Raises StoreError if closed."""
        if self._is_closed:
            raise StoreError(f"{self._name}: the store is closed")
        compute = torch.cuda.current_stream(self._device)
        stream = self._streams[is_write, is_urgent]
        if after is not None:
            stream.wait_event(after)
        nbytes = buffer.numel()
        self._forget_ended()
        for earlier in self._in_flight.overlapping(offset_bytes, nbytes):
            if (earlier.is_write or is_write) and earlier.stream is not stream:
                stream.wait_event(earlier.end)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        # Cheaper than torch.cuda.stream(), which looks the current stream and device up again.
        torch.cuda.set_stream(stream)
        try:
            with torch._C._DisableTorchDispatch():
                slot = self._arena[offset_bytes : offset_bytes + nbytes]
                to, source = (slot, buffer) if is_write else (buffer, slot)
                to.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(compute)
        end.record(stream)
        transfer = StreamTransfer(
            is_write, offset_bytes, nbytes, self._clock, start, end, buffer, stream
        )
        self._outstanding[is_write, is_urgent].append(transfer)
        self._in_flight.add(transfer)
        return transfer

    def _forget_ended(self) -> None:
        # A stream serves its transfers in order, so the first that has not ended ends the search.
        for transfers in self._outstanding.values():
            while transfers and transfers[0].done:
                self._in_flight.remove(transfers.popleft())

    def close(self) -> None:
        """Wait for the streams."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.synchronize()
        for transfers in self._outstanding.values():
            for transfer in transfers:
                # Whoever keeps it, for a report, does not keep what it has moved.
                transfer.wait()
        self._outstanding.clear()
        self._in_flight = InFlight()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def owns_current_thread(self) -> bool:
        """Streams have no threads."""
        return False
