"""Synthetic traces: a Llama-like training step of any length, with roofline durations.

One iteration is M micro-batches of forward and backward through L layers, gradients accumulated,
then AdamW parameter by parameter. Every operator takes max(FLOPs / compute rate, bytes / memory
rate, launch time). Sizes are those of single precision; nothing is random.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

_BYTES_PER_ELEMENT = 4
_ROUNDING_BYTES = 512


@dataclass(frozen=True)
class SyntheticModel:
    """A decoder-only transformer and the machine that runs it; sizes in elements."""

    layers: int = 32
    micro_batches: int = 57
    hidden: int = 4096
    intermediate: int = 14336
    key_value: int = 1024
    heads: int = 32
    vocabulary: int = 128256
    micro_batch_size: int = 2
    sequence: int = 4096
    flops_per_second: float = 55e12
    memory_bytes_per_second: float = 3e12
    launch_seconds: float = 4e-6

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_size * self.sequence


HUNDRED_THOUSAND_KERNELS = SyntheticModel()
"""About 8 billion parameters and just above 100,000 kernels."""


@dataclass
class _Recorder:
    """Collects kernels and storages; a storage that is no parameter dies at its last access."""

    model: SyntheticModel
    kernels: list[tuple[Any, ...]] = field(default_factory=list)
    accesses: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    storages: list[list[Any]] = field(default_factory=list)
    phase: str = "forward"
    micro_batch: int | None = 0

    def persistent(self, name: str, elements: int, kind: str) -> int:
        self.storages.append([elements * _BYTES_PER_ELEMENT, kind, name, None, None])
        return len(self.storages) - 1

    def run(
        self,
        op: str,
        reads: Sequence[int],
        outputs: Sequence[tuple[int, str]] = (),
        updates: Sequence[int] = (),
        flops: float = 0.0,
    ) -> list[int]:
        """One kernel; ``outputs`` are (elements, kind) of new storages, whose ids return."""
        kernel = len(self.kernels)
        created = []
        for elements, kind in outputs:
            self.storages.append([elements * _BYTES_PER_ELEMENT, kind, "", kernel, kernel])
            created.append(len(self.storages) - 1)
        touched = sorted({*reads, *updates, *created})
        for storage in touched:
            written = storage in created or storage in updates
            self.accesses.append((kernel, storage, storage not in created, written))
            if self.storages[storage][3] is not None:
                self.storages[storage][4] = kernel
        moved_bytes = sum(self.storages[storage][0] for storage in touched)
        model = self.model
        seconds = max(
            flops / model.flops_per_second,
            moved_bytes / model.memory_bytes_per_second,
            model.launch_seconds,
        )
        signature = zlib.crc32(f"{op}:{moved_bytes}".encode())
        row = (kernel, op, None, self.phase, self.micro_batch, seconds, 0.0, 0, signature, 0)
        self.kernels.append((*row, None, None, None))
        return created

    def trace(self) -> Trace:
        ordinals: dict[int, int] = {}
        rows = []
        for index, (nbytes, kind, name, birth, death) in enumerate(self.storages):
            ordinal = None
            if birth is not None:
                ordinal = ordinals.get(birth, 0)
                ordinals[birth] = ordinal + 1
            allocated = -(-nbytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
            identity = (name, birth, ordinal, death)
            rows.append((index, nbytes, allocated, kind, *identity, "float32", True))
        metadata = TraceMetadata(
            source="fake",
            device="cuda",
            allocator_rounding_bytes=_ROUNDING_BYTES,
            micro_batches=self.model.micro_batches,
            model=f"synthetic-{self.model.layers}-layers",
            optimizer="AdamW",
            optimizer_implementation="for-loop",
            known_differences=["durations from a roofline", "operators of a simplified decoder"],
        )
        return Trace(
            kernels=Kernels.from_rows(self.kernels),
            storages=Storages.from_rows(rows),
            accesses=Accesses.from_rows(self.accesses),
            metadata=metadata,
        )


def synthetic_trace(model: SyntheticModel = HUNDRED_THOUSAND_KERNELS) -> Trace:
    """One training iteration of ``model``; see the module's text."""
    recorder = _Recorder(model)
    parameters = _parameters(recorder)
    states = {
        name: [recorder.persistent(f"{name}.{part}", size, "optimizer_state") for part in "mv"]
        for name, (_, size) in parameters.items()
    }
    gradients: dict[str, int] = {}
    for micro_batch in range(model.micro_batches):
        recorder.micro_batch = micro_batch
        _micro_batch(recorder, parameters, gradients)
    recorder.micro_batch, recorder.phase = None, "optimizer"
    for name, (parameter, size) in parameters.items():
        _adamw(recorder, parameter, gradients[name], states[name], size)
    return recorder.trace()


_LAYER_SIZES = ("norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down")


def _parameters(recorder: _Recorder) -> dict[str, tuple[int, int]]:
    """Storage and elements of each parameter by name, in the order of first use."""
    m = recorder.model
    sizes = {"embedding": m.vocabulary * m.hidden}
    layer = {
        "norm1": m.hidden,
        "q": m.hidden * m.hidden,
        "k": m.hidden * m.key_value,
        "v": m.hidden * m.key_value,
        "o": m.hidden * m.hidden,
        "norm2": m.hidden,
        "gate": m.hidden * m.intermediate,
        "up": m.hidden * m.intermediate,
        "down": m.hidden * m.intermediate,
    }
    for index in range(m.layers):
        sizes |= {f"{index}.{part}": layer[part] for part in _LAYER_SIZES}
    sizes |= {"norm": m.hidden, "head": m.vocabulary * m.hidden}
    return {n: (recorder.persistent(n, size, "parameter"), size) for n, size in sizes.items()}


def _micro_batch(
    recorder: _Recorder, parameters: dict[str, tuple[int, int]], gradients: dict[str, int]
) -> None:
    m, tokens = recorder.model, recorder.model.tokens
    recorder.phase = "forward"
    stream, activation = tokens * m.hidden, "activation"
    (ids,) = recorder.run("aten.empty.memory_format", [], [(2 * tokens, "input")])
    table = parameters["embedding"][0]
    (hidden,) = recorder.run("aten.embedding.default", [table, ids], [(stream, activation)])
    saved = []
    for index in range(m.layers):
        layer = {part: parameters[f"{index}.{part}"][0] for part in _LAYER_SIZES}
        hidden, kept = _forward_layer(recorder, layer, hidden)
        saved.append(kept)
    (normed,) = recorder.run(
        "aten.rms_norm.default", [hidden, parameters["norm"][0]], [(stream, activation)]
    )
    logits_size = tokens * m.vocabulary
    head, flops = parameters["head"][0], 2.0 * tokens * m.hidden * m.vocabulary
    (logits,) = recorder.run(
        "aten.mm.default", [normed, head], [(logits_size, activation)], (), flops
    )
    (loss,) = recorder.run("aten.cross_entropy_loss.default", [logits, ids], [(1, "temporary")])
    recorder.phase = "backward"
    (grad,) = recorder.run(
        "aten.nll_loss_backward.default", [loss, logits, ids], [(logits_size, "temporary")]
    )
    back = _Backward(recorder, parameters, gradients)
    back.accumulate("head", [grad, normed], flops)
    (grad,) = recorder.run("aten.mm.default", [grad, head], [(stream, "temporary")], (), flops)
    grad = back.norm("norm", grad, hidden)
    for index in reversed(range(m.layers)):
        grad = _backward_layer(back, index, saved[index], grad)
    back.accumulate("embedding", [grad, ids], 0.0)


def _forward_layer(
    recorder: _Recorder, layer: dict[str, int], hidden: int
) -> tuple[int, dict[str, int]]:
    m, tokens = recorder.model, recorder.model.tokens
    stream, narrow, wide = tokens * m.hidden, tokens * m.key_value, tokens * m.intermediate
    kept = {"input": hidden}

    def run(name: str, op: str, reads: list[int], elements: int, flops: float = 0.0) -> int:
        (kept[name],) = recorder.run(op, reads, [(elements, "activation")], (), flops)
        return kept[name]

    def project(name: str, source: int, elements: int, inner: int) -> int:
        weight = layer[name]
        return run(name, "aten.mm.default", [source, weight], elements, 2.0 * elements * inner)

    normed = run("normed1", "aten.rms_norm.default", [hidden, layer["norm1"]], stream)
    q = project("q", normed, stream, m.hidden)
    k = project("k", normed, narrow, m.hidden)
    v = project("v", normed, narrow, m.hidden)
    rotated_q = run("rotated_q", "aten.mul.Tensor", [q], stream)
    rotated_k = run("rotated_k", "aten.mul.Tensor", [k], narrow)
    attention, kept["logsumexp"] = recorder.run(
        "aten._scaled_dot_product_flash_attention.default",
        [rotated_q, rotated_k, v],
        [(stream, "activation"), (tokens * m.heads, "activation")],
        (),
        2.0 * stream * m.sequence,
    )
    kept["attention"] = attention
    projected = project("o", attention, stream, m.hidden)
    middle = run("middle", "aten.add.Tensor", [hidden, projected], stream)
    normed = run("normed2", "aten.rms_norm.default", [middle, layer["norm2"]], stream)
    gate = project("gate", normed, wide, m.hidden)
    up = project("up", normed, wide, m.hidden)
    silu = run("silu", "aten.silu.default", [gate], wide)
    product = run("product", "aten.mul.Tensor", [silu, up], wide)
    down = project("down", product, stream, m.intermediate)
    return run("output", "aten.add.Tensor", [middle, down], stream), kept


@dataclass
class _Backward:
    """The backward pass of one micro-batch: where gradients go, and the operators it repeats."""

    recorder: _Recorder
    parameters: dict[str, tuple[int, int]]
    gradients: dict[str, int]

    def accumulate(self, name: str, reads: list[int], flops: float) -> None:
        """A weight gradient: kept from the first micro-batch, added to it in later ones."""
        size = self.parameters[name][1]
        kind = "temporary" if name in self.gradients else "gradient"
        (grad,) = self.recorder.run("aten.mm.default", reads, [(size, kind)], (), flops)
        if kind == "temporary":
            self.recorder.run("aten.add_.Tensor", [grad], (), [self.gradients[name]])
        else:
            self.gradients[name] = grad

    def linear(self, name: str, grad: int, source: int, elements: int) -> int:
        """Both gradients of a projection whose input ``source`` has ``elements``."""
        weight, size = self.parameters[name]
        flops = 2.0 * self.recorder.model.tokens * size
        self.accumulate(name, [grad, source], flops)
        return self.map("aten.mm.default", [grad, weight], elements, flops)

    def norm(self, name: str, grad: int, source: int) -> int:
        """Gradients of an RMSNorm."""
        elements = self.recorder.model.tokens * self.recorder.model.hidden
        self.accumulate(name, [grad, source], 0.0)
        weight = self.parameters[name][0]
        return self.map("aten.rms_norm_backward.default", [grad, source, weight], elements)

    def map(self, op: str, reads: list[int], elements: int, flops: float = 0.0) -> int:
        """An operator with one temporary result."""
        return self.recorder.run(op, reads, [(elements, "temporary")], (), flops)[0]


def _backward_layer(back: _Backward, index: int, kept: dict[str, int], grad: int) -> int:
    m, tokens = back.recorder.model, back.recorder.model.tokens
    stream, narrow, wide = tokens * m.hidden, tokens * m.key_value, tokens * m.intermediate
    product = back.linear(f"{index}.down", grad, kept["product"], wide)
    d_up = back.map("aten.mul.Tensor", [product, kept["silu"]], wide)
    d_silu = back.map("aten.mul.Tensor", [product, kept["up"]], wide)
    d_gate = back.map("aten.silu_backward.default", [d_silu, kept["gate"]], wide)
    from_up = back.linear(f"{index}.up", d_up, kept["normed2"], stream)
    from_gate = back.linear(f"{index}.gate", d_gate, kept["normed2"], stream)
    back.recorder.run("aten.add_.Tensor", [from_gate], (), [from_up])
    middle = back.norm(f"{index}.norm2", from_up, kept["middle"])
    back.recorder.run("aten.add_.Tensor", [grad], (), [middle])
    attention = back.linear(f"{index}.o", middle, kept["attention"], stream)
    needs = ("rotated_q", "rotated_k", "v", "attention", "logsumexp")
    d_q, d_k, d_v = back.recorder.run(
        "aten._scaled_dot_product_flash_attention_backward.default",
        [attention, *(kept[name] for name in needs)],
        [(stream, "temporary"), (narrow, "temporary"), (narrow, "temporary")],
        (),
        5.0 * stream * m.sequence,
    )
    d_q = back.map("aten.mul.Tensor", [d_q], stream)
    d_k = back.map("aten.mul.Tensor", [d_k], narrow)
    total = back.linear(f"{index}.q", d_q, kept["normed1"], stream)
    for name, part in (("k", d_k), ("v", d_v)):
        more = back.linear(f"{index}.{name}", part, kept["normed1"], stream)
        back.recorder.run("aten.add_.Tensor", [more], (), [total])
    result = back.norm(f"{index}.norm1", total, kept["input"])
    back.recorder.run("aten.add_.Tensor", [middle], (), [result])
    return result


def _adamw(
    recorder: _Recorder, parameter: int, gradient: int, states: list[int], size: int
) -> None:
    first, second = states
    recorder.run("aten.mul_.Tensor", [], (), [parameter])
    recorder.run("aten.lerp_.Scalar", [gradient], (), [first])
    recorder.run("aten.mul_.Tensor", [], (), [second])
    recorder.run("aten.addcmul_.default", [gradient], (), [second])
    (root,) = recorder.run("aten.sqrt.default", [second], [(size, "temporary")])
    recorder.run("aten.add_.Tensor", [], (), [root])
    recorder.run("aten.addcdiv_.default", [first, root], (), [parameter])
