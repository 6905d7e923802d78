"""Measures this machine with the very stores that training will use, and describes it as Hardware.

A rate is bytes over the time in which a queue serves a transfer; latency is the time from issue to
the last byte of a small transfer on an idle channel. Both are what the simulator adds up. Medians
of several rounds, each over buffers that no cache holds.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.errors import InputError
from teraio.executor.stores import FileStore, HostStore, Store, Transfer
from teraio.executor.stores.base import round_up

MIB = 2**20
_SMALL_BYTES = 512
_COVER = 3.0
"""Transfers are issued for so many times the kernels' own time, so that they outlast them."""


_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = (OSError, ValueError)
"""A control group's file is absent, unreadable or says "max"."""


@dataclass(frozen=True)
class _Effort:
    """How much to measure. ``limit_seconds`` ends the rounds of the slowdown on a busy machine.

    ``working_set_bytes`` is each direction's, in memory and on the disk: more than caches hold.
    """

    transfer_bytes: int
    working_set_bytes: int
    rounds: int
    round_seconds: float
    kernel_seconds: float
    small_transfers: int
    limit_seconds: float

    @property
    def num_slots(self) -> int:
        """Slots and buffers of each direction, used in turn."""
        return max(2, min(64, self.working_set_bytes // self.transfer_bytes))


_FULL = _Effort(
    transfer_bytes=32 * MIB,
    working_set_bytes=256 * MIB,
    rounds=7,
    round_seconds=0.4,
    kernel_seconds=0.2,
    small_transfers=200,
    limit_seconds=30.0,
)
_QUICK = _Effort(
    transfer_bytes=4 * MIB,
    working_set_bytes=64 * MIB,
    rounds=3,
    round_seconds=0.05,
    kernel_seconds=0.04,
    small_transfers=30,
    limit_seconds=1.5,
)


@dataclass(frozen=True)
class _Measured:
    """Bytes per second, and seconds; the fields of ``contracts.hardware.Rates``."""

    read_rate: float
    write_rate: float
    duplex_read_rate: float
    duplex_write_rate: float
    latency_seconds: float

    def as_fields(self) -> dict[str, float]:
        return {name: _rounded(value) for name, value in vars(self).items()}


def probe(
    *,
    device: str = "cpu",
    directory: str | Path | None = None,
    quick: bool = False,
    transfer_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Hardware:
    """Rates, latencies, capacities and slowdowns of this machine, as Hardware.

    ``directory`` is where the file tier will be (None: a temporary folder, and no path in the
    result). ``transfer_bytes``: the size to measure at, best that of the storages to be moved.
    ``quick`` takes seconds and is rough. With ``device="cpu"`` half of the memory that this process
    may use plays the GPU and a quarter is the host tier; its link, main memory itself, is given the
    sum of the devices' rates, so that it never binds. Noise that would let a direction run faster
    beside the other than alone is clipped. Raises InputError, StoreError.
    """
    device_type = torch.device(device).type
    if device_type not in ("cpu", "cuda"):
        raise InputError(f"device: must be cpu or cuda, got {device!r}")
    effort = _QUICK if quick else _FULL
    if transfer_bytes is not None:
        if transfer_bytes < 1:
            raise InputError(f"transfer_bytes: must be positive, got {transfer_bytes}")
        effort = replace(effort, transfer_bytes=round_up(transfer_bytes, 4096))
    say = progress or (lambda message: None)
    capacity_bytes = 2 * effort.num_slots * effort.transfer_bytes

    say("host memory: copies in each direction, then in both")
    host_store = HostStore(capacity_bytes, device=device)
    try:
        host = _Bench(host_store, effort)
        host_rates = host.rates()
        say("kernels while transfers run")
        slowdown = host.slowdown(host_rates)
    finally:
        host_store.close()
    with _given_or_temporary(directory) as folder:
        say(f"files in {folder}")
        free_bytes = _free_bytes(folder)
        file_store = FileStore("ssd0", folder, capacity_bytes, device=device)
        try:
            file_rates = _Bench(file_store, effort).rates()
        finally:
            file_store.close()
    ssd = Ssd(
        name="ssd0",
        capacity_bytes=free_bytes * 9 // 10,
        paths=() if directory is None else (str(directory),),
        **file_rates.as_fields(),  # type: ignore[arg-type]
    )
    return _as_hardware(device_type, host_rates, slowdown, ssd)


def _as_hardware(device_type: str, host_rates: _Measured, slowdown: Slowdown, ssd: Ssd) -> Hardware:
    memory_bytes = usable_memory_bytes()
    rates = host_rates.as_fields()
    link = {name: value for name, value in rates.items() if name != "latency_seconds"}
    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        gpu_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        host_bytes = memory_bytes * 3 // 4
    else:
        name, gpu_bytes, host_bytes = "main memory", memory_bytes // 2, memory_bytes // 4
        link = {name: value + getattr(ssd, name) for name, value in link.items()}
    return Hardware(
        name=f"probed {device_type}",
        gpu=(Gpu(name=name, memory_bytes=gpu_bytes, link="link0"),),
        link=(Link(name="link0", **link),),
        host=Host(memory_bytes=host_bytes, **rates),  # type: ignore[arg-type]
        ssd=(ssd,),
        slowdown=slowdown,
    )


def usable_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or less where a control group says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    root = _CONTROL_GROUPS
    candidates = [root / "memory" / "memory.limit_in_bytes"]
    with suppress(*_NO_LIMIT):
        for line in _OWN_GROUPS.read_text().splitlines():
            group = root / line.split(":", 2)[2].lstrip("/")
            candidates += [
                folder / "memory.max"
                for folder in (group, *group.parents)
                if folder.is_relative_to(root)
            ]
    for candidate in candidates:
        with suppress(*_NO_LIMIT):
            limits.append(int(candidate.read_text()))
    return min(limits)


class _Bench:
    """One store, with slots and buffers for either direction: the upper half is written to."""

    def __init__(self, store: HostStore | FileStore, effort: _Effort) -> None:
        self._store: Store = store
        self._device = store.device_type
        self._effort = effort
        self._transfer_bytes = transfer_bytes = effort.transfer_bytes
        self._slots = effort.num_slots
        self._buffers = {
            is_write: [
                torch.ones(transfer_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(self._slots)
            ]
            for is_write in (False, True)
        }
        # Slots of training are written again and again: first touch is not what is measured.
        for index in range(2 * self._slots):
            source = self._buffers[True][index % self._slots]
            store.write(source, index * transfer_bytes, transfer_bytes).wait()

    def rates(self) -> _Measured:
        """Solo and duplex rates and the latency."""
        read_rate, _ = self._median_rates(reads=True, writes=False)
        _, write_rate = self._median_rates(reads=False, writes=True)
        duplex_read_rate, duplex_write_rate = self._median_rates(reads=True, writes=True)
        return _Measured(
            read_rate=read_rate,
            write_rate=write_rate,
            duplex_read_rate=min(duplex_read_rate, read_rate),
            duplex_write_rate=min(duplex_write_rate, write_rate),
            latency_seconds=max(self._latency_seconds(is_write) for is_write in (False, True)),
        )

    def slowdown(self, rates: _Measured) -> Slowdown:
        """Kernel time while the store reads, writes or does both, over kernel time alone."""
        kernels = _Kernels(self._device, self._effort.kernel_seconds)
        alone: list[float] = []
        factors: dict[str, list[float]] = {"read": [], "write": [], "both": []}
        deadline = time.perf_counter() + self._effort.limit_seconds
        # Interleaved, so that a machine that changes its pace changes it for all alike.
        for _ in range(self._effort.rounds):
            seconds, share = kernels.run()
            alone.append(seconds / share)
            for name, values in factors.items():
                values.append(self._factor_beside(kernels, statistics.median(alone), name, rates))
            if time.perf_counter() > deadline:
                break
        return Slowdown(
            **{name: max(1.0, _rounded(statistics.median(x))) for name, x in factors.items()}
        )

    def _issue(self, is_write: bool, index: int) -> Transfer:
        slot = index % self._slots
        buffer = self._buffers[is_write][slot]
        start = self._store.write if is_write else self._store.read
        offset_bytes = (slot + is_write * self._slots) * self._transfer_bytes
        return start(buffer, offset_bytes, self._transfer_bytes)

    def _median_rates(self, *, reads: bool, writes: bool) -> tuple[float, float]:
        """Bytes per second of both directions, 0 for one that is not asked for."""
        directions = [is_write for is_write, asked in ((False, reads), (True, writes)) if asked]
        count = 2
        rounds: list[tuple[float, float]] = []
        while len(rounds) < self._effort.rounds:
            issued: dict[bool, list[Transfer]] = {False: [], True: []}
            for index in range(count):
                for is_write in directions:
                    issued[is_write].append(self._issue(is_write, index))
            for is_write in directions:
                issued[is_write][-1].wait()
            begin, end = _common_window([issued[is_write] for is_write in directions])
            if not rounds and end - begin < self._effort.round_seconds / 2 and count < 4096:
                # Too short to count; the first rounds also warm up.
                scale = self._effort.round_seconds / max(end - begin, 1e-6)
                count = max(count + 1, math.ceil(count * min(scale, 16.0)))
                continue
            rounds.append((_rate(issued[False], begin, end), _rate(issued[True], begin, end)))
        return (
            statistics.median(read for read, _ in rounds),
            statistics.median(write for _, write in rounds),
        )

    def _latency_seconds(self, is_write: bool) -> float:
        small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8, device=self._device)
        seconds = []
        for index in range(self._effort.small_transfers):
            start = self._store.write if is_write else self._store.read
            issued_at = time.perf_counter()
            transfer = start(small, index % self._slots * 4096, _SMALL_BYTES)
            transfer.wait()
            seconds.append(transfer.end_seconds - issued_at)
        return max(statistics.median(seconds), 0.0)

    def _factor_beside(
        self, kernels: _Kernels, alone_seconds: float, name: str, rates: _Measured
    ) -> float:
        """By which factor the kernels run longer beside transfers of the named kind."""
        duplex = name == "both"
        read_rate = rates.duplex_read_rate if duplex else rates.read_rate
        write_rate = rates.duplex_write_rate if duplex else rates.write_rate
        rate_of = {"read": {False: read_rate}, "write": {True: write_rate}}
        chosen = rate_of.get(name, {False: read_rate, True: write_rate})
        issued = {
            is_write: [
                self._issue(is_write, index)
                for index in range(
                    math.ceil(_COVER * alone_seconds * rate / self._transfer_bytes) + 1
                )
            ]
            for is_write, rate in chosen.items()
        }
        begin = time.perf_counter()
        seconds, share = kernels.run()
        for transfers in issued.values():
            transfers[-1].wait()
        covered_seconds = min(x[-1].end_seconds for x in issued.values()) - begin
        return _factor(share * alone_seconds, seconds, covered_seconds)


class _Kernels:
    """A mix of compute-bound and memory-bound kernels that runs for about ``seconds``."""

    def __init__(self, device: str, seconds: float) -> None:
        self._device = device
        size = 4096 if device == "cuda" else 384
        generator = torch.Generator().manual_seed(0)
        self._matrix = torch.randn(size, size, generator=generator).to(device)
        self._vector = torch.ones(size * size * 4, device=device)
        self._repetitions = 1
        self._limit_seconds = math.inf
        self.run()
        self._repetitions = max(1, math.ceil(seconds / max(self.run()[0], 1e-6)))
        self._limit_seconds = _COVER * seconds

    def run(self) -> tuple[float, float]:
        """Wall seconds of one run, and its share done: less than 1 where it took too long."""
        self._synchronize()
        done = 0
        begin = time.perf_counter()
        while done < self._repetitions and time.perf_counter() < begin + self._limit_seconds:
            torch.mm(self._matrix, self._matrix)
            self._vector.mul(1.5).add_(self._vector)
            done += 1
        self._synchronize()
        return time.perf_counter() - begin, done / self._repetitions

    def _synchronize(self) -> None:
        # The compute stream alone: the transfers beside it go on.
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()


def _factor(alone_seconds: float, seconds: float, covered_seconds: float) -> float:
    """Slowdown of kernels of which the first ``covered_seconds`` ran beside transfers."""
    if covered_seconds >= seconds:
        return seconds / alone_seconds
    # The rest ran at full speed, so this much of their work had been done beside transfers.
    done_seconds = alone_seconds - (seconds - covered_seconds)
    return covered_seconds / max(done_seconds, alone_seconds / 10)


def _common_window(channels: list[list[Transfer]]) -> tuple[float, float]:
    """From when all channels had begun until the first had ended."""
    begin = max(issued[0].start_seconds for issued in channels)
    end = min(issued[-1].end_seconds for issued in channels)
    return begin, max(begin, end)


def _rate(issued: list[Transfer], begin: float, end: float) -> float:
    """Bytes per second served in a window; a transfer across its border counts in proportion."""
    moved_bytes = served_seconds = 0.0
    for transfer in issued:
        seconds = transfer.end_seconds - transfer.start_seconds
        inside = min(end, transfer.end_seconds) - max(begin, transfer.start_seconds)
        if inside > 0:
            served_seconds += inside
            moved_bytes += transfer.nbytes * inside / seconds
    return moved_bytes / served_seconds if served_seconds > 0 else 0.0


def _rounded(value: float) -> float:
    """Four significant digits: more would claim what no measurement gives."""
    return float(f"{value:.4g}")


def _free_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


@contextmanager
def _given_or_temporary(directory: str | Path | None) -> Iterator[Path]:
    if directory is not None:
        yield Path(directory)
        return
    with tempfile.TemporaryDirectory(prefix="teraio-probe-") as folder:
        yield Path(folder)
