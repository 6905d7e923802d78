"""SSD devices by backend: kvikio, stripe sets, the choice between backends, and their reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.executor.fake_kvikio import fake_library

from teraio.contracts.hardware import Ssd
from teraio.errors import CapacityError, InputError, StoreError
from teraio.executor.stores import (
    FileStore,
    GdsStore,
    Store,
    gds,
    io_meter,
    measure_backends,
    open_ssd,
    ssd,
)
from teraio.executor.stores.io_meter import IoMeter
from teraio.executor.stores.kvikio_library import KvikioLibrary
from teraio.executor.stores.ssd import BackendRates
from teraio.executor.stores.striping import Stripes

MIB = 2**20
UNIT = 64 * 1024

UseKvikio = Callable[..., KvikioLibrary]


@pytest.fixture
def use_kvikio(monkeypatch: pytest.MonkeyPatch) -> UseKvikio:
    """Puts a kvikio in place, with the given attributes of its files."""

    def use(**options: object) -> KvikioLibrary:
        library = fake_library(**options)
        monkeypatch.setattr(gds, "load_kvikio", lambda *, bounce_buffer_bytes: library)
        return library

    return use


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three disks."""
    made = [tmp_path / name for name in ("one", "two", "three")]
    for folder in made:
        folder.mkdir()
    return made


def device_of(folders: list[Path], capacity_bytes: int = 8 * MIB) -> Ssd:
    return Ssd(
        name="ssd0",
        capacity_bytes=capacity_bytes,
        read_rate=1e9,
        write_rate=1e9,
        paths=tuple(map(str, folders)),
        preferred_io_bytes=UNIT,
    )


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_stripes_cover_every_byte_once(members: int) -> None:
    """Whatever transfers there are, no two bytes of the device share a place in a file."""
    stripes = Stripes(members, 8)
    places: dict[tuple[int, int], int] = {}
    for offset, nbytes in [(0, 20), (20, 1), (21, 30), (51, 8), (59, 69)]:
        pieces = stripes.pieces(offset, 0, nbytes)
        assert [p.begin for p in pieces] == [0, *(p.end for p in pieces[:-1])]
        assert pieces[-1].end == nbytes
        for piece in pieces:
            assert 0 < piece.end - piece.begin <= 8
            for index in range(piece.end - piece.begin):
                place = (piece.member, piece.member_offset + index)
                assert place not in places
                places[place] = offset + piece.begin + index
    assert len(places) == 128
    for member in range(members):
        own = [place for m, place in places if m == member]
        assert max(own) + 1 == stripes.member_bytes(128, member) == len(own)


@pytest.mark.parametrize("backend", ["file", "gds"])
def test_members_share_the_bytes(backend: str, folders: list[Path], use_kvikio: UseKvikio) -> None:
    """Every file gets its third, in both directions, and says so."""
    use_kvikio()
    store = open_ssd(device_of(folders), folders, 6 * MIB, backend=backend)
    source, destination = noise(6 * MIB), torch.zeros(6 * MIB, dtype=torch.uint8)
    store.write(source, 0, 6 * MIB)
    store.read(destination, 0, 6 * MIB).wait()
    store.close()
    assert torch.equal(source, destination)
    uses = store.file_uses
    assert [use.path for use in uses] == [str(folder) for folder in folders]
    for use in uses:
        assert use.device == "ssd0"
        assert use.backend == ("file" if backend == "file" else "gds-compat")
        assert use.read_bytes == use.write_bytes == 2 * MIB
        assert use.read_rate is not None
        assert use.write_rate is not None
        assert 0 < use.read_rate < 1e12


@pytest.mark.parametrize("backend", ["file", "gds"])
def test_members_are_served_at_the_same_time(
    backend: str, folders: list[Path], use_kvikio: UseKvikio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request ends before one to each of three disks is under way."""
    use_kvikio()
    real, under_way, together = os.pwritev, set[object](), threading.Event()

    def write(descriptor: int, *arguments: Any) -> int:
        under_way.add(descriptor)
        if len(under_way) == 3:
            together.set()
        if not together.wait(30):
            raise OSError(110, "the other disks are idle")
        return real(descriptor, *arguments)

    store = open_ssd(device_of(folders), folders, 24 * UNIT, backend=backend)
    monkeypatch.setattr(os, "pwritev", write)
    store.write(noise(24 * UNIT), 0, 24 * UNIT).wait()
    store.close()


@pytest.mark.parametrize("backend", ["file", "gds"])
def test_one_member_that_fails_is_named(
    backend: str, folders: list[Path], use_kvikio: UseKvikio
) -> None:
    """The transfer fails with the path of that disk; the slot is bad until it is rewritten."""
    use_kvikio()
    store = open_ssd(device_of(folders), folders, 6 * MIB, backend=backend)
    store.write(noise(6 * MIB), 0, 6 * MIB).wait()
    cut(folders[1])
    destination = torch.zeros(6 * MIB, dtype=torch.uint8)
    with pytest.raises(StoreError, match=f"ssd0 in {folders[1]}: was cut from {2 * MIB} to 0"):
        store.read(destination, 0, 6 * MIB).wait()
    # The first unit lies on the first disk alone.
    store.read(destination, 0, UNIT).wait()
    with pytest.raises(StoreError, match="two: was cut"):
        store.write(noise(6 * MIB), 0, 6 * MIB).wait()
    store.close()


@pytest.mark.parametrize("backend", ["file", "gds"])
def test_growing_a_stripe_set(backend: str, folders: list[Path], use_kvikio: UseKvikio) -> None:
    """Each file grows by its share; what was written stays; a full disk changes nothing."""
    use_kvikio()
    store = open_ssd(device_of(folders), folders, MIB, backend=backend)
    first = noise(MIB)
    store.write(first, 0, MIB)
    store.grow(2 * MIB)
    assert store.reserved_bytes == 3 * MIB
    second = noise(2 * MIB, seed=1)
    store.write(second, MIB, 2 * MIB)
    destination = torch.zeros(3 * MIB, dtype=torch.uint8)
    store.read(destination, 0, 3 * MIB).wait()
    assert torch.equal(destination, torch.cat([first, second]))
    with pytest.raises(CapacityError, match="exceed its capacity"):
        store.grow(8 * MIB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse_space)
        with pytest.raises(StoreError, match=r"cannot reserve .* No space left"):
            store.grow(MIB)
    assert store.reserved_bytes == 3 * MIB
    store.read(destination, 0, 3 * MIB).wait()
    assert torch.equal(destination, torch.cat([first, second]))
    store.close()


@pytest.mark.parametrize("backend", ["file", "gds"])
@pytest.mark.parametrize("is_striped", [False, True])
def test_a_full_disk_at_the_start(
    backend: str, is_striped: bool, folders: list[Path], use_kvikio: UseKvikio
) -> None:
    """Refused with the path, and nothing is left there."""
    use_kvikio()
    some = folders if is_striped else folders[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse_space)
        with pytest.raises(StoreError, match=f"ssd0 in {folders[0]}: cannot reserve .* No space"):
            open_ssd(device_of(some), some, 6 * MIB, backend=backend)
    with pytest.raises(StoreError, match=r"ssd0 in .*: needs .* more .* the disk has .* free"):
        open_ssd(device_of(some, 10**16), some, 10**15, backend=backend)
    with pytest.raises(InputError, match="nowhere: no such directory for ssd0"):
        open_ssd(device_of(some), folders[0] / "nowhere", MIB, backend=backend)
    assert all(list(folder.iterdir()) == [] for folder in folders)


@pytest.mark.parametrize("backend", ["file", "gds"])
def test_a_file_that_was_cut_stays_bad(backend: str, tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """Also once a write has made it as long as before: what lies between would read as zeros."""
    use_kvikio()
    store = open_ssd(device_of([tmp_path]), tmp_path, MIB, backend=backend)
    store.write(noise(MIB), 0, MIB).wait()
    cut(tmp_path)
    last = noise(4096)
    with pytest.raises(StoreError, match=f"was cut from {MIB} to 0 bytes by somebody else"):
        store.write(last, MIB - 4096, 4096).wait()
    with pytest.raises(StoreError, match="what it held is lost"):
        store.read(torch.empty(4096, dtype=torch.uint8), 0, 4096).wait()
    store.close()


def test_no_file_is_ever_seen(tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """kvikio opens a name, which is gone before the first byte is written."""
    use_kvikio()
    store = GdsStore("ssd0", tmp_path, MIB, device="cpu")
    assert list(tmp_path.iterdir()) == []
    store.write(noise(100), 0, 100).wait()
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_short_transfers_of_kvikio(tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """A count below what was asked for is an error that names path, offset, wanted and got."""
    use_kvikio(missing_bytes=1)
    store = GdsStore("ssd0", tmp_path, MIB, device="cpu")
    with pytest.raises(
        StoreError, match=f"ssd0 in {tmp_path}: write at offset 8192 wanted 100 bytes, got 99"
    ):
        store.write(noise(100), 8192, 100).wait()
    with pytest.raises(StoreError, match="read at offset 0 wanted 5 bytes, got 4"):
        store.read(noise(5), 0, 5).wait()
    store.close()


def test_errors_of_kvikio_come_after_all_requests(tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """The transfer keeps its memory until the last of its requests has ended."""
    ended: list[int] = []
    real = fake_library().module.CuFile._write

    def write(self: object, view: memoryview, size: int, offset: int) -> int:
        if offset == 0:
            raise RuntimeError("POSIX error on pwrite: Input/output error")
        time.sleep(0.05)
        ended.append(offset)
        return int(real(self, view, size, offset))

    use_kvikio(_write=write)
    store = GdsStore("ssd0", tmp_path, MIB, preferred_io_bytes=UNIT, device="cpu")
    transfer = store.write(noise(2 * UNIT), 0, 2 * UNIT)
    with pytest.raises(StoreError, match=r"wanted 65536 bytes, failed: .*Input/output error"):
        transfer.wait()
    assert ended == [UNIT]
    with pytest.raises(StoreError, match="Input/output error"):
        store.read(torch.empty(4096, dtype=torch.uint8), 0, 4096).wait()
    store.close()


def test_a_kvikio_that_gives_back_other_bytes(tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """Whoever asks for it is told before training begins."""

    def read(self: object, view: memoryview, size: int, offset: int) -> int:
        return size

    use_kvikio(_read=read)
    with pytest.raises(StoreError, match=r"other bytes than it was given.*--ssd-backend file"):
        open_ssd(device_of([tmp_path]), tmp_path, MIB, backend="gds")


@pytest.mark.parametrize("serves", [True, False])
def test_a_driver_that_can_may_not_for_every_file(serves: bool, tmp_path: Path) -> None:
    """Some file systems are refused: such a file says that it is bounced."""
    library = fake_library()
    opened: list[str] = []

    class File(library.module.CuFile):  # type: ignore[misc, name-defined]
        def __init__(self, path: str, flags: str) -> None:
            mode = library.module.defaults.get("compat_mode")
            if mode == "OFF" and not serves:
                raise RuntimeError("cuFile error: not a supported file system")
            opened.append(mode)
            super().__init__(path, flags)

    library.module.CuFile = File
    file = gds.GdsFile(
        "ssd0", tmp_path, KvikioLibrary(library.module, is_gds=True), alignment_bytes=4096
    )
    assert file.is_gds == serves
    assert opened == (["OFF", "AUTO"] if serves else ["ON"])
    file.close()


def test_requests_with_a_stream_of_their_own(tmp_path: Path) -> None:
    """GPUDirect requests go through cuFile's streams: the default stream is not waited for."""
    calls: list[tuple[object, ...]] = []

    def submit(self: object, *arguments: object) -> SimpleNamespace:
        calls.append(arguments)
        return SimpleNamespace(check_bytes_done=lambda: 4096 if len(calls) < 3 else 4095)

    library = fake_library(raw_read_async=submit, raw_write_async=submit)
    file = gds.GdsFile("ssd0", tmp_path, library, alignment_bytes=4096)
    file.reserve(MIB)
    memory, stream = object(), SimpleNamespace(cuda_stream=77)
    for is_write in (True, False):
        file.start(memory, 4096, 8192, is_write=is_write, stream=stream).wait()  # type: ignore[arg-type]
    assert calls == [(memory, 77, 4096, 8192, 0)] * 2
    with pytest.raises(StoreError, match="read at offset 0 wanted 4096 bytes, got 4095"):
        file.start(memory, 4096, 0, is_write=False, stream=stream).wait()  # type: ignore[arg-type]
    use = file.meter.use("ssd0", str(tmp_path), "gds")
    assert (use.write_bytes, use.read_bytes) == (4096, 4096 + 4095)
    file.close()


def test_kvikio_is_asked_for_and_missing(tmp_path: Path) -> None:
    """A clear error with a remedy; nobody who does not ask for it needs it."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from teraio.contracts.hardware import Hardware\n"
        "from teraio.executor.stores import open_ssd\n"
        "ssd = Hardware.preset('cpu').ssd[0]\n"
        "open_ssd(ssd, sys.argv[1], 4096).close()\n"
        "assert 'kvikio' not in sys.modules\n"
        "open_ssd(ssd, sys.argv[1], 4096, backend='gds')\n"
    )
    for kvikio, message in [
        (None, "kvikio is not installed; pip install"),
        ("import os; os.abort()", "a process that loads kvikio ends with -6"),
        ("raise RuntimeError('no driver')", "ends with 1: RuntimeError: no driver"),
    ]:
        path = [str(tmp_path / "site"), *sys.path] if kvikio else sys.path
        if kvikio:
            (tmp_path / "site").mkdir(exist_ok=True)
            (tmp_path / "site" / "kvikio.py").write_text(kvikio)
        elif _has_kvikio():
            continue
        result = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert "StoreError" in result.stderr
        assert message in result.stderr, result.stderr
        assert "--ssd-backend file" in result.stderr


@pytest.mark.parametrize(("fast", "expected"), [(True, GdsStore), (False, FileStore)])
def test_the_faster_backend_is_taken(
    fast: bool,
    expected: type[Store],
    tmp_path: Path,
    use_kvikio: UseKvikio,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By measurement, where there is a GPU; here a rate stands for it."""
    use_kvikio()
    monkeypatch.setattr(ssd, "_rate", lambda store, device: float(isinstance(store, GdsStore)))
    if not fast:
        monkeypatch.setattr(ssd, "_rate", lambda store, device: float(isinstance(store, FileStore)))
    rates = measure_backends(device_of([tmp_path]), tmp_path, device="cpu")
    assert rates.fastest == ("gds" if fast else "file")
    store = open_ssd(device_of([tmp_path]), tmp_path, MIB, backend=rates.fastest)
    assert isinstance(store, expected)
    store.close()


def test_both_backends_are_measured_in_the_directory(tmp_path: Path, use_kvikio: UseKvikio) -> None:
    """Real bytes, in less than a few seconds; a kvikio that fails is no reason to stop."""
    use_kvikio()
    rates = measure_backends(device_of([tmp_path]), tmp_path, device="cpu")
    assert rates.gds is not None
    assert rates.file > 1e6
    assert rates.gds > 1e6
    use_kvikio(missing_bytes=1)
    rates = measure_backends(device_of([tmp_path]), tmp_path, device="cpu")
    assert rates.gds is None
    assert "wanted" in rates.gds_error
    assert rates.fastest == "file"


def test_what_bounces_all_the_same_must_be_clearly_faster() -> None:
    """kvikio's own bounce buffers cost kernels time; GPUDirect does not."""
    assert BackendRates(1e9, 1.05e9).fastest == "file"
    assert BackendRates(1e9, 1.2e9).fastest == "gds"
    assert BackendRates(1e9, 1.05e9, is_direct=True).fastest == "gds"
    assert BackendRates(1e9, None, "missing").fastest == "file"


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    """With the names that there are."""
    with pytest.raises(InputError, match=r"ssd_backend: must be one of .*'auto', 'gds', 'file'"):
        open_ssd(device_of([tmp_path]), tmp_path, MIB, backend="nvme")
    with pytest.raises(InputError, match="at least one folder"):
        open_ssd(device_of([tmp_path]), [], MIB, backend="file")


def test_busy_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at the same time take as long as one, and idle time counts for none."""
    clock = [10.0]
    monkeypatch.setattr(io_meter, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    meter = IoMeter()
    meter.begin()
    clock[0] += 1
    meter.begin()
    clock[0] += 2
    meter.end(5)
    clock[0] += 4
    meter.end(7)
    clock[0] += 8
    with meter.counting(8):
        clock[0] += 16
    with pytest.raises(ValueError, match="mine"), meter.counting(100):
        raise ValueError("mine")
    assert meter.nbytes == 20
    assert meter.seconds == 1 + 2 + 4 + 16


def refuse_space(*arguments: int) -> None:
    """A disk that is full."""
    raise OSError(28, "No space left on device")


def cut(folder: Path) -> None:
    """Empty the nameless files that this process has in a folder, behind its back."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{descriptor}"
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
            os.truncate(link, 0)
            found += 1
    assert found > 0


def _has_kvikio() -> bool:
    import importlib.util

    return importlib.util.find_spec("kvikio") is not None
