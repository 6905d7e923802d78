"""Disk space that grows while it is watched."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from teraio.errors import StoreError
from teraio.executor.stores import reserved_space
from teraio.executor.stores.reserved_space import ReservedSpace

BLOCK = 4096


@pytest.fixture
def space() -> Any:
    """One block of a file."""
    with tempfile.TemporaryFile() as file:
        made = ReservedSpace(os.dup(file.fileno()), "disk", BLOCK)
        made.reserve(BLOCK)
        yield made
        made.close()


def test_growth_during_a_check_is_no_damage(space: ReservedSpace, monkeypatch: Any) -> None:
    """One thread has asked for the size, and another lets the file grow before it compares."""
    status = os.fstat(space.descriptor)

    def grow_and_answer(descriptor: int) -> Any:
        space.reserve(4 * BLOCK)
        return status

    answer = SimpleNamespace(
        fstat=grow_and_answer, fstatvfs=os.fstatvfs, posix_fallocate=os.posix_fallocate
    )
    with monkeypatch.context() as patched:
        patched.setattr(reserved_space, "os", answer)
        space.check()
    space.check()
    assert os.fstat(space.descriptor).st_size == 4 * BLOCK


def test_a_cut_is_damage_for_good(space: ReservedSpace) -> None:
    """Also once the size is right again: the bytes are gone."""
    os.ftruncate(space.descriptor, 0)
    for _ in range(2):
        with pytest.raises(StoreError, match="was cut from 4096 to 0 bytes by somebody else"):
            space.check()
        os.ftruncate(space.descriptor, BLOCK)
