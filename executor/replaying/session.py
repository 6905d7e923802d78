"""A replay under way: iterations played over open tiers, and the timeline that they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.executor.measured_timeline import build_timeline
from teraio.executor.replaying.device_kernels import DeviceKernels
from teraio.executor.replaying.device_times import settle_device_times
from teraio.executor.replaying.memory_traffic import MemoryTraffic
from teraio.executor.replaying.patterns import Patterns
from teraio.executor.replaying.player import Player
from teraio.executor.replaying.room import untracked_bytes
from teraio.executor.replaying.stand_ins import HostKernels, StandIns, quick_switching
from teraio.executor.residency import Residency
from teraio.executor.stores import FileUse
from teraio.executor.tiers import Tiers
from teraio.profiler.allocator_settings import exact_blocks
from teraio.traces.trace import Trace


class Session:
    """Plays iterations: those that warm up, then those that count. The first begins with all
    transfers done; on a GPU kernels are calibrated by it, which takes a second one to recover from.

    ``moves_found``: offloads of a steady iteration whose storage was there; ``kernel_error``: by
    how much the stand-in kernels of the last iteration missed their time in all, as a fraction.
    """

    def __init__(
        self, trace: Trace, plan: Plan, tiers: Tiers, device_type: str, verify: str
    ) -> None:
        self._trace, self._plan, self._tiers = trace, plan, tiers
        self._device_type = device_type
        self._patterns = Patterns(len(plan.storages), device_type, verify)
        self.kernel_error = 0.0
        self.moves_found = 0
        self.iteration_seconds: list[float] = []
        self.ssd_files: tuple[FileUse, ...] = ()

    @property
    def moves_planned(self) -> int:
        """Rows of the plan's moves."""
        return len(self._plan.moves)

    @property
    def transfers_checked(self) -> int:
        """Reads whose bytes were compared."""
        return self._patterns.num_checked

    def play(
        self,
        iterations: int,
        *,
        has_memory_traffic: bool,
        progress: Callable[[int], None] | None,
    ) -> Timeline:
        """Raises StoreError (also for wrong bytes) and CapacityError."""
        plan = self._plan
        with ExitStack() as stack:
            stack.enter_context(exact_blocks(self._device_type))
            traffic = MemoryTraffic(self._device_type) if has_memory_traffic else None
            on_device = DeviceKernels(traffic) if self._device_type == "cuda" else None
            stack.enter_context(quick_switching())
            residency = Residency(
                self._tiers,
                plan.metadata.gpu_memory_bytes,
                rounding_bytes=plan.metadata.allocator_rounding_bytes,
                untracked_bytes=untracked_bytes(plan),
            )
            kernels: StandIns = on_device or HostKernels(traffic)
            player = Player(
                self._trace, plan, residency, kernels, self._patterns, self._device_type
            )
            stack.callback(player.clear)
            begun = time.perf_counter()
            player.start()
            player.log.cold_start_seconds = time.perf_counter() - begun
            num_warm_up = 1 if on_device is None else 2
            for number in range(num_warm_up + iterations):
                player.play_iteration(is_warm_up=number < num_warm_up)
                if on_device is not None:
                    player.log.last.memory_bytes = player.memory_bytes
                    if number == 0 and traffic is None and not self._patterns.is_on:
                        on_device.recalibrate()
                if progress is not None:
                    progress(number)
            for record in player.log.last.traffic.transfers:
                record.transfer.wait()
            self._patterns.finish()
            self.ssd_files = tuple(self._tiers.file_uses)
            if on_device is not None:
                self.kernel_error = on_device.error()
                _settle(player, on_device)
            steady = player.log.newest_steady
            self.moves_found = 0 if steady is None else steady.moves_found
            self.iteration_seconds = player.log.seconds()[num_warm_up:]
            return self._timeline(player)

    def _timeline(self, player: Player) -> Timeline:
        metadata = self._plan.metadata
        return build_timeline(
            player.log,
            rank=metadata.rank,
            ideal_seconds=metadata.ideal_seconds,
            gap_seconds=float(self._trace.kernels.gap_before_seconds.sum()),
            capacity_bytes=metadata.gpu_memory_bytes,
            num_storages=len(self._plan.storages),
        )


def _settle(player: Player, kernels: DeviceKernels) -> None:
    """Give the newest iterations their times on the GPU."""
    log = player.log
    played = list(kernels.iterations)[-len(log.recent) :]
    for record, of_record in zip(log.recent, played, strict=True):
        settle_device_times(log, record, of_record, player.gap_seconds)
    # All were watched here, so that the median one may stand for them.
    log.watched = None
