"""A model of PyTorch's CUDA caching allocator with expandable segments: what fragmentation costs.

Best fit by size, then address, where the hole at the end counts as endless; a block is split
exactly, and merged with free neighbours when it is freed. Where no hole is large enough, pages are
mapped at the lowest address at which they make one, mostly at the segment's end. Sizes, pages and
pools are those of ``CUDACachingAllocator.cpp`` (torch 2.11 to 2.13). Addresses begin at 0 in each
pool.
"""

from __future__ import annotations

from teraio.simulator.holes import Holes

MIB = 2**20
_SMALL_REQUEST_BYTES = MIB
LARGE_PAGE_BYTES = 20 * MIB
_PAGE_BYTES = {True: 2 * MIB, False: LARGE_PAGE_BYTES}
"""Of the pool for small requests, and of the other: what is mapped at once."""

_ENDLESS_BYTES = 2**62
"""Of address space behind the last page."""


class CachingAllocator:
    """``reserved_bytes`` are mapped, ``allocated_bytes`` of them in use, in ``block_bytes``."""

    block_bytes = 512

    def __init__(self) -> None:
        self._pools = {is_small: _Segment(page) for is_small, page in _PAGE_BYTES.items()}
        self.allocated_bytes = 0
        self.allocated_peak_bytes = 0
        self.reserved_peak_bytes = 0

    @property
    def large(self) -> _Segment:
        """The pool for requests of more than 1 MiB."""
        return self._pools[False]

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch holds from the GPU now."""
        return sum(pool.mapped_bytes for pool in self._pools.values())

    def allocate(self, nbytes: int) -> Block:
        """A block for a request of ``nbytes``."""
        size = max(-(-nbytes // self.block_bytes), 1) * self.block_bytes
        is_small = nbytes <= _SMALL_REQUEST_BYTES
        block = Block(is_small, self._pools[is_small].take(size), size)
        self.allocated_bytes += size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; its pages stay mapped."""
        self.allocated_bytes -= block.nbytes
        self._pools[block.is_small].holes.put_back(block.address, block.nbytes)

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
        self.holes = Holes()
        self._page_bytes = page_bytes

    def take(self, nbytes: int) -> int:
        """Address of a new block."""
        begin = self.holes.take(nbytes)
        if begin is None:
            pages_bytes = self.missing_bytes(nbytes)
            self.holes.put_back(self.mapped_bytes, pages_bytes)
            self.mapped_bytes += pages_bytes
            self.holes.growth = {self.mapped_bytes: _ENDLESS_BYTES}
            begin = self.holes.take(nbytes)
        assert begin is not None
        return begin

    def missing_bytes(self, nbytes: int) -> int:
        """Whole pages to be mapped behind the last one for a block; a hole that ends there counts.

        0 if a hole is large enough.
        """
        if self.holes.largest_bytes >= nbytes:
            return 0
        missing_bytes = nbytes - self.holes.ending_at(self.mapped_bytes)
        return -(-missing_bytes // self._page_bytes) * self._page_bytes
