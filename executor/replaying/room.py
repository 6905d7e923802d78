"""What memory a replay takes, and whether the machine has it."""

from __future__ import annotations

import torch

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.executor.planned_places import planned_bytes_per_device
from teraio.executor.probing.limits import available_memory_bytes, check_memory_by_touching
from teraio.executor.replaying.scene import Scene
from teraio.executor.stores.striped_space import Directories
from teraio.executor.tiers import Tiers, open_tiers
from teraio.traces.trace import UNTRACKED, Trace
from teraio.units import format_bytes


def untracked_bytes(plan: Plan) -> int:
    """GPU memory that no tensor has: counted, but not taken."""
    storages = plan.storages
    rows = (storages.name == UNTRACKED) & (storages.birth < 0)
    return int(storages.allocated_bytes[rows].sum())


def open_replay_tiers(
    scene: Scene,
    *,
    is_budget_given: bool,
    ssd_path: Directories | None,
    ssd_backend: str,
    device_type: str,
) -> Tiers:
    """The stores of a replay. Raises InputError if memory is short, CapacityError, StoreError.

    Host memory is what the plan's slots need, and some more for evictions: a little where the plan
    fits, else what could have to leave; but never more than the budget, and the whole of one
    that the user gave.
    """
    plan, hardware = scene.plan, scene.plan.hardware
    planned = planned_bytes_per_device(plan, hardware)
    budget_bytes = _host_budget(plan, hardware, planned)
    host_bytes = budget_bytes
    if not is_budget_given:
        largest_bytes = int(plan.storages.nbytes.max(initial=0))
        spare_bytes = 2 * (largest_bytes if scene.fits else scene.trace.peak_allocated_bytes)
        host_bytes = min(budget_bytes, planned.get(HOST, 0) + spare_bytes)
    _check_room(plan, scene.trace, host_bytes, device_type)
    return open_tiers(
        hardware,
        plan.metadata.rank,
        planned,
        host_memory_bytes=host_bytes,
        ssd_path=ssd_path,
        device_type=device_type,
        ssd_backend=ssd_backend,
    )


def _host_budget(plan: Plan, hardware: Hardware, planned: dict[str, int]) -> int:
    """Of the host budget, what bounce buffers leave. Raises InputError if the plan needs more."""
    metadata = plan.metadata
    given = metadata.host_memory_bytes
    bounce_bytes = sum(
        ssd.bounce_bytes
        for ssd in hardware.ssds_of_rank(metadata.rank)
        if planned.get(ssd.name, 0) and not ssd.gds
    )
    needed_bytes = planned.get(HOST, 0) + bounce_bytes
    if needed_bytes > given:
        raise InputError(
            f"host_memory: the plan needs {needed_bytes} bytes, the budget is {given}; "
            "plan again for this budget"
        )
    return given - bounce_bytes


def _check_room(plan: Plan, trace: Trace, host_bytes: int, device_type: str) -> None:
    budget_bytes = plan.metadata.gpu_memory_bytes
    gpu_bytes = min(budget_bytes, trace.peak_allocated_bytes) - untracked_bytes(plan)
    if device_type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info()
        free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if gpu_bytes > free_bytes:
            raise InputError(
                f"replay: takes {format_bytes(gpu_bytes)} of GPU memory, of which "
                f"{format_bytes(free_bytes)} are free; take a smaller --scale"
            )
        gpu_bytes = 0
    needed_bytes = gpu_bytes + host_bytes
    if needed_bytes > available_memory_bytes():
        _check_main_memory(needed_bytes)


def _check_main_memory(needed_bytes: int) -> None:
    """Some machines get more memory than they show as it is used."""
    try:
        check_memory_by_touching(needed_bytes)
    except InputError as error:
        raise InputError(f"{error}, or take a smaller --scale") from None
