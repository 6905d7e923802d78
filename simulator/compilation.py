"""How the engine is compiled: numba, machine code cached on disk, decorators typed for mypy.

To check every index of the engine, run with NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

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


def source_fingerprint() -> str:
    """SHA-256 over the source of every module of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
