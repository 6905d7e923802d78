"""Stores: the tiers that tensors are offloaded to, host memory and files."""

from teraio.executor.stores.base import Buffer, Store, Transfer
from teraio.executor.stores.file import FileStore
from teraio.executor.stores.gds import GdsStore
from teraio.executor.stores.host import HostStore
from teraio.executor.stores.io_meter import FileUse
from teraio.executor.stores.slots import SlotAllocator
from teraio.executor.stores.ssd import measure_backends, open_ssd
from teraio.executor.stores.streams import CudaClock
from teraio.executor.stores.verified import VerifiedStore

__all__ = [
    "Buffer",
    "CudaClock",
    "FileStore",
    "FileUse",
    "GdsStore",
    "HostStore",
    "SlotAllocator",
    "Store",
    "Transfer",
    "VerifiedStore",
    "measure_backends",
    "open_ssd",
]
