"""Measures this machine with the very stores that training will use, and describes it as Hardware.

A rate and a latency are those of ``latency + bytes / rate`` that describe transfers in a row best,
over a range of sizes; so the simulator adds up what was measured.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from teraio.contracts.hardware import Hardware
from teraio.errors import InputError
from teraio.executor.probing.description import Raw, describe
from teraio.executor.probing.disks import Disk, DiskProbe
from teraio.executor.probing.effort import FULL, QUICK, QUICK_GPU, Effort
from teraio.executor.probing.hosts import (
    background_kernels,
    measure_host,
    measure_kernels,
    measure_together,
)
from teraio.executor.probing.limits import (
    Limits,
    check_memory_by_touching,
    own_memory_bytes,
    read_limits,
)
from teraio.executor.probing.measurements import Measurements
from teraio.executor.probing.places import GpuPlace, places_of
from teraio.units import format_bytes, parse_bytes

Say = Callable[[str], None]
Directories = str | Path | Sequence[str | Path] | None

_COPIES = 4
"""Host and device side of both directions, where all of it is this machine's memory."""


def probe(
    *,
    device: str = "cpu",
    directory: Directories = None,
    stripe: bool = False,
    quick: bool = False,
    sizes: Sequence[int | str] | None = None,
    sustained: float | None = None,
    host_memory: int | str | None = None,
    progress: Say | None = None,
) -> Hardware:
    """Rates, latencies, capacities and slowdowns of this machine; see :func:`measure_machine`."""
    return measure_machine(
        device=device,
        directory=directory,
        stripe=stripe,
        quick=quick,
        sizes=sizes,
        sustained=sustained,
        host_memory=host_memory,
        progress=progress,
    ).hardware


def measure_machine(
    *,
    device: str = "cpu",
    directory: Directories = None,
    stripe: bool = False,
    quick: bool = False,
    sizes: Sequence[int | str] | None = None,
    sustained: float | None = None,
    host_memory: int | str | None = None,
    progress: Say | None = None,
) -> Measurements:
    """Measure, fit, and describe as Hardware; the tables come along.

    ``device`` is ``cuda`` (all GPUs), ``cuda:1`` or ``cpu``. Each ``directory`` is an SSD device of
    its own, or with ``stripe`` all are one (None: a temporary folder, and no path in the result).
    ``sizes`` are those of the transfers, best around those of the storages to be moved;
    ``sustained`` the seconds for which each SSD is written to (default 60); ``quick`` takes seconds
    and is rough. ``host_memory`` (bytes) is touched to see that it is there, and becomes the host
    tier's capacity. With ``device="cpu"`` half of the memory that this process may use plays the
    GPU and a quarter is the host tier; its link, main memory itself, is given the sum of the
    devices' rates, so that it never binds. Raises InputError, StoreError.
    """
    say = progress or (lambda message: None)
    places = places_of(device)
    limits = read_limits()
    quick_effort = QUICK_GPU if places[0].is_cuda else QUICK
    effort = _effort(quick_effort if quick else FULL, sizes, sustained, limits)
    with _disks(directory, stripe) as disks:
        DiskProbe.check(effort, disks)
        host_bytes = _checked_host_bytes(host_memory, limits, say)
        raw = _measure(places, disks, effort, say)
        return describe(
            f"probed {device}",
            raw,
            limits,
            read_limits(),
            host_bytes,
            keeps_paths=directory is not None,
        )


def _measure(places: list[GpuPlace], disks: list[Disk], effort: Effort, say: Say) -> Raw:
    host_paths = []
    for place in places:
        say(f"host memory beside {place.device}: copies in each direction, then in both")
        host_paths.append(measure_host(place, effort))
    say("kernels while transfers run")
    slowdowns = measure_kernels(places[0], host_paths[0], effort)
    if len(places) > 1:
        say("all GPUs at once")
    together = measure_together(places)
    disk_probe = DiskProbe(places[0], effort, background_kernels(places[0]), say)
    measured = [disk_probe.measure(disk) for disk in disks]
    shares = [1.0] * len(disks)
    if len(disks) > 1:
        say("all disks at once")
        shares = disk_probe.shares_beside_each_other(measured)
    if places[0].is_cuda:
        # A training in this process shall find the memory as it was.
        torch.cuda.empty_cache()
    return Raw(places, host_paths, slowdowns, together, measured, shares)


def _effort(
    effort: Effort, sizes: Sequence[int | str] | None, sustained: float | None, limits: Limits
) -> Effort:
    """The effort with the caller's wishes, and without sizes for which memory is too small."""
    most_bytes = limits.memory_bytes // (4 * _COPIES)
    if sizes is None:
        fitting = tuple(size for size in effort.sizes if size <= most_bytes) or effort.sizes[:1]
        effort = replace(effort, sizes=fitting)
    else:
        wanted = tuple(sorted({parse_bytes(size, "sizes") for size in sizes}))
        if not wanted or wanted[0] < 1 or wanted[-1] > most_bytes:
            raise InputError(
                f"sizes: between 1 byte and a sixteenth of the memory ({format_bytes(most_bytes)}) "
                f"each, got {list(sizes)}"
            )
        effort = replace(effort, sizes=wanted)
    if sustained is not None:
        if not 0 <= sustained < math.inf:
            raise InputError(f"sustained: must be 0 or more seconds, got {sustained}")
        effort = replace(effort, sustained_seconds=sustained)
    return replace(effort, memory_bytes=min(effort.memory_bytes, most_bytes))


@contextmanager
def _disks(directory: Directories, stripe: bool) -> Iterator[list[Disk]]:
    if directory is None:
        if stripe:
            raise InputError("stripe: needs a --directory on each of the drives")
        with tempfile.TemporaryDirectory(prefix="teraio-probe-") as folder:
            yield [Disk("ssd0", (Path(folder),))]
        return
    several = [directory] if isinstance(directory, (str, Path)) else directory
    folders = [Path(folder) for folder in several]
    if stripe:
        yield [Disk("ssd0", tuple(folders))]
    else:
        yield [Disk(f"ssd{index}", (folder,)) for index, folder in enumerate(folders)]


def _checked_host_bytes(host_memory: int | str | None, limits: Limits, say: Say) -> int | None:
    if host_memory is None:
        return None
    host_bytes = parse_bytes(host_memory, "host_memory")
    if limits.control_group_bytes is not None:
        # Beyond that the kernel would end this process without a word.
        has_bytes = limits.control_group_bytes - own_memory_bytes()
        if host_bytes > has_bytes:
            raise InputError(
                f"host_memory: needs {format_bytes(host_bytes)}, the control group of this process "
                f"has {format_bytes(max(has_bytes, 0))} left; ask for less"
            )
    check_memory_by_touching(host_bytes, say=say)
    return host_bytes
