"""Disks that are full, refuse O_DIRECT, or outlive their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from teraio.contracts.hardware import Hardware
from teraio.errors import CapacityError, InputError, OffloadWarning, StoreError
from teraio.executor.stores import FileStore, HostStore, block_file

MIB = 2**20


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, whose limits may then be lowered."""
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            textwrap.dedent(script),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_full_disk_is_an_error_and_never_garbage(tmp_path: Path) -> None:
    """The write fails with path and bytes; a read of the slot fails too, until it is rewritten."""
    script = """
        import resource, sys, torch
        from teraio.errors import StoreError
        from teraio.executor.stores import FileStore
        store = FileStore("ssd0", sys.argv[1], 8 << 20, preferred_io_bytes=2 << 20)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        source = torch.full((4 << 20,), 3, dtype=torch.uint8)
        destination = torch.full((4096,), 5, dtype=torch.uint8)
        write = store.write(source, 0, 4 << 20)
        reads = [store.read(destination, 1 << 20, 4096)]
        for transfer in (write, *reads):
            try:
                transfer.wait()
            except StoreError as error:
                print(error)
        reads.append(store.read(destination, 0, 4096))
        try:
            reads[1].wait()
        except StoreError as error:
            print(error)
        assert write.done and destination.eq(5).all()
        store.write(source, 0, 4096).wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        store.write(source, 0, 4 << 20).wait()
        store.read(destination, 1 << 20, 4096).wait()
        assert destination.eq(3).all()
        store.close()
    """
    result = run_python(script, str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert f"ssd0 in {tmp_path}: write at offset 0 wanted {2 * MIB} bytes, got {MIB}" in lines[0]
    assert lines[1] == lines[2] == lines[0]


def test_space_is_checked_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that does not fit the disk is refused with what it needs and what there is."""
    with pytest.raises(StoreError, match=r"ssd0 in .*: needs 1000 TB.* the disk has .* free"):
        FileStore("ssd0", tmp_path, 10**15)

    def refuse(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match="cannot reserve 8192 bytes: No space left"):
        FileStore("ssd0", tmp_path, 5000)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    """Nothing is created in places that the user did not make."""
    with pytest.raises(InputError, match="nowhere: no such directory for ssd0"):
        FileStore("ssd0", tmp_path / "nowhere", MIB)


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto says so once and works; insisting fails; declining is silent."""
    open_unnamed = block_file._open_unnamed

    def refuse_direct(directory: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_unnamed(directory, flags)

    monkeypatch.setattr(block_file, "_open_unnamed", refuse_direct)
    with pytest.warns(OffloadWarning, match="page cache, O_DIRECT failed: Invalid argument"):
        store = FileStore("ssd0", tmp_path, MIB)
    assert not store.is_direct
    store.close()
    with pytest.raises(StoreError, match="O_DIRECT does not work here"):
        FileStore("ssd0", tmp_path, MIB, direct=True)
    FileStore("ssd0", tmp_path, MIB, direct=False).close()


def test_blocks_larger_than_the_plan_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan packed at 512 bytes still runs on a disk with blocks of 4096, through the cache."""
    monkeypatch.setattr(block_file, "probe_alignment", lambda descriptor: 4096)
    with pytest.warns(OffloadWarning, match="needs blocks of 4096 bytes, this device 512"):
        store = FileStore("ssd0", tmp_path, MIB, alignment_bytes=512)
    source = torch.arange(200, dtype=torch.uint8)
    destination = torch.zeros_like(source)
    store.write(source, 512, 200)
    store.read(destination, 512, 200).wait()
    store.close()
    assert torch.equal(source, destination)


def test_a_file_system_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is gone before the first byte is written."""
    real_open = os.open

    def refuse_unnamed(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_unnamed)
    store = FileStore("ssd0", tmp_path, MIB, direct=False)
    assert list(tmp_path.iterdir()) == []
    store.write(torch.ones(10, dtype=torch.uint8), 0, 10).wait()
    store.close()


def test_two_stores_in_one_directory(tmp_path: Path) -> None:
    """They share nothing, not even when they have the same name; no file is ever seen."""
    stores = [FileStore("ssd0", tmp_path, MIB, direct=False) for _ in range(2)]
    for value, store in enumerate(stores):
        store.write(torch.full((100,), value, dtype=torch.uint8), 0, 100)
    for value, store in enumerate(stores):
        destination = torch.empty(100, dtype=torch.uint8)
        store.read(destination, 0, 100).wait()
        assert bool((destination == value).all())
        assert list(tmp_path.iterdir()) == []
        store.close()


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """kill -9 in the middle of a write; a second run in the same directory starts clean."""
    script = """
        import os, signal, sys, torch
        from teraio.executor.stores import FileStore
        store = FileStore("ssd0", sys.argv[1], 64 << 20, direct=False)
        for index in range(4):
            store.write(torch.zeros(16 << 20, dtype=torch.uint8), index << 24, 16 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    for _ in range(2):
        assert run_python(script, str(tmp_path)).returncode == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ["raise ValueError('mine')", "sys.exit(1)", "os.fork()"])
def test_interpreters_end_cleanly(tmp_path: Path, ending: str) -> None:
    """With transfers in flight and nobody to call close: no hang, no noise but the user's own."""
    script = f"""
        import os, sys, torch
        from teraio.executor.stores import FileStore, HostStore
        stores = [FileStore("ssd0", sys.argv[1], 64 << 20, direct=False), HostStore(64 << 20)]
        source = torch.zeros(32 << 20, dtype=torch.uint8)
        transfers = [store.write(source, 0, 32 << 20) for store in stores]
        {ending}
    """
    result = run_python(script, str(tmp_path))
    assert result.returncode == (0 if "fork" in ending else 1)
    lines = [line for line in result.stderr.splitlines() if "Traceback" not in line]
    assert [x for x in lines if not x.startswith(" ")] == ["ValueError: mine"] * ("raise" in ending)


def test_growing(tmp_path: Path) -> None:
    """The overflow area grows up to the capacity, in whole blocks, and is usable."""
    store = FileStore("ssd0", tmp_path, MIB, capacity_bytes=3 * MIB, direct=False)
    source = torch.arange(100, dtype=torch.uint8)
    with pytest.raises(StoreError, match="outside"):
        store.write(source, MIB, 100)
    store.grow(100)
    assert store.reserved_bytes == MIB + 4096
    store.write(source, MIB, 100)
    destination = torch.zeros_like(source)
    store.read(destination, MIB, 100).wait()
    assert torch.equal(source, destination)
    with pytest.raises(CapacityError, match=f"ssd0: .* exceed its capacity of {3 * MIB}"):
        store.grow(2 * MIB)
    store.close()
    with pytest.raises(CapacityError, match="exceed its capacity"):
        FileStore("ssd0", tmp_path, 2 * MIB, capacity_bytes=MIB)


def test_of_hardware(tmp_path: Path) -> None:
    """Name, alignment and capacity are the Hardware's; bounce buffers stay within its bytes."""
    ssd = Hardware.preset("cpu").ssd[0]
    store = FileStore.of_ssd(ssd, tmp_path, MIB)
    assert (store.name, store.alignment_bytes) == (ssd.name, ssd.alignment_bytes)
    assert store.capacity_bytes == ssd.capacity_bytes
    assert store.pinned_bytes == ssd.bounce_bytes
    store.close()


def test_alignment_is_what_the_file_takes(tmp_path: Path) -> None:
    """The probe's answer works for size, offset and address, and leaves the file empty."""
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        assert block_file.probe_alignment(descriptor) == 512
        assert os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)


def test_host_memory_that_is_not_there() -> None:
    """An arena larger than the address space is refused by name."""
    with pytest.raises(StoreError, match="host: cannot map"):
        HostStore(2**60)
