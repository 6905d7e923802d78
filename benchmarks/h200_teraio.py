"""The rows of teraio in benchmarks/h200.py: one process that profiles, plans and executes.

Its argument is an order in JSON: see :class:`Order`. The training without a plan is timed first, in
the same process; the bound of each plan is printed before the plan is executed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_figures import (
        comparison,
        memory_text,
        outcome_text,
        plan_figures,
        promise_text,
        run_figures,
    )
    from benchmarks.h200_rows import Contender, Setting, emit, say
    from benchmarks.h200_training import (
        HostMemory,
        Trainee,
        Window,
        checksum,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
        setup_of,
    )
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_figures import (
        comparison,
        memory_text,
        outcome_text,
        plan_figures,
        promise_text,
        run_figures,
    )
    from h200_rows import Contender, Setting, emit, say
    from h200_training import (
        HostMemory,
        Trainee,
        Window,
        checksum,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
        setup_of,
    )

import teraio
from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.profiler.costs.kernel_timing import time_kernels
from teraio.profiler.costs.timings import Timings
from teraio.traces.trace import Trace
from teraio.units import format_bytes, format_seconds, parse_bytes

LANDING_STEPS = 3
"""More to warm up where a plan has to be laid over other kernels first."""

PROBE_SIZES_MIB = (4, 16, 64, 128)
"""Sizes of what moves: weights of bench-3.4b are 38 to 393 MB."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to measure. ``contenders``: :class:`Contender` as lists; empty for the ideal alone.

    ``until``: ``trace`` stops once training is traced and the machine measured, ``plan`` once plans
    are made (which needs no GPU where traces and hardware are kept), ``run`` executes them.
    ``folder`` gets trace, hardware and plans; those in ``plans_from`` are used instead of made.
    ``hardware``: a file or preset; None measures this machine. ``time_kernels``: price the fake
    trace with kernels timed here. ``spare_host``: pinned beyond what a plan needs, for what it
    misses. ``steps``: iterations that are timed, after ``warm_up``.
    """

    setting: Mapping[str, Any]
    contenders: list[list[Any]]
    folder: str
    until: str = "run"
    plans_from: str | None = None
    hardware: str | None = None
    probe: str = "quick"
    host_memory: str = "90GB"
    spare_host: str = "2GB"
    time_kernels: bool = False
    time_limit: float | None = None
    planner: str = "optimal"
    warm_up: int = 3
    steps: int = 10


@dataclass(frozen=True)
class Plain:
    """Training without a plan."""

    window: Window
    losses: list[float]
    checksum: int
    memory: dict[str, int]
    runs_agree: bool | None


class Session:
    """What the rows of one process share, made when it is first needed."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.setting = Setting(**order.setting)
        self.device = self.setting.device
        self.folder = Path(order.folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def plain(self) -> Plain:
        """The ideal, timed; with exactness wanted twice, to see whether it is the same twice."""
        first = self._run_plain()
        agree = None
        if self.setting.exact:
            again = self._run_plain()
            agree = _same(again, first)
            say(f"two plain runs agree bit for bit: {agree}")
            first = min(first, again, key=lambda run: run.window.step_seconds)
        say(f"ideal {format_seconds(first.window.step_seconds)} {memory_text(first.memory)}")
        return replace(first, runs_agree=agree)

    def _run_plain(self) -> Plain:
        forget_memory(self.device)
        host = HostMemory()
        trainee = Trainee(self.setting)
        window = run_window(trainee.step, self.order.warm_up, self.order.steps, self.device)
        memory = peaks(self.device) | host.as_row()
        losses = [float(loss) for loss in window.losses]
        return Plain(window, losses, checksum(trainee.model), memory, None)

    @cached_property
    def trace(self) -> Trace:
        """Recorded here, or an earlier run's."""
        name = f"{self.setting.name}.trace"
        kept = self._kept(name)
        if kept is not None:
            say(f"trace of an earlier run: {name}")
            return Trace.load(kept)
        forget_memory(self.device)
        trainee = Trainee(self.setting)
        began = time.perf_counter()
        with teraio.profile(trainee.model, trainee.optimizer) as profile:
            number = 0
            while not profile.done:
                trainee.step(number)
                profile.step()
                number += 1
        trace = profile.trace
        trace.save(self.folder / name)
        say(
            f"traced {trace.num_kernels} kernels, {len(trace.storages)} storages in {number} steps "
            f"({time.perf_counter() - began:.0f} s): ideal {format_seconds(trace.ideal_seconds)}, "
            f"peak {format_bytes(trace.peak_allocated_bytes)}"
        )
        return trace

    @cached_property
    def fake_trace(self) -> Trace:
        """The same training traced without its tensors, here or by an earlier run."""
        name = f"{self.setting.name}-fake.trace"
        kept = self._kept(name)
        if kept is not None:
            say(f"trace of an earlier run: {name}")
            return Trace.load(kept)
        forget_memory(self.device)
        setup = setup_of(self.setting)
        fake = teraio.trace(
            setup.model,
            sequence=setup.sequence,
            micro_batch_size=setup.micro_batch_size,
            dtype=setup.dtype,
            optimizer_implementation=setup.optimizer_implementation,
            compile_blocks=setup.compile_blocks,
            gpu="h200",
        )
        if self.order.time_kernels:
            fake = self._timed(fake)
        fake.save(self.folder / name)
        say(f"traced without a GPU: ideal {format_seconds(fake.ideal_seconds)}")
        return fake

    def _timed(self, fake: Trace) -> Trace:
        """The trace with the times of its distinct calls on this GPU, as ``teraio time`` does."""
        path = self.folder / f"{self.setting.name}.timings"
        kept = self._kept(path.name)
        began = time.perf_counter()
        timings = time_kernels(
            fake, device=self.device, known=None if kept is None else Timings.load(kept)
        )
        timings.save(path)
        say(f"timed kernels in {time.perf_counter() - began:.0f} s")
        saved = self.folder / "untimed.trace"
        fake.save(saved)
        return teraio.trace(saved, gpu="h200", timings=timings)

    @cached_property
    def hardware(self) -> Hardware:
        """This machine's GPU and host memory, as probed; without its disk, which takes no part."""
        kept = self._kept("hardware.toml")
        if self.order.hardware is not None:
            hardware = Hardware.load(self.order.hardware)
        elif kept is not None:
            hardware = Hardware.load(kept)
        else:
            forget_memory(self.device)
            hardware = teraio.probe(
                device=self.device,
                quick=self.order.probe == "quick",
                sizes=[f"{size}MiB" for size in PROBE_SIZES_MIB] if self.device == "cuda" else None,
                progress=say,
            )
        hardware.save(self.folder / "hardware.toml")
        say(hardware.to_toml())
        return replace(hardware, ssd=())

    def _kept(self, name: str) -> Path | None:
        """What an earlier run left under this name."""
        if self.order.plans_from is None:
            return None
        path = Path(self.order.plans_from) / name
        return path if path.exists() else None

    def measure(self, contender: Contender) -> dict[str, Any]:
        """The figures of one row."""
        plain = self.plain
        if contender.name == "ideal":
            return plain.window.as_row() | plain.memory | {"runs_agree": plain.runs_agree}
        plan, row = self.planned(contender)
        row |= self._execute(plan, lands=contender.name == "fake-trace")
        row |= comparison(row, plain.window.step_seconds)
        say(outcome_text(contender, row))
        return row

    def planned(self, contender: Contender) -> tuple[Plan, dict[str, Any]]:
        """The plan of a row, and all that is known before it is executed."""
        trace = self.trace_of(contender)
        plan = self._plan(contender, trace)
        simulated = teraio.simulate(trace, plan, plan.hardware, record=False)
        row = plan_figures(plan) | {
            "simulated_seconds": simulated.iteration_seconds,
            "simulated_evictions": simulated.metadata.evictions,
            "trace_ideal_seconds": trace.ideal_seconds,
            "trace_peak_allocated_bytes": trace.peak_allocated_bytes,
        }
        say(promise_text(contender, row))
        return plan, row

    def trace_of(self, contender: Contender) -> Trace:
        """What a contender's plan is made from."""
        return self.fake_trace if contender.name == "fake-trace" else self.trace

    def _plan(self, contender: Contender, trace: Trace) -> Plan:
        name = f"{self.setting.name}-{contender.label}.plan"
        kept = self._kept(name)
        if kept is not None:
            plan = Plan.load(kept)
            if plan.metadata.trace_hash == trace.hash:
                say(f"plan of an earlier run: {name}")
                return plan
        if contender.name == "empty-plan":
            plan = teraio.plan(trace, self.hardware, planner="ideal")
        else:
            plan = teraio.plan(
                trace,
                self.hardware,
                planner=self.order.planner,
                gpu_memory=self._budget_bytes(contender),
                host_memory=parse_bytes(self.order.host_memory, "host_memory"),
                transform=contender.transform,
                time_limit=self.order.time_limit,
                bound=True,
            )
        plan.save(self.folder / name)
        return plan

    def _budget_bytes(self, contender: Contender) -> int:
        """A share of the peak of the measured trace, for the plan of the fake trace too."""
        return int((contender.budget_share or 1.0) * self.trace.peak_allocated_bytes)

    def _execute(self, plan: Plan, *, lands: bool) -> dict[str, Any]:
        """Train under the plan: seconds, memory, what the run reports, whether bits are equal.

        ``lands``: the plan is of a trace that is not the run's, which takes it some steps to learn.
        """
        forget_memory(self.device)
        trainee = Trainee(self.setting)
        host = HostMemory()
        arena_bytes = plan.metadata.arena_bytes.get(HOST, 0)
        # A plan without moves was made for exactly the peak; it is to show the executor alone.
        gpu_memory = None if len(plan.moves) else self.hardware.gpu[0].memory_bytes
        # As many in all as without a plan, so that losses can be compared.
        learning = min(LANDING_STEPS, self.order.steps - 1) if lands else 0
        warm_up, steps = self.order.warm_up + learning, self.order.steps - learning
        began = time.perf_counter()
        with teraio.execute(
            plan,
            trainee.model,
            trainee.optimizer,
            gpu_memory=gpu_memory,
            host_memory=arena_bytes + parse_bytes(self.order.spare_host, "spare_host"),
        ) as run:
            opening_seconds = time.perf_counter() - began
            window = run_window(trainee.step, warm_up, steps, self.device)
            memory = peaks(self.device) | host.as_row()
        row = window.as_row() | memory | run_figures(run.report)
        row["opening_seconds"] = opening_seconds
        row["bit_identical"] = self._is_identical(row["losses"], checksum(trainee.model))
        return row

    def _is_identical(self, losses: list[float], parameters: int) -> bool | None:
        """None where plain training itself was not seen to be the same twice."""
        plain = self.plain
        if _bits(losses) == _bits(plain.losses) and parameters == plain.checksum:
            return True
        return False if plain.runs_agree else None


def _same(one: Plain, other: Plain) -> bool:
    return _bits(one.losses) == _bits(other.losses) and one.checksum == other.checksum


def _bits(losses: list[float]) -> list[str]:
    """Equal for equal bits, also where a loss is not a number."""
    return [float(loss).hex() for loss in losses]


def take(session: Session, contender: Contender) -> None:
    """Do for a row what the order wants done, and hand it on if it is measured."""
    until = session.order.until
    if until == "run" or contender.name == "ideal":
        emit(contender, session.measure(contender) | {"made_on": made_on(session.device)})
    elif until == "plan":
        session.planned(contender)
    else:
        _ = session.trace_of(contender), session.hardware


def main() -> None:
    """Measure what the order says; a row that fails does not keep the others from being tried."""
    session = Session(Order(**json.loads(sys.argv[1])))
    prepare_process(session.setting)
    for contender in (Contender(*given) for given in session.order.contenders):
        try:
            take(session, contender)
        except Exception as error:
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}"[:500]
            emit(contender, {"failed": failed, "made_on": made_on(session.device)})


if __name__ == "__main__":
    main()
