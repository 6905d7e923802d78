"""What a step leaves behind: nothing that only Python's garbage collector could give back."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

import teraio


def test_steps_leave_no_cycles(case: Any, machine: Any) -> None:
    """Thousands in each step would make it look through the whole heap every few steps, for tenths
    of a second in which the GPU waits.
    """
    training = case()
    trace = training.trace()
    hardware = machine(gpu_memory=int(0.7 * trace.peak_allocated_bytes))
    plan = teraio.plan(trace, hardware, planner="greedy")
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer):
        for number in range(4):
            training.step(model, optimizer, number)
        gc.collect()
        gc.disable()
        try:
            for number in range(3):
                training.step(model, optimizer, number)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = Counter(type(thing).__module__ for thing in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    ours = {module: count for module, count in kinds.items() if module.startswith("teraio")}
    if ours:
        pytest.fail(f"three steps left {ours} to the garbage collector")
