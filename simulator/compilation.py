"""How the engine is compiled: numba, machine code cached on disk, decorators typed for mypy.

To check every index of the engine, run with NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

# Compiled functions work on arrays that they are given and allocate none. Without numba's reference
# counting of arrays they run about twenty times faster.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def compiled(function: Function) -> Function:
    """Compile into the first compiled caller; Python cannot call it.

    It has no wrappers for Python, which take longer to compile than the function itself.
    """
    options = _OPTIONS | {
        "forceinline": True,
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return cast(Function, numba.njit(**options)(function))


def compiled_and_cached(function: Function) -> Function:
    """Compile on first use and keep the machine code on disk for later processes.

    numba takes cached code for outdated when the function's own file changes, not when a callee's
    does. A name that changes with any source file of the package gives each version its own file.
    """
    function.__qualname__ += f"_{source_fingerprint()[:16]}"
    try:
        return cast(Function, numba.njit(cache=True, nogil=True, **_OPTIONS)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Function, numba.njit(nogil=True, **_OPTIONS)(function))


class CompilationWatch(event.Listener):
    """Within its block: the seconds for which numba compiled, 0 where its machine code was on disk.

    ``tell`` gets a line of text when that begins: the first plan on a machine waits for it.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.seconds = 0.0
        self._tell = tell
        self._depth = 0
        self._began = 0.0
        self._has_told = False

    def __enter__(self) -> Self:
        event.register("numba:compile", self)
        return self

    def __exit__(self, *exception: Any) -> None:
        event.unregister("numba:compile", self)

    def on_start(self, event: Any) -> None:
        """A function is compiled; those that it calls may be within its time."""
        if self._depth == 0:
            self._began = time.perf_counter()
            if self._tell is not None and not self._has_told:
                self._has_told = True
                self._tell("compiling first, which a machine does once")
        self._depth += 1

    def on_end(self, event: Any) -> None:
        """It has been."""
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.perf_counter() - self._began


def source_fingerprint() -> str:
    """SHA-256 over the source of every module of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
