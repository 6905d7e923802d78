"""Stores beside a busy GPU: order, overlap, memory; and training through the SSD tier there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware, Ssd
from teraio.errors import StoreError
from teraio.executor.stores import (
    FileStore,
    GdsStore,
    HostStore,
    Store,
    VerifiedStore,
    measure_backends,
    open_ssd,
)
from teraio.executor.stores.checksums import place_sums
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.allocator_settings import exact_blocks

pytestmark = pytest.mark.gpu

MIB = 2**20
KINDS = ["host", "file", "striped file", "gds", "striped gds", "verified host", "verified file"]
BUSY_CYCLES = 400_000_000
"""Some two tenths of a second."""

Open = Callable[..., Store]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which store."""
    if "gds" in request.param:
        pytest.importorskip("kvikio", reason="needs kvikio")
    return str(request.param)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders, which stand for two disks."""
    made = [tmp_path / name for name in ("one", "two")]
    for folder in made:
        folder.mkdir()
    return made


@pytest.fixture
def open_store(kind: str, folders: list[Path]) -> Iterator[Open]:
    """Opens stores of the kind, and closes them."""
    opened: list[Store] = []

    def build(nbytes: int = 64 * MIB) -> Store:
        store: Store
        if "host" in kind:
            store = HostStore(nbytes, device="cuda")
        else:
            cls = GdsStore if "gds" in kind else FileStore
            paths = folders if "striped" in kind else folders[:1]
            store = cls("ssd0", paths, nbytes, preferred_io_bytes=MIB, device="cuda")
        store = VerifiedStore(store) if "verified" in kind else store
        opened.append(store)
        return store

    yield build
    for store in opened:
        store.close()


def keep_busy() -> None:
    """Work for the current stream."""
    torch.cuda._sleep(BUSY_CYCLES)


def filled(value: int, nbytes: int = 8 * MIB) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def test_a_write_waits_for_what_is_computed_before(open_store: Open) -> None:
    """Its source gets its content after a long kernel; an early copy would be of the old one."""
    store = open_store()
    source, destination = filled(1), filled(0)
    torch.cuda.synchronize()
    keep_busy()
    source.fill_(2)
    store.write(source, 0, len(source)).wait()
    store.read(destination, 0, len(source)).make_stream_wait()
    assert bool((destination == 2).all())


def test_a_read_waits_for_who_still_uses_its_memory(open_store: Open) -> None:
    """A long kernel, then a copy of the memory's old content: an early read would change it."""
    store = open_store()
    store.write(filled(2), 0, 8 * MIB).wait()
    destination = filled(1)
    torch.cuda.synchronize()
    keep_busy()
    old = destination.clone()
    read = store.read(destination, 0, 8 * MIB)
    read.make_stream_wait()
    assert bool((old == 1).all())
    assert bool((destination == 2).all())


def test_after_an_event_only_that_is_waited_for(open_store: Open, kind: str) -> None:
    """Transfers run beside a long kernel that was issued after the event they follow."""
    if kind in ("gds", "striped gds"):
        pytest.skip("kvikio's compatibility mode waits for the default stream")
    if "verified" in kind:
        pytest.skip("checksums are kernels of the current stream")
    store = open_store()
    source, destination = filled(3), filled(0)
    store.write(source, 0, len(source)).wait()
    store.read(destination, 0, len(source)).wait()
    torch.cuda.synchronize()
    before = torch.cuda.current_stream().record_event()
    keep_busy()
    end = torch.cuda.current_stream().record_event()
    store.write(source, 0, len(source), after=before).wait()
    store.read(destination, 0, len(source), after=before).wait()
    assert not end.query()


def test_the_host_goes_on_when_it_issues(open_store: Open, kind: str) -> None:
    """Issuing takes no time, however busy the GPU is."""
    store = open_store()
    source, destination = filled(3), filled(0)
    store.write(source, 0, len(source)).wait()
    torch.cuda.synchronize()
    keep_busy()
    begin = time.perf_counter()
    transfers = [
        store.write(source, 16 * MIB, len(source)),
        store.read(destination, 0, len(source)),
    ]
    seconds = time.perf_counter() - begin
    for transfer in transfers:
        transfer.wait()
    assert seconds < 0.05


def test_times_do_not_count_the_wait_for_the_compute(open_store: Open) -> None:
    """A transfer begins when its queue could serve it, not when it was issued."""
    store = open_store()
    source = filled(3, MIB)
    store.write(source, 0, MIB).wait()
    torch.cuda.synchronize()
    keep_busy()
    transfer = store.write(source, 0, MIB)
    transfer.wait()
    assert transfer.end_seconds - transfer.start_seconds < 0.1


def test_memory_of_expandable_segments(open_store: Open) -> None:
    """Where the executor lets tensors lie: large ones, and ones inside others' segments."""
    with exact_blocks("cuda"):
        store = open_store(256 * MIB)
        sizes = [100 * MIB + 3, 5, 4097, 30 * MIB + 511, MIB - 1]
        tensors = [
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda") for nbytes in sizes
        ]
        expected = [tensor.clone() for tensor in tensors]
        offset = 0
        for tensor in tensors:
            nbytes = len(tensor)
            storage = tensor.untyped_storage()
            store.write(storage, offset, nbytes).wait()
            storage.resize_(0)
            storage.resize_(nbytes)
            tensor.zero_()
            store.read(storage, offset, nbytes).make_stream_wait()
            offset += (nbytes + 4095) // 4096 * 4096
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, wanted)


def test_bytes_behind_a_buffer_are_left_alone(open_store: Open) -> None:
    """Blocks are padded in the store, not in the memory of a neighbour."""
    store = open_store()
    slab = filled(7, MIB)
    part = slab[4096 : 4096 + 5001]
    store.write(filled(9, 5001), 0, 5001).wait()
    store.read(part, 0, 5001).wait()
    assert bool((part == 9).all())
    assert bool((slab[:4096] == 7).all())
    assert bool((slab[4096 + 5001 :] == 7).all())


def test_sums_on_a_gpu_are_those_on_a_cpu() -> None:
    """To the bit, and in little memory."""
    memory = torch.randint(0, 256, (64 * MIB + 77,), dtype=torch.uint8, device="cuda")
    on_cpu = place_sums(memory.cpu())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sums = place_sums(memory)
    assert torch.cuda.max_memory_allocated() - before < 16 * MIB
    assert torch.equal(sums.cpu(), on_cpu)


def test_a_store_that_gives_back_other_bytes(open_store: Open, kind: str) -> None:
    """Noticed before the next kernel can use them."""
    store = open_store()
    if not isinstance(store, VerifiedStore):
        pytest.skip("it does not check")
    source, destination = filled(1), filled(0)
    store.write(source, 0, len(source)).wait()
    store.inner.write(filled(2), 0, len(source)).wait()
    with pytest.raises(StoreError, match="are not those that were written"):
        store.read(destination, 0, len(source)).make_stream_wait()


def disk(folders: list[Path]) -> Ssd:
    return Ssd(
        name="ssd0",
        capacity_bytes=2**30,
        read_rate=1e9,
        write_rate=1e9,
        paths=tuple(map(str, folders)),
    )


def test_the_choice_between_backends(folders: list[Path]) -> None:
    """Quick, and where kvikio is absent it says so."""
    begin = time.perf_counter()
    rates = measure_backends(disk(folders[:1]), folders[0], device="cuda")
    seconds = time.perf_counter() - begin
    assert rates.file > 1e7
    assert (rates.gds is None) == bool(rates.gds_error)
    print(f"file {rates.file / 1e9:.2f} GB/s, gds {rates.gds}, {seconds:.1f} s {rates.gds_error}")
    store = open_ssd(disk(folders[:1]), folders[0], MIB, device="cuda")
    assert isinstance(store, GdsStore if rates.fastest == "gds" else FileStore)
    store.close()


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def train(model: Any, optimizer: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(64, 512, generator=generator).cuda()
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("backend", ["file", "gds", "auto"])
@pytest.mark.parametrize("is_striped", [False, True])
def test_training(backend: str, is_striped: bool, folders: list[Path]) -> None:
    """Everything goes to disk and back, checked, and the losses are those of plain training."""
    if backend == "gds":
        pytest.importorskip("kvikio", reason="needs kvikio")
    model, optimizer = training()
    losses = [train(model, optimizer, number) for number in range(12)]
    model, optimizer = training()
    with teraio.profile(model, optimizer) as profile:
        number = 0
        while not profile.done:
            train(model, optimizer, number)
            profile.step()
            number += 1
    hardware = Hardware.preset("cpu").with_budgets(gpu_memory="2GB", host_memory="500MB")
    plan = evict_everything(profile.trace, hardware, tiers="ssd")
    model, optimizer = training()
    with teraio.execute(
        plan,
        model,
        optimizer,
        ssd_path=folders if is_striped else folders[0],
        ssd_backend=backend,
        verify_transfers=True,
    ) as run:
        assert [train(model, optimizer, number) for number in range(12)] == losses
    report = run.report
    assert report.verified_reads > 0
    for use in report.ssd_files:
        print(use.path, use.backend, use.read_rate, use.write_rate)
        assert use.read_bytes > 0
        assert backend == "auto" or use.backend.startswith(backend)
