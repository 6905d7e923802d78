"""The paper's models as it trains them, traced without a GPU, and what their traces show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.table import BoolArray, IntArray
from teraio.profiler.costs.pricing import price
from teraio.profiler.fake.tracing import trace as fake_trace
from teraio.traces.characterise import Characteristics, characteristics
from teraio.traces.idleness import LARGE_BYTES, LONG_SECONDS, Idleness, idleness
from teraio.traces.lifetimes import InactivePeriods, active_bytes, inactive_periods
from teraio.traces.trace import Trace

GPU = "h100-nvl"
HARDWARE = Hardware.preset("paper")
SSD_BYTES_PER_SECOND = 6.5e9
"""Of the paper's section 2.1: what one of its SSDs writes."""

ABOVE_100_MB = 10**8


@dataclass(frozen=True)
class Setting:
    """A model as the paper trains it; it gives the batch, not the size of a micro-batch."""

    model: str
    title: str
    batch: int
    sequence: int
    micro_batch_size: int
    stages: int
    options: Mapping[str, Any] = field(default_factory=dict)
    variation: str = ""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one iteration."""
        return self.batch // self.micro_batch_size


LANGUAGE_MODELS = (
    Setting("llama3-8b", "Llama3-8B", 128, 4096, 2, 2),
    Setting("llama3-70b", "Llama3-70B", 256, 2048, 4, 2),
    Setting("gpt2-40b", "GPT2-40B", 16, 1024, 2, 2),
    Setting("t5-11b", "T5-11B", 64, 512, 8, 1),
)
"""Section 2. A T5 has no stages here: its encoder and decoder train on one GPU."""

BERT = Setting("bert-large", "BERT-Large", 64, 512, 64, 1)
"""The paper gives no batch: this is the largest power of two that an H100 NVL holds."""


_BASE = Setting("llama3-8b", "Llama3-8B", 32, 4096, 2, 1)

VARIATIONS = (
    replace(_BASE, variation="as above: fused AdamW in buckets, memory-efficient attention"),
    replace(_BASE, variation="micro-batches of 1", micro_batch_size=1),
    replace(_BASE, variation="micro-batches of 4", micro_batch_size=4),
    replace(_BASE, variation="AdamW by a loop", options={"optimizer_implementation": "for-loop"}),
    replace(
        _BASE,
        variation="AdamW for all parameters at once",
        options={"optimizer_implementation": "foreach", "bucket_bytes": 10**15},
    ),
    replace(_BASE, variation="attention as matrix products", options={"attention": "math"}),
    replace(_BASE, variation="bf16 autocast, flash attention", options={"dtype": "bf16"}),
    replace(_BASE, variation="each block compiled", options={"compile_blocks": True}),
    replace(_BASE, variation="checkpoints", options={"checkpoint": "non-reentrant"}),
)
"""Llama3-8B on one GPU, 16 micro-batches (of 2): what the shares depend on."""


@dataclass(frozen=True)
class Measured:
    """What one stage's trace shows, at fp32 and with matrix products in TF32."""

    setting: Setting
    stage: int
    trace: Trace
    found: Characteristics
    above_100_mb: Idleness
    tf32: Idleness
    long_fraction_without_tails: float | None
    long_fraction_that_outlasts_the_ssd: float | None
    seconds_idle_above_100_mb: float | None

    @property
    def title(self) -> str:
        """Model and stage."""
        stages = self.setting.stages
        where = f", stage {self.stage} of {stages}" if stages > 1 else ""
        return self.setting.title + where

    @property
    def ever_idle_fraction(self) -> float | None:
        """Of the storages of 10 MB to 1 GB that are ever idle, the share idle for 10 ms or more."""
        large = self.found.large_storages
        return large.long_idle_storages / large.idle_storages if large.idle_storages else None

    @property
    def above_100_mb_of_1_mb(self) -> float | None:
        """Share of storages above 100 MB in those of 1 MB or more: without biases and scalars."""
        nbytes = self.trace.storages.nbytes
        return _mean(nbytes[nbytes >= 10**6] >= ABOVE_100_MB)

    def most_active(self, phase: str) -> tuple[int, float]:
        """The kernel of a phase that uses most, and the share of the GPU's memory."""
        active = active_bytes(self.trace)
        inside = np.flatnonzero(self.trace.kernels.phase == phase)
        kernel = int(inside[np.argmax(active[inside])])
        return kernel, float(active[kernel] / HARDWARE.gpu[0].memory_bytes)


def measure(setting: Setting, stage: int, folder: Path | None) -> Measured:
    """Trace one stage (or load its trace) and work out the claims."""
    trace = _trace_of(setting, stage, folder)
    return Measured(
        setting=setting,
        stage=stage,
        trace=trace,
        found=characteristics(trace, HARDWARE),
        above_100_mb=idleness(trace, ABOVE_100_MB, None),
        tf32=idleness(price(trace, gpu=GPU, precision="tf32")),
        long_fraction_without_tails=_long_fraction_without_tails(trace),
        long_fraction_that_outlasts_the_ssd=_outlast_the_ssd(trace),
        seconds_idle_above_100_mb=_sixtieth_percentile(trace),
    )


def _trace_of(setting: Setting, stage: int, folder: Path | None) -> Trace:
    name = "-".join(filter(None, (setting.model, str(stage), setting.variation)))
    path = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}.trace" if folder else None
    if path is not None and path.exists():
        return Trace.load(path)
    print(f"tracing {name}", flush=True)
    trace = fake_trace(
        setting.model,
        sequence=setting.sequence,
        micro_batch_size=setting.micro_batch_size,
        micro_batches=setting.micro_batches,
        stages=setting.stages,
        stage=stage,
        gpu=GPU,
        **setting.options,
    )
    # The preset has one GPU, and every rank has one like it.
    trace = replace(trace, metadata=replace(trace.metadata, rank=0, model=setting.title))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.save(path)
    return trace


def _large_periods(trace: Trace) -> tuple[InactivePeriods, IntArray, BoolArray]:
    """Inactive periods, the bytes of each one's storage, and which are of 10 MB to 1 GB."""
    periods = inactive_periods(trace)
    nbytes = trace.storages.nbytes[periods.storage]
    return periods, nbytes, (nbytes >= LARGE_BYTES[0]) & (nbytes <= LARGE_BYTES[1])


def _long_fraction_without_tails(trace: Trace) -> float | None:
    """Share of long periods, of those between two accesses: as the paper defines them."""
    periods, _, large = _large_periods(trace)
    return _mean(periods.seconds[large & ~periods.is_tail] >= LONG_SECONDS)


def _outlast_the_ssd(trace: Trace) -> float | None:
    """Share of the long periods of large storages in which one SSD could write the storage."""
    periods, nbytes, large = _large_periods(trace)
    chosen = large & (periods.seconds >= LONG_SECONDS)
    return _mean(periods.seconds[chosen] >= nbytes[chosen] / SSD_BYTES_PER_SECOND)


def _sixtieth_percentile(trace: Trace) -> float | None:
    """Seconds within which 60 % of the inactive periods of storages above 100 MB end."""
    periods = inactive_periods(trace)
    seconds = periods.seconds[trace.storages.nbytes[periods.storage] >= ABOVE_100_MB]
    return float(np.quantile(seconds, 0.6)) if len(seconds) else None


def _mean(values: BoolArray) -> float | None:
    return float(np.mean(values)) if len(values) else None
