"""What the GDS store uses of kvikio, on CPU memory: real files, real errors, real threads.

It behaves as kvikio's compatibility mode does: opens a path, serves requests in a pool of threads,
writes until all is written, and raises RuntimeError with the system's message.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from teraio.executor.stores.kvikio_library import KvikioLibrary


class FakeFuture:
    """Has ``get`` instead of ``result``."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()


class FakeCuFile:
    """A file opened by its path, as kvikio does; everything after that goes through the handle."""

    pool = ThreadPoolExecutor(8, thread_name_prefix="kvikio")
    missing_bytes = 0
    """How much less than asked for a request moves."""

    def __init__(self, path: str, flags: str = "r") -> None:
        assert flags == "r+"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def pwrite(self, memory: Any, size: int, file_offset: int, task_size: int) -> FakeFuture:
        return FakeFuture(self.pool.submit(self._write, memoryview(memory), size, file_offset))

    def pread(self, memory: Any, size: int, file_offset: int, task_size: int) -> FakeFuture:
        return FakeFuture(self.pool.submit(self._read, memoryview(memory), size, file_offset))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, view: memoryview, size: int, offset: int) -> int:
        assert len(view) == size
        size -= self.missing_bytes
        done = 0
        while done < size:
            try:
                done += os.pwritev(self._descriptor, [view[done:size]], offset + done)
            except OSError as error:
                raise RuntimeError(f"POSIX error on pwrite: {error.strerror}") from None
        return done

    def _read(self, view: memoryview, size: int, offset: int) -> int:
        assert len(view) == size
        size -= self.missing_bytes
        done = 0
        while done < size:
            count = os.preadv(self._descriptor, [view[done:size]], offset + done)
            if count == 0:
                raise RuntimeError("POSIX error on pread: EOF")
            done += count
        return done


class FakeDefaults:
    """Settings that are kept, of which only the mode has an effect, on files with GPUDirect."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"num_threads": 1, "compat_mode": "AUTO"}

    def get(self, name: str) -> Any:
        return self.values[name]

    def set(self, name: str, value: Any) -> AbstractContextManager[None]:
        self.values[name] = value
        return nullcontext()


def fake_library(**options: Any) -> KvikioLibrary:
    """The library without GPUDirect; ``options`` are attributes of its files' class."""
    files = type("CuFile", (FakeCuFile,), options)
    modes = SimpleNamespace(AUTO="AUTO", ON="ON", OFF="OFF")
    module = SimpleNamespace(CuFile=files, CompatMode=modes, defaults=FakeDefaults())
    return KvikioLibrary(module, is_gds=False)


def installed(path: Path) -> str:
    """A folder for PYTHONPATH in which every Python finds this library as ``kvikio``."""
    package = path / "kvikio"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "defaults.py").write_text(_DEFAULTS)
    (package / "cufile_driver.py").write_text("")
    return str(path)


_PACKAGE = f"""
import sys
from types import SimpleNamespace
sys.path.append({str(Path(__file__).parent)!r})
from fake_kvikio import FakeCuFile as CuFile
CompatMode = SimpleNamespace(AUTO="AUTO", ON="ON", OFF="OFF")
"""

_DEFAULTS = """
from fake_kvikio import FakeDefaults
_all = FakeDefaults()
get, set = _all.get, _all.set
def is_compat_mode_preferred():
    return True
"""
