"""Several ranks of one training, each a process with a plan and a GPU of its own.

A run knows its rank from ``torch.distributed`` if that is initialised, else from what launchers
such as torchrun put into the environment. A plan is executed by the rank that it was made for, and
by no other: storages and collectives of ranks differ, and so do their shares of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from teraio.contracts.plan import Plan
from teraio.contracts.rank_paths import plan_path_of_rank
from teraio.errors import InputError

PlanChoice = Plan | str | Path | Sequence[Plan | str | Path]
"""One plan, the name of a rank's plan (see :func:`plan_path_of_rank`), or those of all ranks."""


def current_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) where training is not parallel.

    Raises InputError for an environment that makes no sense.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1)


def is_parallel() -> bool:
    """Whether this process is, or by its launcher is about to be, in a process group."""
    distributed = torch.distributed
    is_in_group = distributed.is_available() and distributed.is_initialized()
    return is_in_group or current_rank()[1] > 1


def ranks_on_this_machine() -> int:
    """How many ranks share its memory, as their launcher says; all of them if it does not.

    Raises InputError for an environment that makes no sense.
    """
    num_ranks = current_rank()[1]
    return max(1, min(_from_environment("LOCAL_WORLD_SIZE", num_ranks), num_ranks))


def plan_of_this_rank(choice: PlanChoice) -> Plan:
    """Load, of what the user gave, the plan of this rank.

    Raises InputError if there is none, several, or only one of another rank or number of ranks.
    """
    rank, world_size = current_rank()
    if isinstance(choice, (Plan, str, Path)):
        plan = _load(choice, rank, world_size)
    else:
        plan = _only_one(choice, rank, world_size)
    check_rank(plan, rank, world_size)
    return plan


def check_rank(plan: Plan, rank: int, world_size: int) -> None:
    """Raise InputError for a plan that was made for another rank, or for other numbers of them."""
    planned = plan.metadata
    if (planned.rank, planned.world_size) == (rank, world_size):
        return
    remedy = "give the plan of this rank, e.g. as P.{rank}.plan"
    if planned.world_size != world_size:
        remedy = f"profile and plan the training as it runs now, with {world_size} ranks"
    raise InputError(
        f"plan: is of rank {planned.rank} of {planned.world_size}, this process is rank {rank} of "
        f"{world_size}; {remedy}"
    )


def check_device(models: Iterable[torch.nn.Module]) -> None:
    """Raise InputError if the parameters lie on another GPU than the process's current one."""
    for model in models:
        for parameter in model.parameters():
            device = parameter.device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                raise InputError(
                    f"device: the model is on {device}, the current GPU is cuda:"
                    f"{torch.cuda.current_device()}; call torch.cuda.set_device({device.index}) "
                    "before anything else"
                )
            break


def name_rank(error: BaseException) -> None:
    """Say in an error's notes which rank it happened on, where there are several."""
    rank, world_size = current_rank()
    note = f"teraio: on rank {rank} of {world_size}"
    if world_size > 1 and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _load(choice: Plan | str | Path, rank: int, world_size: int) -> Plan:
    if isinstance(choice, Plan):
        return choice
    return Plan.load(plan_path_of_rank(choice, rank, world_size))


def _only_one(choice: Sequence[Plan | str | Path], rank: int, world_size: int) -> Plan:
    plans = [item if isinstance(item, Plan) else Plan.load(item) for item in choice]
    found = [plan for plan in plans if plan.metadata.rank == rank]
    if len(found) != 1:
        ranks = sorted(plan.metadata.rank for plan in plans)
        raise InputError(
            f"plan: one of the {len(plans)} plans must be of rank {rank} of {world_size}; they are "
            f"of ranks {ranks}"
        )
    return found[0]


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{name}: the launcher's variable must be a number, got {text!r}"
        ) from None
