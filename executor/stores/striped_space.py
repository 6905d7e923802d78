"""The disk space of a device that lies in one file or is striped over several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from teraio.errors import CapacityError, InputError
from teraio.executor.stores.base import Store, round_up
from teraio.executor.stores.striping import Stripes

Directories: TypeAlias = str | Path | Sequence[str | Path]
"""One folder, or one for each file of a stripe set."""


class Member(Protocol):
    """A file of a device."""

    def reserve(self, reserved_bytes: int) -> None:
        """Occupy at least so many bytes. Raises StoreError."""
        ...


def as_directories(directories: Directories) -> list[Path]:
    """The folders as a list. Raises InputError if there is none."""
    if isinstance(directories, (str, Path)):
        return [Path(directories)]
    folders = [Path(directory) for directory in directories]
    if not folders:
        raise InputError("ssd_path: needs at least one folder")
    return folders


def grow_members(store: Store, nbytes: int, stripes: Stripes, members: Sequence[Member]) -> int:
    """Reserve ``nbytes`` more in the files of a store; its bytes then.

    Raises CapacityError (its capacity), StoreError (a disk); the store has then what it had before.
    """
    reserved_bytes = round_up(store.reserved_bytes + nbytes, store.alignment_bytes)
    if reserved_bytes > store.capacity_bytes:
        raise CapacityError(
            f"{store.name}: {nbytes} bytes more than the {store.reserved_bytes} reserved exceed "
            f"its capacity of {store.capacity_bytes}"
        )
    for index, member in enumerate(members):
        member.reserve(stripes.member_bytes(reserved_bytes, index))
    return reserved_bytes


def whole_blocks(nbytes: int, block_bytes: int) -> int:
    """The largest multiple of ``block_bytes`` that is not above ``nbytes``, at least one block."""
    return max(nbytes - nbytes % block_bytes, block_bytes)
