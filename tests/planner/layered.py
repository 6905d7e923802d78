"""A small model of layers, by hand: what the policies compared with ours need, in round numbers."""

from __future__ import annotations

from typing import Any

from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

PARAMETER, HIDDEN, OUTPUT = 40, 100, 10
"""Bytes of a layer's parameter (gradient and optimizer state as many), of what it saves for its own
backward pass, and of its output, which the next layer saves."""


class _Program:
    """Collects kernels of one second each, with the storages that they touch by name."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, ...]] = []
        self.storages: dict[str, list[Any]] = {}
        self.accesses: list[tuple[int, str, str]] = []

    def persistent(self, name: str, nbytes: int, kind: str) -> None:
        self.storages[name] = [nbytes, kind, None, None]

    def run(
        self,
        op: str,
        module: str,
        phase: str,
        micro_batch: int | None,
        touched: dict[str, str],
        makes: dict[str, tuple[int, str]] | None = None,
    ) -> None:
        """One kernel; ``touched`` says how it uses each storage, ``makes`` bytes and kind of new
        ones, which die with their last use.
        """
        kernel = len(self.kernels)
        row = (kernel, op, module, phase, micro_batch, 1.0, 0.0, 0, kernel, 0)
        self.kernels.append((*row, None, None, None))
        for name, (nbytes, kind) in (makes or {}).items():
            self.storages[name] = [nbytes, kind, kernel, kernel]
            touched = touched | {name: "w"}
        for name, how in touched.items():
            self.accesses.append((kernel, name, how))
            if self.storages[name][2] is not None:
                self.storages[name][3] = kernel

    def trace(self, micro_batches: int) -> Trace:
        names = list(self.storages)
        rows = [
            (
                i,
                nbytes,
                nbytes,
                kind,
                name,
                birth,
                None if birth is None else i,
                death,
                "int8",
                True,
            )
            for i, (name, (nbytes, kind, birth, death)) in enumerate(self.storages.items())
        ]
        accesses = sorted(
            (kernel, names.index(name), "r" in how, "w" in how)
            for kernel, name, how in self.accesses
        )
        return Trace(
            kernels=Kernels.from_rows(self.kernels),
            storages=Storages.from_rows(rows),
            accesses=Accesses.from_rows(accesses),
            metadata=TraceMetadata(source="fake", micro_batches=micro_batches),
        )


def layered_trace(layers: int = 3, micro_batches: int = 2) -> Trace:
    """Per micro-batch: two forward kernels a layer, the loss, three backward kernels a layer; then
    one optimizer kernel a layer. Layer i is the module ``blocks.i``.

    Layer i reads ``x{i}`` and its parameter ``w{i}``, saves ``h{i}`` and makes ``x{i+1}``.
    """
    program = _Program()
    for i in range(layers):
        program.persistent(f"w{i}", PARAMETER, "parameter")
        program.persistent(f"m{i}", PARAMETER, "optimizer_state")
    for batch in range(micro_batches):
        _forward(program, layers, batch)
        _backward(program, layers, batch)
    for i in range(layers):
        touched = {f"w{i}": "rw", f"g{i}": "r", f"m{i}": "rw"}
        program.run("adamw", "", "optimizer", None, touched)
    return program.trace(micro_batches)


def _forward(program: _Program, layers: int, batch: int) -> None:
    activation = "activation"
    program.run("data", "", "forward", batch, {}, {f"x0.{batch}": (OUTPUT, activation)})
    for i in range(layers):
        x, h, y = f"x{i}.{batch}", f"h{i}.{batch}", f"x{i + 1}.{batch}"
        module = f"blocks.{i}"
        makes = {h: (HIDDEN, activation)}
        program.run("linear", f"{module}.up", "forward", batch, {x: "r", f"w{i}": "r"}, makes)
        program.run("act", module, "forward", batch, {h: "r"}, {y: (OUTPUT, activation)})
    last = f"x{layers}.{batch}"
    program.run("loss", "head", "forward", batch, {last: "r"}, {f"l.{batch}": (1, activation)})


def _backward(program: _Program, layers: int, batch: int) -> None:
    def grad(i: int) -> str:
        return f"d{i}.{batch}"

    last = {f"x{layers}.{batch}": "r", f"l.{batch}": "r"}
    made = {grad(layers): (OUTPUT, "temporary")}
    program.run("loss_backward", "head", "backward", batch, last, made)
    for i in reversed(range(layers)):
        x, h, t, module = f"x{i}.{batch}", f"h{i}.{batch}", f"t{i}.{batch}", f"blocks.{i}"
        makes = {t: (OUTPUT, "temporary")}
        touched = {grad(i + 1): "r", h: "r"}
        program.run("act_backward", module, "backward", batch, touched, makes)
        touched = {t: "r", x: "r"}
        new = {f"g{i}": (PARAMETER, "gradient")} if batch == 0 else {}
        if batch > 0:
            touched |= {f"g{i}": "rw"}
        program.run("weight_grad", f"{module}.up", "backward", batch, touched, new)
        makes = {grad(i): (OUTPUT, "temporary")}
        touched = {t: "r", f"w{i}": "r"}
        program.run("input_grad", f"{module}.up", "backward", batch, touched, makes)
