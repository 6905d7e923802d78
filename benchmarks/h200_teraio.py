"""The rows of teraio in benchmarks/h200.py: one process that profiles, plans and executes.

Its argument is an order in JSON: see :class:`Order`. What takes the GPU's time and brings no figure
is done once: training without a plan is measured once on a machine and kept, and other processes
make the plans while a run goes on whose speed does not matter. The bound of each plan is printed
before the plan is executed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_figures import comparison, outcome_text, promise_text, run_figures
    from benchmarks.h200_plain import Plain, PlainTraining, Steps, are_same, load_plain
    from benchmarks.h200_planning import MOVELESS, Planners, PlanWork
    from benchmarks.h200_rows import Contender, Setting, boot_id, emit, say
    from benchmarks.h200_training import (
        HostMemory,
        Trainee,
        checksum,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_exactly,
        run_window,
        setup_of,
    )
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_figures import comparison, outcome_text, promise_text, run_figures
    from h200_plain import Plain, PlainTraining, Steps, are_same, load_plain
    from h200_planning import MOVELESS, Planners, PlanWork
    from h200_rows import Contender, Setting, boot_id, emit, say
    from h200_training import (
        HostMemory,
        Trainee,
        checksum,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_exactly,
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

BRIEF_EXACT_STEPS = 5
"""Compared bit by bit where the plan is no budget's that must hold: enough to learn and to move."""

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
    misses. ``headroom``: share of the GPU budget that plans leave free. ``exact_steps``: iterations
    with deterministic algorithms that come first, whose losses are compared with those of plain
    training. ``steps``: iterations that are timed, after ``warm_up``.
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
    headroom: float = 0.0
    time_kernels: bool = False
    time_limit: float | None = None
    planner: str = "optimal"
    exact_steps: int = 0
    warm_up: int = 3
    steps: int = 10


class Session:
    """What the rows of one process share, made when it is first needed."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.setting = Setting(**order.setting)
        self.device = self.setting.device
        self.folder = Path(order.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.contenders = [Contender(*given) for given in order.contenders]
        self._promises: dict[Contender, Future[dict[str, Any]]] = {}
        num_plans = sum(contender.name != "ideal" for contender in self.contenders)
        # They load their libraries while the training is traced.
        is_planning = num_plans > 0 and order.until != "trace"
        self._planners = Planners(num_plans) if is_planning else None

    def prepare(self) -> None:
        """Trace and machine, then plans and plain training's losses, as far as they are wanted."""
        if self._planners is not None:
            _ = self.trace, self.hardware
            self._promises = {c: self._promise_of(c) for c in self.contenders if c.name != "ideal"}
        if self.order.until == "run":
            self._plain_training.run_for_comparison()
        if self._planners is not None:
            # Before anything is timed.
            self._planners.close()

    @cached_property
    def plain(self) -> Plain:
        """The ideal, and the losses that every plan must give."""
        plain = self._plain_training.run()
        plain.save(self.folder / self._plain_name)
        return plain

    @cached_property
    def _plain_training(self) -> PlainTraining:
        order, kept = self.order, self._kept(self._plain_name)
        steps = Steps(exact=order.exact_steps, warm_up=order.warm_up, timed=order.steps)
        return PlainTraining(self.setting, steps, None if kept is None else load_plain(kept))

    @property
    def _plain_name(self) -> str:
        return f"{self.setting.name}-plain.json"

    @cached_property
    def trace(self) -> Trace:
        """Recorded here, or an earlier run's."""
        name = self._trace_name
        kept = self._kept(name)
        if kept is not None:
            return self._loaded(kept)
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

    def _loaded(self, kept: Path) -> Trace:
        """A trace of an earlier run, in this run's folder too."""
        say(f"trace of an earlier run: {kept.name}")
        trace = Trace.load(kept)
        if kept.parent.resolve() != self.folder.resolve():
            trace.save(self.folder / kept.name)
        return trace

    @property
    def _trace_name(self) -> str:
        return f"{self.setting.name}.trace"

    @property
    def _fake_trace_name(self) -> str:
        return f"{self.setting.name}-fake.trace"

    @cached_property
    def fake_trace(self) -> Trace:
        """The same training traced without its tensors, here or by an earlier run."""
        name = self._fake_trace_name
        kept = self._kept(name)
        if kept is not None:
            return self._loaded(kept)
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
            began = time.perf_counter()
            hardware = teraio.probe(
                device=self.device,
                directory=(),
                quick=self.order.probe == "quick",
                sizes=[f"{size}MiB" for size in PROBE_SIZES_MIB] if self.device == "cuda" else None,
                progress=say,
            )
            say(f"probed in {time.perf_counter() - began:.0f} s")
        hardware.save(self.folder / "hardware.toml")
        say(hardware.to_toml())
        return hardware

    def _kept(self, name: str) -> Path | None:
        """What an earlier run left under this name."""
        if self.order.plans_from is None:
            return None
        path = Path(self.order.plans_from) / name
        return path if path.exists() else None

    def measure(self, contender: Contender) -> dict[str, Any]:
        """The figures of one row."""
        if contender.name == "ideal":
            return self.plain.as_row()
        row = self.promised(contender)
        plain = self.plain
        plan = Plan.load(self._plan_path(contender))
        row |= self._execute(plan, contender) | {"boot": boot_id()}
        row |= comparison(row, plain.step_seconds)
        say(outcome_text(contender, row))
        return row

    def promised(self, contender: Contender) -> dict[str, Any]:
        """All that is known of a row's plan before it is executed."""
        row = self._promises[contender].result()
        say(promise_text(contender, row))
        return row

    def trace_of(self, contender: Contender) -> Trace:
        """What a contender's plan is made from."""
        return self.fake_trace if contender.name == "fake-trace" else self.trace

    def _promise_of(self, contender: Contender) -> Future[dict[str, Any]]:
        """What another process will say of the row's plan; an error is the row's own."""
        assert self._planners is not None
        try:
            return self._planners.start(self._work(contender))
        except Exception as error:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(error)
            return failed

    def _work(self, contender: Contender) -> PlanWork:
        _ = self.trace_of(contender), self.hardware  # Their files are what the planner reads.
        is_fake = contender.name == "fake-trace"
        path = self._plan_path(contender)
        return PlanWork(
            trace=self.folder / (self._fake_trace_name if is_fake else self._trace_name),
            hardware=self.folder / "hardware.toml",
            output=path,
            kept=self._kept(path.name),
            planner=MOVELESS if contender.name == "empty-plan" else self.order.planner,
            gpu_memory=self._budget_bytes(contender),
            headroom=self.order.headroom,
            host_memory=self.order.host_memory,
            transform=contender.transform,
            time_limit=self.order.time_limit,
        )

    def _plan_path(self, contender: Contender) -> Path:
        return self.folder / f"{self.setting.name}-{contender.label}.plan"

    def _budget_bytes(self, contender: Contender) -> int:
        """A share of the peak of the measured trace, for the plan of the fake trace too."""
        return int((contender.budget_share or 1.0) * self.trace.peak_allocated_bytes)

    def _execute(self, plan: Plan, contender: Contender) -> dict[str, Any]:
        """Train under the plan: seconds, memory, what the run reports, whether bits are equal."""
        forget_memory(self.device)
        trainee = Trainee(self.setting)
        host = HostMemory()
        arena_bytes = plan.metadata.arena_bytes.get(HOST, 0)
        # A plan without moves was made for exactly the peak; it is to show the executor alone.
        gpu_memory = self.hardware.gpu[0].memory_bytes
        if len(plan.moves):
            gpu_memory = self._budget_bytes(contender)
        exact, warm_up = self._exact_steps(contender), self.order.warm_up
        if contender.name == "fake-trace":
            # Its plan is not of this run's kernels, which takes some steps to learn.
            warm_up = max(warm_up, self.order.warm_up + LANDING_STEPS - exact)
        began = time.perf_counter()
        with teraio.execute(
            plan,
            trainee.model,
            trainee.optimizer,
            gpu_memory=gpu_memory,
            host_memory=arena_bytes + parse_bytes(self.order.spare_host, "spare_host"),
        ) as run:
            opening_seconds = time.perf_counter() - began
            exact_losses, exact_seconds = run_exactly(trainee.step, exact, self.device)
            window = run_window(trainee.step, warm_up, self.order.steps, self.device, exact)
            memory = peaks(self.device) | host.as_row()
        row = window.as_row() | memory | run_figures(run.report)
        row["opening_seconds"], row["exact_step_seconds"] = opening_seconds, exact_seconds
        row["losses"] = [*(float(loss) for loss in exact_losses), *row["losses"]]
        row["compared_steps"] = exact or min(len(row["losses"]), len(self.plain.losses))
        row["bit_identical"] = self._is_identical(row["losses"], exact, trainee)
        return row

    def _exact_steps(self, contender: Contender) -> int:
        given = self.order.exact_steps
        return given if contender.name == "teraio" else min(given, BRIEF_EXACT_STEPS)

    def _is_identical(self, losses: list[float], exact: int, trainee: Trainee) -> bool | None:
        """None where plain training was not seen to give the same twice, and this is not the same;
        or where its losses are those of exact steps and this has none.

        Parameters are compared where both runs took as many steps, all alike.
        """
        plain = self.plain
        if exact:
            is_same = are_same(losses[:exact], plain.exact_losses[:exact])
        elif plain.exact_losses:
            return None
        else:
            count = min(len(losses), len(plain.losses))
            is_same = are_same(losses[:count], plain.losses[:count])
            if is_same and len(losses) == len(plain.losses):
                is_same = checksum(trainee.model) == plain.checksum
        return True if is_same else (False if plain.runs_agree else None)


def take(session: Session, contender: Contender) -> None:
    """Do for a row what the order wants done, and hand it on if it is measured."""
    until = session.order.until
    if until == "run":
        emit(contender, session.measure(contender) | {"made_on": made_on(session.device)})
    elif until == "plan" and contender.name != "ideal":
        session.promised(contender)
    elif contender.name != "ideal":
        _ = session.trace_of(contender), session.hardware


def main() -> None:
    """Measure what the order says; a row that fails does not keep the others from being tried."""
    order = Order(**json.loads(sys.argv[1]))
    prepare_process(Setting(**order.setting))
    session = Session(order)
    session.prepare()
    for contender in session.contenders:
        try:
            take(session, contender)
        except Exception as error:
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}"[:500]
            emit(contender, {"failed": failed, "made_on": made_on(session.device)})


if __name__ == "__main__":
    main()
