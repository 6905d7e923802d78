"""What is said and counted where the simulator and the planners compile themselves."""

from __future__ import annotations

from typing import Any

import numba

from teraio.simulator.compilation import CompilationWatch


def function_and_caller() -> Any:
    """A function that compiles another, neither of them known to numba yet."""
    inner: Any = numba.njit(lambda x: x + 1)
    outer: Any = numba.njit(lambda x: inner(x) * 2)
    return outer


def test_it_is_said_once_and_counted() -> None:
    """Of a function and those that it calls."""
    outer = function_and_caller()
    told: list[str] = []
    with CompilationWatch(told.append) as watch:
        assert outer(1) == 4
        assert function_and_caller()(1) == 4
    assert told == ["compiling first, which a machine does once"]
    assert 0 < watch.seconds < 60


def test_what_is_compiled_already_is_not() -> None:
    outer = function_and_caller()
    told: list[str] = []
    outer(1)
    with CompilationWatch(told.append) as watch:
        outer(2)
    assert (told, watch.seconds) == ([], 0.0)


def test_nobody_needs_to_listen() -> None:
    outer = function_and_caller()
    with CompilationWatch() as watch:
        outer(1)
    before = watch.seconds
    assert before > 0
    function_and_caller()(1)
    assert watch.seconds == before, "only inside its block"
