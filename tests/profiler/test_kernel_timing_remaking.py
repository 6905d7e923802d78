"""Calls made again from their description: the same shapes, valid values, and they run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from teraio.errors import InputError
from teraio.profiler.costs.arguments import tensors_of
from teraio.profiler.costs.calls import describe_arguments
from teraio.profiler.costs.regions import REGION, build_graph, describe_region, make_region
from teraio.profiler.costs.remaking import MadeCall, find_operator, make_call
from teraio.profiler.operators import nested_tensors

aten = torch.ops.aten


def remade(func: Any, *args: Any, **kwargs: Any) -> MadeCall:
    """The call, described and made again."""
    return make_call(str(func), describe_arguments(args, kwargs), "cpu")


def looks(values: Any) -> list[tuple[Any, ...]]:
    """Type, shape and strides of all tensors."""
    return [(t.dtype, t.shape, t.stride()) for t in nested_tensors(values)]


x, y = torch.randn(4, 8), torch.randn(8, 4)
ids = torch.tensor([3, 1])
ADAM = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
WEIGHTS = [torch.randn(3), torch.randn(2, 2)]
STEPS = [torch.tensor(1.0), torch.tensor(1.0)]
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
IMAGE, FILTER = torch.randn(1, 2, 6, 6), torch.randn(4, 2, 3, 3)

CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (x, x.t()), {}),
    (aten.addmm.default, (torch.randn(4), x, y), {}),
    (aten.bmm.default, (torch.randn(2, 4, 8)[:, :, ::2], torch.randn(2, 4, 3)), {}),
    (aten.add.Tensor, (x, x[0].expand(4, 8)), {"alpha": 2}),
    (aten.mul.Tensor, (x, 0.5), {}),
    (aten.add_.Tensor, (x.clone(), x), {}),
    (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    (aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
    (aten.cat.default, ([x, x], -1), {}),
    (aten.sum.dim_IntList, (x, [0], True), {}),
    (aten.empty.memory_format, ([4, 4],), {"device": torch.device("cpu"), "pin_memory": False}),
    (aten.randint.low, (0, 10, [4]), {"device": torch.device("cpu")}),
    (aten.embedding.default, (torch.randn(5, 3), ids), {}),
    (aten.embedding_dense_backward.default, (torch.randn(2, 3), ids, 5, -1, False), {}),
    (aten.nll_loss_forward.default, (torch.randn(2, 5), ids, None, 1, -100), {}),
    (
        aten.nll_loss_backward.default,
        (torch.tensor(1.0), torch.randn(2, 5), ids, None, 1, -100, torch.tensor(2.0)),
        {},
    ),
    (aten.gather.default, (torch.randn(2, 5), 1, ids[:, None]), {}),
    (aten.scatter_add.default, (torch.zeros(5), 0, ids, torch.randn(2)), {}),
    (aten.index_select.default, (torch.randn(5, 3), 0, ids), {}),
    (aten.index.Tensor, (torch.randn(5, 4), [None, ids]), {}),
    (aten.index_put.default, (torch.zeros(5, 3), [ids], torch.randn(2, 3)), {}),
    (aten.index_add.default, (torch.zeros(5, 3), 0, ids, torch.randn(2, 3)), {}),
    (aten.native_layer_norm.default, (x, [8], torch.ones(8), torch.zeros(8), 1e-5), {}),
    (aten.native_dropout_backward.default, (x, x > 0, 2.0), {}),
    (aten._log_softmax.default, (x, 1, False), {}),
    (aten.convolution.default, (IMAGE, FILTER, None, *CONVOLUTION), {}),
    (aten._foreach_add_.Scalar, ([torch.tensor(1.0), torch.tensor(2.0)], 1), {}),
    (aten._fused_adamw_.default, (WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS, [], STEPS), ADAM),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CASES, ids=[str(func) for func, *_ in CASES])
def test_a_call_made_again_looks_alike_and_runs(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    call = remade(func, *args, **kwargs)
    assert call.func is func
    assert looks([*call.args, *call.kwargs.values()]) == looks([*args, *kwargs.values()])
    torch.manual_seed(0)
    result = call()
    assert looks(result) == looks(func(*args, **kwargs))
    if func is not aten.empty.memory_format:
        assert all(bool(t.isfinite().all()) for t in nested_tensors(result))


def test_tensors_that_shared_a_storage_share_one_again() -> None:
    buffer = torch.randn(16)
    call = remade(aten.add.Tensor, buffer[:8], buffer[8:])
    one, other = call.args
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
    apart = remade(aten.add.Tensor, x, x.clone()).args
    assert apart[0].untyped_storage()._cdata != apart[1].untyped_storage()._cdata


def test_data_is_neither_zero_nor_alike() -> None:
    first, second = remade(aten.add.Tensor, x, x.clone()).args
    assert first.std() > 0.5
    assert not torch.equal(first, second)
    assert remade(aten.relu.default, x.bfloat16()).args[0].float().std() > 0.5


def test_a_scalar_tensor_is_one_and_moments_are_positive() -> None:
    _, _, _, squares, _, steps = remade(
        aten._fused_adamw_.default, WEIGHTS, WEIGHTS, WEIGHTS, [torch.ones(9)], [], STEPS, **ADAM
    ).args
    assert all(bool((s >= 0).all()) for s in squares)
    assert [float(s) for s in steps] == [1.0, 1.0]


def test_a_storage_seen_as_two_types_is_one() -> None:
    data = torch.zeros(4, dtype=torch.int64)
    call = remade(aten.copy_.default, data.view(torch.uint8)[:8], data[:1])
    assert looks(call.args) == looks((data.view(torch.uint8)[:8], data[:1]))


def test_eight_bit_floats_are_drawn() -> None:
    drawn = remade(aten._to_copy.default, x.to(torch.float8_e4m3fn), dtype=torch.float32).args[0]
    assert drawn.dtype == torch.float8_e4m3fn
    assert drawn.float().std() > 0.5


def attention(dropout: float) -> tuple[Any, tuple[Any, ...]]:
    """The CPU's backward attention with what its forward pass returns."""
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward(q, k, v, dropout, True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward, (torch.randn_like(out), q, k, v, out, logsumexp, dropout, True)


def test_attention_goes_backward_from_a_true_forward_pass() -> None:
    func, args = attention(0.0)
    call = remade(func, *args)
    _, q, k, v, out, logsumexp, *_ = call.args
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    torch.testing.assert_close([out, logsumexp], list(forward(q, k, v, 0.0, True)))
    assert all(bool(g.isfinite().all()) for g in call())


def test_every_gpu_attention_finds_its_forward_results_by_name() -> None:
    from teraio.profiler.costs.remaking import _RESULT_NAMES

    for family in ("flash", "efficient", "cudnn"):
        forward = getattr(aten, f"_scaled_dot_product_{family}_attention").default
        backward = getattr(aten, f"_scaled_dot_product_{family}_attention_backward").default
        given = {argument.name for argument in backward._schema.arguments}
        returned = {result.name for result in forward._schema.returns}
        needed = given & set(_RESULT_NAMES)
        assert {"out", "logsumexp", "philox_seed", "philox_offset"} <= needed
        for name in needed:
            assert returned & set(_RESULT_NAMES[name]), (family, name)


def test_groups_end_where_the_rows_end() -> None:
    left, right = torch.empty(12, 8).bfloat16(), torch.empty(3, 8, 4).bfloat16()
    offsets = torch.tensor([4, 8, 12], dtype=torch.int32)
    made = remade(aten._grouped_mm.default, left, right, offsets).args[2]
    assert made.tolist() == [4, 8, 12]
    assert made.dtype == torch.int32


def test_what_cannot_be_made_again_is_named() -> None:
    with pytest.raises(InputError, match=r"aten\.no_such_operator\.default: this torch has no"):
        make_call("aten.no_such_operator.default", '{"args":[],"kwargs":{}}', "cpu")
    with pytest.raises(InputError, match=r"aten\.relu\.default: self is a sparse_coo tensor"):
        remade(aten.relu.default, torch.eye(3).to_sparse())
    with pytest.raises(InputError, match="self: this torch has no dtype 'load'"):
        make_call("aten.relu.default", '{"args":[{"dtype":"load"}],"kwargs":{}}', "cpu")
    assert find_operator("aten.mm.default") is aten.mm.default


class Block(torch.nn.Module):
    """A product, a slice and a reduction: several results, one of them an input."""

    def forward(self, value: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = aten.mm.default(value, weight)
        largest, places = aten.max.dim(aten.relu.default(product), 1)
        return largest, aten.add.Tensor(largest, 0.5), value, places


def traced(value: torch.Tensor, weight: torch.Tensor) -> torch.fx.GraphModule:
    """The block as a graph that knows the shapes within, as compilers hand it over."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: torch.fx.GraphModule = make_fx(Block(), tracing_mode="fake")(value, weight)
    return graph


def test_a_region_is_described_and_built_again() -> None:
    outputs = Block()(x, y)
    described = describe_region(traced(x, y), [x, y], outputs)
    assert described is not None
    assert described.work.flops == 2 * 4 * 8 * 4
    # x and y in; two results of 4 floats and 4 integers out; x passes through.
    assert described.work[1:] == (4 * 64, 4 * 8 + 4 * 8)
    region, inputs = json.loads(described.arguments)["args"]
    assert [shape for _, shape, *_ in tensors_of(inputs)] == [[4, 8], [8, 4]]
    again = build_graph(region["graph"], "cpu")(x, y)
    torch.testing.assert_close(list(again), list(outputs))


def test_a_region_that_holds_other_things_than_operators_is_not_described() -> None:
    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("value", torch.ones(4))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.add(given, self.get_buffer("value"))

    graph = torch.fx.symbolic_trace(Constant())
    assert describe_region(graph, [torch.ones(4)], [torch.ones(4)]) is None
    with pytest.raises(InputError, match="is not described"):
        make_region('{"args":[{"opaque":"CompiledFxGraph"},[]],"kwargs":{}}', "cpu")


def test_a_file_cannot_make_a_region_call_anything_but_operators() -> None:
    for name in ("os.system", "builtins.exec", "aten.__class__.mro", "aten.mm.__call__"):
        graph = [["call", name, ["true"], {}], ["output", [{"node": 0}]]]
        with pytest.raises(InputError, match="this torch has no such operator"):
            build_graph(graph, "cpu")


def test_the_operator_of_regions_is_that_of_fake_traces() -> None:
    from teraio.profiler.fake.compiled_regions import _run_region
    from teraio.profiler.operators import describe_operator

    assert describe_operator(_run_region).name == REGION
