"""What this process may use: memory (control groups, lazy machines), locked memory, disk space."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from teraio.errors import InputError
from teraio.executor.stores.arena import Arena
from teraio.units import format_bytes

_GIB = 2**30
_NO_LIMIT = (OSError, ValueError)
"""A control group's file is absent, unreadable or says "max"."""

_MARGIN_BYTES = 2 * _GIB
_GROWING_SECONDS = 5.0
"""A machine that adds memory on demand gets so long to do it."""


@dataclass(frozen=True)
class Limits:
    """``memory_bytes`` is the least of the machine's memory and of what control groups allow.

    ``control_group_bytes`` and ``locked_bytes`` (RLIMIT_MEMLOCK) are None where there is no limit.
    CUDA's own pinning does not count as locked memory.
    """

    memory_bytes: int
    machine_bytes: int
    control_group_bytes: int | None
    locked_bytes: int | None


def read_limits(
    groups: Path = Path("/sys/fs/cgroup"), own_groups: Path = Path("/proc/self/cgroup")
) -> Limits:
    """The limits of this process, now."""
    machine_bytes = machine_memory_bytes()
    # Version 1 writes "none" as a number beyond any memory.
    of_groups = min(
        (limit for _, limit in _group_limits(groups, own_groups) if limit < 2**62), default=None
    )
    locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Limits(
        memory_bytes=machine_bytes if of_groups is None else min(machine_bytes, of_groups),
        machine_bytes=machine_bytes,
        control_group_bytes=of_groups,
        locked_bytes=None if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
    )


def machine_memory_bytes() -> int:
    """All memory that the kernel knows of now; a machine may get more while it runs."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where a control group says so."""
    return read_limits().memory_bytes


def _group_limits(groups: Path, own_groups: Path) -> Iterator[tuple[Path, int]]:
    """(folder, limit) of the process's control groups, of version 1 and 2, and of those that hold
    them.
    """
    files = [groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"]
    with suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                files += _up_to(groups / "memory", path, ["memory.limit_in_bytes"])
            elif not controllers:
                for root in (groups, groups / "unified"):
                    # Above memory.high a process is slowed down without end: a limit as well.
                    files += _up_to(root, path, ["memory.max", "memory.high"])
    for file in files:
        with suppress(*_NO_LIMIT):
            yield file.parent, int(file.read_text())


def _held_bytes(group: Path) -> int:
    """What a control group holds, but for copies of files, which give way. 0 if it does not say."""
    held_bytes, counts = 0, {}
    for name in ("memory.current", "memory.usage_in_bytes"):
        with suppress(*_NO_LIMIT):
            held_bytes = int((group / name).read_text())
    with suppress(*_NO_LIMIT):
        lines = (group / "memory.stat").read_text().splitlines()
        counts = {name: int(count) for name, count in map(str.split, lines)}
    for name in ("inactive_file", "active_file"):
        # Version 1 counts what groups inside hold by another name.
        held_bytes -= counts.get(f"total_{name}", counts.get(name, 0))
    return max(held_bytes, 0)


def _up_to(root: Path, path: str, names: list[str]) -> list[Path]:
    group = root / path.lstrip("/")
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [folder / name for folder in folders for name in names]


def own_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"),
    groups: Path = Path("/sys/fs/cgroup"),
    own_groups: Path = Path("/proc/self/cgroup"),
) -> int:
    """What the machine could give out now without swapping (MemAvailable), or less where a control
    group allows no more.
    """
    of_machine = machine_memory_bytes()
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            of_machine = int(line.split()[1]) * 1024
    left = (limit - _held_bytes(group) for group, limit in _group_limits(groups, own_groups))
    return max(min([of_machine, *left]), 0)


def check_memory_by_touching(
    nbytes: int,
    *,
    available: Callable[[], int] | None = None,
    say: Callable[[str], None] = lambda message: None,
    step_bytes: int = _GIB,
    patience_seconds: float = _GROWING_SECONDS,
) -> None:
    """Touch ``nbytes`` of memory and give them back.

    Some virtual machines show little memory at first and get more as it is used, so only this tells
    whether it is there. Stops before the machine runs out. ``available`` (default:
    :func:`available_memory_bytes`) says how much it has to give. Raises InputError: needs X, has Y.
    """
    available = available or available_memory_bytes
    touched_bytes = 0
    with ExitStack() as held:
        while touched_bytes < nbytes:
            step = min(step_bytes, nbytes - touched_bytes)
            if not _wait_for(available, step + _MARGIN_BYTES, patience_seconds):
                has_bytes = max(touched_bytes + available() - _MARGIN_BYTES, 0)
                raise InputError(
                    f"host_memory: needs {format_bytes(nbytes)}, this machine has "
                    f"{format_bytes(has_bytes)} to give; ask for less"
                )
            held.callback(Arena(step, pinned=False).close)
            touched_bytes += step
            say(f"touching host memory: {format_bytes(touched_bytes)} of {format_bytes(nbytes)}")


def _wait_for(available: Callable[[], int], nbytes: int, patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while available() < nbytes:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def free_disk_bytes(folder: Path) -> int:
    """What an ordinary user may still write there."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether files there take memory instead of a disk (tmpfs)."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0] in ("tmpfs", "ramfs")
    return False


def check_directory(folder: Path, needed_bytes: int) -> None:
    """Raise InputError unless files of ``needed_bytes`` can be made in ``folder``."""
    if not folder.is_dir():
        raise InputError(f"directory: {folder} is not a directory; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"directory: {folder} is not writable by this user")
    free_bytes = free_disk_bytes(folder)
    if free_bytes < needed_bytes:
        raise InputError(
            f"directory: {folder}: measuring needs {format_bytes(needed_bytes)}, the disk has "
            f"{format_bytes(free_bytes)} free; free some, or give another directory"
        )
