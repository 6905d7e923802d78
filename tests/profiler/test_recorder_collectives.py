"""Collectives bear their group and their number in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from teraio.profiler import profile

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of one, over gloo."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield dist.new_group([0])
    finally:
        dist.destroy_process_group()


def test_collectives_are_numbered_within_their_group(group: dist.ProcessGroup) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathered = torch.zeros(9)
    with profile(model, optimizer) as session:
        while not session.done:
            model(torch.randn(2, 4)).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_gather([gathered[:4]], model.bias.detach(), group=group)
            optimizer.step()
            optimizer.zero_grad()
    trace = session.trace
    kernels = trace.kernels
    rows = np.flatnonzero(kernels.group != "")
    assert [op.split(".")[1] for op in kernels.op[rows]] == [
        "allreduce_",
        "allreduce_",
        "allgather_",
    ]
    default = dist.group.WORLD
    assert default is not None
    assert kernels.group[rows].tolist() == [default.group_name] * 2 + [group.group_name]
    assert kernels.group_sequence[rows].tolist() == [0, 1, 0]
    assert (kernels.peer_rank == -1).all()
    assert (trace.metadata.rank, trace.metadata.world_size) == (0, 1)
    (target,) = np.flatnonzero(trace.storages.nbytes == 36)
    gather = trace.accesses.take(trace.accesses.kernel == rows[2])
    written = dict(zip(gather.storage.tolist(), gather.writes.tolist(), strict=True))
    assert written[int(target)]
    assert list(written.values()).count(True) == 1
