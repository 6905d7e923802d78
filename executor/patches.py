"""Replacing functions for the time of a run, and putting the originals back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Functions replaced by wrappers of themselves; :meth:`undo` restores all, latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Replace ``owner.name`` by ``make(original)``."""
        is_own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make(original)))
        if is_own:
            self._undo.append(lambda: setattr(owner, name, original))
        else:
            self._undo.append(lambda: delattr(owner, name))

    def undo(self) -> None:
        """Restore every original."""
        while self._undo:
            self._undo.pop()()
