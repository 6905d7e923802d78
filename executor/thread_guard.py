"""Threads and processes beside the one that trains.

A dispatch mode sees the operators of its own thread. Threads that start during a run get a mode of
their own, which makes what they touch resident, over the budget if need be, and keeps the training
thread from moving it while they do; only the training thread sends storages away. A forked process
(a data loader's worker) inherits tensors but neither stores nor their threads: everything is
brought back before the fork, and the child forgets the run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

from teraio.errors import TeraioError
from teraio.executor.mode import ExecutorMode
from teraio.executor.patches import Patches
from teraio.profiler.dispatch import dense_parts
from teraio.profiler.operators import describe_operator, tensors_with_flags

WORKER_THREAD_PREFIX = "teraio"

_forked_runs: list[ForkGuard] = []


class VisitorMode(TorchDispatchMode):
    """Operators of another thread: what they touch is resident until they have run."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As for the mode of the training thread."""
        return True

    def __init__(self, host: ExecutorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host = host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        host = self._host
        if host.is_idle:
            return func(*args, **kwargs)
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        with host.lock:
            with host.residency.keeping():
                host.visit(self._touched(func, args, kwargs))
            return func(*args, **kwargs)

    def _touched(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Tensor, bool]]:
        """(tensor, whether it is written)."""
        return [
            (part, writes)
            for tensor, _, writes in tensors_with_flags(describe_operator(func), args, kwargs)
            for part in (tensor, *dense_parts(tensor))
        ]


class ThreadGuard:
    """Gives a :class:`VisitorMode` to every thread that starts while active.

    Threads that run already when the guard starts are not seen; nor are those of libraries.
    """

    def __init__(self, host: ExecutorMode) -> None:
        self._host = host
        self._patches = Patches()

    def start(self) -> None:
        """Watch for threads."""
        host = self._host

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(thread: threading.Thread) -> None:
                if thread.name.startswith(WORKER_THREAD_PREFIX):
                    original(thread)
                    return
                # Not entered as a context: torch keeps count of those for all threads together.
                visitor = VisitorMode(host)
                _push_mode(visitor)
                try:
                    original(thread)
                finally:
                    # Left to the end of the thread it would go without the interpreter's lock, and
                    # take the process down where that is ending too.
                    if _get_current_dispatch_mode() is visitor:
                        _pop_mode()

            return guarded

        self._patches.wrap(threading.Thread, "_bootstrap_inner", make)

    def stop(self) -> None:
        """Watch no longer; the modes already given see to it that they do nothing any more."""
        self._patches.undo()


class ForkGuard:
    """Brings everything back around a fork of this process, and makes the child's run idle."""

    def __init__(self, host: ExecutorMode, bring_back: Callable[[], Callable[[], None]]) -> None:
        self._host = host
        self._bring_back = bring_back
        self._undo: Callable[[], None] | None = None

    def start(self) -> None:
        """Watch for forks."""
        _forked_runs.append(self)

    def stop(self) -> None:
        """Watch no longer."""
        _forked_runs.remove(self)

    def before(self) -> None:
        """The fork is next."""
        if self._host.registry.device_type == "cpu":
            self._host.lock.acquire()
            # A tier that fails now fails the run at its next use; the fork goes on.
            with suppress(TeraioError):
                self._undo = self._bring_back()

    def after_in_parent(self) -> None:
        """Go on as before."""
        if self._host.registry.device_type == "cpu":
            undo, self._undo = self._undo, None
            try:
                if undo is not None:
                    undo()
            finally:
                self._host.lock.release()

    def after_in_child(self) -> None:
        """Be an ordinary process."""
        self._host.is_idle = True
        if self._host.registry.device_type == "cpu":
            self._host.lock.release()


def _before_fork() -> None:
    for run in _forked_runs:
        run.before()


def _after_fork_in_parent() -> None:
    for run in _forked_runs:
        run.after_in_parent()


def _after_fork_in_child() -> None:
    for run in _forked_runs:
        run.after_in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
