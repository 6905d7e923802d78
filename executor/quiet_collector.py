"""Python's garbage collector, kept from looking through everything while a GPU waits.

Every ten steps or so it would look through all objects of the process, libraries' included: some
0.3 s in which nothing is issued, more than the training thread is ahead of the GPU. What exists
when a run begins, and what its first iterations make to last, is set aside (``gc.freeze``); a full
look through the rest takes a fifth of it. Cycles of what was set aside can be collected after the
run, not within it.
"""

from __future__ import annotations

import gc

_FIRST_ITERATIONS = 2
"""After so many the optimizer's state exists, and what was compiled for the first ones."""

_FEW = 5_000
"""Python 3.12 begins with some hundred objects set aside; who sets PyTorch aside has 100,000."""


class QuietCollector:
    """Sets aside what lasts, for the time of a run; nothing where the collector is switched off or
    somebody else has set objects aside, which could not be told apart afterwards.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._is_active = False
        self._iterations_left = _FIRST_ITERATIONS
        self._count = 0

    def start(self) -> None:
        """A run begins: garbage goes, and with it what it holds on the GPU; the rest stays."""
        self._is_active = self._is_wanted and gc.isenabled() and gc.get_freeze_count() < _FEW
        if self._is_active:
            self._set_aside()

    def end_iteration(self) -> None:
        """An iteration has ended, and one of the first has made things that last."""
        if self._iterations_left and self._is_active:
            self._iterations_left -= 1
            if not self._iterations_left and gc.isenabled():
                self._set_aside()

    def stop(self) -> None:
        """Everything is looked through again from here on, unless others have set more aside."""
        if self._is_active and gc.get_freeze_count() <= self._count:
            gc.unfreeze()
        self._is_active = False

    def _set_aside(self) -> None:
        gc.collect()
        gc.freeze()
        self._count = gc.get_freeze_count()
