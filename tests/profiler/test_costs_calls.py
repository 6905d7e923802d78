"""Which calls are the same, and how one is written down."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from teraio.profiler.costs.arguments import (
    base_name,
    has_opaque_part,
    is_causal,
    mask_arguments,
    product_precision,
    tensors_of,
)
from teraio.profiler.costs.calls import CallBook, describe_arguments
from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import describe_operator

aten = torch.ops.aten


def number(book: CallBook, func: Any, *args: Any, **kwargs: Any) -> int:
    """Call the operator and have the call numbered, as a recorder does."""
    call = KernelCall(func, describe_operator(func), args, kwargs)
    return book.number(call, func(*args, **kwargs))


def test_kernels_of_equal_shapes_are_one_call() -> None:
    book = CallBook()
    first = number(book, aten.mm.default, torch.randn(4, 8), torch.randn(8, 2))
    assert number(book, aten.mm.default, torch.randn(4, 8), torch.randn(8, 2)) == first == 0
    assert len(book) == 1


@pytest.mark.parametrize(
    "other",
    [
        (torch.randn(4, 8), torch.randn(8, 3)),  # shape
        (torch.randn(4, 8), torch.randn(2, 8).t()),  # strides
        (torch.randn(4, 8).double(), torch.randn(8, 2).double()),  # type
    ],
)
def test_kernels_that_differ_in_a_tensor_are_two_calls(other: tuple[torch.Tensor, ...]) -> None:
    book = CallBook()
    number(book, aten.mm.default, torch.randn(4, 8), torch.randn(8, 2))
    assert number(book, aten.mm.default, *other) == 1


def test_reading_one_storage_twice_is_another_call_than_reading_two() -> None:
    book, x = CallBook(), torch.randn(4)
    number(book, aten.mul.Tensor, x, torch.randn(4))
    assert number(book, aten.mul.Tensor, x, x) == 1


def test_integers_and_truth_values_distinguish_and_nonzero_floats_do_not() -> None:
    book, x = CallBook(), torch.randn(4)
    calls = [number(book, aten.mul.Tensor, x, value) for value in (2, 3, 0.5, 0.25, 0.0, True, 1)]
    assert calls == [0, 1, 2, 2, 3, 4, 5]


def test_a_call_is_described_in_the_form_that_the_module_tells() -> None:
    text = describe_arguments(
        (torch.zeros(2, 3, dtype=torch.bfloat16), [1, 2], 0.5, None, True),
        {"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided},
    )
    assert json.loads(text) == {
        "args": [{"tensor": ["bfloat16", [2, 3], [3, 1], 0]}, [1, 2], {"float": 0.5}, None, True],
        "kwargs": {
            "dtype": {"dtype": "float32"},
            "device": {"device": "cpu"},
            "layout": {"layout": "strided"},
        },
    }


def test_tensors_of_one_storage_bear_its_number() -> None:
    x = torch.zeros(4, 4)
    described = json.loads(describe_arguments((x, torch.zeros(4), x[1], x.t()), {}))
    assert [storage for *_, storage in tensors_of(described)] == [0, 1, 0, 0]


def test_the_first_value_of_a_float_is_kept_and_infinity_is_text() -> None:
    book = CallBook()
    number(book, aten.mul.Tensor, torch.randn(4), 0.5)
    number(book, aten.mul.Tensor, torch.randn(4), 0.25)
    assert '{"float":0.5}' in book.table().arguments[0]
    assert describe_arguments((float("-inf"),), {}) == '{"args":[{"float":"-inf"}],"kwargs":{}}'


def test_what_json_cannot_tell_is_opaque() -> None:
    for value in (torch.eye(3).to_sparse(), object(), torch.Generator()):
        described = json.loads(describe_arguments((value,), {}))
        assert has_opaque_part(described)
    assert not has_opaque_part(json.loads(describe_arguments((torch.eye(3), [1.0]), {})))


def test_a_table_holds_operators_in_order_with_their_work() -> None:
    book = CallBook()
    number(book, aten.mm.default, torch.randn(4, 8), torch.randn(8, 2))
    number(book, aten.relu.default, torch.randn(16))
    table = book.table()
    assert table.op.tolist() == ["aten.mm.default", "aten.relu.default"]
    assert table.flops.tolist() == [2 * 4 * 8 * 2, 0]
    assert table.read_bytes.tolist() == [4 * (32 + 16), 64]
    assert table.written_bytes.tolist() == [4 * 8, 64]


def test_fake_and_real_tensors_are_described_alike() -> None:
    real, fake = CallBook(), CallBook()
    number(real, aten.mm.default, torch.randn(4, 8), torch.randn(2, 8).t())
    with FakeTensorMode():
        number(fake, aten.mm.default, torch.randn(4, 8), torch.randn(2, 8).t())
    assert real.table().equals(fake.table())


def test_masking_forgets_float_values_and_devices_and_is_done_once() -> None:
    texts = [
        describe_arguments((value,), {"device": torch.device(device)})
        for value, device in ((0.5, "cpu"), (0.25, "meta"))
    ]
    masked = [mask_arguments(text) for text in texts]
    assert masked[0] == masked[1] == mask_arguments(masked[0])
    zero = mask_arguments(describe_arguments((0.0,), {"device": torch.device("cpu")}))
    assert zero == mask_arguments(zero) != masked[0]


def test_tf32_concerns_products_of_float32_alone() -> None:
    single = describe_arguments((torch.zeros(2, 2), torch.zeros(2, 2)), {})
    half = describe_arguments((torch.zeros(2, 2).bfloat16(), torch.zeros(2, 2).bfloat16()), {})
    assert product_precision("aten.mm.default", single, "tf32") == "tf32"
    assert product_precision("aten.mm.default", single, "fp32") == ""
    assert product_precision("aten.mm.default", half, "tf32") == ""
    assert product_precision("aten.add.Tensor", single, "tf32") == ""


def test_causal_attention_is_recognised_by_position_and_by_name() -> None:
    op = "aten._scaled_dot_product_flash_attention.default"
    assert base_name(op) == "_scaled_dot_product_flash_attention"
    q = torch.zeros(1, 1, 2, 8)
    for args, kwargs, expected in (
        ((q, q, q, 0.0, True), {}, True),
        ((q, q, q), {"is_causal": True}, True),
        ((q, q, q), {}, False),
    ):
        assert is_causal(op, json.loads(describe_arguments(args, kwargs))) is expected
    assert not is_causal("aten.mm.default", {"args": [1, 1, 1, 1, True], "kwargs": {}})


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "flash_for_cpu"])
@pytest.mark.parametrize("direction", ["", "_backward"])
def test_positions_of_the_causal_flag_are_those_of_torch(name: str, direction: str) -> None:
    from teraio.profiler.costs.arguments import IS_CAUSAL_POSITION

    family, _, suffix = name.partition("_")
    operator = f"_scaled_dot_product_{family}_attention{'_' + suffix if suffix else ''}{direction}"
    names = [argument.name for argument in getattr(aten, operator).default._schema.arguments]
    assert names.index("is_causal") == IS_CAUSAL_POSITION[operator]
