"""Storages that something beside the compute stream still uses after the call has returned.

A collective reads and writes its tensors until it has completed, and a kernel on another CUDA
stream until that stream has reached its end. Until then they must neither leave nor be copied;
afterwards they move like any other. Nothing here blocks: another rank may be waiting for what this
one does next. Only where a run would have to end for lack of memory does it wait, for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from teraio.executor.holding import Holding
from teraio.executor.patches import Patches
from teraio.executor.residency import Residency
from teraio.profiler.operators import nested_tensors

PATIENCE_SECONDS = 30.0
"""How long a run that is out of memory waits for a use to end before it gives up."""

_POLL_SECONDS = 0.001


@dataclass(eq=False)
class _Use:
    """It ends with ``event``, with all ``works``, or when one of ``outputs`` is waited for."""

    holdings: list[Holding]
    event: torch.cuda.Event | None = None
    works: list[Any] = field(default_factory=list)
    outputs: frozenset[Holding] = frozenset()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, as far as one can ask."""
        if self.event is not None:
            return bool(self.event.query())
        return not self.outputs and all(work.is_completed() for work in self.works)


class UsesInFlight:
    """Counts uses under way in ``Holding.in_flight``; on a GPU it knows the compute stream.

    That is the stream on which the run was entered; all transfers are ordered with it.
    """

    def __init__(self, residency: Residency, lock: threading.RLock, device_type: str) -> None:
        self._residency = residency
        self._lock = lock
        self._patches = Patches()
        self._uses: list[_Use] = []
        self._next = 0
        self._compute = torch.cuda.current_stream() if device_type == "cuda" else None
        self._computing: frozenset[torch.Stream] = frozenset(
            () if self._compute is None else (self._compute,)
        )

    def start(self) -> None:
        """Notice what is waited for: some works never say that they have completed."""

        def make(wait: Callable[..., Any]) -> Callable[..., Any]:
            def waiting(work: Any, *args: Any, **kwargs: Any) -> Any:
                result = wait(work, *args, **kwargs)
                with self._lock:
                    self._waited_for(work)
                return result

            return waiting

        if torch.distributed.is_available():
            self._patches.wrap(torch._C._distributed_c10d.Work, "wait", make)

    def stop(self) -> None:
        """Notice it no longer."""
        self._patches.undo()

    def compute_stream(self) -> AbstractContextManager[Any]:
        """Inside, the compute stream is the current one: memory that moves is ordered with it."""
        return torch.cuda.stream(self._compute) if self.is_elsewhere else nullcontext()

    @property
    def is_elsewhere(self) -> bool:
        """Whether kernels go to another stream than the compute stream now."""
        compute = self._compute
        if compute is None:
            return False
        # The handle alone: this is asked several times for each kernel.
        return bool(torch._C._cuda_getCurrentRawStream(compute.device_index) != compute.cuda_stream)

    def make_visible(self, holdings: Iterable[Holding]) -> None:
        """Let the current stream, if it is another, wait for what has been brought back."""
        if self.is_elsewhere:
            for holding in holdings:
                if holding.arrived is not None:
                    holding.arrived.make_stream_wait()

    def note(
        self, operator: Any, holdings: list[Holding], born: list[Holding], result: Any
    ) -> None:
        """An operator has been issued that touches ``holdings``, ``born`` among them."""
        if operator.is_collective:
            self._note_collective(operator.name, holdings, result)
        if self.is_elsewhere:
            event = torch.cuda.current_stream().record_event()
            self._add(_Use(holdings, event))
            for holding in born:
                # Its memory goes back to that stream's pool, which does not wait for this one.
                holding.shared_with |= self._computing

    def poll(self) -> None:
        """Let go of what has ended, as far as a look at two of them tells.

        Most end in the order in which they began; the other look goes round, because some never do.
        """
        while self._uses and self._uses[0].is_done:
            self._end(self._uses[:1])
        if len(self._uses) > 1:
            self._next = self._next % (len(self._uses) - 1) + 1
            use = self._uses[self._next]
            if use.is_done:
                self._end([use])

    def wait_for_one(self) -> bool:
        """Wait until at least one use has ended; False if none is under way, or none ends."""
        known = len(self._uses)
        end = time.monotonic() + PATIENCE_SECONDS
        while self._uses and time.monotonic() < end:
            self._end([use for use in self._uses if use.is_done])
            if len(self._uses) < known:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _note_collective(self, name: str, holdings: list[Holding], result: Any) -> None:
        if "wait_tensor" in name:
            waited = set(holdings)
            self._end([use for use in self._uses if use.outputs & waited])
            return
        works = list(_works_in(result))
        if works:
            self._add(_Use(holdings, works=works))
        elif name.startswith("_c10d_functional."):
            addresses = {tensor.untyped_storage()._cdata for tensor in nested_tensors(result)}
            outputs = frozenset(h for h in holdings if h.state.address in addresses)
            self._add(_Use(holdings, outputs=outputs))
        else:
            # Part of a batch whose work is not shown: nobody can tell when it ends.
            for holding in holdings:
                holding.is_fixed = True

    def _waited_for(self, work: Any) -> None:
        """The compute stream is in order after it, on a CPU the host; another stream is not."""
        if self.is_elsewhere:
            return
        concerned = [use for use in self._uses if any(one is work for one in use.works)]
        for use in concerned:
            use.works = [one for one in use.works if one is not work]
        self._end([use for use in concerned if not use.works])

    def _add(self, use: _Use) -> None:
        self._uses.append(use)
        for holding in use.holdings:
            holding.in_flight += 1

    def _end(self, ended: list[_Use]) -> None:
        for use in ended:
            self._uses.remove(use)
            for holding in use.holdings:
                holding.in_flight -= 1
                self._residency.order.note_use(holding)


def _works_in(result: Any) -> Iterator[Any]:
    """The ``Work`` objects among an operator's results."""
    if isinstance(result, (list, tuple)):
        for item in result:
            yield from _works_in(item)
    elif isinstance(result, torch.ScriptObject):
        work = torch._C._distributed_c10d.Work.unbox(result)
        if work is not None:
            yield work
