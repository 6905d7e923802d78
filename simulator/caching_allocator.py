"""A model of PyTorch's CUDA caching allocator with expandable segments: what fragmentation costs.

Best fit by size, then address; a block is split exactly, and merged with free neighbours when it
is freed. Where no hole is large enough, pages are mapped at the lowest address at which they make
one, mostly at the segment's end. Sizes, pages and pools are those of ``CUDACachingAllocator.cpp``
(torch 2.9 to 2.13). Addresses begin at 0 in each pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
_BLOCK_BYTES = 512
_SMALL_REQUEST_BYTES = MIB
_PAGE_BYTES = {True: 2 * MIB, False: 20 * MIB}
"""Of the pool for small requests, and of the other: what is mapped at once."""


class CachingAllocator:
    """``reserved_bytes`` are mapped, ``allocated_bytes`` of them in use, in blocks of 512."""

    def __init__(self) -> None:
        self._pools = {is_small: _Segment(page) for is_small, page in _PAGE_BYTES.items()}
        self.allocated_bytes = 0
        self.allocated_peak_bytes = 0
        self.reserved_peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch holds from the GPU now."""
        return sum(pool.mapped_bytes for pool in self._pools.values())

    def allocate(self, nbytes: int) -> Block:
        """A block for a request of ``nbytes``."""
        size = max(-(-nbytes // _BLOCK_BYTES), 1) * _BLOCK_BYTES
        is_small = nbytes <= _SMALL_REQUEST_BYTES
        block = Block(is_small, self._pools[is_small].take(size), size)
        self.allocated_bytes += size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; its pages stay mapped."""
        self.allocated_bytes -= block.nbytes
        self._pools[block.is_small].put_back(block.address, block.nbytes)

    def reset_peaks(self) -> None:
        """Peaks count from here on."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes


class Block:
    """Bytes in use: their pool, and where in it they lie."""

    __slots__ = ("address", "is_small", "nbytes")

    def __init__(self, is_small: bool, address: int, nbytes: int) -> None:
        self.is_small = is_small
        self.address = address
        self.nbytes = nbytes


class _Segment:
    """One pool: an address space whose pages are mapped from its beginning, without gaps."""

    def __init__(self, page_bytes: int) -> None:
        self.mapped_bytes = 0
        self._page_bytes = page_bytes
        self._holes: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._begin_of_end: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        """Address of a new block."""
        index = bisect_left(self._holes, (nbytes, -1))
        if index == len(self._holes):
            self._map_for(nbytes)
            index = bisect_left(self._holes, (nbytes, -1))
        size, begin = self._holes[index]
        self._remove(size, begin)
        if size > nbytes:
            self._insert(size - nbytes, begin + nbytes)
        return begin

    def put_back(self, begin: int, nbytes: int) -> None:
        """A block becomes a hole, one with the holes beside it."""
        end = begin + nbytes
        before = self._begin_of_end.get(begin)
        if before is not None:
            self._remove(begin - before, before)
            begin = before
        after_bytes = self._size_at.get(end)
        if after_bytes is not None:
            self._remove(after_bytes, end)
            end += after_bytes
        self._insert(end - begin, begin)

    def _map_for(self, nbytes: int) -> None:
        """Map pages behind the last one; a hole that ends there counts."""
        end = self.mapped_bytes
        missing_bytes = nbytes - (end - self._begin_of_end.get(end, end))
        pages = -(-missing_bytes // self._page_bytes)
        self.mapped_bytes += pages * self._page_bytes
        self.put_back(end, pages * self._page_bytes)

    def _insert(self, nbytes: int, begin: int) -> None:
        insort(self._holes, (nbytes, begin))
        self._size_at[begin] = nbytes
        self._begin_of_end[begin + nbytes] = begin

    def _remove(self, nbytes: int, begin: int) -> None:
        del self._holes[bisect_left(self._holes, (nbytes, begin))]
        del self._size_at[begin]
        del self._begin_of_end[begin + nbytes]
