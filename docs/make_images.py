"""Draws the pictures of the documentation again: ``python docs/make_images.py``.

The trace is synthetic (benchmarks/synthetic.py): one step of a Llama-like transformer of 8 billion
parameters in single precision, four micro-batches, AdamW. Everything shown is simulated on the
preset ``paper``: one GPU of 94 GB, SSDs of 16 GB/s each way, a PCIe link of 50 GB/s.
"""

from __future__ import annotations

import sys
from pathlib import Path

import teraio
from teraio.contracts.drawing import save_picture
from teraio.planner.plot_comparison import plot_comparison

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
HARDWARE = "paper"
PLANNERS = ["ideal", "optimal", "greedy", "on-demand"]


def make_images() -> None:
    """Write memory.png, timeline.png and comparison.png."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from synthetic import SyntheticModel, synthetic_trace

    trace = synthetic_trace(SyntheticModel(micro_batches=4))
    hardware = teraio.Hardware.preset(HARDWARE)
    save_picture(trace.plot(hardware.gpu[0].memory_bytes), IMAGES / "memory.png")
    plan = teraio.plan(trace, hardware)
    save_picture(teraio.simulate(trace, plan).plot(), IMAGES / "timeline.png")
    table = teraio.compare(trace, hardware, PLANNERS)
    save_picture(plot_comparison(table), IMAGES / "comparison.png")


if __name__ == "__main__":
    make_images()
