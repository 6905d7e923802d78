"""Completing a draft: clean copies, slots, the state at kernel 0 and the account of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError, InputError
from teraio.planner.drafts import ANY_SSD
from teraio.planner.plan_building import build_plan, rebuild_plan
from teraio.planner.policies.evict_everything import Tiers, evict_everything
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace


def draft_of(plan: Plan) -> Moves:
    """The plan's moves without what building works out."""
    moves = plan.moves
    return replace(
        moves,
        tier_offset_bytes=np.full(len(moves), 7),
        writes=np.ones(len(moves), dtype=bool),
        device=np.where(moves.tier == "ssd", ANY_SSD, "host"),
    )


def test_builds_the_plan_made_by_hand(
    small_trace: Trace, small_hardware: Hardware, small_plan: Plan
) -> None:
    """From its bare moves: the same writes, placement, copies, peaks and bytes written."""
    budget = small_plan.metadata
    hardware = small_hardware.with_budgets(budget.gpu_memory_bytes, budget.host_memory_bytes)
    plan = build_plan(small_trace, draft_of(small_plan), hardware, planner="draft")
    assert plan.moves.writes.tolist() == small_plan.moves.writes.tolist()
    assert plan.moves.device.tolist() == small_plan.moves.device.tolist()
    assert plan.storages.placement.tolist() == small_plan.storages.placement.tolist()
    assert plan.copies.storage.tolist() == small_plan.copies.storage.tolist()
    assert plan.metadata.peak_gpu_bytes == budget.peak_gpu_bytes
    assert plan.metadata.ssd_bytes_written == dict(budget.ssd_bytes_written)
    assert plan.metadata.arena_bytes == dict(budget.arena_bytes)
    verification = verify(small_trace, plan)
    assert verification.valid, verification.violations
    assert verification.fits


def test_rebuilding_a_plan_changes_nothing(small_plan: Plan) -> None:
    """Its own moves give the hand-made plan again, but for the choice of offsets."""
    again = rebuild_plan(small_plan, draft_of(small_plan))
    assert again.moves.writes.tolist() == small_plan.moves.writes.tolist()
    assert again.storages.placement.tolist() == small_plan.storages.placement.tolist()
    assert again.metadata.arena_bytes == dict(small_plan.metadata.arena_bytes)


def test_deleting_the_writer_makes_the_next_move_write(
    small_trace: Trace, small_plan: Plan
) -> None:
    """Without the first absence of ``weight`` the second one has no copy to reuse."""
    kept = np.delete(np.arange(len(small_plan.moves)), 1)
    plan = rebuild_plan(small_plan, small_plan.moves.take(kept))
    of_weight = plan.moves.storage == 1
    assert plan.moves.writes[of_weight].tolist() == [True, False]
    assert plan.storages.placement[1] == "gpu"
    assert verify(small_trace, plan).valid


def test_rebuilding_without_moves_leaves_everything_on_the_gpu(
    small_trace: Trace, small_plan: Plan
) -> None:
    """No arena, no copies, every storage that lives at kernel 0 placed on the GPU."""
    plan = rebuild_plan(small_plan, Moves.empty())
    assert plan.metadata.arena_bytes == {}
    assert len(plan.copies) == 0
    assert plan.storages.placement.tolist() == ["gpu", "gpu", "gpu", "", "gpu", "gpu", "gpu"]
    assert plan.metadata.peak_gpu_bytes == small_trace.peak_allocated_bytes


def test_unwritten_storage_is_never_written_and_keeps_its_slot(
    make_trace: Callable[..., Trace], make_hardware: Callable[..., Hardware]
) -> None:
    """W is only read, by 0, 3 and 6: three absences, no bytes written, one slot for all times."""
    trace = make_trace(
        [1.0] * 9,
        [("W", 100, None, None), ("T", 50, 1, 8)],
        [(0, "W", "r"), (3, "W", "r"), (6, "W", "r"), (1, "T", "w"), (8, "T", "r")],
    )
    plan = evict_everything(trace, make_hardware(1000), minimum_bytes=1, tiers="ssd")
    of_weight = plan.moves.storage == 0
    assert of_weight.sum() == 3
    assert not plan.moves.writes[of_weight].any()
    assert plan.metadata.ssd_bytes_written == {"ssd0": 50}
    assert plan.metadata.arena_bytes == {"ssd0": 150}
    assert verify(trace, plan).valid


def test_copy_that_serves_after_the_cut_is_listed(
    make_trace: Callable[..., Trace], make_hardware: Callable[..., Hardware]
) -> None:
    """W is written by 3 and read by 5 and, over the cut, by 2: away in 4, and in 0 and 1."""
    trace = make_trace(
        [1.0] * 6, [("W", 100, None, None)], [(3, "W", "rw"), (5, "W", "r"), (2, "W", "r")]
    )
    plan = evict_everything(trace, make_hardware(1000), minimum_bytes=1)
    assert plan.moves.after_kernel.tolist() == [3, 5]
    assert plan.moves.writes.tolist() == [True, False]
    assert plan.storages.placement[0] == "host"
    assert len(plan.copies) == 0
    # If it leaves before kernel 1 only, it is on the GPU at kernel 0 and its copy will serve.
    plan = rebuild_plan(plan, replace(plan.moves, free_by=np.array([4, 1])))
    assert plan.storages.placement[0] == "gpu"
    assert plan.copies.storage.tolist() == [0]
    assert verify(trace, plan).valid


def test_bounce_buffers_are_part_of_the_host_arena(
    one_tensor: Trace, make_hardware: Callable[..., Hardware]
) -> None:
    """An SSD without GPUDirect Storage in use pins its bounce buffer; the budget must hold it."""
    hardware = make_hardware(100, gds=False, bounce_bytes=4096, host_bytes=4096)
    plan = evict_everything(one_tensor, hardware, minimum_bytes=1, tiers="ssd")
    assert plan.metadata.arena_bytes == {"ssd0": 100, "host": 4096}
    assert plan.metadata.peak_host_bytes == 4096
    smaller = hardware.with_budgets(host_memory=4095)
    with pytest.raises(CapacityError, match="host: the plan needs 4096 bytes"):
        evict_everything(one_tensor, smaller, minimum_bytes=1, tiers="ssd")


def test_full_ssd_is_an_error_that_names_it(
    one_tensor: Trace, make_hardware: Callable[..., Hardware]
) -> None:
    """A capacity of 99 bytes does not hold a slot of 100."""
    hardware = make_hardware(100, capacity_bytes=99)
    with pytest.raises(CapacityError, match="ssd0"):
        evict_everything(one_tensor, hardware, minimum_bytes=1, tiers="ssd")


def test_storages_are_spread_over_ssds(
    make_trace: Callable[..., Trace], make_hardware: Callable[..., Hardware]
) -> None:
    """Four equal storages on two SSDs: two each, and all periods of one on the same."""
    names = ["a", "b", "c", "d"]
    trace = make_trace(
        [1.0] * 8,
        [(name, 10, None, None) for name in names],
        [(k, name, "rw") for k in (0, 4) for name in names],
    )
    plan = evict_everything(trace, make_hardware(100, num_ssds=2), minimum_bytes=1, tiers="ssd")
    devices = [set(plan.moves.device[plan.moves.storage == s].tolist()) for s in range(4)]
    assert all(len(device) == 1 for device in devices)
    assert sorted(device.pop() for device in devices) == ["ssd0", "ssd0", "ssd1", "ssd1"]
    assert verify(trace, plan).valid


def test_unknown_devices_are_refused(
    one_tensor: Trace, make_hardware: Callable[..., Hardware]
) -> None:
    """A device that the machine lacks, and an SSD on a machine without any."""
    hardware = make_hardware(100)
    plan = evict_everything(one_tensor, hardware, minimum_bytes=1, tiers="ssd")
    moves = replace(plan.moves, device=np.full(len(plan.moves), "tape"))
    with pytest.raises(InputError, match="'tape' is not one of"):
        build_plan(one_tensor, moves, hardware, planner="draft")
    with pytest.raises(InputError, match="reaches none"):
        evict_everything(one_tensor, make_hardware(100, num_ssds=0), minimum_bytes=1, tiers="ssd")
    with pytest.raises(InputError, match="tiers"):
        evict_everything(one_tensor, hardware, tiers="tape")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("tiers", ["host", "ssd", "both"])
def test_evicting_everything_from_random_cycles_is_valid(
    seed: int,
    tiers: Tiers,
    random_trace: Callable[[int], Trace],
    make_hardware: Callable[..., Hardware],
) -> None:
    """Each resizable period leaves, tails and wraps included, and the verifier agrees."""
    trace = random_trace(seed)
    hardware = make_hardware(10**6, num_ssds=2)
    plan = evict_everything(
        trace,
        hardware,
        minimum_bytes=1,
        tiers=tiers,
        predicted_seconds=10.0**6,
    )
    verification = verify(trace, plan)
    assert verification.valid, verification.violations
    assert verification.fits, verification.violations
