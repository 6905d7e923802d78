"""Host memory that a machine has, but not for one process alone: other ranks, control groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teraio.errors import InputError
from teraio.executor import host_room
from teraio.executor.host_room import host_bytes_to_take
from teraio.executor.probing import limits

GIB = 2**30


@pytest.mark.parametrize(
    ("environment", "expected_gib"),
    [
        ({}, 90),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 45),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 22.5),
        # A launcher that does not say: all may be here.
        ({"RANK": "0", "WORLD_SIZE": "2"}, 45),
        # Left over from another launch.
        ({"LOCAL_WORLD_SIZE": "4"}, 90),
    ],
)
def test_all_ranks_together_take_no_more_than_there_is(
    environment: dict[str, str], expected_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees all of the machine's memory, since all look before any takes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_room, "available_memory_bytes", lambda: 100 * GIB)
    taken = host_bytes_to_take(256 * GIB, 10 * GIB, is_given=False)
    assert taken == expected_gib * GIB


def test_a_rank_that_needs_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have taken theirs already, so it is asked whether it is there."""
    asked: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(host_room, "available_memory_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(host_room, "check_memory_by_touching", asked.append)
    assert host_bytes_to_take(256 * GIB, 60 * GIB, is_given=False) == 60 * GIB
    assert host_bytes_to_take(70 * GIB, 60 * GIB, is_given=True) == 70 * GIB
    assert asked == [60 * GIB, 70 * GIB]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # Copies of files give way, memory does not.
        (
            "0::/job",
            {
                "job/memory.max": "3000000",
                "job/memory.current": "1500000",
                "job/memory.stat": "anon 900000\ninactive_file 400000\nactive_file 100000\n",
            },
            2000000,
        ),
        # Of a group and the one that holds it, the fuller binds.
        (
            "0::/job/step",
            {
                "job/step/memory.max": "max",
                "job/memory.high": "2500000",
                "job/memory.current": "2400000",
            },
            100000,
        ),
        # Version 1; what groups inside hold is in the totals.
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "4000000",
                "memory/memory.usage_in_bytes": "3000000",
                "memory/memory.stat": "inactive_file 0\ntotal_inactive_file 500000\n",
            },
            1500000,
        ),
        ("0::/", {"memory.max": "1000000", "memory.current": "1200000"}, 0),
        ("0::/", {"memory.max": "1000000", "memory.stat": "not what it was"}, 1000000),
        ("0::/", {"memory.max": "max", "memory.current": "9000"}, 5000 * 1024),
        ("0::/", {"memory.max": str(2**50), "memory.current": "9000"}, 5000 * 1024),
    ],
)
def test_what_a_control_group_leaves(
    own: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    """A container is ended at its limit, however much the machine around it has."""
    write(tmp_path, {"own": own, "meminfo": "MemAvailable:    5000 kB"})
    write(tmp_path / "groups", files)
    found = limits.available_memory_bytes(
        tmp_path / "meminfo", tmp_path / "groups", tmp_path / "own"
    )
    assert found == expected


def test_touching_stops_at_the_group_s_limit(tmp_path: Path, monkeypatch: Any) -> None:
    """It would end the process that it is to save."""
    write(tmp_path, {"memory.max": str(5 * GIB), "memory.current": str(4 * GIB)})
    write(tmp_path, {"meminfo": f"MemAvailable:    {100 * GIB // 1024} kB", "own": "0::/"})
    places = (tmp_path / "meminfo", tmp_path, tmp_path / "own")
    monkeypatch.setattr(limits.available_memory_bytes, "__defaults__", places)
    with pytest.raises(InputError, match=r"needs 8\.59 GB, this machine has 0 B to give"):
        limits.check_memory_by_touching(8 * GIB, patience_seconds=0.0)
