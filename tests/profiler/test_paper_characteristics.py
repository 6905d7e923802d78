"""The benchmark that writes docs/paper.md, on models small enough for a test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def paper() -> Iterator[ModuleType]:
    """The script as a module, loaded from its folder as Python does."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("paper_characteristics")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def models(paper: ModuleType) -> ModuleType:
    """The settings and what is measured of each."""
    return importlib.import_module("paper_models")


@pytest.fixture(scope="module")
def document(paper: ModuleType) -> ModuleType:
    """The document's blocks."""
    return importlib.import_module("paper_document")


@pytest.fixture(scope="module")
def measured(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama as if the paper had trained it: eight sequences in micro-batches of two."""
    setting = models.Setting("tiny-llama", "Tiny Llama", 8, 32, 2, 1)
    return models.measure(setting, 0, tmp_path_factory.mktemp("traces"))


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_settings_are_those_of_the_papers_section_2(models: ModuleType) -> None:
    assert [(s.model, s.batch, s.sequence) for s in models.LANGUAGE_MODELS] == [
        ("llama3-8b", 128, 4096),
        ("llama3-70b", 256, 2048),
        ("gpt2-40b", 16, 1024),
        ("t5-11b", 64, 512),
    ]
    for setting in (*models.LANGUAGE_MODELS, models.BERT, *models.VARIATIONS):
        assert setting.micro_batches * setting.micro_batch_size == setting.batch


def test_every_micro_batch_of_the_batch_is_in_the_trace(measured: Any) -> None:
    assert set(measured.trace.kernels.micro_batch) >= {0, 1, 2, 3}
    assert measured.trace.metadata.micro_batches == 4


def test_traces_are_kept_and_used_again(models: ModuleType, measured: Any, tmp_path: Path) -> None:
    """Another trace under the name is taken for the model's."""
    shorter = models.Setting("tiny-llama", "Tiny Llama", 2, 32, 2, 1)
    measured.trace.save(tmp_path / "tiny-llama-0.trace")
    again = models.measure(shorter, 0, tmp_path)
    assert again.trace.hash == measured.trace.hash


def test_tables_have_a_row_each_and_shares_of_the_gpu(paper: ModuleType, measured: Any) -> None:
    found = measured.found
    headings, _, row = _cells(paper.activity_table([measured]))
    assert len(headings) == len(row)
    assert row[0] == "Tiny Llama"
    assert row[2] == f"{100 * found.active_time_mean_bytes / 94e9:.3g} %"
    assert row[4] == f"{100 * found.active_max_bytes / 94e9:.3g} %"
    phases = [cells[1] for cells in _cells(paper.most_active_table([measured]))[2:]]
    assert phases == ["forward", "backward", "optimizer"]
    for table in (paper.idle_table, paper.variation_table):
        headings, _, row = _cells(table([measured]))
        assert len(headings) == len(row)


def test_claims_tell_the_papers_numbers_beside_ours(paper: ModuleType, measured: Any) -> None:
    text = paper.claims([measured], measured)
    for number in ("1.7 %", "14 %", "40 %", "48 %", "two orders"):
        assert number in text
    over_time = measured.found.active_time_mean_fraction_of_gpu
    assert f"{100 * over_time:.1f} % over time" in text


def test_models_count_alike_however_many_stages_they_have(paper: ModuleType, measured: Any) -> None:
    """Two stages of one model use 1 % and 3 %, another model 6 %."""

    def stage(model: str, fraction: float) -> Any:
        found = replace(measured.found, active_mean_fraction_of_gpu=fraction)
        return replace(measured, found=found, setting=replace(measured.setting, model=model))

    shares = [stage("a", 0.01), stage("a", 0.03), stage("b", 0.06)]
    assert paper._mean_of_models(shares, "active_mean_fraction_of_gpu") == pytest.approx(0.04)


def test_times_are_relative_to_bert(paper: ModuleType, measured: Any) -> None:
    bert = replace(measured, seconds_idle_above_100_mb=2e-3)
    model = replace(measured, seconds_idle_above_100_mb=0.5)
    rows = _cells(paper.bert_table([model], bert))
    assert [row[-1] for row in rows[2:]] == ["250", "1"]


def test_only_named_blocks_are_replaced(document: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "paper.md"
    block = "<!-- measured: {} -->\nold\n<!-- end -->\n"
    path.write_text("before\n" + block.format("claims") + "between\n" + block.format("idle"))
    document.renew({"claims": "new\n"}, path)
    assert path.read_text() == (
        "before\n<!-- measured: claims -->\nnew\n<!-- end -->\nbetween\n" + block.format("idle")
    )


def test_pictures_of_both_figures(paper: ModuleType, measured: Any, tmp_path: Path) -> None:
    """One panel for each first stage; the place of a missing one stays empty."""
    paper.draw([measured, replace(measured, stage=1)], tmp_path)
    for name in ("paper-active.png", "paper-idle.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_the_document_holds_every_block(paper: ModuleType, document: ModuleType) -> None:
    """If this fails: python benchmarks/paper_characteristics.py."""
    blocks = document.blocks_of()
    assert set(paper.BLOCKS) <= set(blocks)
    assert all(len(_cells(blocks[name])) > 2 for name in paper.BLOCKS)
