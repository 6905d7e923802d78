"""Compiled regions as calls: their graph as JSON, so that another machine can compile and time it.

A graph is a list of nodes in order: ``["input"]``, ``["call", operator, args, kwargs]`` or
``["output", values]``, where ``{"node": number}`` stands for an earlier node's result and all else
is written as in :mod:`teraio.profiler.costs.calls`. Only operators of ``torch.ops`` and picking one
of several results can be called, so reading a file runs no code of its author's.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from teraio.errors import InputError
from teraio.profiler.costs.arguments import base_name, canonical_json
from teraio.profiler.costs.calls import DescribedCall, describe_value
from teraio.profiler.costs.remaking import MadeCall, TensorMaker, find_operator, plain_value
from teraio.profiler.costs.work import Work, flops_of, moved_bytes_of

REGION = "higher_order.inductor_compiled_code"
"""What the operator of compiled regions is called."""

_PICK = "getitem"


def describe_region(
    graph: GraphModule, inputs: Sequence[Any], outputs: Sequence[Any]
) -> DescribedCall | None:
    """Arguments and work of a region; None if its graph holds more than calls of operators.

    Bytes are those of inputs and outputs: what the region makes and uses up within is unknown.
    """
    nodes: dict[Node, int] = {}
    described: list[list[Any]] = []
    for node in graph.graph.nodes:
        text = _describe_node(node, nodes)
        if text is None:
            return None
        nodes[node] = len(described)
        described.append(text)
    storages: dict[int, int] = {}
    arguments = {
        "args": [{"graph": described}, [describe_value(value, storages) for value in inputs]],
        "kwargs": {},
    }
    read_bytes, written_bytes = moved_bytes_of(inputs, outputs)
    work = Work(sum(_flops(node) for node in nodes), read_bytes, written_bytes)
    return DescribedCall(canonical_json(arguments), work)


def _describe_node(node: Node, nodes: dict[Node, int]) -> list[Any] | None:
    if node.op == "placeholder":
        return ["input"]
    if node.op not in {"call_function", "output"}:
        return None
    values = [_describe(value, nodes) for value in node.args]
    if node.op == "output":
        return ["output", values[0]]
    if node.target is operator.getitem:
        return ["call", _PICK, values, {}]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    named = {name: _describe(value, nodes) for name, value in node.kwargs.items()}
    return ["call", str(node.target), values, named]


def _describe(value: Any, nodes: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": nodes[value]}
    if isinstance(value, (list, tuple)):
        return [_describe(item, nodes) for item in value]
    return describe_value(value, {})


def _flops(node: Node) -> int:
    """FLOPs of one node, by the shapes that the compiler has noted."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    args = map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = map_arg(node.kwargs, lambda n: n.meta.get("val"))
    name = base_name(str(node.target))
    return flops_of(name, node.target, args, kwargs, node.meta.get("val"))


def make_region(arguments: str, device: str) -> MadeCall:
    """A compiled region with random inputs. Raises InputError if it is not described whole."""
    region, inputs = json.loads(arguments)["args"]
    if "graph" not in region:
        raise InputError(f"{REGION}: is not described, so it cannot be made again")
    maker = TensorMaker({"args": inputs}, device)
    values = [
        maker.tensor(value["tensor"])
        if isinstance(value, dict) and "tensor" in value
        else plain_value(value, device, REGION)
        for value in inputs
    ]
    return MadeCall(_compiled(canonical_json(region["graph"]), device), tuple(values), {})


@lru_cache(maxsize=64)
def _compiled(graph: str, device: str) -> Any:
    return torch.compile(build_graph(json.loads(graph), device), fullgraph=True, dynamic=False)


def build_graph(described: Sequence[Any], device: str) -> GraphModule:
    """The graph of a region, for ``device``. Raises InputError for an unknown operator."""
    graph = Graph()
    nodes: list[Node] = []

    def value_of(value: Any) -> Any:
        if isinstance(value, list):
            return [value_of(item) for item in value]
        if isinstance(value, dict) and "node" in value:
            return nodes[value["node"]]
        return plain_value(value, device, REGION)

    for kind, *content in described:
        if kind == "input":
            nodes.append(graph.placeholder(f"input_{len(nodes)}"))
        elif kind == "output":
            nodes.append(graph.output(tuple(value_of(content[0]))))
        else:
            name, args, kwargs = content
            target = operator.getitem if name == _PICK else find_operator(name)
            named = {key: value_of(value) for key, value in kwargs.items()}
            nodes.append(graph.call_function(target, tuple(value_of(args)), named))
    return GraphModule(torch.nn.Module(), graph)
