"""Queues that are CUDA streams: transfers between a GPU and pinned host memory.

Note: who waits for what
  copy stream     -> the point of the compute stream at issue: the source has been computed, and
                     earlier work is through with memory just given to a destination
  copy stream     -> transfers of other queues that touch the same bytes of the arena
  copy stream     -> its queue's last copy, where that was in the other stream
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

TURN_BYTES = 64 * 2**20
"""What one stream of a queue copies before it is the other's turn: a millisecond."""

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
    """A transfer on copy streams; see :class:`teraio.executor.stores.base.Transfer`."""

    is_write: bool
    offset_bytes: int
    nbytes: int
    clock: CudaClock
    start: torch.cuda.Event
    end: torch.cuda.Event
    buffer: torch.Tensor | None
    queue: StreamQueue
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


class StreamQueue:
    """Copies in the order of issue, on streams that take turns.

    A GPU's copy engine stays with a stream for as long as that has something to copy: an H200 let
    copies of other streams, also of one with a higher priority, wait for all that was queued, half
    a second. A stream that waits for the other one of its queue lets them in.
    """

    def __init__(self, *, is_urgent: bool) -> None:
        # Urgent transfers are few. Streams share a GPU's channels, so no more than are of use.
        priority, num_streams = (-1, 1) if is_urgent else (0, 2)
        self._streams = deque(torch.cuda.Stream(priority=priority) for _ in range(num_streams))
        self._bytes_of_turn = 0
        self.transfers: deque[StreamTransfer] = deque()

    @property
    def stream(self) -> torch.cuda.Stream:
        """Whose turn it is: what is put into it comes after all that the queue has."""
        return self._streams[0]

    def begin_copy(self, nbytes: int) -> None:
        """It is the next stream's turn, if so many bytes more are too many for one turn."""
        is_over = self._bytes_of_turn > 0 and self._bytes_of_turn + nbytes > TURN_BYTES
        if is_over and len(self._streams) > 1:
            self._streams.rotate()
            self.stream.wait_stream(self._streams[1])
            self._bytes_of_turn = 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy uint8 (nbytes,), in several turns if that is much. The current stream changes."""
        for begin in range(0, to.numel(), TURN_BYTES):
            chunk = slice(begin, min(begin + TURN_BYTES, to.numel()))
            nbytes = chunk.stop - begin
            self.begin_copy(nbytes)
            # Cheaper than torch.cuda.stream(), which looks the current stream and device up again.
            torch.cuda.set_stream(self.stream)
            to[chunk].copy_(source[chunk], non_blocking=True)
            self._bytes_of_turn += nbytes

    def forget_ended(self, in_flight: InFlight[StreamTransfer]) -> None:
        """Copies end in order, so the first that has not ended ends the search."""
        while self.transfers and self.transfers[0].done:
            in_flight.remove(self.transfers.popleft())

    def synchronize(self) -> None:
        """Wait for the streams."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Wait for the streams. Whoever keeps a transfer, for a report, keeps not what it moved."""
        self.synchronize()
        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()


class StreamQueues:
    """One queue per direction, and one of higher priority for urgent transfers of each."""

    def __init__(self, name: str, arena: torch.Tensor, clock: CudaClock | None = None) -> None:
        self._name = name
        self._arena = arena
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._clock = clock or CudaClock()
        self._queues = {
            (is_write, is_urgent): StreamQueue(is_urgent=is_urgent)
            for is_write in (False, True)
            for is_urgent in (False, True)
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
        """Put a copy into its queue. Raises StoreError if closed."""
        if self._is_closed:
            raise StoreError(f"{self._name}: the store is closed")
        compute = torch.cuda.current_stream(self._device)
        queue, nbytes = self._queues[is_write, is_urgent], buffer.numel()
        queue.begin_copy(nbytes)
        if after is not None:
            queue.stream.wait_event(after)
        for each in self._queues.values():
            each.forget_ended(self._in_flight)
        for earlier in self._in_flight.overlapping(offset_bytes, nbytes):
            if (earlier.is_write or is_write) and earlier.queue is not queue:
                queue.stream.wait_event(earlier.end)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record(queue.stream)
        try:
            with torch._C._DisableTorchDispatch():
                slot = self._arena[offset_bytes : offset_bytes + nbytes]
                queue.copy(*((slot, buffer) if is_write else (buffer, slot)))
        except BaseException:
            # No transfer keeps the buffer of what has been copied by now.
            queue.synchronize()
            raise
        finally:
            torch.cuda.set_stream(compute)
        end.record(queue.stream)
        transfer = StreamTransfer(
            is_write, offset_bytes, nbytes, self._clock, start, end, buffer, queue
        )
        queue.transfers.append(transfer)
        self._in_flight.add(transfer)
        return transfer

    def close(self) -> None:
        """Wait for what is under way."""
        self._is_closed = True
        for queue in self._queues.values():
            queue.close()
        self._in_flight = InFlight()
        self._arena = torch.empty(0, dtype=torch.uint8)

    def owns_current_thread(self) -> bool:
        """Streams have no threads."""
        return False
