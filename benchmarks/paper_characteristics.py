"""What the paper says about idle memory, measured on its models: rewrites docs/paper.md.

``python benchmarks/paper_characteristics.py`` traces one iteration of each model on every stage of
its pipeline without a GPU (fake tensors, roofline of an H100 NVL), works out the claims of the
paper's section 2.1 and replaces the blocks of docs/paper.md between ``<!-- measured: NAME -->`` and
``<!-- end -->``. With ``--traces FOLDER`` traces are kept there and used again.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from teraio.contracts.drawing import new_figure, save_picture
from teraio.contracts.hardware import Hardware
from teraio.profiler.costs.pricing import price
from teraio.profiler.fake.tracing import trace as fake_trace
from teraio.traces.characterise import Characteristics, characteristics
from teraio.traces.idleness import LARGE_BYTES, LONG_SECONDS, Idleness, idleness
from teraio.traces.lifetimes import active_bytes, inactive_periods
from teraio.traces.trace import Trace
from teraio.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "paper.md"
IMAGES = ROOT / "docs" / "images"
GPU = "h100-nvl"
HARDWARE = Hardware.preset("paper")
SSD_BYTES_PER_SECOND = 6.5e9
"""Of the paper's section 2.1: what one of its SSDs writes."""

ABOVE_100_MB = 10**8

BLOCKS = ("claims", "activity", "most-active", "idle", "bert", "variations")
"""The measured blocks of the document, in its order."""


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
    Setting("t5-11b", "T5-11B", 64, 512, 4, 1),
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
    long_periods_that_outlast_the_ssd: float | None

    @property
    def title(self) -> str:
        """Model and stage."""
        stages = self.setting.stages
        where = f", stage {self.stage} of {stages}" if stages > 1 else ""
        return self.setting.title + where


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
        long_periods_that_outlast_the_ssd=_outlast_the_ssd(trace),
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


def _outlast_the_ssd(trace: Trace) -> float | None:
    """Share of the long periods of large storages in which one SSD could write the storage."""
    periods = inactive_periods(trace)
    nbytes = trace.storages.nbytes[periods.storage]
    large = (nbytes >= LARGE_BYTES[0]) & (nbytes <= LARGE_BYTES[1])
    chosen = large & (periods.seconds >= LONG_SECONDS)
    outlast = periods.seconds[chosen] >= nbytes[chosen] / SSD_BYTES_PER_SECOND
    return float(np.mean(outlast)) if len(outlast) else None


def claims(models: Sequence[Measured], bert: Measured) -> str:
    """The paper's claims beside ours, one a row."""
    found = [m.found for m in models]
    large = [f.large_storages for f in found]
    over_time = mean(f.active_time_mean_fraction_of_gpu or 0.0 for f in found)
    over_kernels = mean(f.active_mean_fraction_of_gpu or 0.0 for f in found)
    most = max(f.active_max_fraction_of_gpu or 0.0 for f in found)
    shorter = share_of_bert_within(models, bert, 1 / 100)
    rows = [
        (
            "active tensors, on average",
            "1.7 % of GPU memory",
            f"{_percent(over_time, 1)} over time, {_percent(over_kernels, 1)} over kernels",
        ),
        ("active tensors, at most", "less than 14 %", _percent(most, 1)),
        (
            "tensors of 10 MB to 1 GB idle for more than 10 ms",
            "more than 40 %",
            _span(one.long_idle_storage_fraction for one in large),
        ),
        ("the same, of those that are ever idle", "", _span(map(_of_those_ever_idle, large))),
        ("the same, of their idle periods", "", _span(one.long_period_fraction for one in large)),
        (
            "BERT-Large: tensors larger than 100 MB",
            "48 %",
            _percent(bert.above_100_mb.storage_fraction),
        ),
        (
            "BERT-Large: of these, idle for a hundredth of the language models' time",
            "more than 60 %",
            _percent(shorter),
        ),
    ]
    return _table(("claim", "paper", "here"), rows)


def activity_table(measured: Iterable[Measured]) -> str:
    """How much of the GPU's memory lives, and how much kernels use, per model and stage."""
    headings = ("model", "alive, at most", "in use, over time", "over kernels", "at most", "by")
    rows = []
    for m in measured:
        found = m.found
        fractions = (
            found.peak_live_bytes / HARDWARE.gpu[0].memory_bytes,
            found.active_time_mean_fraction_of_gpu,
            found.active_mean_fraction_of_gpu,
            found.active_max_fraction_of_gpu,
        )
        rows.append((m.title, *map(_precise, fractions), _operator(found.active_max_op)))
    return _table(headings, rows)


def idle_table(measured: Iterable[Measured]) -> str:
    """How long storages of 10 MB to 1 GB lie idle, per model and stage."""
    headings = (
        "model",
        "10 MB to 1 GB",
        "idle 10 ms: of all",
        "of those ever idle",
        "of periods",
        "in TF32",
        "median period",
        "outlast 6.5 GB/s",
    )
    rows = []
    for m in measured:
        large = m.found.large_storages
        shares = (
            large.storage_fraction,
            large.long_idle_storage_fraction,
            _of_those_ever_idle(large),
            large.long_period_fraction,
            m.tf32.long_period_fraction,
        )
        period = format_seconds(large.median_period_seconds or 0.0)
        outlast = _percent(m.long_periods_that_outlast_the_ssd)
        rows.append((m.title, *map(_percent, shares), period, outlast))
    return _table(headings, rows)


def variation_table(measured: Iterable[Measured]) -> str:
    """One model trained in other ways: what is in use, and how long the rest is idle."""
    headings = ("Llama3-8B on one GPU", "in use, over time", "over kernels", "at most", "by")
    headings += ("idle 10 ms: of all", "of those ever idle", "of periods")
    rows = []
    for m in measured:
        found, large = m.found, m.found.large_storages
        fractions = (
            found.active_time_mean_fraction_of_gpu,
            found.active_mean_fraction_of_gpu,
            found.active_max_fraction_of_gpu,
        )
        idle = (
            large.long_idle_storage_fraction,
            _of_those_ever_idle(large),
            large.long_period_fraction,
        )
        used = (*map(_precise, fractions), _operator(found.active_max_op))
        rows.append((m.setting.variation, *used, *map(_percent, idle)))
    return _table(headings, rows)


def bert_table(models: Sequence[Measured], bert: Measured) -> str:
    """Idle periods of storages above 100 MB: BERT-Large beside the language models."""
    headings = ("model", "iteration", "storages above 100 MB", "median idle period", "of BERT's")
    base = bert.above_100_mb.median_period_seconds or 1.0
    rows = []
    for m in (*models, bert):
        period = m.above_100_mb.median_period_seconds or 0.0
        share = _percent(m.above_100_mb.storage_fraction)
        iteration = format_seconds(m.trace.ideal_seconds)
        rows.append((m.title, iteration, share, format_seconds(period), f"{period / base:.3g} x"))
    return _table(headings, rows)


def most_active_table(measured: Iterable[Measured]) -> str:
    """The operators that use most, once each, forward and backward apart from the optimizer."""
    rows = []
    for m in measured:
        active, kernels = active_bytes(m.trace), m.trace.kernels
        for phase in ("forward", "backward", "optimizer"):
            inside = np.flatnonzero(kernels.phase == phase)
            kernel = inside[np.argmax(active[inside])]
            used, share = int(active[kernel]), active[kernel] / HARDWARE.gpu[0].memory_bytes
            op = _operator(kernels.op[kernel])
            rows.append((m.title, phase, op, format_bytes(used), _percent(share, 1)))
    return _table(("model", "phase", "operator", "in use", "of the GPU"), rows)


def share_of_bert_within(models: Sequence[Measured], bert: Measured, factor: float) -> float | None:
    """Share of BERT's idle periods (above 100 MB) within ``factor`` times the models' median."""
    usual = median(m.above_100_mb.median_period_seconds or 0.0 for m in models)
    periods = inactive_periods(bert.trace)
    large = bert.trace.storages.nbytes[periods.storage] >= ABOVE_100_MB
    return float(np.mean(periods.seconds[large] <= usual * factor)) if large.any() else None


def _of_those_ever_idle(large: Idleness) -> float | None:
    return large.long_idle_storages / large.idle_storages if large.idle_storages else None


def _percent(fraction: float | None, digits: int = 0) -> str:
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def _precise(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.3g} %"


def _span(fractions: Iterable[float | None]) -> str:
    known = [100 * fraction for fraction in fractions if fraction is not None]
    return f"{min(known):.0f} to {max(known):.0f} %" if known else "-"


def _operator(op: str) -> str:
    return f"`{op.removeprefix('aten.').removesuffix('.default')}`"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(measured: Sequence[Measured], folder: Path) -> None:
    """The paper's Figures 1 and 2 as paper-active.png and paper-idle.png, of the first stages."""
    first = [m for m in measured if m.stage == 0]
    rows = -(-len(first) // 2)
    (ssd,) = HARDWARE.ssd
    active = new_figure(10.0, 3.6 * rows).subplots(rows, 2, squeeze=False)
    idle = new_figure(10.0, 3.6 * rows).subplots(rows, 2, squeeze=False)
    for m, above, below in itertools.zip_longest(first, active.flat, idle.flat):
        if m is None:
            above.remove()
            below.remove()
            continue
        m.trace.plot_activity(HARDWARE.gpu[0].memory_bytes, above)
        m.trace.plot_idleness(ssd, below)
        above.set_title(m.title, fontsize="medium", pad=50)
        below.set_title(m.title, fontsize="medium", pad=36)
    save_picture(active[0, 0], folder / "paper-active.png")
    save_picture(idle[0, 0], folder / "paper-idle.png")


def renew(blocks: dict[str, str], document: Path = DOCUMENT) -> None:
    """Replace the measured blocks of a document; those without a new text stay."""
    pattern = re.compile(r"(<!-- measured: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    text = document.read_text()
    document.write_text(
        pattern.sub(lambda found: found[1] + blocks.get(found[2], found[3]) + found[4], text)
    )


def main() -> None:
    """Trace, print the tables, and write them and the picture into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder that keeps the traces")
    parser.add_argument("--print-only", action="store_true", help="leave docs/ as it is")
    arguments = parser.parse_args()
    models = [
        measure(setting, stage, arguments.traces)
        for setting in LANGUAGE_MODELS
        for stage in range(setting.stages)
    ]
    bert = measure(BERT, 0, arguments.traces)
    variations = [measure(setting, 0, arguments.traces) for setting in VARIATIONS]
    texts = (
        claims(models, bert),
        activity_table([*models, bert]),
        most_active_table(models),
        idle_table([*models, bert]),
        bert_table(models, bert),
        variation_table(variations),
    )
    blocks = dict(zip(BLOCKS, texts, strict=True))
    for name, block in blocks.items():
        print(f"\n{name}\n{block}", end="")
    if not arguments.print_only:
        renew(blocks)
        draw(models, IMAGES)


if __name__ == "__main__":
    main()
