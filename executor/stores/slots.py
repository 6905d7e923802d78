"""Where demand evictions go: a first-fit allocator over the overflow area of a store."""

from __future__ import annotations

from bisect import bisect_left, insort

from teraio.errors import InputError
from teraio.executor.stores.base import round_up


class SlotAllocator:
    """Hands out aligned slots of the bytes ``begin_bytes`` .. ``end_bytes`` of a store.

    Free ranges are kept in order of address, never empty, never touching one another.
    """

    def __init__(self, begin_bytes: int, end_bytes: int, alignment_bytes: int) -> None:
        begin_bytes = round_up(begin_bytes, alignment_bytes)
        end_bytes -= end_bytes % alignment_bytes
        self._alignment_bytes = alignment_bytes
        self._end_bytes = max(begin_bytes, end_bytes)
        self._used: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []
        if end_bytes > begin_bytes:
            self._free.append((begin_bytes, end_bytes))

    @property
    def end_bytes(self) -> int:
        """Where the area ends at present."""
        return self._end_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot, in as many pieces as there may be."""
        return sum(end - begin for begin, end in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest slot that :meth:`allocate` would grant."""
        return max((end - begin for begin, end in self._free), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new slot of at least ``nbytes``, at the lowest address; None if no room."""
        size = round_up(max(nbytes, 1), self._alignment_bytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                self._used[begin] = size
                return begin
        return None

    def free(self, offset_bytes: int) -> None:
        """Give a slot back. Raises InputError if none begins there."""
        size = self._used.pop(offset_bytes, None)
        if size is None:
            raise InputError(f"overflow area: no slot begins at {offset_bytes}")
        self._insert(offset_bytes, offset_bytes + size)

    def extend(self, end_bytes: int) -> None:
        """Let the area end at ``end_bytes``, which is further than before."""
        end_bytes -= end_bytes % self._alignment_bytes
        if end_bytes > self._end_bytes:
            begin_bytes, self._end_bytes = self._end_bytes, end_bytes
            self._insert(begin_bytes, end_bytes)

    def _insert(self, begin: int, end: int) -> None:
        index = bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
        insort(self._free, (begin, end))
