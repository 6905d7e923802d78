"""A thread that does one thing after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from teraio.executor.stores.queues import Await

Job = Callable[[], Await]


class Worker:
    """Jobs in the order of :meth:`submit`, which never fails: the thread runs from the beginning.

    Not a ThreadPoolExecutor: ``submit`` of those holds a lock of the whole process, in which the
    garbage collector may close another store, whose threads need it too; and they take no more jobs
    as soon as the interpreter begins to end. ``gpu`` is the thread's current one.
    """

    def __init__(self, name: str, gpu: int | None = None) -> None:
        self._gpu = gpu
        self._jobs: queue.SimpleQueue[tuple[Future[Await], Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Await]:
        """Do it after all that has been submitted before."""
        future: Future[Await] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Do what has been submitted, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        while True:
            item = self._jobs.get()
            if item is None:
                return
            self._do(*item)
            del item  # While it sleeps, it keeps nobody's memory.

    def _do(self, future: Future[Await], job: Job) -> None:
        try:
            future.set_result(job())
        except BaseException as failure:  # A thread has no caller: whoever asks gets it.
            future.set_exception(failure)
