"""The executor's mode where training is parallel: collectives, and kernels on several streams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

from teraio.errors import CapacityError
from teraio.executor.holding import Holding
from teraio.executor.mode import ExecutorMode
from teraio.executor.uses_in_flight import UsesInFlight
from teraio.profiler.dispatch import KernelCall
from teraio.profiler.storages import StorageState


class ParallelMode(ExecutorMode):
    """Storages stay while collectives and other streams use them, and move again afterwards.

    Memory is taken, given back and filled in the order of the compute stream, whichever stream the
    kernel goes to that needs it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        device_type = self.registry.device_type
        self.in_flight = UsesInFlight(self.residency, self.lock, device_type)

    def __enter__(self) -> Self:
        super().__enter__()
        self.in_flight.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.in_flight.stop()
        super().__exit__(*exception)

    def compute_stream(self) -> AbstractContextManager[Any]:
        """See :class:`UsesInFlight`."""
        return self.in_flight.compute_stream()

    def on_view(self, state: StorageState) -> None:
        with self.compute_stream():
            super().on_view(state)
        self.in_flight.make_visible([state.attachment])

    def before_kernel(self, call: KernelCall) -> None:
        self.in_flight.poll()
        with self.compute_stream():
            if self._moves.late_frees:
                self._moves.release_late()
            super().before_kernel(call)
        self.in_flight.make_visible(self._holding(state) for state in call.flags)

    def on_collective(self, holdings: list[Holding]) -> None:
        """It stays until the collective has completed; see :meth:`_find_births`."""

    def _find_births(self, call: KernelCall, result: Any) -> None:
        super()._find_births(call, result)
        if call.operator.is_collective or self.in_flight.is_elsewhere:
            holdings = [self._holding(state) for state in call.flags]
            born = [self._holding(state) for state in call.born]
            self.in_flight.note(call.operator, holdings, born, result)

    def after_kernel(self, call: KernelCall) -> None:
        with self.compute_stream():
            super().after_kernel(call)

    def _make_ready(self, call: KernelCall, holdings: list[Holding]) -> None:
        while True:
            try:
                return super()._make_ready(call, holdings)
            except CapacityError:
                if not self.in_flight.wait_for_one():
                    raise

    def visit(self, touched: Any) -> list[Holding]:
        """See :meth:`ExecutorMode.visit`."""
        with self.compute_stream():
            holdings = super().visit(touched)
        self.in_flight.make_visible(holdings)
        self.residency.memory.note_uses(holdings)
        return holdings
