"""Stores: the tiers that tensors are offloaded to, host memory and files."""

from teraio.executor.stores.base import Buffer, Store, Transfer
from teraio.executor.stores.file import FileStore
from teraio.executor.stores.host import HostStore
from teraio.executor.stores.slots import SlotAllocator
from teraio.executor.stores.streams import CudaClock

__all__ = [
    "Buffer",
    "CudaClock",
    "FileStore",
    "HostStore",
    "SlotAllocator",
    "Store",
    "Transfer",
]
