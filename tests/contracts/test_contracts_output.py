"""Outputs replace outputs, refuse everything else, and survive a death at any moment."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from teraio.contracts.drawing import save_picture
from teraio.contracts.hardware import Hardware
from teraio.contracts.output import (
    check_replaceable,
    is_teraio_output,
    previous_path,
    recover_directory,
    replacing_directory,
    replacing_file,
)
from teraio.errors import InputError, OffloadWarning
from teraio.traces.trace import Trace


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs, no cleanup either."""


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_an_older_output_is_replaced(small_trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    replace(small_trace, metadata=replace(small_trace.metadata, model="old")).save(path)
    small_trace.save(path)
    assert Trace.load(path).metadata.model == "small"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.trace"]


@pytest.mark.parametrize("replacing", [replacing_file, replacing_directory])
def test_what_the_system_does_not_create_is_named(replacing: Any, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    with pytest.raises(InputError, match=r"x: nothing can be written to .* \(File name too long"):
        replacing(path).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written to"):
        check_replaceable(tmp_path / "t.trace")


def break_off(file: Path) -> None:
    file.write_text("half of")
    raise RuntimeError("half")


@pytest.mark.parametrize("what", ["file", "directory", "empty directory", "mixed", "dangling link"])
def test_what_teraio_did_not_write_is_refused(
    small_trace: Trace, tmp_path: Path, what: str
) -> None:
    path = tmp_path / "t.trace"
    if what == "file":
        path.write_text("mine")
    elif what == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        if what == "mixed":
            small_trace.save(path)
        else:
            path.mkdir()
        if what != "empty directory":
            (path / "thesis.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(InputError, match="was not written by teraio; not replaced"):
        small_trace.save(path)
    assert listing(tmp_path) == before


def test_a_missing_parent_is_named(small_trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .*/none does not exist"):
        small_trace.save(tmp_path / "none" / "t.trace")


def test_a_file_takes_its_place_only_when_done(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    Hardware.preset("g10").save(path)
    with pytest.raises(RuntimeError, match="half"), replacing_file(path) as temporary:
        break_off(temporary)
    assert Hardware.load(path).name == "g10"
    assert listing(tmp_path) == ["h.toml"]


def test_a_directory_takes_its_place_only_when_done(small_trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    small_trace.save(path)
    with pytest.raises(RuntimeError, match="half"), replacing_directory(path) as temporary:
        break_off(temporary / "kernels.parquet")
    assert Trace.load(path).hash == small_trace.hash
    assert [p.name for p in tmp_path.iterdir()] == ["t.trace"]


def die_between_the_renames(trace: Trace, path: Path, monkeypatch: Any) -> None:
    """Save, and die when the old directory has moved away and the new one has not come."""
    rename = Path.rename

    def rename_or_die(self: Path, target: Path) -> Path:
        if target == path:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            trace.save(path)


def test_death_between_the_renames_keeps_the_old_version(
    small_trace: Trace, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "t.trace"
    small_trace.save(path)
    newer = replace(small_trace, metadata=replace(small_trace.metadata, model="newer"))
    die_between_the_renames(newer, path, monkeypatch)
    assert not path.exists()
    assert previous_path(path).is_dir()
    with pytest.warns(OffloadWarning, match="a save was interrupted; the version before it"):
        assert Trace.load(path).metadata.model == "small"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Trace.load(path).metadata.model == "small"


def test_saving_again_after_a_death_loses_nothing(
    small_trace: Trace, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "t.trace"
    small_trace.save(path)
    newer = replace(small_trace, metadata=replace(small_trace.metadata, model="newer"))
    die_between_the_renames(newer, path, monkeypatch)
    newer.save(path)
    assert Trace.load(path).metadata.model == "newer"
    assert not previous_path(path).exists()


def test_recovery_does_nothing_where_nothing_is_missing(small_trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    assert not recover_directory(path)
    small_trace.save(path)
    assert not recover_directory(path)


def test_outputs_are_known_by_their_mark(small_trace: Trace, tmp_path: Path) -> None:
    small_trace.save(tmp_path / "t.trace")
    Hardware.preset("g10").save(tmp_path / "h.toml")
    assert is_teraio_output(tmp_path / "t.trace")
    assert is_teraio_output(tmp_path / "h.toml")
    for suffix in ("png", "svg", "pdf"):
        save_picture(plt.subplots()[1], tmp_path / f"p.{suffix}")
        assert is_teraio_output(tmp_path / f"p.{suffix}")
    plt.close("all")


@pytest.mark.parametrize("suffix", ["py", "toml", "json", "svg"])
def test_what_only_speaks_of_teraio_is_not_its_output(suffix: str, tmp_path: Path) -> None:
    """Such as the very script that is to be profiled."""
    (tmp_path / f"mine.{suffix}").write_text("import teraio  # {'generator': 'teraio'}")
    assert not is_teraio_output(tmp_path / f"mine.{suffix}")
    assert not is_teraio_output(tmp_path)
