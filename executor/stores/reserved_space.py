"""Disk space behind a file descriptor: taken up front, grown in place, and watched."""

from __future__ import annotations

import os

from teraio.errors import StoreError
from teraio.executor.stores.base import round_up
from teraio.units import format_bytes


class ReservedSpace:
    """The first ``reserved_bytes`` of a file; owns its ``descriptor``. ``label`` begins errors."""

    def __init__(self, descriptor: int, label: str, alignment_bytes: int) -> None:
        self.descriptor = descriptor
        self.label = label
        self.reserved_bytes = 0
        self._alignment_bytes = alignment_bytes
        self._damage = ""

    def reserve(self, reserved_bytes: int) -> None:
        """Let the file occupy at least so many bytes. Raises StoreError: needs X, has Y."""
        reserved_bytes = round_up(reserved_bytes, self._alignment_bytes)
        missing_bytes = reserved_bytes - self.reserved_bytes
        if missing_bytes <= 0:
            return
        system = os.fstatvfs(self.descriptor)
        free_bytes = system.f_bavail * system.f_frsize
        if missing_bytes > free_bytes:
            raise StoreError(
                f"{self.label}: needs {format_bytes(missing_bytes)} more ({missing_bytes} bytes), "
                f"the disk has {format_bytes(free_bytes)} free"
            )
        try:
            os.posix_fallocate(self.descriptor, self.reserved_bytes, missing_bytes)
        except OSError as error:
            raise StoreError(
                f"{self.label}: cannot reserve {missing_bytes} bytes: {error.strerror}"
            ) from None
        self.reserved_bytes = reserved_bytes

    def check(self) -> None:
        """Raise StoreError if the file has lost bytes, now or at any check before.

        A file that was cut and then written beyond the cut reads zeros where data was, and says
        nothing. Nobody but this class changes its size, so a smaller one means just that.
        """
        if not self._damage:
            # Read before the size: another thread may let the file grow in between.
            reserved_bytes = self.reserved_bytes
            size = os.fstat(self.descriptor).st_size
            if size >= reserved_bytes:
                return
            self._damage = (
                f"{self.label}: was cut from {reserved_bytes} to {size} bytes by somebody "
                "else; what it held is lost"
            )
        raise StoreError(self._damage)

    def close(self) -> None:
        """Give the disk space back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
