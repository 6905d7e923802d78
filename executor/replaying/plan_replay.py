"""``teraio.replay``: what a machine can do with a plan, before any model is ported to it."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline, summary
from teraio.errors import InputError, OffloadWarning
from teraio.executor.replaying.patterns import CHECKS
from teraio.executor.replaying.room import open_replay_tiers
from teraio.executor.replaying.scene import make_scene
from teraio.executor.replaying.session import Session
from teraio.executor.stores import FileUse
from teraio.executor.stores.striped_space import Directories
from teraio.traces.trace import Trace, as_trace
from teraio.units import format_seconds

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Replay:
    """What a replay measured, and what the simulator says of the same plan at the same scale.

    Attributes: ``timeline``: the median iteration; ``predicted``: the simulated one (no events);
    ``all_iteration_seconds``: every iteration after the warm-up; ``moves_found`` of
    ``moves_planned``: offloads of an iteration; ``transfers_checked``: reads whose bytes were
    compared; ``kernel_error``: fraction by which the stand-in kernels of the last iteration missed
    their time in all (0 on a CPU, where they go by the clock); ``ssd_files``: each file of the SSD
    tier, with what served it and its rates; ``scale``: of sizes, durations and budgets.
    """

    timeline: Timeline
    predicted: Timeline
    all_iteration_seconds: list[float]
    moves_planned: int
    moves_found: int
    transfers_checked: int
    kernel_error: float
    ssd_files: tuple[FileUse, ...]
    device: str
    scale: float

    def __repr__(self) -> str:
        return (
            f"<Replay on {self.device}: iteration {format_seconds(self.iteration_seconds)}, "
            f"predicted {format_seconds(self.predicted_seconds)} ({self.error:+.1%})>"
        )

    @property
    def iteration_seconds(self) -> float:
        """Median measured iteration."""
        return float(statistics.median(self.all_iteration_seconds))

    @property
    def predicted_seconds(self) -> float:
        """Mean iteration of the simulated steady state."""
        return self.predicted.iteration_seconds

    @property
    def error(self) -> float:
        """measured / predicted - 1: above 0, the replay was slower."""
        predicted = self.predicted_seconds
        return self.iteration_seconds / predicted - 1 if predicted > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """The keys of ``teraio simulate --json``, measured, and those of the replay."""
        measured = {**summary(self.timeline), "iteration_seconds": self.iteration_seconds}
        return {
            **measured,
            "predicted_seconds": self.predicted_seconds,
            "predicted_stall_seconds": self.predicted.stall_seconds,
            "error": self.error,
            "all_iteration_seconds": self.all_iteration_seconds,
            "moves_planned": self.moves_planned,
            "moves_found": self.moves_found,
            "transfers_checked": self.transfers_checked,
            "kernel_error": self.kernel_error,
            "device": self.device,
            "scale": self.scale,
        }


def replay(
    trace: Trace | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    device: str = "cpu",
    hardware: Hardware | str | Path | None = None,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    ssd_path: Directories | None = None,
    ssd_backend: str = "auto",
    iterations: int = 3,
    scale: float = 1.0,
    verify: str | None = None,
    memory_traffic: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Play a plan with real memory and real transfers; no model runs, kernels are timed stand-ins.

    Stand-in kernels take the trace's durations and gaps; moves are issued by the executor's own
    code. Without a plan, storages are paged on demand. One iteration warms up, ``iterations`` are
    measured. ``device``: whose memory is planned, ``cpu`` or ``cuda``. ``hardware``: whose rates
    the prediction counts on (the plan's; without a plan, its tiers too). Budgets are the plan's,
    then the hardware's; SSD files are as for ``execute``. ``scale`` (at most 1) multiplies sizes,
    durations and budgets alike.

    ``verify``: how much of each storage is compared after it came back: ``full``, ``sampled`` (the
    default on a CPU) or ``off`` (the default on a GPU, where it takes time from the kernels).
    ``memory_traffic`` lets stand-in kernels read and write as much as the trace's do, so that they
    and the transfers slow each other down. ``progress`` is called after each iteration with its
    number.

    Raises InputError (an argument, a plan of another trace, too little memory), StoreError (a
    transfer failed, or moved wrong bytes) and CapacityError (no tier has room).
    """
    verify = verify or ("sampled" if device == "cpu" else "off")
    _check_arguments(device, iterations, scale, verify)
    trace = as_trace(trace)
    plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
    scene = make_scene(trace, plan, hardware, gpu_memory, host_memory, scale)
    predicted = scene.predicted(hardware, has_memory_traffic=memory_traffic)
    tiers = open_replay_tiers(
        scene,
        is_budget_given=host_memory is not None,
        ssd_path=ssd_path,
        ssd_backend=ssd_backend,
        device_type=device,
    )
    with closing(tiers):
        if scene.is_planned and not scene.fits:
            message = "the plan does not fit its budgets; what is missing is moved on demand"
            warnings.warn(message, OffloadWarning, stacklevel=2)
        session = Session(scene.trace, scene.plan, tiers, device, verify)
        timeline = session.play(iterations, has_memory_traffic=memory_traffic, progress=progress)
    return _replay_of(session, timeline, predicted, device, scale)


def _replay_of(
    session: Session, timeline: Timeline, predicted: Timeline, device: str, scale: float
) -> Replay:
    return Replay(
        timeline=timeline,
        predicted=predicted,
        all_iteration_seconds=session.iteration_seconds,
        moves_planned=session.moves_planned,
        moves_found=session.moves_found,
        transfers_checked=session.transfers_checked,
        kernel_error=session.kernel_error,
        ssd_files=session.ssd_files,
        device=device,
        scale=scale,
    )


def _check_arguments(device: str, iterations: int, scale: float, verify: str) -> None:
    if verify not in CHECKS:
        raise InputError(f"verify: must be one of {CHECKS}, got {verify!r}")
    if device not in DEVICES:
        raise InputError(f"device: must be one of {DEVICES}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: there is no GPU here; replay on the CPU: device='cpu'")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise InputError(f"iterations: must be a positive integer, got {iterations!r}")
    if not isinstance(scale, int | float) or not math.isfinite(scale) or not 0 < scale <= 1:
        raise InputError(f"scale: must be above 0 and at most 1, got {scale!r}")
