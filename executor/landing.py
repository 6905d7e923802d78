"""Landing a plan on a run whose kernels are not quite the planned ones.

A plan may come from a trace without a GPU, or of another attention kernel or optimizer
implementation. Then some kernels are others than planned, everywhere in the iteration, and create
other storages. So a whole iteration of the run is laid beside the plan, and the plan is rewritten
in the run's own kernels: what follows is compared with these, at no further cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.executor.alignment import Block, differing_blocks, find_beginning, paired_sections
from teraio.executor.landed_plan import Entry, Match, rewrite
from teraio.executor.landed_rows import identify
from teraio.executor.observation import Observation, ObservedKernel
from teraio.profiler.storages import StorageState

_MAX_BLOCK = 32
"""Kernels of a pass that may be others in a row; more of them are another training."""

_LEAST_MATCHED = 0.5
"""Share of the planned kernels of the passes that a run must have to be taken for the planned."""


@dataclass(frozen=True)
class Landing:
    """A plan in the run's own kernels.

    ``row_of``: rows that the storages of the observed iteration play. ``num_substituted`` counts
    kernels that are others, extra or left out; ``first_substituted`` says what the first was.
    """

    plan: Plan
    row_of: dict[StorageState, int]
    num_substituted: int
    first_substituted: str


def land(plan: Plan, observation: Observation, *, is_cold: bool) -> Landing | None:
    """The plan in the kernels of an observed iteration; None if that is another training.

    Of the first iteration of a training (``is_cold``) only kernels in the place of others are
    believed: its optimizer creates state, and anything may precede it.
    """
    if not is_cold and not observation.is_whole:
        return None
    observed = list(observation.kernels)
    match = _match(plan, observed, is_cold=is_cold)
    if match is None:
        return None
    if not match.blocks:
        return Landing(plan, {}, 0, "")
    row_of = identify(plan, observed, match)
    return Landing(
        rewrite(plan, observed, match, row_of),
        row_of,
        sum(block.length for block in match.blocks),
        _describe(plan, observed, match),
    )


def _match(plan: Plan, observed: list[ObservedKernel], *, is_cold: bool) -> Match | None:
    numbers: dict[tuple[str, int], int] = {}
    planned = [
        numbers.setdefault(key, len(numbers))
        for key in zip(plan.kernels.op.tolist(), plan.kernels.signature.tolist(), strict=True)
    ]
    run = [numbers.setdefault((k.op, k.signature), len(numbers)) for k in observed]
    match, num_planned, num_others = Match([], []), 0, 0
    sections = paired_sections(plan.kernels.phase.tolist(), [k.phase for k in observed])
    for number, (kind, whole) in enumerate(sections):
        if is_cold and kind == "optimizer":
            _keep_planned(match, whole)
            continue
        if is_cold and number == 0:
            whole = whole._replace(run_start=find_beginning(planned, run, whole))
        blocks = differing_blocks(planned, run, whole)
        if kind == "pass":
            if max((block.length for block in blocks), default=0) > _MAX_BLOCK:
                return None
            num_planned += whole.planned_stop - whole.planned_start
            num_others += sum(block.planned_stop - block.planned_start for block in blocks)
        _append(match, whole, blocks, is_cold=is_cold)
    is_another = num_planned - num_others < _LEAST_MATCHED * num_planned
    return None if is_another else match


def _append(match: Match, whole: Block, blocks: list[Block], *, is_cold: bool) -> None:
    entries, (planned, planned_stop, observed, _) = match.entries, whole
    for block in (*blocks, None):
        stop = planned_stop if block is None else block.planned_start
        entries += [Entry(planned + i, observed + i) for i in range(stop - planned)]
        if block is None:
            return
        if is_cold and block.is_one_sided:
            # Gradients that do not exist yet, or a message every hundred steps.
            _keep_planned(match, block)
        else:
            first = len(entries)
            entries += [Entry(MISSING, o) for o in range(block.run_start, block.run_stop)]
            match.blocks.append(block._replace(run_start=first, run_stop=len(entries)))
        planned, observed = block.planned_stop, block.run_stop


def _keep_planned(match: Match, block: Block) -> None:
    match.entries.extend(Entry(p, MISSING) for p in range(block.planned_start, block.planned_stop))


def _describe(plan: Plan, observed: list[ObservedKernel], match: Match) -> str:
    first = match.blocks[0]
    is_planned = first.planned_start < first.planned_stop
    planned = plan.kernels.op[first.planned_start] if is_planned else "nothing"
    run = "nothing"
    if first.run_start < first.run_stop:
        run = observed[match.entries[first.run_start].observed].op
    return f"kernel {first.run_start}: {run} instead of {planned}"
