"""The table of GPUs, and what the roofline makes of single calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from teraio.errors import InputError
from teraio.profiler.costs.gpus import GPUS, GpuSpec, as_gpu
from teraio.profiler.costs.roofline import roofline_seconds
from teraio.traces.trace import Calls

H200 = GPUS["h200"]


def tensor(shape: list[int], dtype: str = "float32", storage: int = 0) -> dict[str, Any]:
    """A contiguous tensor, as the calls table describes it."""
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return {"tensor": [dtype, shape, strides, storage]}


def seconds(
    op: str,
    args: list[Any],
    *,
    flops: int = 0,
    read_bytes: int = 0,
    written_bytes: int = 0,
    precision: str = "fp32",
    gpu: GpuSpec = H200,
) -> float:
    """What the roofline says of one call."""
    text = json.dumps({"args": args, "kwargs": {}}, separators=(",", ":"))
    calls = Calls.from_rows([(0, op, text, flops, read_bytes, written_bytes)])
    return float(roofline_seconds(calls, gpu, precision)[0])


SQUARES = [tensor([4096, 4096], storage=i) for i in range(2)]
HALVES = [tensor([4096, 4096], "bfloat16", storage=i) for i in range(2)]
PRODUCT = 2 * 4096**3


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_gpu_has_its_peaks_in_order(gpu: GpuSpec) -> None:
    peak = gpu.peak
    assert peak["fp32"] <= peak["tf32"] <= peak["bf16"] == peak["fp16"]
    for shares in (gpu.efficiencies.matrix, gpu.efficiencies.attention):
        assert set(shares) == set(peak)
        assert all(0 < share < 1 for share in shares.values())
    assert 0 < gpu.efficiencies.memory_if_uneven < gpu.efficiencies.memory < 1
    assert 10**10 < gpu.link_rate < gpu.memory_rate < 10**13
    assert GPUS[gpu.name] is gpu is as_gpu(gpu.name) is as_gpu(gpu)


def test_an_unknown_gpu_is_named_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"gpu: 'b200' is not one of h100-nvl, .*rtx5090"):
        as_gpu("b200")


def test_large_products_take_their_flops_over_the_rate_that_is_reached() -> None:
    rate = H200.peak["fp32"] * H200.efficiencies.matrix["fp32"]
    taken = seconds("aten.mm.default", SQUARES, flops=PRODUCT, read_bytes=2**27)
    assert taken == pytest.approx(PRODUCT / rate + H200.launch_seconds)


def test_precision_decides_about_float32_products_and_operands_about_the_others() -> None:
    single = {p: seconds("aten.mm.default", SQUARES, flops=PRODUCT, precision=p) for p in PEAKS}
    half = {p: seconds("aten.mm.default", HALVES, flops=PRODUCT, precision=p) for p in PEAKS}
    assert single["tf32"] < single["fp32"] == single["bf16"]
    assert half["tf32"] == half["fp32"] == half["bf16"] < single["tf32"]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_no_gpu_is_slower_for_being_allowed_less_precision(gpu: GpuSpec) -> None:
    single, tf32 = (
        seconds("aten.mm.default", SQUARES, flops=PRODUCT, precision=precision, gpu=gpu)
        for precision in ("fp32", "tf32")
    )
    assert seconds("aten.mm.default", HALVES, flops=PRODUCT, gpu=gpu) < tf32 <= single


PEAKS = ("fp32", "tf32", "bf16")


def test_tf32_leaves_attention_and_other_kernels_alone() -> None:
    q = tensor([2, 8, 1024, 64])
    for op, flops in (
        ("aten._scaled_dot_product_efficient_attention.default", 10**12),
        ("aten.add.Tensor", 0),
    ):
        taken = {
            precision: seconds(op, [q, q, q], flops=flops, read_bytes=10**9, precision=precision)
            for precision in PEAKS
        }
        assert len(set(taken.values())) == 1


def test_causal_attention_takes_half_as_long() -> None:
    q = tensor([2, 8, 1024, 64], "bfloat16")
    op = "aten._scaled_dot_product_flash_attention.default"
    full, causal = (
        seconds(op, [q, q, q, {"float": 0.0}, is_causal], flops=10**12) - H200.launch_seconds
        for is_causal in (False, True)
    )
    assert causal == pytest.approx(full / 2)


def test_memory_bound_kernels_take_their_bytes_over_the_rate_that_is_reached() -> None:
    x = tensor([2**20])
    share = H200.efficiencies
    moved: dict[str, Any] = {"read_bytes": 2**33, "written_bytes": 2**32}
    for op, args, reached in (
        ("aten.add.Tensor", [x, x], share.memory),
        ("aten.add.Tensor", [x, tensor([1])], share.memory_if_uneven),
        ("aten.mul.Tensor", [x, tensor([2**20], "bfloat16")], share.memory_if_uneven),
        ("aten.add.Tensor", [x, tensor([])], share.memory),
        ("aten._to_copy.default", [x], share.memory_if_uneven),
        ("aten._fused_adamw_.default", [[x, x], [x, x]], share.memory_of_lists),
    ):
        expected = (2**33 + 2**32) / (H200.memory_rate * reached) + H200.launch_seconds
        assert seconds(op, args, **moved) == pytest.approx(expected)


def test_a_kernel_takes_a_launch_at_least_and_no_work_takes_no_time() -> None:
    assert seconds("aten.add.Tensor", [tensor([1])], read_bytes=4) > H200.launch_seconds
    assert seconds("aten.empty.memory_format", [[4]]) == 0
    assert seconds("mine.unknown.default", [{"opaque": "Handle"}]) == H200.launch_seconds


def test_collectives_cross_the_link() -> None:
    x = tensor([2**20])
    gathered = seconds("c10d.allgather_.default", [x], read_bytes=2**30, written_bytes=2**33)
    assert gathered == pytest.approx(2**33 / H200.link_rate + H200.launch_seconds)
    reduced = seconds("c10d.allreduce_.default", [x], read_bytes=2**30, written_bytes=2**30)
    assert reduced == pytest.approx(2**31 / H200.link_rate + H200.launch_seconds)
    assert seconds("_c10d_functional.wait_tensor.default", [x]) == 0


def test_the_parts_of_a_compiled_region_follow_one_another() -> None:
    region = [{"graph": [["input"]]}, [*HALVES]]
    op = "higher_order.inductor_compiled_code"
    both = seconds(op, region, flops=PRODUCT, read_bytes=2**33)
    products, memory = seconds(op, region, flops=PRODUCT), seconds(op, region, read_bytes=2**33)
    assert both == pytest.approx(products + memory - H200.launch_seconds)


def test_a_slower_gpu_is_slower() -> None:
    times = {
        name: seconds("aten.mm.default", HALVES, flops=PRODUCT, gpu=GPUS[name])
        for name in ("h100-sxm", "a100-80", "rtx4090")
    }
    assert times["h100-sxm"] < times["a100-80"] < times["rtx4090"]
