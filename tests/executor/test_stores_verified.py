"""Checksums of what comes back from a store."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from teraio.errors import StoreError
from teraio.executor.stores import FileStore, HostStore, Store, VerifiedStore
from teraio.executor.stores.checksums import crc, place_sums

KIB = 1024
MIB = 2**20
PAGE = 4096


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.fixture(params=["host", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VerifiedStore]:
    """A checked store of one MiB."""
    inner: Store
    if request.param == "host":
        inner = HostStore(MIB)
    else:
        inner = FileStore("ssd0", tmp_path, MIB, preferred_io_bytes=64 * KIB)
    checked = VerifiedStore(inner, lambda device, offset, nbytes: f"weights of {device}")
    yield checked
    checked.close()


def swap(memory: torch.Tensor, first: int, second: int, nbytes: int) -> None:
    kept = memory[first : first + nbytes].clone()
    memory[first : first + nbytes] = memory[second : second + nbytes]
    memory[second : second + nbytes] = kept


DAMAGES: dict[str, Callable[[torch.Tensor], object]] = {
    "first bit": lambda m: m[0].bitwise_xor_(1),
    "last bit": lambda m: m[-1].bitwise_xor_(128),
    "a sign bit": lambda m: m[7].bitwise_xor_(128),
    "a page of zeros": lambda m: m[8 * PAGE : 9 * PAGE].zero_(),
    "pages in one row": lambda m: swap(m, 0, PAGE, PAGE),
    "pages in one column": lambda m: swap(m, 0, 32 * KIB, PAGE),
    "pages elsewhere": lambda m: swap(m, 2 * PAGE, 100 * KIB, PAGE),
    "words in one row": lambda m: swap(m, 8, 64, 8),
    "bytes of the rest": lambda m: swap(m, len(m) - 2, len(m) - 5, 1),
    "shifted by a byte": lambda m: m.copy_(m.roll(1)),
    "another's": lambda m: m.copy_(noise(len(m), seed=9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("checksum", [crc, place_sums])
def test_damage_is_noticed(checksum: Callable[[torch.Tensor], object], damage: str) -> None:
    """Bits that flip, pages and words that change places, a part that was not written."""
    memory = noise(300 * KIB + 13)
    before = checksum(memory)
    assert same(before, checksum(memory.clone()))
    DAMAGES[damage](memory)
    assert not same(before, checksum(memory))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 513, 32 * KIB, 32 * KIB + 1, 70_000])
def test_sums_of_any_size_and_place(nbytes: int) -> None:
    """The same bytes have the same sums, wherever they lie; zeros have others."""
    memory = noise(nbytes)
    shifted = torch.cat([noise(3, seed=2), memory])[3:]
    assert same(place_sums(memory), place_sums(shifted))
    if nbytes > 1:
        assert not same(place_sums(memory), place_sums(torch.zeros_like(memory)))


def test_what_was_written_is_what_is_read(store: VerifiedStore) -> None:
    """Reads of whole writes are counted; the newest content of a place counts."""
    first, second = noise(100 * KIB), noise(60 * KIB, seed=1)
    destination = torch.zeros_like(first)
    store.write(first, 0, len(first))
    store.read(destination, 0, len(first)).wait()
    store.write(second, 0, len(second))
    store.read(destination, 0, len(second)).make_stream_wait()
    assert torch.equal(destination[: len(second)], second)
    assert store.num_verified == 2


def test_other_bytes_are_an_error(store: VerifiedStore) -> None:
    """Named: device, offset, size, what lies there; and it stays an error."""
    source, destination = noise(5000), torch.zeros(5000, dtype=torch.uint8)
    store.write(source, 8192, 5000).wait()
    store.inner.write(noise(5000, seed=1), 8192, 5000).wait()
    read = store.read(destination, 8192, 5000)
    for _ in range(2):
        with pytest.raises(
            StoreError,
            match=rf"{store.name}: the 5000 bytes read at offset 8192 are not those that were "
            rf"written there \(weights of {store.name}\): checksum [0-9a-f]+ instead of",
        ):
            read.wait()
    store.write(source, 8192, 5000)
    store.read(destination, 8192, 5000).wait()
    assert torch.equal(source, destination)


def test_the_source_may_change_after_the_write(store: VerifiedStore) -> None:
    """It is the content at the write that counts; once written, memory is free."""
    source, destination = noise(5000), torch.zeros(5000, dtype=torch.uint8)
    expected = source.clone()
    store.write(source, 0, 5000).wait()
    source.zero_()
    store.read(destination, 0, 5000).wait()
    assert torch.equal(destination, expected)


def test_parts_are_read_unchecked(store: VerifiedStore) -> None:
    """Nothing is known of half of what was written, nor of what nobody has written."""
    store.write(noise(5000), 0, 5000).wait()
    destination = torch.zeros(5000, dtype=torch.uint8)
    store.read(destination, 0, 100).wait()
    store.read(destination, 16 * KIB, 5000).wait()
    assert store.num_verified == 0


def test_a_write_over_the_end_of_another(store: VerifiedStore) -> None:
    """What is left of the other is no longer what was written."""
    store.write(noise(5000), 0, 5000).wait()
    later = noise(5000, seed=1)
    store.write(later, 4096, 5000).wait()
    destination = torch.zeros(5000, dtype=torch.uint8)
    store.read(destination, 0, 5000).wait()
    assert store.num_verified == 0
    store.read(destination, 4096, 5000).wait()
    assert store.num_verified == 1
    assert torch.equal(destination, later)


def test_a_read_that_nobody_waits_for_keeps_nothing(store: VerifiedStore) -> None:
    """Its memory goes when its owner lets it go."""
    store.write(noise(5000), 0, 5000).wait()
    destination = torch.zeros(5000, dtype=torch.uint8)
    watcher = weakref.ref(destination.untyped_storage())
    read = store.read(destination.untyped_storage(), 0, 5000)
    del destination
    while not read.done:
        pass
    gc.collect()
    assert watcher() is None
    read.wait()
    assert store.num_verified == 0


def same(one: object, other: object) -> bool:
    """Whether two checksums agree."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other
