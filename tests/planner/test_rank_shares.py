"""Fair shares of a machine that several ranks use, and one plan for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Ssd
from teraio.errors import InputError
from teraio.planner import plan_ranks, share_of_rank, verify
from teraio.traces.trace import Trace

GB = 10**9


def node(num_gpus: int, *, links: int, ssd_gpus: tuple[int, ...] = ()) -> Hardware:
    """GPUs that take turns on ``links``, and one SSD that some of them reach."""
    return Hardware(
        name="node",
        gpu=tuple(
            Gpu(name=f"gpu{i}", memory_bytes=80 * GB, link=f"link{i % links}")
            for i in range(num_gpus)
        ),
        link=tuple(
            Link(name=f"link{i}", read_rate=50 * GB, write_rate=40 * GB) for i in range(links)
        ),
        host=Host(
            memory_bytes=512 * GB, read_rate=50 * GB, write_rate=50 * GB, memory_rate=200 * GB
        ),
        ssd=(
            Ssd(
                name="ssd",
                read_rate=16 * GB,
                write_rate=12 * GB,
                capacity_bytes=8000 * GB,
                gpus=ssd_gpus,
            ),
        ),
    )


def test_what_a_node_has_once_is_divided_among_its_ranks() -> None:
    share = share_of_rank(node(4, links=2), rank=1, world_size=4)
    assert share.host.memory_bytes == 128 * GB
    assert share.host.memory_rate == 50 * GB
    assert share.link_of_rank(1).read_rate == 25 * GB
    assert share.link_of_rank(1).duplex_write_rate == 20 * GB
    (ssd,) = share.ssds_of_rank(1)
    assert (ssd.read_rate, ssd.write_rate, ssd.capacity_bytes) == (4 * GB, 3 * GB, 2000 * GB)


def test_what_a_gpu_has_for_itself_stays_whole() -> None:
    whole = node(2, links=2)
    share = share_of_rank(whole, rank=1, world_size=2)
    assert share.gpu == whole.gpu
    assert share.link == whole.link
    assert (share.host.read_rate, share.host.write_rate) == (50 * GB, 50 * GB)


def test_an_ssd_is_divided_among_the_gpus_that_reach_it() -> None:
    whole = node(4, links=4, ssd_gpus=(0, 2))
    assert share_of_rank(whole, rank=2, world_size=4).ssds_of_rank(2)[0].read_rate == 8 * GB
    assert share_of_rank(whole, rank=1, world_size=4).ssds_of_rank(1) == ()
    # Two ranks on a node of four GPUs: one of them alone reaches the SSD.
    assert share_of_rank(whole, rank=0, world_size=2).ssd == whole.ssd


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "host_share"),
    [(8, None, 128 * GB), (8, 4, 128 * GB), (2, None, 256 * GB), (1, None, 512 * GB)],
)
def test_more_ranks_than_gpus_are_on_several_nodes(
    world_size: int, ranks_per_node: int | None, host_share: int
) -> None:
    share = share_of_rank(node(4, links=4), 0, world_size, ranks_per_node)
    assert share.host.memory_bytes == host_share


def test_a_file_of_one_gpu_stands_for_a_node_of_several() -> None:
    """As ``probe`` writes it: all ranks share the host, each has a GPU and link of its own."""
    share = share_of_rank(node(1, links=1), rank=1, world_size=2)
    assert share.host.memory_bytes == 256 * GB
    assert share.link[0].read_rate == 50 * GB
    assert share.ssd[0].read_rate == 8 * GB


@pytest.mark.parametrize("ranks_per_node", [1, 3, 9])
def test_numbers_that_cannot_be_are_named(ranks_per_node: int) -> None:
    with pytest.raises(InputError, match=f"ranks_per_node: .* got {ranks_per_node}"):
        share_of_rank(node(4, links=4), 0, 8, ranks_per_node)


def test_ranks_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match=r"rank: must be in 0\.\.1, got 2"):
        share_of_rank(node(2, links=2), 2, 2)


@pytest.fixture
def layers(make_trace: Callable[..., Trace]) -> Trace:
    """Three layers there and back: 40 GB each, 120 GB together."""
    names = ("a", "b", "c")
    return make_trace(
        [30.0] * 6,
        [(name, 40 * GB, k, 5 - k) for k, name in enumerate(names)],
        [(k, name, "w") for k, name in enumerate(names)]
        + [(5 - k, name, "r") for k, name in enumerate(names)],
    )


def of_rank(trace: Trace, rank: int, world_size: int = 2) -> Trace:
    return replace(trace, metadata=replace(trace.metadata, rank=rank, world_size=world_size))


def test_each_rank_gets_a_plan_for_its_share(layers: Trace) -> None:
    traces = [of_rank(layers, 0), of_rank(layers, 1)]
    plans = plan_ranks(
        traces,
        node(2, links=1),
        planner="greedy",
        gpu_memory="80GB",
        host_memory="100GB",
    )
    for rank, (one, plan) in enumerate(zip(traces, plans, strict=True)):
        metadata = plan.metadata
        assert (metadata.rank, metadata.world_size) == (rank, 2)
        assert (metadata.gpu_memory_bytes, metadata.host_memory_bytes) == (80 * GB, 50 * GB)
        assert plan.hardware.link[0].read_rate == 25 * GB
        assert verify(one, plan).valid
        assert len(plan.moves) > 0


def test_traces_that_do_not_belong_together_are_refused(layers: Trace) -> None:
    for traces, message in (
        ([], "traces: give at least one"),
        ([of_rank(layers, 0), of_rank(layers, 0)], "several are of rank 0"),
        ([of_rank(layers, 0), of_rank(layers, 1, 4)], r"different numbers of ranks: \[2, 4\]"),
    ):
        with pytest.raises(InputError, match=message):
            plan_ranks(traces, node(2, links=2), planner="greedy")
