"""The documentation agrees with the code: generated blocks are fresh, links and commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from teraio.cli.group import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.fixture(scope="module")
def make_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_generated_blocks_are_fresh(document: Path, make_tables: ModuleType) -> None:
    """If this fails: python docs/make_tables.py."""
    text = document.read_text()
    assert make_tables.renewed(text) == text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_exist(document: Path) -> None:
    for name in re.findall(r"^\$ teraio (\S+)", document.read_text(), re.MULTILINE):
        assert name in COMMANDS


def test_every_command_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    documented = re.findall(r"<!-- help: (\S+) -->", text)
    assert set(COMMANDS) - {"demo"} <= set(documented)


def test_a_stale_block_would_be_noticed(make_tables: ModuleType) -> None:
    stale = "<!-- table: teraio.contracts.plan.Copies -->\nold\n<!-- end -->"
    assert "`tier_offset_bytes` | int64" in make_tables.renewed(stale)
