"""The disks of a machine that is known, measured again: what they do changes within minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from teraio.contracts.hardware import Hardware, Ssd
from teraio.errors import InputError
from teraio.executor.probing.disks import Disk, DiskProbe, MeasuredDisk, slower
from teraio.executor.probing.effort import FULL, MIB
from teraio.executor.probing.hosts import background_kernels
from teraio.executor.probing.places import places_of

_SIZES = (16 * MIB, 64 * MIB)


def probe_disks(
    hardware: Hardware,
    *,
    device: str = "cpu",
    directory: str | Path | Sequence[str | Path] | None = None,
    sizes: Sequence[int] = _SIZES,
    sustained_seconds: float = 6.0,
    progress: Callable[[str], None] | None = None,
) -> Hardware:
    """``hardware`` with rates and latencies of its SSDs as they are now; some 15 s for each.

    Disks that others use too, virtual ones among them, were seen to be a fifth faster or slower
    within minutes. ``directory`` is the folder (several: of a stripe set) of the only SSD [default:
    each SSD's own ``paths``]; ``sizes`` (bytes) are those of the transfers. Raises InputError for
    an SSD without a folder and for one that is missing or too full, StoreError.
    """
    folders = [_folders(ssd, directory, len(hardware.ssd)) for ssd in hardware.ssd]
    disks = [Disk(ssd.name, each) for ssd, each in zip(hardware.ssd, folders, strict=True)]
    place = places_of(device)[0]
    effort = replace(FULL, sizes=tuple(sizes), sustained_seconds=sustained_seconds)
    DiskProbe.check(effort, disks)
    bench = DiskProbe(place, effort, background_kernels(place), progress or (lambda message: None))
    measured = [
        bench.measure(disk, "gds" if ssd.gds else "file")
        for ssd, disk in zip(hardware.ssd, disks, strict=True)
    ]
    shares = bench.shares_beside_each_other(measured) if len(disks) > 1 else [1.0] * len(disks)
    if place.is_cuda:
        torch.cuda.empty_cache()
    renewed = (_renewed(*each) for each in zip(hardware.ssd, measured, shares, strict=True))
    return replace(hardware, ssd=tuple(renewed))


def _folders(
    ssd: Ssd, directory: str | Path | Sequence[str | Path] | None, num_ssds: int
) -> tuple[Path, ...]:
    if directory is None:
        if not ssd.paths:
            raise InputError(f"{ssd.name}: the hardware has no paths for it; give its directory")
        return tuple(Path(path) for path in ssd.paths)
    if num_ssds != 1:
        raise InputError(f"directory: is for hardware with one SSD, this has {num_ssds}")
    several = [directory] if isinstance(directory, (str, Path)) else directory
    return tuple(Path(folder) for folder in several)


def _renewed(ssd: Ssd, measured: MeasuredDisk, share: float) -> Ssd:
    now = slower(measured.as_ssd(), share)
    return replace(
        ssd,
        latency_seconds=now.latency_seconds,
        read_rate=now.read_rate,
        write_rate=now.write_rate,
        duplex_read_rate=now.duplex_read_rate,
        duplex_write_rate=now.duplex_write_rate,
    )
