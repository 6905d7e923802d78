"""PyTorch's CUDA allocator as the executor sees it: its layout, blocks, moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from teraio.executor.gpu_allocator import ENDLESS, GpuAllocator, Relocation


def segment(begin: int, *blocks: tuple[int, str], **fields: Any) -> dict[str, Any]:
    """As PyTorch describes one; sizes in MiB."""
    address, described = begin, []
    for size, state in blocks:
        described.append({"address": address, "size": size * 2**20, "state": state})
        address += size * 2**20
    return {
        "device": 0,
        "segment_type": "large",
        "stream": 7,
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "address": begin,
        "total_size": sum(size for size, _ in blocks) * 2**20,
        "blocks": described,
        **fields,
    }


def allocator_seeing(monkeypatch: Any, *segments: dict[str, Any]) -> GpuAllocator:
    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **options: list(segments))
    return GpuAllocator()


def test_a_look_into_the_allocator(monkeypatch: Any) -> None:
    """Free and used blocks of the pool that serves the run; all that is reserved on its device."""
    mib = 2**20
    allocator = allocator_seeing(
        monkeypatch,
        segment(0, (30, "active_allocated"), (10, "inactive")),
        segment(60 * mib, (20, "inactive"), (5, "active_pending_free")),
        segment(500 * mib, (2, "inactive"), segment_type="small"),
        segment(600 * mib, (20, "inactive"), stream=8),
        segment(700 * mib, (20, "inactive"), segment_pool_id=(1, 0)),
        segment(800 * mib, (40, "inactive"), device=1),
    )
    layout = allocator.look()
    assert layout is not None
    assert layout.holes == [(30 * mib, 10 * mib), (60 * mib, 20 * mib)]
    assert layout.blocks == [(0, 30 * mib), (80 * mib, 5 * mib)]
    assert layout.reserved_bytes == (40 + 25 + 2 + 20 + 20) * mib
    assert layout.growth == {40 * mib: 20 * mib, 85 * mib: ENDLESS}


def test_where_pytorch_cannot_tell_nothing_moves(monkeypatch: Any) -> None:
    """A snapshot that fails ends no training."""
    allocator = allocator_seeing(monkeypatch)

    def fail(**options: Any) -> Any:
        raise RuntimeError("unexpected layout")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", fail)
    assert allocator.look() is None


def test_without_expandable_segments_nothing_moves(monkeypatch: Any) -> None:
    """Blocks lie in many ranges then, and pages do not help."""
    plain = segment(0, (30, "inactive"), is_expandable=False)
    assert allocator_seeing(monkeypatch, plain).look() is None


class RecordedStream:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def record_event(self) -> str:
        return "end of the copy"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def test_another_stream_waits_for_a_move() -> None:
    """What it has been ordered with before is not the copy that has come since."""
    run: Any = RecordedStream()
    other: Any = RecordedStream()
    Relocation(run).make_stream_wait(other)
    assert (run.waited, other.waited) == ([], ["end of the copy"])


@pytest.mark.gpu
def test_a_storage_moves_within_the_gpu() -> None:
    """The real allocator: another address, the same bytes, views too; a look shows both places."""
    allocator = GpuAllocator()
    tensor = torch.arange(4 * 2**20, device="cuda", dtype=torch.int32)
    view = tensor[5:9]
    storage = tensor.untyped_storage()
    before = allocator.address(storage)
    layout = allocator.look()
    if layout is None:
        pytest.skip("needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert (before, 16 * 2**20) in layout.blocks
    allocator.move(storage, storage.nbytes())
    assert allocator.address(storage) != before
    assert view.tolist() == [5, 6, 7, 8]
    assert torch.equal(tensor, torch.arange(4 * 2**20, device="cuda", dtype=torch.int32))
    after = allocator.look()
    assert after is not None
    assert (allocator.address(storage), 16 * 2**20) in after.blocks
    assert any(begin <= before < begin + size for begin, size in after.holes)
    plug = allocator.allocate(16 * 2**20)
    assert plug == before
    allocator.free(plug)


@pytest.mark.gpu
def test_another_stream_finds_a_storage_where_it_has_moved() -> None:
    """It waits for the copy, however late that is on the run's stream."""
    allocator = GpuAllocator()
    tensor = torch.zeros(64 * 2**20, device="cuda", dtype=torch.uint8)
    other = torch.cuda.Stream()
    for round_ in range(20):
        other.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(20_000_000)
        tensor.fill_(round_ + 1)
        storage = tensor.untyped_storage()
        relocation = allocator.move(storage, storage.nbytes())
        with torch.cuda.stream(other):
            relocation.make_stream_wait()
            seen = tensor.clone()
        torch.cuda.current_stream().wait_stream(other)
        assert bool((seen == round_ + 1).all())
