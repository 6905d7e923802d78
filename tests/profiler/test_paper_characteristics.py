"""The benchmark that writes docs/paper.md, on models small enough for a test."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    """The script as a module."""
    path = ROOT / "benchmarks" / "paper_characteristics.py"
    spec = importlib.util.spec_from_file_location("paper_characteristics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama as if the paper had trained it: eight sequences in micro-batches of two."""
    setting = paper.Setting("tiny-llama", "Tiny Llama", 8, 32, 2, 1)
    return paper.measure(setting, 0, tmp_path_factory.mktemp("traces"))


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_settings_are_those_of_the_papers_section_2(paper: ModuleType) -> None:
    assert [(s.model, s.batch, s.sequence) for s in paper.LANGUAGE_MODELS] == [
        ("llama3-8b", 128, 4096),
        ("llama3-70b", 256, 2048),
        ("gpt2-40b", 16, 1024),
        ("t5-11b", 64, 512),
    ]
    for setting in (*paper.LANGUAGE_MODELS, paper.BERT, *paper.VARIATIONS):
        assert setting.micro_batches * setting.micro_batch_size == setting.batch


def test_every_micro_batch_of_the_batch_is_in_the_trace(measured: Any) -> None:
    assert set(measured.trace.kernels.micro_batch) >= {0, 1, 2, 3}
    assert measured.trace.metadata.micro_batches == 4


def test_traces_are_kept_and_used_again(paper: ModuleType, measured: Any, tmp_path: Path) -> None:
    """Another trace under the name is taken for the model's."""
    shorter = paper.Setting("tiny-llama", "Tiny Llama", 2, 32, 2, 1)
    measured.trace.save(tmp_path / "tiny-llama-0.trace")
    again = paper.measure(shorter, 0, tmp_path)
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
    for number in ("1.7 %", "14 %", "40 %", "48 %", "60 %"):
        assert number in text


def test_periods_of_bert_beside_those_of_the_models(
    paper: ModuleType, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the periods of the same model are within its median."""
    monkeypatch.setattr(paper, "ABOVE_100_MB", 1)
    same = replace(measured, above_100_mb=paper.idleness(measured.trace, 1, None))
    assert paper.share_of_bert_within([same], same, 1e9) == 1.0
    assert paper.share_of_bert_within([same], same, 1) == pytest.approx(0.5, abs=0.05)
    assert paper.share_of_bert_within([same], same, 0) == 0.0
    assert _cells(paper.bert_table([same], same))[-1][-1] == "1 x"


def test_only_named_blocks_are_replaced(paper: ModuleType, tmp_path: Path) -> None:
    document = tmp_path / "paper.md"
    block = "<!-- measured: {} -->\nold\n<!-- end -->\n"
    document.write_text("before\n" + block.format("claims") + "between\n" + block.format("idle"))
    paper.renew({"claims": "new\n"}, document)
    assert document.read_text() == (
        "before\n<!-- measured: claims -->\nnew\n<!-- end -->\nbetween\n" + block.format("idle")
    )


def test_pictures_of_both_figures(paper: ModuleType, measured: Any, tmp_path: Path) -> None:
    """One panel for each first stage; the place of a missing one stays empty."""
    paper.draw([measured, replace(measured, stage=1)], tmp_path)
    for name in ("paper-active.png", "paper-idle.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_the_document_holds_every_block(paper: ModuleType) -> None:
    """If this fails: python benchmarks/paper_characteristics.py."""
    text = paper.DOCUMENT.read_text()
    blocks = re.findall(r"<!-- measured: (\S+) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert [name for name, _ in blocks] == list(paper.BLOCKS)
    assert all(_cells(body)[0] != [""] for _, body in blocks)
