"""An unnamed file of fixed place on a disk, read and written in whole blocks or not at all.

Unnamed: nothing is left behind, however the process ends. Short counts are errors: ``pwrite`` to a
full disk returns fewer bytes and raises nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import warnings
from pathlib import Path

from teraio.errors import InputError, OffloadWarning, StoreError
from teraio.executor.stores.io_meter import FileMeter
from teraio.executor.stores.reserved_space import ReservedSpace

_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 65536)


class BlockFile:
    """``reserved_bytes`` of a disk in ``directory``, through O_DIRECT where that works.

    ``direct``: None tries O_DIRECT and warns once if it must do without, True insists, False never
    asks. ``is_direct`` says what came of it, ``alignment_bytes`` what offsets, sizes and buffer
    addresses must be multiples of. Raises InputError (directory), StoreError (space, I/O).
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        reserved_bytes: int,
        *,
        alignment_bytes: int = 4096,
        direct: bool | None = None,
    ) -> None:
        self.label = f"{name} in {directory}"
        self.directory = directory
        self.alignment_bytes = alignment_bytes
        self.meter = FileMeter()
        check_directory(name, directory)
        descriptor, self.is_direct = self._open(directory, direct)
        self._space = ReservedSpace(descriptor, self.label, alignment_bytes)
        try:
            self.reserve(reserved_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def reserved_bytes(self) -> int:
        """What it occupies of the disk."""
        return self._space.reserved_bytes

    def reserve(self, reserved_bytes: int) -> None:
        """Let the file occupy at least so many bytes. Raises StoreError: needs X, has Y."""
        self._space.reserve(reserved_bytes)

    def write(self, source: memoryview, offset_bytes: int) -> None:
        """Write all of ``source``. Raises StoreError naming path, offset, wanted and got bytes."""
        self._transfer(source, offset_bytes, is_write=True)

    def read(self, destination: memoryview, offset_bytes: int) -> None:
        """Fill all of ``destination``. Raises StoreError as :meth:`write` does."""
        self._transfer(destination, offset_bytes, is_write=False)

    def close(self) -> None:
        """Give the disk space back."""
        self._space.close()

    def _transfer(self, view: memoryview, offset_bytes: int, *, is_write: bool) -> None:
        self._space.check()
        with self.meter.of(is_write=is_write).counting(len(view)):
            got, reason = self._move(view, offset_bytes, is_write=is_write)
            if got < len(view):
                verb = "write" if is_write else "read"
                raise StoreError(
                    f"{self.label}: {verb} at offset {offset_bytes} wanted {len(view)} bytes, "
                    f"got {got}: {reason}"
                )

    def _move(self, view: memoryview, offset_bytes: int, *, is_write: bool) -> tuple[int, str]:
        """Bytes moved, and why not all of them were."""
        call = os.pwritev if is_write else os.preadv
        wanted, got = len(view), 0
        while got < wanted:
            try:
                count = call(self._space.descriptor, [view[got:]], offset_bytes + got)
            except OSError as error:
                return got, error.strerror or str(error)
            got += count
            if count == 0 or (got < wanted and got % self.alignment_bytes):
                return got, "the disk is full" if is_write else "the file ends there"
        return got, ""

    def _open(self, directory: Path, direct: bool | None) -> tuple[int, bool]:
        reason = ""
        if direct is not False:
            try:
                descriptor = _open_unnamed(directory, os.O_DIRECT)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                needed = probe_alignment(descriptor)
                if needed is not None and self.alignment_bytes % needed == 0:
                    return descriptor, True
                os.close(descriptor)
                reason = f"it needs blocks of {needed} bytes, this device {self.alignment_bytes}"
        if direct:
            raise StoreError(f"{self.label}: O_DIRECT does not work here: {reason}")
        if reason:
            message = f"{self.label}: goes through the page cache, O_DIRECT failed: {reason}"
            warnings.warn(message, OffloadWarning, stacklevel=4)
        try:
            return _open_unnamed(directory, 0), False
        except OSError as error:
            raise StoreError(f"{self.label}: cannot create a file: {error.strerror}") from None


def check_directory(name: str, directory: Path) -> None:
    """Raise InputError if ``directory``, where device ``name`` is to have a file, is not there."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory for {name}; create it first")


def probe_alignment(descriptor: int) -> int | None:
    """The least multiple that this file takes for size, offset and address; None if none works.

    The rules differ between file systems and kernels, so the file itself is asked. Leaves it empty.
    """
    with mmap.mmap(-1, 4 * _ALIGNMENTS[-1]) as buffer, memoryview(buffer) as view:
        for alignment_bytes in _ALIGNMENTS:
            # An odd multiple, so that the address is not aligned to anything larger.
            piece = view[alignment_bytes : 2 * alignment_bytes]
            try:
                written = os.pwritev(descriptor, [piece], alignment_bytes)
                read = os.preadv(descriptor, [piece], alignment_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return None
                continue
            finally:
                piece.release()
            if written == read == alignment_bytes:
                os.ftruncate(descriptor, 0)
                return alignment_bytes
    return None


def _open_unnamed(directory: Path, extra_flags: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # A file system without unnamed files: the name lives until the next line.
    descriptor, path = tempfile.mkstemp(prefix=".teraio-", dir=directory)
    try:
        return os.open(path, flags)
    finally:
        os.unlink(path)
        os.close(descriptor)
