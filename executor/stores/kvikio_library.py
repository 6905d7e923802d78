"""kvikio, loaded only where it has been seen to work: cuFile may abort the process that loads it.

On machines without a GPU, without /run/udev, or without the driver modules that it looks for, it
has ended whole processes. So another process tries it first, once.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

from teraio.errors import StoreError

_REMEDY = "or say --ssd-backend file (ssd_backend='file')"
_TRIAL_SECONDS = 120
_THREADS = 32
"""At least so many: each store keeps only a few requests under way, and none shall wait for a
thread. They sleep otherwise."""

_ANSWER = "teraio: "
"""Begins the line that counts: libraries may say something too."""

_TRIAL = f"""
import json, kvikio, kvikio.cufile_driver, kvikio.defaults
gds = False
if not kvikio.defaults.is_compat_mode_preferred():
    try:
        gds = bool(kvikio.cufile_driver.get("is_gds_available"))
    except Exception:
        gds = False
print({_ANSWER!r} + json.dumps(dict(gds=gds)))
"""


@dataclass(frozen=True)
class KvikioLibrary:
    """The module, and whether its driver can move bytes between disks and GPUs directly."""

    module: Any
    is_gds: bool

    def open(self, path: str) -> tuple[Any, bool]:
        """A ``CuFile`` for reading and writing, and whether GPUDirect Storage serves it.

        A driver that can do it may still not do it for every file system.
        """
        is_gds = self.is_gds and self._opens_direct(path)
        modes = self.module.CompatMode
        with self.module.defaults.set("compat_mode", modes.AUTO if is_gds else modes.ON):
            return self.module.CuFile(path, "r+"), is_gds

    def _opens_direct(self, path: str) -> bool:
        with self.module.defaults.set("compat_mode", self.module.CompatMode.OFF):
            try:
                self.module.CuFile(path, "r+").close()
            except (RuntimeError, OSError, ValueError):
                return False
        return True


def load_kvikio(*, bounce_buffer_bytes: int) -> KvikioLibrary:
    """kvikio, ready for stores that keep ``bounce_buffer_bytes`` under way in each request.

    Raises StoreError that says what is wrong and what to do.
    """
    found = _try_elsewhere()
    if isinstance(found, str):
        raise StoreError(found)
    try:
        import kvikio
        import kvikio.defaults
    except (ImportError, OSError, RuntimeError) as error:
        raise StoreError(f"ssd_backend: kvikio does not load here: {error}; {_REMEDY}") from None
    library = KvikioLibrary(kvikio, bool(found["gds"]))
    _configure(library, bounce_buffer_bytes)
    return library


@cache
def _try_elsewhere() -> dict[str, Any] | str:
    """What a process of its own has found out, or why there is nothing to be had."""
    if importlib.util.find_spec("kvikio") is None:
        return f"ssd_backend: kvikio is not installed; pip install 'teraio[gds-cu13]', {_REMEDY}"
    try:
        # cuFile writes its log where it is started.
        with tempfile.TemporaryDirectory(prefix="teraio-kvikio-") as folder:
            trial = subprocess.run(
                [sys.executable, "-c", _TRIAL],
                capture_output=True,
                text=True,
                timeout=_TRIAL_SECONDS,
                cwd=folder,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ssd_backend: kvikio could not be tried: {error}; {_REMEDY}"
    for line in reversed(trial.stdout.splitlines()):
        if trial.returncode == 0 and line.startswith(_ANSWER):
            found: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
            return found
    said = (trial.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        f"ssd_backend: a process that loads kvikio ends with {trial.returncode}: {said}; {_REMEDY}"
    )


def _configure(library: KvikioLibrary, bounce_buffer_bytes: int) -> None:
    """Settings of the process: they change how fast kvikio is, for others that use it too."""
    defaults = library.module.defaults
    threads = max(int(defaults.get("num_threads")), _THREADS)
    settings: dict[str, Any] = {
        "num_threads": threads,
        "bounce_buffer_size": bounce_buffer_bytes,
        # Through the page cache, training would push everything else out of memory.
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    for name, value in settings.items():
        try:
            is_set = defaults.get(name) == value
        except KeyError:
            continue  # An older version, without this setting.
        if not is_set:
            defaults.set(name, value)
