"""Iterations of many micro-batches, at random: small enough to be bounded whole and by turns."""

from __future__ import annotations

import random
from typing import Any

from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

SECONDS = (0.25, 0.5, 1.0)


class Iteration:
    """Collects kernels, and storages that live from their first use to their last."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.noise, self.chance = noise, random.Random(seed)
        self.kernels: list[tuple[Any, ...]] = []
        self.uses: dict[str, dict[int, str]] = {}

    def run(
        self, op: str, phase: str, micro_batch: int | None, seconds: float, **uses: str
    ) -> None:
        """One kernel, and how it uses each storage: r, w or rw."""
        kernel = len(self.kernels)
        seconds *= max(0.1, 1 + self.noise * self.chance.gauss(0, 1))
        row = (kernel, op, None, phase, micro_batch, seconds, 0.0, 0, 7, 0, None, None, None, None)
        self.kernels.append(row)
        for name, how in uses.items():
            self.uses.setdefault(name, {})[kernel] = how

    def trace(self, sizes: dict[str, int], persistent: set[str]) -> Trace:
        rows: list[tuple[Any, ...]] = []
        table: list[tuple[int, int, bool, bool]] = []
        for index, (name, uses) in enumerate(self.uses.items()):
            nbytes, stays = sizes[name.split("_")[0]], name in persistent
            birth, death = (None, None) if stays else (min(uses), max(uses))
            kind = "parameter" if stays else "activation"
            ordinal = None if stays else index
            rows.append((index, nbytes, nbytes, kind, name, birth, ordinal, death, "float32", True))
            table += [(k, index, "r" in how, "w" in how) for k, how in uses.items()]
        return Trace(
            kernels=Kernels.from_rows(self.kernels),
            storages=Storages.from_rows(rows),
            accesses=Accesses.from_rows(sorted(table)),
            metadata=TraceMetadata(source="fake"),
        )


def repeating_trace(seed: int, micro_batches: int, noise: float = 0.0) -> Trace:
    """Two or three layers, forward and backward for each micro-batch, and an optimizer.

    Half of them run one forward pass ahead, as the first of two pipeline stages does. ``noise`` is
    the standard deviation of kernel times, relative. Per layer there is a parameter, a gradient
    that all backward passes add to, an optimizer state, and what each micro-batch saves.
    """
    chance = random.Random(seed)
    layers = range(chance.choice((2, 3)))
    kinds = [f"{kind}{i}" for i in layers for kind in ("parameter", "gradient", "state", "saved")]
    sizes = {name: chance.randint(5, 90) for name in [*kinds, "table"]}
    times = {(kind, i): chance.choice(SECONDS) for i in layers for kind in ("f", "b", "o")}
    iteration = Iteration(noise, seed)

    def forward(m: int) -> None:
        for i in layers:
            uses = {f"parameter{i}": "r", f"saved{i}_{m}": "w"}
            uses |= {f"saved{i - 1}_{m}": "r"} if i else {"table": "r"}
            iteration.run(f"f{i}", "forward", m, times["f", i], **uses)

    def backward(m: int) -> None:
        for i in reversed(layers):
            how = "rw" if m else "w"
            uses = {f"parameter{i}": "r", f"saved{i}_{m}": "r", f"gradient{i}": how}
            iteration.run(f"b{i}", "backward", m, times["b", i], **uses)

    ahead = chance.choice((0, 1))
    for step in range(micro_batches + ahead):
        if step < micro_batches:
            forward(step)
        if step >= ahead:
            backward(step - ahead)
    for i in layers:
        uses = {f"parameter{i}": "rw", f"state{i}": "rw", f"gradient{i}": "r"}
        iteration.run(f"o{i}", "optimizer", None, times["o", i], **uses)
    stay = {f"{kind}{i}" for i in layers for kind in ("parameter", "state")}
    return iteration.trace(sizes, stay | {"table"})
