"""What the paper says about idle memory, measured on its models: rewrites docs/paper.md.

``python benchmarks/paper_characteristics.py`` traces one iteration of each model on every stage of
its pipeline without a GPU (fake tensors, roofline of an H100 NVL), works out the claims of the
paper's section 2.1 and replaces the blocks of docs/paper.md between ``<!-- measured: NAME -->`` and
``<!-- end -->``. With ``--traces FOLDER`` traces are kept there and used again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from teraio.contracts.drawing import new_figure, save_picture
from teraio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from benchmarks.paper_document import (
        IMAGES,
        operator,
        percent,
        renew,
        span,
        table,
        three_digits,
    )
    from benchmarks.paper_models import (
        BERT,
        HARDWARE,
        LANGUAGE_MODELS,
        VARIATIONS,
        Measured,
        measure,
    )
else:  # A script's own folder is on its path, the repository's root is not.
    from paper_document import IMAGES, operator, percent, renew, span, table, three_digits
    from paper_models import BERT, HARDWARE, LANGUAGE_MODELS, VARIATIONS, Measured, measure

BLOCKS = ("claims", "activity", "most-active", "idle", "bert", "variations")
"""The measured blocks of the document, in its order."""


def claims(models: Sequence[Measured], bert: Measured) -> str:
    """The paper's claims beside ours, one a row."""
    found = [m.found for m in models]
    large = [f.large_storages for f in found]
    over_time = _mean_of_models(models, "active_time_mean_fraction_of_gpu")
    over_kernels = _mean_of_models(models, "active_mean_fraction_of_gpu")
    most = max(f.active_max_fraction_of_gpu or 0.0 for f in found)
    passes = max(m.most_active(phase)[1] for m in models for phase in ("forward", "backward"))
    times = [_times_bert(m, bert) for m in models]
    bert_large = percent(bert.above_100_mb.storage_fraction)
    bert_large += f" ({percent(bert.above_100_mb_of_1_mb)} of those of 1 MB or more)"
    rows = [
        (
            "active tensors, on average",
            "1.7 % of GPU memory",
            f"{percent(over_time, 1)} over time, {percent(over_kernels, 1)} over kernels",
        ),
        (
            "active tensors, at most",
            "less than 14 %",
            f"{percent(passes, 1)} in forward and backward, {percent(most, 1)} in the optimizer",
        ),
        (
            "tensors of 10 MB to 1 GB idle for more than 10 ms",
            "more than 40 %",
            span(one.long_idle_storage_fraction for one in large),
        ),
        ("the same, of those that are ever idle", "", span(m.ever_idle_fraction for m in models)),
        (
            "the same, of the times between two uses",
            "",
            span(m.long_fraction_without_tails for m in models),
        ),
        ("BERT-Large: tensors larger than 100 MB", "48 %", bert_large),
        (
            "BERT-Large: most of these are idle for shorter times than in the others",
            "two orders of magnitude",
            f"{min(times):.0f} to {max(times):.0f} times",
        ),
    ]
    return table(("claim", "paper", "here"), rows)


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
        rows.append((m.title, *map(three_digits, fractions), operator(found.active_max_op)))
    return table(headings, rows)


def idle_table(measured: Iterable[Measured]) -> str:
    """How long storages of 10 MB to 1 GB lie idle, per model and stage."""
    headings = (
        "model",
        "10 MB to 1 GB",
        "idle 10 ms: of all",
        "of those ever idle",
        "of periods",
        "tails aside",
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
            m.ever_idle_fraction,
            large.long_period_fraction,
            m.long_fraction_without_tails,
            m.tf32.long_period_fraction,
        )
        period = format_seconds(large.median_period_seconds or 0.0)
        outlast = percent(m.long_fraction_that_outlasts_the_ssd)
        rows.append((m.title, *map(percent, shares), period, outlast))
    return table(headings, rows)


def variation_table(measured: Iterable[Measured]) -> str:
    """One model trained in other ways: what is in use, and how long the rest is idle."""
    headings = ["Llama3-8B on one GPU", "in use, over time", "over kernels", "at most", "by"]
    headings += ["idle 10 ms: of all", "of those ever idle", "of periods"]
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
            m.ever_idle_fraction,
            large.long_period_fraction,
        )
        used = (*map(three_digits, fractions), operator(found.active_max_op))
        rows.append((m.setting.variation, *used, *map(percent, idle)))
    return table(headings, rows)


def bert_table(models: Sequence[Measured], bert: Measured) -> str:
    """Idle periods of storages above 100 MB: BERT-Large beside the language models."""
    headings = ["model", "iteration", "above 100 MB: of all", "of those of 1 MB or more"]
    headings += ["60 % of their periods end within", "times BERT-Large's"]
    rows = []
    for m in (*models, bert):
        large = m.above_100_mb
        of_all, of_larger = percent(large.storage_fraction), percent(m.above_100_mb_of_1_mb)
        idle = format_seconds(m.seconds_idle_above_100_mb or 0.0)
        iteration = format_seconds(m.trace.ideal_seconds)
        rows.append((m.title, iteration, of_all, of_larger, idle, f"{_times_bert(m, bert):.3g}"))
    return table(headings, rows)


def most_active_table(measured: Iterable[Measured]) -> str:
    """The operators that use most, once each, forward and backward apart from the optimizer."""
    rows = []
    for m in measured:
        for phase in ("forward", "backward", "optimizer"):
            kernel, share = m.most_active(phase)
            used = format_bytes(share * HARDWARE.gpu[0].memory_bytes)
            op = operator(m.trace.kernels.op[kernel])
            rows.append((m.title, phase, op, used, percent(share, 1)))
    return table(("model", "phase", "operator", "in use", "of the GPU"), rows)


def _mean_of_models(measured: Iterable[Measured], name: str) -> float:
    """Mean of a characteristic over models; each model's is the mean over its stages."""
    by_model: dict[str, list[float]] = {}
    for m in measured:
        by_model.setdefault(m.setting.model, []).append(getattr(m.found, name))
    return mean(mean(values) for values in by_model.values())


def _times_bert(measured: Measured, bert: Measured) -> float:
    """How many times longer the model's storages above 100 MB lie idle than BERT-Large's."""
    return (measured.seconds_idle_above_100_mb or 0.0) / (bert.seconds_idle_above_100_mb or 1.0)


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
