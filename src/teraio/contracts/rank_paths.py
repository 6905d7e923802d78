"""Names of what each rank of parallel training writes and reads: a trace or plan for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from teraio.errors import InputError

PLACEHOLDER = "{rank}"
"""In a path: where the rank's number stands."""


def path_of_rank(path: str | Path, rank: int) -> Path:
    """The file of one rank: ``T.{rank}.trace`` gives ``T.1.trace``, ``T.trace`` ``T.rank1.trace``.

    In the second form the number stands before the last suffix.
    """
    text = str(path)
    if PLACEHOLDER in text:
        return Path(text.replace(PLACEHOLDER, str(rank)))
    plain = Path(path)
    return plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}")


def plan_path_of_rank(path: str | Path, rank: int, world_size: int) -> Path:
    """Where the plan of one of ``world_size`` ranks lies, given what the user calls it.

    ``path`` is a name with ``{rank}``, the name under which ``teraio plan`` was told to write the
    plans of all ranks (``P.plan`` for ``P.rank0.plan`` ...), a folder of them, or one plan. Raises
    InputError if there is none for the rank.
    """
    plain = Path(path)
    if PLACEHOLDER in str(path):
        return _existing(path_of_rank(path, rank), rank, world_size)
    if world_size > 1 and not plain.exists():
        return _existing(path_of_rank(path, rank), rank, world_size)
    if plain.is_dir():
        plans = sorted(child for child in plain.glob("*.plan") if child.is_dir())
        if plans:
            return _only_one_of_rank(plain, plans, rank)
    return plain


def _existing(path: Path, rank: int, world_size: int) -> Path:
    if not path.exists():
        raise InputError(f"{path}: there is no plan for rank {rank} of {world_size}")
    return path


def _only_one_of_rank(folder: Path, plans: Sequence[Path], rank: int) -> Path:
    """The plan that says that it is this rank's, whatever it is called."""
    from teraio.contracts.plan import Plan

    found = [path for path in plans if Plan.load(path).metadata.rank == rank]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(f"{folder}: one plan of rank {rank} is wanted there, found {names}")
    return found[0]
