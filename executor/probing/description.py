"""From what was measured to Hardware, and the sentences that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.executor.probing.disks import MeasuredDisk, share_a_file_system, slower
from teraio.executor.probing.fitting import KINDS
from teraio.executor.probing.kernels import weighted_slowdown
from teraio.executor.probing.limits import Limits
from teraio.executor.probing.links import Together
from teraio.executor.probing.measurements import MeasuredPath, Measurements
from teraio.executor.probing.places import GpuPlace
from teraio.units import format_bytes

_RATES = [f"{kind}_rate" for kind in KINDS]


@dataclass(frozen=True)
class Raw:
    """All that was measured; lists run over GPUs or disks. ``shares``: what disks keep at once."""

    places: Sequence[GpuPlace]
    host_paths: Sequence[MeasuredPath]
    slowdowns: dict[str, Slowdown]
    together: Together | None
    disks: Sequence[MeasuredDisk]
    shares: Sequence[float]


def describe(
    name: str,
    raw: Raw,
    limits_before: Limits,
    limits: Limits,
    host_bytes: int | None,
    *,
    keeps_paths: bool,
) -> Measurements:
    """The machine as Hardware, with the limits that it has come to.

    ``host_bytes`` is the host tier's capacity, if the user gave it; without ``keeps_paths`` the
    SSDs' folders are not told.
    """
    ssds = [disk.as_ssd() for disk in raw.disks]
    notes = [*_notes_on_disks(raw, ssds), *_notes_on_gpus(raw)]
    if host_bytes is None:
        notes += notes_on_memory(limits_before, limits)
    ssds = [slower(ssd, share) for ssd, share in zip(ssds, raw.shares, strict=True)]
    if not keeps_paths:
        ssds = [replace(ssd, paths=()) for ssd in ssds]
    links, link_of_gpu = _links(raw, ssds)
    hardware = Hardware(
        name=name,
        gpu=tuple(
            Gpu(name=_name(place), memory_bytes=_gpu_bytes(place, limits), link=link)
            for place, link in zip(raw.places, link_of_gpu, strict=True)
        ),
        link=tuple(links),
        host=_host(raw, limits, host_bytes),
        ssd=tuple(ssds),
        slowdown=weighted_slowdown(raw.slowdowns),
    )
    return Measurements(
        hardware=hardware,
        paths=(*raw.host_paths, *(path for disk in raw.disks for path in disk.paths)),
        slowdowns=raw.slowdowns,
        sustained=tuple(disk.sustained for disk in raw.disks if disk.sustained is not None),
        together=raw.together,
        limits=limits,
        notes=tuple(notes),
    )


def _name(place: GpuPlace) -> str:
    return torch.cuda.get_device_name(place.index) if place.is_cuda else "main memory"


def _gpu_bytes(place: GpuPlace, limits: Limits) -> int:
    if not place.is_cuda:
        return limits.memory_bytes // 2
    free_bytes: int = torch.cuda.mem_get_info(place.index)[0]
    return free_bytes + torch.cuda.memory_reserved(place.index)


def _host(raw: Raw, limits: Limits, host_bytes: int | None) -> Host:
    """The host tier is as fast as its fastest link: the links bind where they are slower."""
    is_cuda = raw.places[0].is_cuda
    fits = [path.fit for path in raw.host_paths]
    nodes = [place.node for place in raw.places if place.node is not None]
    default_bytes = limits.memory_bytes * 3 // 4 if is_cuda else limits.memory_bytes // 4
    return Host(
        memory_bytes=default_bytes if host_bytes is None else host_bytes,
        memory_rate=raw.together.memory_rate if raw.together else None,
        numa_nodes=tuple(nodes),
        latency_seconds=max(fit.latency_seconds for fit in fits),
        **{rate: max(getattr(fit, rate) for fit in fits) for rate in _RATES},
    )


def _links(raw: Raw, ssds: Sequence[Ssd]) -> tuple[list[Link], list[str]]:
    """The links, and the name of each GPU's. A GPU's own link is as fast as its host transfers."""
    own = [{rate: getattr(path.fit, rate) for rate in _RATES} for path in raw.host_paths]
    if not raw.places[0].is_cuda:
        own = [{rate: own[0][rate] + sum(getattr(ssd, rate) for ssd in ssds) for rate in _RATES}]
    groups: list[tuple[int, ...]] = [(gpu,) for gpu in range(len(own))]
    if raw.together is not None:
        groups = [link.gpus for link in raw.together.links]
    links: list[Link] = []
    link_of_gpu = [""] * len(own)
    for index, gpus in enumerate(groups):
        rates = own[gpus[0]]
        if len(gpus) > 1 and raw.together is not None:
            shared = raw.together.links[index].rates
            rates = {f"{kind}_rate": float(f"{shared[kind]:.4g}") for kind in KINDS}
        links.append(Link(name=f"link{index}", **rates))
        for gpu in gpus:
            link_of_gpu[gpu] = links[-1].name
    return links, link_of_gpu


def _notes_on_disks(raw: Raw, ssds: Sequence[Ssd]) -> list[str]:
    notes = []
    if share_a_file_system([disk.disk for disk in raw.disks]):
        notes.append("Some directories lie on one file system: give one on each drive.")
    for ssd, share in zip(ssds, raw.shares, strict=True):
        if slower(ssd, share) != ssd:
            notes.append(
                f"{ssd.name} keeps {share:.0%} of its rates while all disks transfer: its rates "
                "are those."
            )
    for disk in raw.disks:
        lasting, at_first = disk.lasting_write_rate, disk.paths[0].fit.write_rate
        if lasting is not None and lasting < 0.9 * at_first:
            notes.append(
                f"{disk.disk.name} writes {format_bytes(at_first)}/s at first and "
                f"{format_bytes(lasting)}/s in the long run: write_rate is that."
            )
        if disk.disk.is_in_memory:
            notes.append(f"{disk.disk.name} lies in memory (tmpfs): its rates are no drive's.")
        if disk.gds_error:
            notes.append(f"{disk.disk.name} without GPUDirect Storage: {disk.gds_error}")
        for path in disk.paths:
            if path.backend in _NOTES_ON_BACKENDS:
                notes.append(f"{disk.disk.name}: {_NOTES_ON_BACKENDS[path.backend]}")
    return notes


_NOTES_ON_BACKENDS = {
    "file buffered": "no O_DIRECT here, so its rates are those of the page cache.",
    "gds-compat": "kvikio runs without GPUDirect, through host memory.",
}


def notes_on_memory(before: Limits, now: Limits) -> list[str]:
    """Signs of a machine that gets memory as it is used, so that its capacity is not known."""
    remedy = "if it gets memory as it is used, give --host-memory, which is touched to see."
    shown = format_bytes(now.machine_bytes)
    if now.machine_bytes > before.machine_bytes:
        first = format_bytes(before.machine_bytes)
        return [f"This machine showed {first} of memory at first and {shown} later: {remedy}"]
    allowed = now.control_group_bytes
    if allowed is not None and allowed > now.machine_bytes:
        return [
            f"The control group allows {format_bytes(allowed)}, the machine shows {shown}: {remedy}"
        ]
    return []


def _notes_on_gpus(raw: Raw) -> list[str]:
    notes = []
    if raw.together is not None and raw.together.memory_rate is not None:
        notes.append("All GPUs at once are slower than each: host memory binds (memory_rate).")
    if len({place.node for place in raw.places}) > 1:
        notes.append(
            "GPUs hang on several memory nodes: start training with torchrun --numa-binding=node."
        )
    return notes
