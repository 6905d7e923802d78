"""Dollars per token and years of SSDs, worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from teraio.contracts.hardware import SECONDS_PER_YEAR, Hardware
from teraio.contracts.plan import Accesses, Plan
from teraio.errors import InputError
from teraio.planner.comparison import plan_summary
from teraio.planner.cost import dollars_per_million_tokens, tokens_of, years_of_ssds
from teraio.planner.greedy import plan_greedy
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata
from teraio.traces.unrolling import unroll

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]


def priced(hardware: Hardware, dollars: float = SECONDS_PER_YEAR / 4000) -> Hardware:
    """Every part at the same price."""
    return replace(
        hardware,
        gpu=tuple(replace(gpu, price_dollars=dollars) for gpu in hardware.gpu),
        host=replace(hardware.host, price_dollars=dollars),
        ssd=tuple(replace(ssd, price_dollars=dollars) for ssd in hardware.ssd),
        server_price_dollars=dollars,
    )


@pytest.fixture
def plan(one_tensor: Trace, make_hardware: MakeHardware) -> Plan:
    """8 s, 4,000 tokens and 50 bytes to the SSD per iteration; the four parts together cost 0.001 $
    for each second of a year.
    """
    hardware = priced(make_hardware(100, host_bytes=0, endurance_bytes=10**6))
    return changed(
        plan_greedy(one_tensor, hardware),
        predicted_seconds=8.0,
        tokens=4000,
        ssd_bytes_written={"ssd0": 50},
    )


def changed(plan: Plan, **metadata: Any) -> Plan:
    return replace(plan, metadata=replace(plan.metadata, **metadata))


def with_hardware(plan: Plan, hardware: Hardware) -> Plan:
    return changed(plan, hardware=hardware.to_toml())


def test_a_million_tokens_cost_what_the_machine_loses_meanwhile(plan: Plan) -> None:
    """0.001 $/s x 8 s / 4,000 tokens = 2 $ per million; over 5 years a fifth of it.

    500 W at 0.36 $ per kWh are 0.18 $ per hour, 0.00005 $ per second: 0.1 $ more.
    """
    assert dollars_per_million_tokens(plan, life_years=1.0) == pytest.approx(2.0)
    assert dollars_per_million_tokens(plan) == pytest.approx(0.4)
    power = {"watts_per_gpu": 500.0, "dollars_per_kilowatt_hour": 0.36}
    assert dollars_per_million_tokens(plan, life_years=1.0, **power) == pytest.approx(2.1)
    pipeline = changed(plan, world_size=2)
    assert dollars_per_million_tokens(pipeline, life_years=1.0) == pytest.approx(4.0)
    assert plan_summary(plan)["dollars_per_million_tokens"] == pytest.approx(0.4)


def test_gpus_of_a_node_share_its_price(plan: Plan) -> None:
    """Five parts for two GPUs, of which the plan uses one: 5 / 8 of the four parts' price."""
    hardware = plan.hardware
    second = replace(hardware.gpu[0], name="another")
    node = with_hardware(plan, replace(hardware, gpu=(*hardware.gpu, second)))
    assert dollars_per_million_tokens(node, life_years=1.0) == pytest.approx(2.0 * 5 / 8)


def test_what_is_unknown_costs_nothing_that_anyone_could_say(plan: Plan) -> None:
    hardware = plan.hardware
    without = [
        replace(hardware, gpu=(replace(hardware.gpu[0], price_dollars=None),)),
        replace(hardware, host=replace(hardware.host, price_dollars=None)),
        replace(hardware, ssd=(replace(hardware.ssd[0], price_dollars=None),)),
        replace(hardware, server_price_dollars=None),
    ]
    for machine in without:
        assert machine.price_dollars is None
        assert dollars_per_million_tokens(with_hardware(plan, machine)) is None
    assert dollars_per_million_tokens(changed(plan, tokens=None)) is None
    assert dollars_per_million_tokens(changed(plan, planner="ideal")) is None
    free = with_hardware(plan, priced(hardware, 0.0))
    assert dollars_per_million_tokens(free) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"life_years": 0.0}, "life_years: must be above 0"),
        ({"life_years": math.inf}, "life_years: must be above 0 and finite"),
        ({"watts_per_gpu": -1.0}, "watts_per_gpu: must be finite and not negative"),
        ({"dollars_per_kilowatt_hour": math.nan}, "dollars_per_kilowatt_hour: must be finite"),
    ],
)
def test_wrong_assumptions_are_named(plan: Plan, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dollars_per_million_tokens(plan, **arguments)


def test_an_ssd_lasts_until_its_endurance_is_written(plan: Plan) -> None:
    """50 B per 8 s of 10^6 B: 160,000 s."""
    years = 160_000 / SECONDS_PER_YEAR
    assert years_of_ssds(plan) == pytest.approx(years)
    assert plan_summary(plan)["ssd_years"] == pytest.approx(years)
    assert years_of_ssds(changed(plan, ssd_bytes_written={})) == math.inf


def test_the_first_ssd_to_wear_out_counts(plan: Plan) -> None:
    """The second one is written less, and lasts a fifth; if nobody knows how long, nobody does."""
    hardware = plan.hardware
    weak = replace(hardware.ssd[0], name="weak", endurance_bytes=50_000)
    both = changed(plan, ssd_bytes_written={"ssd0": 50, "weak": 12})
    machine = replace(hardware, ssd=(*hardware.ssd, weak))
    expected = 50_000 / 12 * 8 / SECONDS_PER_YEAR
    assert years_of_ssds(with_hardware(both, machine)) == pytest.approx(expected)
    unknown = replace(hardware, ssd=(*hardware.ssd, replace(weak, endurance_bytes=None)))
    assert years_of_ssds(with_hardware(both, unknown)) is None
    assert years_of_ssds(with_hardware(plan, unknown)) == years_of_ssds(plan)


def test_ranks_that_share_an_ssd_wear_it_out_together(plan: Plan) -> None:
    alone = years_of_ssds(plan)
    assert alone is not None
    hardware = plan.hardware
    node = replace(hardware, gpu=hardware.gpu * 2)
    assert years_of_ssds(with_hardware(plan, node)) == alone
    pair = with_hardware(changed(plan, world_size=2), node)
    assert years_of_ssds(pair) == pytest.approx(alone / 2)
    own = replace(node, ssd=(replace(node.ssd[0], gpus=(0,)),))
    assert years_of_ssds(with_hardware(pair, own)) == alone


def test_presets_of_the_paper_have_prices() -> None:
    """30,000 + 4 x 289 + 4,000 / 2 + 6,400 / 2, and twice that for two GPUs."""
    paper, node = Hardware.preset("paper"), Hardware.preset("paper-node")
    assert paper.price_dollars == 36_356
    assert node.price_dollars == 2 * 36_356
    assert Hardware.preset("h200").price_dollars is None


# Tokens


def lookups(
    *micro_batches: dict[str, tuple[int, str]],
    op: str = "aten.embedding.default",
    group: str | None = None,
    **metadata: Any,
) -> Trace:
    """Per micro-batch one kernel per input, (bytes, dtype) by name, and one that uses the result;
    the last is a collective if there is a ``group``.
    """
    kernels: list[tuple[Any, ...]] = []
    storages: list[tuple[Any, ...]] = [
        (0, 8, 8, "parameter", "table", None, None, None, "float32", True)
    ]
    accesses: list[tuple[int, int, bool, bool]] = []
    for index, inputs in enumerate(micro_batches):
        for name, (nbytes, dtype) in inputs.items():
            kernel, storage = len(kernels), len(storages)
            row = (kernel, op, None, "forward", index, 1.0, 0.0, 0, kernel, 0, None, None)
            kernels.append((*row, None, None))
            kind = "input" if not name.startswith("made") else "temporary"
            storages.append((storage, nbytes, nbytes, kind, None, kernel, 0, kernel, dtype, True))
            accesses += [(kernel, 0, True, False), (kernel, storage, True, False)]
    last = len(kernels)
    number = 0 if group else None
    exchange = (last, "c10d.allreduce_", None, "other", None, 1.0, 0.0, 0, last, 0, group, number)
    kernels.append((*exchange, None, None))
    accesses.append((last, 0, True, True))
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="fake", **metadata),
    )


def test_tokens_are_what_embeddings_look_up() -> None:
    """Twelve in one micro-batch, four in the other; their types are as many, positions are made."""
    first = {"ids": (96, "int64"), "types": (48, "int32"), "made": (800, "int64")}
    second = {"ids": (16, "int32")}
    assert tokens_of(lookups(first, second)) == 12 + 4


def test_tokens_of_replicas_add_up_and_those_of_a_pipeline_do_not() -> None:
    inputs = {"ids": (96, "int64")}
    assert tokens_of(lookups(inputs, world_size=4)) == 12
    assert tokens_of(lookups(inputs, world_size=4, group="replicas")) == 48


def test_tokens_that_nobody_knows() -> None:
    assert tokens_of(lookups({"image": (96, "float32")}, op="aten.convolution.default")) is None
    assert tokens_of(lookups({"ids": (96, "float8")})) is None
    assert tokens_of(lookups({"ids": (96, "int64")}, tokens=5)) == 5


def test_a_plan_keeps_the_tokens_of_its_trace(make_hardware: MakeHardware) -> None:
    trace = lookups({"ids": (96, "int64")})
    assert plan_greedy(trace, make_hardware(10_000)).metadata.tokens == 12


def test_unrolling_multiplies_the_tokens_that_were_told() -> None:
    from teraio.profiler import trace
    from teraio.profiler.training import make_setup

    options: dict[str, Any] = {"sequence": 16, "micro_batch_size": 2, "micro_batches": 3}
    traced = trace("tiny-llama", **options)
    assert traced.metadata.tokens == 3 * 2 * 16
    untold = replace(traced, metadata=replace(traced.metadata, tokens=None))
    assert tokens_of(untold) == 3 * 2 * 16
    assert unroll(traced, 4).metadata.tokens == 4 * 2 * 16
    ranks = make_setup("tiny-llama", data_parallel=2, tensor_parallel=2, stages=2, **options)
    assert ranks.tokens == 2 * 3 * 2 * 16


def test_files_from_before_tokens_are_still_read(one_tensor: Trace, tmp_path: Path) -> None:
    """Their hash knew nothing of the field."""
    path = tmp_path / "old.trace"
    one_tensor.save(path)
    for file in path.iterdir():
        table = pq.read_table(file)
        block = json.loads(table.schema.metadata[b"teraio"])
        assert block["metadata"].pop("tokens", "missing") is None
        table = table.replace_schema_metadata({b"teraio": json.dumps(block)})
        pq.write_table(table, file, write_page_checksum=True)
    old = Trace.load(path)
    assert (old.hash, old.metadata.tokens) == (one_tensor.hash, None)
    told = replace(one_tensor, metadata=replace(one_tensor.metadata, tokens=7))
    assert told.hash != one_tensor.hash
    told.save(path)
    assert Trace.load(path).metadata.tokens == 7
