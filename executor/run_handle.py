"""A run as its guards see it: storages by themselves, from any thread, outside every dispatch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from teraio.errors import CapacityError
from teraio.executor.holding import Holding
from teraio.executor.leaving import let_go
from teraio.executor.mode import ExecutorMode
from teraio.executor.thread_guard import WORKER_THREAD_PREFIX
from teraio.units import format_bytes


class RunHandle:
    """What :class:`teraio.executor.read_guard.Guarded` asks of a run."""

    def __init__(self, mode: ExecutorMode) -> None:
        self._mode = mode
        self._saves = threading.local()

    def require(self, storage: torch.UntypedStorage, *, is_pointer: bool) -> None:
        """Bring a storage back; for good if a pointer to it is given away, except to a kernel or a
        save, which need it only while they last.
        """
        holding = self._find(storage)
        if holding is None:
            return
        with self._alone(), self._mode.residency.keeping():
            self._mode.residency.require((holding,))
            if is_pointer and not self._mode.is_running and not self._is_saving:
                self._mode.residency.settle(holding)
                holding.is_fixed = True

    def nbytes_of(self, storage: torch.UntypedStorage) -> int | None:
        """Size of a storage that is away, None for any other."""
        holding = self._find(storage)
        return None if holding is None or holding.is_resident else holding.state.nbytes

    def make_idle(self, storage: torch.UntypedStorage) -> None:
        """Let no transfer use the storage's memory, which the caller replaces."""
        holding = self._find(storage)
        if holding is not None:
            with self._alone():
                self._mode.residency.settle(holding)

    def bring_back(self) -> Callable[[], None]:
        """Bring everything back; the result sends it away again."""
        if self._mode.is_idle:
            return _nothing
        with self._alone():
            send_away_again = self._mode.residency.bring_back()
        was_saving, self._saves.is_under_way = self._is_saving, True

        def undo() -> None:
            self._saves.is_under_way = was_saving
            with self._alone():
                send_away_again()

        return undo

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, this thread reads storages one by one (:meth:`borrow`), within the budget; what
        had to leave for them comes back at the end.
        """
        if self._mode.is_idle:
            yield
            return
        with self._alone():
            resident = [h for h in self._mode.residency.holdings() if h.is_resident]
        was_streaming, self._saves.is_streaming = self.is_streaming, True
        try:
            yield
        finally:
            self._saves.is_streaming = was_streaming
            with self._alone():
                for holding in resident:
                    self._mode.residency.prefetch(holding, 0)

    @contextmanager
    def borrow(self, storage: torch.UntypedStorage) -> Iterator[None]:
        """Have a storage on the GPU inside the block, and where it was afterwards."""
        holding = self._find(storage)
        was_saving, self._saves.is_under_way = self._is_saving, True
        lent: list[Holding] = []
        try:
            if holding is not None:
                with self._alone():
                    lent = [] if holding.is_held else [holding]
                    was_away = not holding.is_resident
                    self._require_within_budget(holding)
                    holding.is_held = True
            yield
        finally:
            self._saves.is_under_way = was_saving
            for one in lent:
                with self._alone():
                    one.is_held = False
                    self._mode.residency.order.note_use(one)
                    if was_away:
                        self._mode.residency.release(one)

    def _require_within_budget(self, holding: Holding) -> None:
        """If that cannot be, over the budget: a save is worth it. It is no kernel's demand."""
        residency = self._mode.residency
        if not holding.is_resident:
            with suppress(CapacityError):
                residency.make_room(holding.allocated_bytes, (holding,))
            residency.fetch(holding, "demand_fetch")
        with residency.keeping():
            residency.require((holding,))

    @property
    def is_streaming(self) -> bool:
        """Whether this thread is inside :meth:`saving`."""
        return getattr(self._saves, "is_streaming", False)

    def restore(self) -> None:
        """Bring everything back until memory is needed again."""
        with self._alone():
            self._mode.residency.restore()

    def end(self, *, discards: bool = False) -> None:
        """Bring everything back for good, or give up (:mod:`leaving`) what is away; threads that
        outlive the run meet an idle mode. Raises CapacityError for what does not fit back.
        """
        with self._alone():
            try:
                if discards:
                    let_go(self._mode)
                self._mode.residency.end()
            except torch.OutOfMemoryError:
                lost_bytes = let_go(self._mode)
                raise CapacityError(
                    f"execute: {format_bytes(lost_bytes)} of the model and its optimizer do not "
                    "fit back on the GPU and are lost; save them inside the block (run.save), and "
                    'leave it with on_exit="discard"'
                ) from None
            finally:
                self._mode.is_idle = True

    @property
    def _is_saving(self) -> bool:
        """Whether this thread is inside a save."""
        return getattr(self._saves, "is_under_way", False)

    def _find(self, storage: torch.UntypedStorage) -> Holding | None:
        mode = self._mode
        if mode.is_idle or threading.current_thread().name.startswith(WORKER_THREAD_PREFIX):
            return None
        state = mode.registry.find_address(storage._cdata)
        holding: Holding | None = None if state is None else state.attachment
        return holding

    @contextmanager
    def _alone(self) -> Iterator[None]:
        mode = self._mode
        with mode.lock, torch._C._DisableTorchDispatch(), mode.compute_stream():
            yield
        self._mode.deliver_interrupt()


def _nothing() -> None:
    """Nothing to undo."""
