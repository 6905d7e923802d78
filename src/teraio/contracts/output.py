"""Writing outputs: beside the target first, then swapped in, so that no run leaves half a file.

``-o`` of every command follows one rule: an existing teraio output is replaced, anything else that
stands there is refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from teraio.errors import InputError

_MARKS = (
    (b"PAR1", b"teraio"),
    (b"# teraio hardware", b""),
    (b'{\n "format": "teraio timings"', b""),
    (b'{"otherData": {"generator": "teraio"', b""),
    (b"\x89PNG", b"Software\0teraio"),
    (b"<?xml", b">teraio<"),
    (b"%PDF", b"/Creator (teraio)"),
)
"""How a file of each form begins, and what else stands near its start or end. The word alone would
not do: scripts that import teraio have it too."""
_MARK_SEARCH_BYTES = 64 * 1024


def is_teraio_output(path: Path) -> bool:
    """Whether teraio wrote what stands at ``path``, by the marks that its files carry."""
    if path.is_dir():
        files = sorted(path.iterdir())
        return bool(files) and all(f.is_file() and is_teraio_output(f) for f in files)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_MARK_SEARCH_BYTES)
        file.seek(max(0, path.stat().st_size - _MARK_SEARCH_BYTES))
        tail = file.read()
    return any(head.startswith(start) and (mark in head or mark in tail) for start, mark in _MARKS)


def check_replaceable(path: Path, is_ours: Callable[[Path], bool] = is_teraio_output) -> None:
    """Raise InputError unless ``path`` is free or holds a teraio output, and its parent exists."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: the folder {path.parent} cannot be written to")
    if (path.exists() or path.is_symlink()) and not is_ours(path):
        raise InputError(f"{path}: exists and was not written by teraio; not replaced")


@contextmanager
def _refusals_named(path: Path) -> Iterator[None]:
    """The system's refusal to create something beside ``path``, as InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path}: nothing can be written to {path.parent} ({error.strerror})"
        ) from None


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes the place of ``path``.

    Raises InputError as :func:`check_replaceable`. On an exception nothing is left behind.
    """
    check_replaceable(path)
    with _refusals_named(path):
        handle, name = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent
        )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def replacing_directory(
    path: Path, is_ours: Callable[[Path], bool] = is_teraio_output
) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; on success it takes the place of ``path``.

    A directory cannot be replaced in one step everywhere: the old one first moves to
    :func:`previous_path`, from which :func:`recover_directory` brings it back if the second step
    never came.
    """
    check_replaceable(path, is_ours)
    with _refusals_named(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        temporary.chmod(0o755)
        previous = previous_path(path)
        if previous.exists() and path.exists():
            shutil.rmtree(previous)
        if path.exists():
            path.rename(previous)
        temporary.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def previous_path(path: Path) -> Path:
    """Where the old directory waits while a new one is swapped in."""
    return path.with_name(f".{path.name}.previous")


def recover_directory(path: Path) -> bool:
    """Undo an interrupted swap: bring the old directory back. Returns whether there was one."""
    if path.exists() or not previous_path(path).is_dir():
        return False
    previous_path(path).rename(path)
    return True


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
