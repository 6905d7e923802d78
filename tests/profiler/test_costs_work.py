"""FLOPs and bytes of single operators, reckoned by hand beside each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from teraio.profiler.costs.work import Work, distinct_elements, moved_bytes_of, work_of
from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import describe_operator

aten = torch.ops.aten
F = 4  # bytes of a float32
L = 8  # bytes of an int64


def work(func: Any, *args: Any, **kwargs: Any) -> Work:
    """What is counted for an operator call on real tensors."""
    call = KernelCall(func, describe_operator(func), args, kwargs)
    return work_of(call, func(*args, **kwargs))


x44, x48, x82 = torch.randn(4, 4), torch.randn(4, 8), torch.randn(8, 2)


def test_matrix_products() -> None:
    assert work(aten.mm.default, x48, x82) == Work(2 * 4 * 8 * 2, (32 + 16) * F, 8 * F)
    bias = torch.randn(2)
    assert work(aten.addmm.default, bias, x48, x82) == Work(128, (2 + 32 + 16) * F, 8 * F)
    left, right = torch.randn(3, 4, 8), torch.randn(3, 8, 2)
    assert work(aten.bmm.default, left, right) == Work(3 * 128, 3 * (32 + 16) * F, 3 * 8 * F)


def test_a_storage_read_twice_counts_once() -> None:
    assert work(aten.mul.Tensor, x44, x44) == Work(0, 16 * F, 16 * F)
    assert work(aten.mul.Tensor, x44, torch.randn(4, 4)) == Work(0, 32 * F, 16 * F)


def test_an_expanded_dimension_counts_once() -> None:
    row = torch.randn(4)
    assert work(aten.add.Tensor, x44, row.expand(4, 4)) == Work(0, (16 + 4) * F, 16 * F)
    assert distinct_elements(torch.randn(3, 1).expand(3, 5)) == 3
    assert distinct_elements(torch.empty(0, 5)) == 0


def test_only_what_a_view_shows_counts() -> None:
    assert work(aten.relu.default, x48[:, :2]) == Work(0, 8 * F, 8 * F)


def test_views_that_overlap_count_no_more_than_their_storage() -> None:
    x = torch.randn(16)
    assert work(aten.cat.default, [x[:12], x[4:]]) == Work(0, 16 * F, 24 * F)


def test_working_in_place_reads_and_writes() -> None:
    assert work(aten.add_.Tensor, torch.randn(4, 4), x44) == Work(0, 32 * F, 16 * F)
    assert work(aten.copy_.default, torch.randn(4, 4), x44) == Work(0, 16 * F, 16 * F)
    assert work(aten.zero_.default, torch.randn(4, 4)) == Work(0, 0, 16 * F)


@pytest.mark.parametrize("func", [aten.empty_like.default, aten.detach.default])
def test_operators_that_launch_nothing_do_no_work(func: Any) -> None:
    assert work(func, x44) == Work(0, 0, 0)


def test_handing_out_memory_or_a_number_is_no_work() -> None:
    assert work(aten.empty.memory_format, [4, 4]) == Work(0, 0, 0)
    assert work(aten._local_scalar_dense.default, torch.randn(())) == Work(0, 0, 0)


def test_a_model_of_shape_alone_is_not_read() -> None:
    assert work(aten.zeros_like.default, x44) == Work(0, 0, 16 * F)
    assert work(aten.new_zeros.default, x44, [2]) == Work(0, 0, 2 * F)


def test_looking_rows_up_reads_these_rows() -> None:
    weight, rows = torch.randn(100, 8), torch.tensor([1, 5, 7])
    assert work(aten.embedding.default, weight, rows) == Work(0, 24 * F + 3 * L, 24 * F)
    assert work(aten.index_select.default, weight, 0, rows) == Work(0, 24 * F + 3 * L, 24 * F)
    assert work(aten.index.Tensor, weight, [rows]) == Work(0, 24 * F + 3 * L, 24 * F)
    columns = torch.zeros(100, 1, dtype=torch.int64)
    assert work(aten.gather.default, weight, 1, columns) == Work(0, 100 * F + 100 * L, 100 * F)


def test_putting_rows_writes_these_rows() -> None:
    rows, values = torch.tensor([1, 5, 7]), torch.randn(3, 8)
    done = work(aten.index_put_.default, torch.randn(100, 8), [rows], values)
    # What is put in place is counted as read, too: the operator may accumulate.
    assert done == Work(0, 24 * F + 24 * F + 3 * L, 24 * F)


def test_the_loss_looks_at_one_logit_of_each_row_and_its_gradient_at_none() -> None:
    logits, target = torch.randn(5, 10), torch.tensor([1, 2, 3, 4, 5])
    forward = work(aten.nll_loss_forward.default, logits, target, None, 1, -100)
    assert forward == Work(0, 5 * F + 5 * L, 2 * F)
    one, total = torch.ones(()), torch.tensor(5.0)
    backward = work(aten.nll_loss_backward.default, one, logits, target, None, 1, -100, total)
    assert backward == Work(0, 2 * F + 5 * L, 50 * F)


def test_fused_adamw_reads_gradients_and_does_not_write_them() -> None:
    lists = [[torch.ones(16)] for _ in range(4)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    done = work(
        aten._fused_adamw_.default,
        *lists,
        [],
        [torch.ones(())],
        amsgrad=False,
        maximize=False,
        **options,
    )
    assert done == Work(0, 4 * 16 * F + F, 3 * 16 * F)


def test_convolutions_count_as_torch_counts_them() -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    args = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert work(aten.convolution.default, *args).flops == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)


def attention_inputs(queries: int, keys: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    """Query, key and value of width 16, batch 2."""
    shapes = [(heads, queries), (key_heads, keys), (key_heads, keys)]
    return [torch.randn(2, h, s, 16) for h, s in shapes]


def test_attention_on_a_cpu_counts_two_products_and_five() -> None:
    q, k, v = attention_inputs(32, 64, 4, 4)
    product = 2 * 2 * 4 * 32 * 64 * 16
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert work(forward, q, k, v).flops == 2 * product
    out, logsumexp = forward(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    done = work(backward, torch.randn_like(out), q, k, v, out, logsumexp, 0.0, False)
    assert done.flops == 5 * product


def test_attention_on_a_gpu_counts_as_torch_counts_it() -> None:
    q, k, v = (x.to("meta") for x in attention_inputs(32, 64, 4, 4))
    forward = aten._scaled_dot_product_efficient_attention.default
    with FlopCounterMode(display=False) as counter:
        result = forward(q, k, v, None, True)
    call = KernelCall(forward, describe_operator(forward), (q, k, v, None, True), {})
    assert work_of(call, result).flops == counter.get_total_flops()


def test_queries_that_share_keys_each_count() -> None:
    q, k, v = (x.to("meta", torch.bfloat16) for x in attention_inputs(32, 32, 8, 2))
    forward = aten._scaled_dot_product_flash_attention.default
    call = KernelCall(forward, describe_operator(forward), (q, k, v), {})
    assert work_of(call, (torch.empty_like(q),)).flops == 2 * (2 * 2 * 8 * 32 * 32 * 16)


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((6, 8), (3, 8, 2), 2 * 6 * 8 * 2),
        ((3, 4, 8), (8, 6), 2 * 4 * 8 * 6),
        ((4, 9), (9, 2), 2 * 4 * 9 * 2),
        ((3, 4, 8), (3, 8, 2), 2 * 3 * 4 * 8 * 2),
    ],
)
def test_grouped_products_count_each_row_once(
    left: tuple[int, ...], right: tuple[int, ...], flops: int
) -> None:
    from teraio.profiler.costs.work import flops_of

    args = [torch.empty(left, device="meta"), torch.empty(right, device="meta")]
    assert flops_of("_grouped_mm", aten._grouped_mm.default, args, {}, None) == flops


def test_a_training_step_has_the_flops_that_torch_counts() -> None:
    from teraio.profiler.costs.calls import CallBook
    from teraio.profiler.dispatch import KernelMode

    class Counter(KernelMode):
        book = CallBook()
        flops = 0

        def _find_births(self, call: KernelCall, result: Any) -> None:
            super()._find_births(call, result)
            self.flops += work_of(call, result).flops

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    with FlopCounterMode(display=False) as theirs:
        model(torch.randn(5, 8)).sum().backward()
    with Counter() as ours:
        model(torch.randn(5, 8)).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_a_region_moves_its_inputs_and_its_new_outputs() -> None:
    x, y = torch.randn(4), torch.randn(8)
    assert moved_bytes_of([x, y, 3], [x, torch.randn(2), None]) == (12 * F, 2 * F)
