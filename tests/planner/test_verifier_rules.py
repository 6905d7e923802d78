"""Each rule of the verifier, broken by one changed field of a plan that is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Copies, Plan
from teraio.contracts.plan_checks import check_plan
from teraio.contracts.table import MISSING, Table
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace

FROZEN, WEIGHT_WRITE, WEIGHT, WEIGHT_AGAIN, STATE, HIDDEN, WRAPPING, LOGITS = range(8)
"""Rows of the small plan's moves."""


TableT = TypeVar("TableT", bound=Table)


def with_cell(table: TableT, row: int, column: str, value: Any) -> TableT:
    """The table with one cell changed."""
    values = getattr(table, column).copy()
    values[row] = value
    return replace(table, **{column: values})


def mutate(plan: Plan, table: str, row: int | None, column: str, value: Any) -> Plan:
    """The plan with one cell of a table, or one field of the metadata, changed."""
    if table == "metadata":
        return replace(plan, metadata=replace(plan.metadata, **{column: value}))
    assert row is not None
    changed: dict[str, Any] = {table: with_cell(getattr(plan, table), row, column, value)}
    return replace(plan, **changed)


def test_the_plan_made_by_hand_breaks_no_rule(small_trace: Trace, small_plan: Plan) -> None:
    verdict = verify(small_trace, small_plan)
    assert verdict.violations == ()
    assert (verdict.valid, verdict.fits, verdict.num_violations) == (True, True, 0)
    assert check_plan(small_plan) == []


MUTATIONS = [
    # rule, table, row, column, value, part of the message
    ("tables", "kernels", 3, "kernel", 4, "must run 0, 1, 2"),
    ("tables", "kernels", 3, "workspace_bytes", -1, "workspace_bytes: out of range"),
    ("tables", "storages", 2, "storage", 5, "must run 0, 1, 2"),
    ("tables", "storages", 2, "nbytes", -5, "nbytes: must not be negative"),
    ("tables", "storages", 2, "allocated_bytes", 10, "at least nbytes, got 10"),
    ("tables", "storages", 2, "allocated_bytes", 2**62, "sum up to"),
    ("tables", "storages", 3, "birth", 8, "birth: must be null or a kernel, got 8"),
    ("tables", "storages", 3, "death", MISSING, "both be null, or neither"),
    ("tables", "storages", 3, "death", 5, "outside the storage's lifetime, got kernel 6"),
    ("tables", "accesses", 0, "kernel", 9, "kernel: must be in 0..7, got kernel 9"),
    ("tables", "accesses", 0, "storage", 7, "no such storage"),
    ("tables", "accesses", 1, "storage", 0, "one row only"),
    ("tables", "accesses", 5, "kernel", 2, "ordered by kernel"),
    ("metadata", "metadata", None, "predicted_seconds", float("nan"), "predicted_seconds: must"),
    ("metadata", "metadata", None, "gpu_memory_bytes", "much", "got 'much'"),
    ("metadata", "metadata", None, "host_memory_bytes", -1, "host_memory_bytes: must be a finite"),
    ("metadata", "metadata", None, "arena_bytes", {"host": -1}, "arena_bytes[host]: must"),
    ("metadata", "metadata", None, "rank", 1, "rank: must be in 0..0, got 1"),
    ("metadata", "metadata", None, "hardware", "gpu = 3", "gpu: must be a list"),
    ("range", "moves", HIDDEN, "storage", 7, "no storage 7"),
    ("range", "moves", HIDDEN, "after_kernel", 8, "after_kernel: must be a kernel 0..7, got 8"),
    ("range", "moves", HIDDEN, "free_by", -1, "free_by: must be a kernel 0..7, got -1"),
    ("range", "moves", HIDDEN, "offload_start", 2**62, "offload_start: must be a kernel"),
    ("range", "moves", HIDDEN, "prefetch_start", MISSING, "both null or neither"),
    ("size", "moves", HIDDEN, "nbytes", 3999, "storage 3 has 4000, got 3999"),
    ("order", "moves", HIDDEN, "offload_start", 4, "offload_start 4 < free_by 4"),
    ("order", "moves", HIDDEN, "offload_start", 2, "offload_start 10 < free_by 4"),
    ("order", "moves", HIDDEN, "free_by", 6, "free_by 6 < prefetch_start 6"),
    ("order", "moves", HIDDEN, "prefetch_start", 7, "prefetch_start 7 <= before_kernel 6"),
    ("order", "moves", LOGITS, "free_by", 2, "free_by 10 <= death 9"),
    ("access", "moves", HIDDEN, "after_kernel", 2, "kernel 2 does not access storage 3"),
    ("access", "moves", HIDDEN, "before_kernel", 7, "next accessed by kernel 6, got 7"),
    ("access", "moves", WEIGHT, "before_kernel", 5, "next accessed by kernel 4, got 5"),
    ("access", "moves", WEIGHT_WRITE, "before_kernel", 2, "next accessed by kernel 9, got 10"),
    ("access", "moves", STATE, "before_kernel", 5, "next accessed by kernel 14, got 13"),
    ("repeat", "moves", WEIGHT, "after_kernel", 4, "already leaves after kernel 4"),
    ("device", "moves", HIDDEN, "tier", "recompute", "tier 'recompute'"),
    ("device", "moves", HIDDEN, "tier", "host", "tier 'host', device 'near'"),
    ("device", "moves", HIDDEN, "device", "tape", "device 'tape'"),
    ("device", "moves", HIDDEN, "device", "far", "the GPU of rank 0 reaches"),
    ("offset", "moves", HIDDEN, "tier_offset_bytes", 4095, "a multiple of 4096, got 4095"),
    ("offset", "moves", LOGITS, "tier_offset_bytes", -512, "a multiple of 512, got -512"),
    ("clean", "moves", WEIGHT_WRITE, "writes", False, "no move leaves storage 1 at host offset"),
    ("clean", "moves", HIDDEN, "writes", False, "no move leaves storage 3 at near offset 4096"),
    ("clean", "moves", WEIGHT, "tier_offset_bytes", 8192, "no move leaves storage 1 at host"),
    ("clean", "accesses", 5, "writes", True, "storage 1 was written since row 1"),
    ("clean", "accesses", 0, "writes", True, "no move leaves storage 0 at host offset 0"),
    ("slot", "moves", HIDDEN, "tier_offset_bytes", 0, "holds until kernel"),
    ("slot", "moves", WRAPPING, "offload_start", 5, "takes bytes of near at kernel 5"),
    ("slot", "moves", LOGITS, "tier_offset_bytes", 512, "storage 0 (moves row 0) holds"),
    ("placement", "storages", 0, "placement", "gpu", "it is at ('host', 'host', 0)"),
    ("placement", "storages", 3, "placement", "gpu", "it is at ('', '', -1)"),
    ("placement", "storages", 2, "device", "host", "it is at ('ssd', 'near', 0)"),
    ("placement", "storages", 2, "tier_offset_bytes", 4096, "it is at ('ssd', 'near', 0)"),
    ("placement", "moves", WRAPPING, "free_by", 0, "it is at ('ssd', 'near', 4096)"),
    ("placement", "moves", STATE, "prefetch_start", 0, "it is at ('gpu', '', -1)"),
    ("copies", "copies", 0, "storage", 3, "storage 3 at ('ssd', 'near', 4096): no such copy"),
    ("copies", "copies", 0, "storage", 99, "no such copy"),
    ("copies", "copies", 0, "tier_offset_bytes", 0, "valid at the cut, not listed"),
    ("copies", "copies", 0, "tier", "host", "valid at the cut, not listed"),
    ("arena", "metadata", None, "arena_bytes", {"host": 11776, "near": 8191}, "arena_bytes[near]"),
    ("arena", "metadata", None, "arena_bytes", {"host": 11775, "near": 8192}, "does not cover"),
    ("arena", "metadata", None, "arena_bytes", {"host": 11776}, "arena_bytes[near]: 0 does not"),
    ("gpu_memory", "metadata", None, "gpu_memory_bytes", 11839, "aten.mm_backward needs 11840"),
    ("gpu_memory", "kernels", 6, "workspace_bytes", 65, "needs 11841 bytes, the budget is 11840"),
    ("tier_memory", "metadata", None, "host_memory_bytes", 11775, "11776 is above the 11775"),
    (
        "tier_memory",
        "metadata",
        None,
        "arena_bytes",
        {"host": 11776, "near": 1_000_001},
        "arena_bytes[near]: 1000001 is above the 1000000",
    ),
    ("trace", "metadata", None, "trace_hash", "0" * 64, "trace_hash: 000000000000..."),
    ("trace", "metadata", None, "micro_batches", 4, "micro_batches: the trace has 1, got 4"),
    ("trace", "metadata", None, "ideal_seconds", 1.0, "ideal_seconds: the trace's is"),
    ("trace", "kernels", 2, "op", "aten.sub", "op: the trace has aten.add, got aten.sub"),
    ("trace", "kernels", 2, "signature", 7, "signature: the trace has 102, got 7"),
    ("trace", "storages", 4, "birth_ordinal", 1, "birth_ordinal: the trace has 0, got 1"),
    ("trace", "storages", 1, "name", "bias", "name: the trace has weight, got bias"),
    ("trace", "accesses", 0, "reads", False, "reads: the trace has True, got False"),
    ("prediction", "metadata", None, "predicted_seconds", 8.7e-3, "of the ideal"),
    ("prediction", "metadata", None, "lower_bound_seconds", 16e-3, "of lower_bound_seconds"),
]


@pytest.mark.parametrize(
    ("rule", "table", "row", "column", "value", "message"),
    MUTATIONS,
    ids=[f"{m[0]}-{m[1]}.{m[3]}={m[4]}" for m in MUTATIONS],
)
def test_one_changed_field_breaks_its_rule(
    small_trace: Trace,
    small_plan: Plan,
    rule: str,
    table: str,
    row: int | None,
    column: str,
    value: Any,
    message: str,
) -> None:
    verdict = verify(small_trace, mutate(small_plan, table, row, column, value))
    found = [str(v) for v in verdict.violations if v.rule == rule]
    assert any(message in text for text in found), verdict.violations
    assert not (verdict.valid and verdict.fits)


@pytest.mark.parametrize("rule", ["gpu_memory", "tier_memory"])
def test_a_broken_budget_leaves_the_plan_valid(
    small_trace: Trace, small_plan: Plan, rule: str
) -> None:
    name = "gpu_memory_bytes" if rule == "gpu_memory" else "host_memory_bytes"
    verdict = verify(small_trace, mutate(small_plan, "metadata", None, name, 11000))
    assert (verdict.valid, verdict.fits) == (True, False)
    assert {v.rule for v in verdict.violations} == {rule}


def test_a_move_of_a_storage_that_cannot_be_given_back_is_refused(
    small_trace: Trace, small_plan: Plan
) -> None:
    resizable = small_trace.storages.resizable.copy()
    resizable[3] = False
    trace = replace(small_trace, storages=replace(small_trace.storages, resizable=resizable))
    plan = mutate(small_plan, "metadata", None, "trace_hash", trace.hash)
    verdict = verify(trace, plan)
    assert [(v.rule, v.row) for v in verdict.violations] == [("resizable", HIDDEN)]


def test_a_tail_of_a_persistent_storage_is_refused(small_trace: Trace, small_plan: Plan) -> None:
    plan = mutate(small_plan, "moves", STATE, "before_kernel", MISSING)
    plan = mutate(plan, "moves", STATE, "prefetch_start", MISSING)
    messages = [v.message for v in verify(small_trace, plan).violations]
    assert "before_kernel: null, but storage 2 is persistent" in messages


def test_a_tail_before_the_last_access_is_refused(small_trace: Trace, small_plan: Plan) -> None:
    plan = mutate(small_plan, "moves", HIDDEN, "before_kernel", MISSING)
    plan = mutate(plan, "moves", HIDDEN, "prefetch_start", MISSING)
    violations = verify(small_trace, plan).violations
    assert any("next accessed by kernel 6, got null" in v.message for v in violations)


def test_a_read_after_the_last_access_is_refused(small_trace: Trace, small_plan: Plan) -> None:
    plan = mutate(small_plan, "moves", LOGITS, "before_kernel", 1)
    plan = mutate(plan, "moves", LOGITS, "prefetch_start", 0)
    violations = verify(small_trace, plan).violations
    assert any("must be null, kernel 4 is the last access" in v.message for v in violations)


def test_a_missing_or_doubled_copy_at_the_cut_is_refused(
    small_trace: Trace, small_plan: Plan
) -> None:
    nothing = replace(small_plan, copies=Copies.empty())
    assert [v.rule for v in verify(small_trace, nothing).violations] == ["copies"]
    twice = replace(small_plan, copies=small_plan.copies.take(np.array([0, 0])))
    found = verify(small_trace, twice).violations
    assert [(v.rule, v.row) for v in found] == [("copies", 1)]
    assert "listed twice" in found[0].message


def test_a_copy_is_shared_over_the_cut_only_while_nothing_writes(
    small_trace: Trace, small_plan: Plan
) -> None:
    """The weight's copy made after kernel 7 serves the moves after 1 and 4 of the next iteration;
    were kernel 1 to write, it would be stale for both.
    """
    writes = with_cell(small_plan.accesses, 1, "writes", True)
    found = [v for v in check_plan(replace(small_plan, accesses=writes)) if v.rule == "clean"]
    assert [v.row for v in found] == [WEIGHT, WEIGHT_AGAIN]


def test_prediction_below_what_a_channel_needs_is_refused(
    small_trace: Trace, small_plan: Plan, small_hardware: Hardware
) -> None:
    """11,000 bytes to ``near`` in three writes: 11 ms at 1 MB/s, and 3 x 0.3 ms of latency."""
    slow = replace(small_hardware.ssd[0], write_rate=1e6, duplex_write_rate=1e6)
    slow_hardware = replace(small_hardware, ssd=(slow, small_hardware.ssd[1]))
    plan = mutate(small_plan, "metadata", None, "predicted_seconds", 11.8e-3)
    found = verify(small_trace, plan, slow_hardware).violations
    assert [v.rule for v in found] == ["prediction"]
    assert "below 0.0119 of near write" in found[0].message
    plan = mutate(small_plan, "metadata", None, "predicted_seconds", 11.91e-3)
    assert verify(small_trace, plan, slow_hardware).violations == ()


@pytest.mark.parametrize(
    ("part", "field", "value", "what"),
    [
        ("link", "read_rate", 1.1e6, "link pcie read"),  # 18,000 bytes read / 1.1 MB/s = 16.4 ms
        ("link", "write_rate", 0.8e6, "link pcie write"),  # 13,500 bytes / 0.8 MB/s = 16.9 ms
        ("host", "read_rate", 0.4e6, "host read"),  # 7,000 bytes / 0.4 MB/s
        ("host", "write_rate", 0.1e6, "host write"),  # 2,500 bytes / 0.1 MB/s
        ("host", "memory_rate", 3.4e6, "host memory"),  # (9,500 + 2 * 22,000) / 3.4 MB/s = 15.7 ms
    ],
)
def test_prediction_is_held_against_every_rate(
    small_trace: Trace,
    small_plan: Plan,
    small_hardware: Hardware,
    part: str,
    field: str,
    value: float,
    what: str,
) -> None:
    slower: dict[str, Any] = {field: value}
    if field != "memory_rate":
        slower[f"duplex_{field}"] = value
    if part == "link":
        machine = replace(small_hardware, link=(replace(small_hardware.link[0], **slower),))
    else:
        machine = replace(small_hardware, host=replace(small_hardware.host, **slower))
    found = verify(small_trace, small_plan, machine).violations
    assert [v.rule for v in found] == ["prediction"] * len(found)
    assert any(f"of {what}" in v.message for v in found), found


def test_another_machine_brings_its_own_budgets_and_devices(
    small_trace: Trace, small_plan: Plan, small_hardware: Hardware
) -> None:
    smaller = small_hardware.with_budgets(gpu_memory=11000, host_memory=11000)
    verdict = verify(small_trace, small_plan, smaller)
    assert (verdict.valid, verdict.fits) == (True, False)
    assert {v.rule for v in verdict.violations} == {"gpu_memory", "tier_memory"}
    without = replace(small_hardware, ssd=())
    assert {v.rule for v in verify(small_trace, small_plan, without).violations} == {"device"}


def test_violations_are_counted_beyond_those_kept(small_trace: Trace, small_plan: Plan) -> None:
    moves = small_plan.moves.take(np.zeros(500, dtype=np.int64))
    verdict = verify(small_trace, replace(small_plan, moves=moves))
    repeats = [v for v in verdict.violations if v.rule == "repeat"]
    assert len(repeats) == 25
    assert verdict.num_violations >= 499


def test_trace_and_plan_are_also_taken_as_paths(
    small_trace: Trace, small_plan: Plan, tmp_path: Any
) -> None:
    small_trace.save(tmp_path / "small.trace")
    small_plan.save(tmp_path / "small.plan")
    assert verify(tmp_path / "small.trace", tmp_path / "small.plan").valid
