"""What every store promises, on CPU memory and, where there is one, on a GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.fake_kvikio import fake_library
from torch.utils._python_dispatch import TorchDispatchMode

from teraio.errors import CapacityError, InputError, StoreError
from teraio.executor.stores import (
    FileStore,
    GdsStore,
    HostStore,
    Store,
    Transfer,
    VerifiedStore,
    gds,
)
from teraio.executor.stores.queues import Await, ThreadQueues, ThreadTransfer

MIB = 2**20
SIZES = [0, 1, 511, 512, 513, 4095, 4097, 3 * MIB + 5]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.gpu,
    ),
]

MakeStore = Callable[..., Store]
StoreThreads = Callable[[], list[threading.Thread]]
KINDS = ["host", "file", "page cache", "striped", "gds", "striped gds", "verified"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which store; "page cache" is a file store without O_DIRECT."""
    return str(request.param)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the buffers are."""
    return str(request.param)


@pytest.fixture
def make_store(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeStore]:
    """Builds stores of this kind and closes them; small pieces, so that pipelines have work.

    On a CPU kvikio is a small one of our own, which really writes and reads files.
    """
    stores: list[Store] = []
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    directory = folders if "striped" in kind else tmp_path
    if "gds" in kind and device == "cpu":
        library = fake_library()
        monkeypatch.setattr(gds, "load_kvikio", lambda *, bounce_buffer_bytes: library)
    elif "gds" in kind:
        pytest.importorskip("kvikio", reason="needs kvikio")

    def make(capacity_bytes: int = 16 * MIB, chunk_bytes: int = MIB) -> Store:
        options: dict[str, Any] = {"device": device, "chunk_bytes": chunk_bytes}
        store: Store
        if kind == "host":
            store = HostStore(capacity_bytes, **options)
        elif "gds" in kind:
            store = GdsStore(
                "ssd0", directory, capacity_bytes, preferred_io_bytes=256 * 1024, **options
            )
        else:
            direct = False if kind == "page cache" else None
            options |= {"preferred_io_bytes": 256 * 1024, "direct": direct, "bounce_bytes": 4 * MIB}
            store = FileStore("ssd0", directory, capacity_bytes, **options)
            if kind == "verified":
                store = VerifiedStore(store)
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def random_bytes(nbytes: int, device: str, seed: int = 0) -> torch.Tensor:
    """Bytes that no buffer happens to hold."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.to(device)


def now_and_later(device: str) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
    """On a GPU, an event of now and one that happens after some tens of milliseconds."""
    if device == "cpu":
        return None, None
    early = torch.cuda.current_stream().record_event()
    torch.cuda._sleep(100_000_000)
    return early, torch.cuda.current_stream().record_event()


def test_is_a_store(make_store: MakeStore) -> None:
    """Both classes have every member of the protocol."""
    store: Store = make_store()
    assert isinstance(store, Store)
    assert store.reserved_bytes == store.capacity_bytes == 16 * MIB
    assert 0 <= store.pinned_bytes <= 16 * MIB


@pytest.mark.parametrize("nbytes", SIZES)
def test_round_trip_is_exact(make_store: MakeStore, device: str, nbytes: int) -> None:
    """Sizes around block borders come back to the bit, and bytes behind them stay as they were."""
    store = make_store()
    source = random_bytes(nbytes, device)
    store.write(source, 4096, nbytes).wait()
    destination = torch.full((nbytes + 64,), 7, dtype=torch.uint8, device=device)
    store.read(destination, 4096, nbytes).wait()
    assert torch.equal(destination[:nbytes], source)
    assert bool((destination[nbytes:] == 7).all())


def test_whole_storages_of_any_dtype(make_store: MakeStore, device: str) -> None:
    """A storage travels as bytes, whatever tensors view it, and stays resizable."""
    store = make_store()
    tensor = torch.randn(1000, device=device, dtype=torch.float64)
    expected, storage = tensor.clone(), tensor.untyped_storage()
    store.write(storage, 0, storage.nbytes()).wait()
    storage.resize_(0)
    storage.resize_(8000)
    store.read(storage, 0, storage.nbytes()).wait()
    assert torch.equal(tensor, expected)


def test_neighbours_do_not_touch_each_other(make_store: MakeStore, device: str) -> None:
    """Slots packed at the alignment keep their own bytes."""
    store = make_store()
    blocks = [random_bytes(4097 - index, device, seed=index) for index in range(20)]
    for index, block in enumerate(blocks):
        store.write(block, index * 8192, len(block))
    for index, block in reversed(list(enumerate(blocks))):
        destination = torch.empty_like(block)
        store.read(destination, index * 8192, len(block)).wait()
        assert torch.equal(destination, block)


def test_a_slot_is_reused_in_order_of_issue(make_store: MakeStore, device: str) -> None:
    """Write, read, write, read of the same bytes, all issued at once, each see their own."""
    store = make_store()
    nbytes = 2 * MIB
    sources = [random_bytes(nbytes, device, seed=round) for round in range(6)]
    destinations = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in sources]
    transfers = []
    for source, destination in zip(sources, destinations, strict=True):
        transfers.append(store.write(source, 0, nbytes))
        transfers.append(store.read(destination, 0, nbytes))
    for transfer in transfers:
        transfer.wait()
    for source, destination in zip(sources, destinations, strict=True):
        assert torch.equal(source, destination)


def test_overlap_by_one_block_is_ordered(make_store: MakeStore, device: str) -> None:
    """A write that overlaps only the end of an outstanding read still waits for it."""
    store = make_store()
    first, second = random_bytes(2 * MIB, device, 1), random_bytes(2 * MIB, device, 2)
    destination = torch.empty_like(first)
    store.write(first, 0, len(first))
    read = store.read(destination, 0, len(first))
    write = store.write(second, 2 * MIB - 4096, len(second))
    write.wait()
    assert read.done
    assert torch.equal(destination, first)


def test_a_queue_serves_in_order_of_issue(make_store: MakeStore, device: str) -> None:
    """Transfers of one direction neither overtake nor overlap each other."""
    store = make_store()
    source = random_bytes(MIB, device)
    transfers = [store.write(source, index * MIB, MIB) for index in range(8)]
    for transfer in transfers:
        transfer.wait()
    times = [(transfer.start_seconds, transfer.end_seconds) for transfer in transfers]
    assert all(start <= end for start, end in times)
    assert all(times[i][1] <= times[i + 1][0] + 1e-5 for i in range(len(times) - 1))


def test_urgent_transfers_come_first_but_not_before_their_bytes(
    make_store: MakeStore, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demand fetch overtakes queued reads, yet waits for the write that it depends on."""
    store = make_store(chunk_bytes=256 * 1024)
    source, destination = random_bytes(8 * MIB, device), torch.zeros(8 * MIB, dtype=torch.uint8)
    store.write(source, 0, len(source)).wait()
    fresh, wanted = random_bytes(4096, device, 5), torch.zeros(4096, dtype=torch.uint8).to(device)
    destination = destination.to(device)
    early, late = now_and_later(device)
    issued = hold_queued_reads(monkeypatch)
    queued = [store.read(destination, 0, len(source), after=late) for _ in range(4)]
    write = store.write(fresh, 8 * MIB, 4096, after=early)
    urgent = store.read(wanted, 8 * MIB, 4096, after=early, urgent=True)
    issued.set_result(write)
    urgent.wait()
    for transfer in queued:
        transfer.wait()
    assert torch.equal(wanted, fresh)
    assert urgent.end_seconds < queued[-1].end_seconds


def hold_queued_reads(monkeypatch: pytest.MonkeyPatch) -> Future[Transfer]:
    """Let threads begin no read that is not urgent before the future has a write, and only one
    before that has ended: else a busy machine may serve all of them before the next call, or the
    write. Streams of a GPU wait for events of theirs.
    """
    move_in_chunks, begun = ThreadQueues._move_in_chunks, list[ThreadTransfer]()
    issued: Future[Transfer] = Future()

    def held(queues: ThreadQueues, transfer: ThreadTransfer, waits: list[Await]) -> None:
        if not (transfer.is_write or transfer.is_urgent):
            write = issued.result(60)
            if begun:
                write.wait()
            begun.append(transfer)
        move_in_chunks(queues, transfer, waits)

    monkeypatch.setattr(ThreadQueues, "_move_in_chunks", held)
    return issued


def test_crossed_urgent_and_queued_transfers_do_not_deadlock(
    make_store: MakeStore, device: str
) -> None:
    """An urgent write waits for a read that waits for a write behind which it would have stood."""
    store = make_store(chunk_bytes=64 * 1024)
    first, second, third = (random_bytes(MIB, device, seed) for seed in range(3))
    destination, last = torch.empty_like(first), torch.empty_like(first)
    transfers = [
        store.write(random_bytes(4 * MIB, device), 4 * MIB, 4 * MIB),
        store.write(first, 0, MIB),
        store.read(destination, 0, MIB),
        store.write(second, 0, MIB, urgent=True),
        store.write(third, 0, MIB),
        store.read(last, 0, MIB, urgent=True),
    ]
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(destination, first)
    assert torch.equal(last, third)


def test_a_transfer_owns_its_buffer_until_it_is_done(make_store: MakeStore, device: str) -> None:
    """All references are dropped in flight; bytes are right, and the buffer goes afterwards."""
    store = make_store()
    expected = random_bytes(4 * MIB, device)
    source = expected.clone()
    watcher = weakref.ref(source.untyped_storage())
    transfer = store.write(source.untyped_storage(), 0, len(source))
    del source
    gc.collect()
    noise = [torch.full((4 * MIB,), 9, dtype=torch.uint8, device=device) for _ in range(4)]
    transfer.wait()
    destination = torch.empty_like(expected)
    store.read(destination, 0, len(expected)).wait()
    assert torch.equal(destination, expected)
    assert watcher() is None
    del noise


def test_times_are_known_at_the_end_only(make_store: MakeStore, device: str) -> None:
    """Start and end lie between issue and the end of the wait, on the clock of perf_counter."""
    store = make_store()
    source = random_bytes(8 * MIB, device)
    before = time.perf_counter()
    transfer = store.write(source, 0, len(source))
    transfer.wait()
    after = time.perf_counter()
    assert transfer.done
    assert before - 1e-4 <= transfer.start_seconds < transfer.end_seconds <= after + 1e-4


def test_make_stream_wait_orders_the_compute_that_follows(
    make_store: MakeStore, device: str
) -> None:
    """What is computed after it sees the bytes that were read."""
    store = make_store()
    source = random_bytes(8 * MIB, device)
    store.write(source, 0, len(source)).wait()
    destination = torch.zeros_like(source)
    transfer = store.read(destination, 0, len(source))
    transfer.make_stream_wait()
    assert torch.equal(destination.clone(), source)


def test_transfers_follow_the_compute_issued_before(make_store: MakeStore, device: str) -> None:
    """A write sees what pending kernels compute; a read does not disturb what they still use."""
    store = make_store()
    size = 2048 if device == "cuda" else 64
    matrix = torch.eye(size, device=device)
    for round in range(5):
        busy = matrix
        for _ in range(50):
            busy = busy @ matrix
        source = (busy[0, 0] * (round + 1)).to(torch.uint8).repeat(4 * MIB)
        store.write(source, 0, 4 * MIB)
        for _ in range(50):
            busy = busy @ matrix
        doubled = source * (busy[0, 0] * 2).to(torch.uint8)
        del source
        # The caching allocator hands out the block that the pending product still reads.
        destination = torch.empty(4 * MIB, dtype=torch.uint8, device=device)
        store.read(destination, 0, 4 * MIB).make_stream_wait()
        assert bool((destination == round + 1).all())
        assert bool((doubled == 2 * (round + 1)).all())


def test_memory_is_free_once_a_write_is_done(make_store: MakeStore, device: str) -> None:
    """After wait, resize_(0) and a new owner of the block, the store has the old bytes."""
    store = make_store()
    for seed in range(5):
        expected = random_bytes(3 * MIB, device, seed)
        storage = expected.clone().untyped_storage()
        store.write(storage, 0, 3 * MIB).wait()
        storage.resize_(0)
        intruder = torch.full((3 * MIB,), 255, dtype=torch.uint8, device=device)
        destination = torch.empty_like(intruder)
        store.read(destination, 0, 3 * MIB).wait()
        assert torch.equal(destination, expected)


@pytest.mark.parametrize(("offset", "nbytes"), [(-4096, 10), (16 * MIB, 1), (15 * MIB, 2 * MIB)])
def test_ranges_outside_are_refused(
    make_store: MakeStore, device: str, offset: int, nbytes: int
) -> None:
    """The error names the store and the range."""
    store = make_store()
    with pytest.raises(StoreError, match=f"{store.name}: bytes {offset} to .* lie outside"):
        store.write(random_bytes(nbytes, device), offset, nbytes)


def test_unaligned_offsets_are_refused(make_store: MakeStore, device: str) -> None:
    """Plans pack slots at the alignment; anything else is a mistake."""
    with pytest.raises(StoreError, match="offset 100 is not a multiple"):
        make_store().write(random_bytes(8, device), 100, 8)


def test_unsuitable_buffers_are_refused(make_store: MakeStore, device: str) -> None:
    """Too small, of another dtype, or with holes."""
    store = make_store()
    with pytest.raises(InputError, match="holds 8 bytes"):
        store.read(random_bytes(8, device), 0, 9)
    with pytest.raises(InputError, match="uint8"):
        store.read(torch.zeros(8, device=device), 0, 8)
    with pytest.raises(InputError, match="contiguous"):
        store.read(random_bytes(16, device)[::2], 0, 8)


def test_close_waits_and_may_be_repeated(
    make_store: MakeStore, device: str, store_threads: StoreThreads
) -> None:
    """What was issued is completed; afterwards everything is refused, and no thread is left."""
    store = make_store()
    transfers = [store.write(random_bytes(MIB, device), i * MIB, MIB) for i in range(8)]
    assert bool(store_threads()) or device == "cuda"
    store.close()
    assert all(transfer.done for transfer in transfers)
    store.close()
    assert store_threads() == []
    with pytest.raises(StoreError, match="closed"):
        store.write(random_bytes(8, device), 0, 8)


@pytest.mark.parametrize("cls", [HostStore, FileStore, GdsStore])
def test_a_dropped_store_closes_itself(
    cls: type[Store],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store_threads: StoreThreads,
) -> None:
    """Nobody calls close after an exception has unwound the caller."""
    if device == "cpu":
        library = fake_library()
        monkeypatch.setattr(gds, "load_kvikio", lambda *, bounce_buffer_bytes: library)
    elif cls is GdsStore:
        pytest.importorskip("kvikio", reason="needs kvikio")
    makers: dict[type[Store], Callable[[], Store]] = {
        HostStore: lambda: HostStore(MIB, device=device),
        FileStore: lambda: FileStore("ssd0", tmp_path, MIB, device=device),
        GdsStore: lambda: GdsStore("ssd0", tmp_path, MIB, device=device),
    }
    store = makers[cls]()
    before = len(store_threads())
    store.write(random_bytes(MIB, device), 0, MIB)
    watcher = weakref.ref(store)
    del store
    gc.collect()
    assert watcher() is None
    assert len(store_threads()) < before or device == "cuda"


def test_dispatch_modes_do_not_see_the_store(make_store: MakeStore, device: str) -> None:
    """An executor calls stores while its own mode is on."""
    seen: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    store = make_store()
    source = random_bytes(4096, device)
    with Recorder():  # type: ignore[no-untyped-call]
        store.write(source.untyped_storage(), 0, 4096).wait()
        store.read(source.untyped_storage(), 0, 4096).wait()
    assert seen == []


def test_what_cannot_grow_says_so(make_store: MakeStore) -> None:
    """A store at its capacity raises, and names it."""
    with pytest.raises(CapacityError, match=str(16 * MIB)):
        make_store().grow(4096)
