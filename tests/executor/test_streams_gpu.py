"""Copies between pinned host memory and a GPU: streams that take turns, and whom they let in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from teraio.executor.stores import HostStore, Transfer
from teraio.executor.stores.streams import TURN_BYTES

pytestmark = pytest.mark.gpu

STORE_BYTES = 3 * TURN_BYTES
CLOCK_SECONDS = 2e-5
"""How well events of different streams can be compared."""


@pytest.fixture
def store() -> Iterator[HostStore]:
    """Pinned memory of three turns."""
    opened = HostStore(STORE_BYTES, device="cuda")
    yield opened
    opened.close()


def noise(nbytes: int) -> torch.Tensor:
    """Bytes of which no two stretches are alike."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")


def queue_up(store: HostStore, buffer: torch.Tensor, *, is_write: bool) -> list[Transfer]:
    """Some four tenths of a second of transfers."""
    move = store.write if is_write else store.read
    return [move(buffer, 0, buffer.numel()) for _ in range(100)]


@pytest.mark.parametrize("nbytes", [1, TURN_BYTES, TURN_BYTES + 1, STORE_BYTES - 5])
def test_a_copy_of_several_turns_is_whole(store: HostStore, nbytes: int) -> None:
    """What comes back is what went, to the last byte."""
    source, back = noise(nbytes), torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    store.write(source, 0, nbytes)
    store.read(back, 0, nbytes).make_stream_wait()
    assert torch.equal(source, back)


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.7])
def test_transfers_keep_their_order(store: HostStore, share: float, is_write: bool) -> None:
    """Whatever stream's turn it is: one after the other."""
    buffer = noise(int(share * TURN_BYTES))
    move = store.write if is_write else store.read
    transfers = [move(buffer, 0, buffer.numel()) for _ in range(20)]
    for transfer in transfers:
        transfer.wait()
    for earlier, later in pairwise(transfers):
        assert earlier.start_seconds < earlier.end_seconds <= later.start_seconds + CLOCK_SECONDS


@pytest.mark.parametrize("is_write", [False, True])
def test_an_urgent_transfer_comes_before_the_queue(store: HostStore, is_write: bool) -> None:
    """It waits for a turn, not for all that was issued before."""
    buffer, urgent = noise(2 * TURN_BYTES), noise(2**20)
    torch.cuda.synchronize()
    transfers = queue_up(store, buffer, is_write=is_write)
    move = store.write if is_write else store.read
    move(urgent, 2 * TURN_BYTES, urgent.numel(), urgent=True).wait()
    assert not transfers[len(transfers) // 2].done


@pytest.mark.parametrize("is_write", [False, True])
def test_copies_of_other_streams_are_let_in(store: HostStore, is_write: bool) -> None:
    """Those to bounce buffers of a file, say."""
    buffer, other = noise(2 * TURN_BYTES), noise(2**20)
    pinned = torch.empty(2**20, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    transfers = queue_up(store, buffer, is_write=is_write)
    with torch.cuda.stream(stream):
        if is_write:
            pinned.copy_(other, non_blocking=True)
        else:
            other.copy_(pinned, non_blocking=True)
    stream.synchronize()
    assert not transfers[len(transfers) // 2].done
