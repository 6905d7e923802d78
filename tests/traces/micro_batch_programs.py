"""Made-up training iterations: any number of micro-batches, any place in a 1F1B pipeline.

A tape plays iterations kernel by kernel and turns one of them into a trace by itself, so that
unrolling is compared with something that knows nothing of periods.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

ITERATIONS = 4
"""Played in all; the second is the trace, the others show what reaches over its ends."""


@dataclass(eq=False)
class Piece:
    """A storage: positions count kernels of all iterations; birth None: there before the first."""

    nbytes: int
    kind: str
    name: str = ""
    birth: int | None = None
    ordinal: int = 0
    death: int | None = None


@dataclass
class Tape:
    """What has been played so far."""

    kernels: list[tuple[object, ...]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    touched: list[tuple[int, Piece, bool, bool]] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def persistent(self, nbytes: int, kind: str, name: str = "") -> Piece:
        """A storage that was there before; it needs a name unless every use is to give it one."""
        self.pieces.append(Piece(nbytes, kind, name))
        return self.pieces[-1]

    def kernel(
        self,
        op: str,
        phase: str,
        micro_batch: int | None,
        *,
        reads: Sequence[Piece] = (),
        writes: Sequence[Piece] = (),
        views: Sequence[Piece] = (),
        makes: Sequence[tuple[int, str]] = (),
        group: str = "",
        peer: int | None = None,
    ) -> list[Piece]:
        """One kernel; what it makes, by size and kind. What has been freed it does not touch."""
        at = len(self.kernels)
        sequence = None
        if group and peer is None:
            sequence = self.sequences[group] = self.sequences.get(group, -1) + 1
        signature = zlib.crc32(f"{op} {phase}".encode())
        place = (op, f"module.{op}", phase, micro_batch)
        self.kernels.append((*place, 1e-3, 0.0, 0, signature, 0, group or None, sequence, peer))
        made = [Piece(n, kind, "", at, i) for i, (n, kind) in enumerate(makes)]
        self.pieces += made
        flags: dict[Piece, tuple[bool, bool]] = {}
        uses = [(p, False, False) for p in views] + [(p, True, False) for p in reads]
        for piece, is_read, is_written in uses + [(p, True, True) for p in writes]:
            before = flags.get(piece, (False, False))
            if piece.death is None:
                flags[piece] = (before[0] or is_read, before[1] or is_written)
        flags |= dict.fromkeys(made, (False, True))
        self.touched += [(at, piece, *flag) for piece, flag in flags.items()]
        return made

    def free(self, *pieces: Piece) -> None:
        """They die now, after the kernel played last; what is dead stays so."""
        for piece in pieces:
            if piece.death is None:
                piece.death = len(self.kernels) - 1

    def end_iteration(self) -> None:
        """The next kernel is the first of another iteration."""
        self.ends.append(len(self.kernels))
        self.sequences.clear()

    def trace(self, micro_batches: int) -> Trace:
        """The second iteration as a cycle."""
        return _Folding(self).trace(micro_batches)


class _Folding:
    """Turns the second iteration of a tape into a trace."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.first, self.length = tape.ends[0], tape.ends[1] - tape.ends[0]
        assert tape.ends[2] - tape.ends[1] == self.length
        self.rows: list[tuple[object, ...]] = []
        self.row_of: dict[tuple[int, int], int] = {}

    def trace(self, micro_batches: int) -> Trace:
        inside = range(self.first, self.first + self.length)
        kernels = [(at - self.first, *self.tape.kernels[at]) for at in inside]
        persistent = [piece for piece in self.tape.pieces if piece.birth is None]
        names = self._names(inside)
        for piece in persistent:
            self._add(piece, names[piece], None, None, None)
        born = [p for p in self.tape.pieces if p.birth in inside]
        lengths = {p: self._length_of(p) for p in born}
        for piece in born:
            self.row_of[self._place(piece)] = len(self.rows)
            lived = min(lengths[piece], self.length)
            self._add(piece, piece.name, *self._place(piece), self._death(piece, lived))
        for piece in born:
            ordinal = sum(1 for p in born if p.birth == piece.birth)
            if lengths[piece] > self.length:
                lived = lengths[piece] - self.length
                assert lived <= self.length
                self._add(piece, "", self._place(piece)[0], ordinal, self._death(piece, lived))
        numbers = {piece: number for number, piece in enumerate(persistent)}
        accesses = [
            (at - self.first, self._row(piece, numbers), *flags)
            for at, piece, *flags in self.tape.touched
            if at in inside
        ]
        return Trace(
            kernels=Kernels.from_rows(kernels),
            storages=Storages.from_rows(self.rows),
            accesses=Accesses.from_rows(accesses),
            metadata=TraceMetadata(source="fake", micro_batches=micro_batches),
        )

    def _names(self, inside: range) -> dict[Piece, str]:
        names = {piece: piece.name for piece in self.tape.pieces}
        at_before, position = -1, 0
        for at, piece, *_ in self.tape.touched:
            position = position + 1 if at == at_before else 0
            at_before = at
            if at in inside and piece.birth is None and not names[piece]:
                names[piece] = f"unnamed:{at - self.first}.{position}"
        return names

    def _add(
        self, piece: Piece, name: str, birth: int | None, ordinal: int | None, death: int | None
    ) -> None:
        described = (piece.nbytes, piece.nbytes, piece.kind, name, birth, ordinal, death)
        self.rows.append((len(self.rows), *described, "float32", True))

    def _place(self, piece: Piece) -> tuple[int, int]:
        assert piece.birth is not None
        return (piece.birth - self.first) % self.length, piece.ordinal

    def _length_of(self, piece: Piece) -> int:
        assert piece.birth is not None
        return self.length if piece.death is None else piece.death - piece.birth + 1

    def _death(self, piece: Piece, lived: int) -> int:
        return (self._place(piece)[0] + lived - 1) % self.length

    def _row(self, piece: Piece, numbers: dict[Piece, int]) -> int:
        return numbers[piece] if piece.birth is None else self.row_of[self._place(piece)]


def schedule(stages_after: int, micro_batches: int) -> list[tuple[str, int]]:
    """Order of forward and backward of each micro-batch on one rank of a 1F1B pipeline."""
    ahead = min(stages_after, micro_batches)
    order = [("forward", m) for m in range(ahead)]
    for m in range(micro_batches):
        order += [("forward", m + ahead)] if m + ahead < micro_batches else []
        order.append(("backward", m))
    return order


@dataclass(frozen=True)
class Habits:
    """What a made-up training script does.

    ``losses``: "freed" with the graph, "rebound" when the next one exists, "listed" to the end of
    the iteration ("listed, one held": the last is freed after the step), "stacked" there as well
    ("stacked, chained": each is made from the one before), "kept" until the next iteration has its
    own list ("kept, logged": and read when that begins), or "hoarded" for ever.
    ``total``: a running loss, "in place", "anew", or "" for none. ``batches``: "listed" before
    training or "drawn" each time.
    ``lag``: hidden values of the last so many micro-batches are kept, and read. ``holds_output``:
    the output of the last forward ahead lives until no forward is left, as in PyTorch's schedule.
    """

    stages_after: int = 0
    parameters: int = 2
    losses: str = "freed"
    total: str = ""
    batches: str = "drawn"
    lag: int = 0
    holds_output: bool = False
    frees_gradients_at_top: bool = False
    is_sharded: bool = False


def play(habits: Habits, micro_batches: int) -> Trace:
    """The trace of an iteration of a script with such habits."""
    tape = Tape()
    script = _Script(tape, habits, micro_batches)
    for _ in range(ITERATIONS):
        script.iteration()
        tape.end_iteration()
    return tape.trace(micro_batches)


class _Script:
    def __init__(self, tape: Tape, habits: Habits, micro_batches: int) -> None:
        self.tape, self.habits, self.micro_batches = tape, habits, micro_batches
        self.parameters = [
            tape.persistent(100 + i, "parameter", f"weight{i}") for i in range(habits.parameters)
        ]
        self.batches = [tape.persistent(8, "input") for _ in range(micro_batches)]
        if habits.batches == "drawn":
            self.batches = []
            tape.pieces = self.parameters.copy()
        self.gradients: list[Piece] = []
        self.saved: dict[int, list[Piece]] = {}
        self.inputs: dict[int, Piece] = {}
        self.losses: list[Piece] = []
        self.total: Piece | None = None
        self.recent: list[Piece] = []
        self.held: list[Piece] = []

    def iteration(self) -> None:
        before = self.losses
        self.losses = []
        logged = before if self.habits.losses == "kept, logged" else []
        self.tape.kernel("begin", "other", None, reads=logged, makes=[(4, "temporary")])
        self.tape.free(self.tape.pieces[-1])
        if self.habits.frees_gradients_at_top:
            self._free_gradients()
        for phase, micro_batch in schedule(self.habits.stages_after, self.micro_batches):
            if phase == "forward":
                self._forward(micro_batch)
            else:
                self._backward(micro_batch)
        if self.habits.losses.startswith("kept"):
            self.tape.free(*before)
        self._step()

    def _forward(self, m: int) -> None:
        tape, habits = self.tape, self.habits
        if self.batches:
            self.inputs[m] = self.batches[m]
        else:
            (self.inputs[m],) = tape.kernel("draw", "other", None, makes=[(8, "input")])
        value, self.saved[m] = self.inputs[m], []
        if habits.stages_after:
            (value,) = tape.kernel("recv", "other", None, makes=[(50, "temporary")], peer=1)
            self.saved[m].append(value)
        for i, parameter in enumerate(self.parameters):
            if habits.is_sharded:
                tape.kernel("gather", "forward", m, reads=[parameter], group="shard")
            reads = [value, parameter, *self.recent]
            makes = [(1000 + i, "activation"), (7, "temporary")]
            made = tape.kernel(f"mm{i}", "forward", m, reads=reads, makes=makes)
            tape.kernel(f"relu{i}", "forward", m, writes=[made[0]], reads=[made[1]])
            tape.free(made[1])
            self.saved[m].append(made[0])
            value = made[0]
        if habits.lag:
            self.recent.append(value)
        self._loss(m, value)
        tape.kernel("send", "other", None, reads=[value], group="pipeline", peer=0)
        if habits.holds_output and m == habits.stages_after - 1:
            self.held = [value]

    def _loss(self, m: int, value: Piece) -> None:
        tape, habits = self.tape, self.habits
        before = self.losses[-1:] if habits.losses == "stacked, chained" else []
        (loss,) = tape.kernel(
            "loss", "forward", m, reads=[value, *before], makes=[(4, "temporary")]
        )
        if habits.losses == "rebound":
            tape.free(*self.losses)
            self.losses = []
        if habits.losses == "freed":
            self.saved[m].append(loss)
        else:
            self.losses.append(loss)
        if habits.total == "in place" and m > 0:
            assert self.total is not None
            tape.kernel("add_", "forward", m, reads=[loss], writes=[self.total])
        elif habits.total:
            old = [] if m == 0 or self.total is None else [self.total]
            (total,) = tape.kernel(
                "add", "forward", m, reads=[loss, *old], makes=[(4, "temporary")]
            )
            if self.total is not None:
                tape.free(self.total)
            self.total = total

    def _backward(self, m: int) -> None:
        tape, habits = self.tape, self.habits
        (grad,) = tape.kernel("seed", "backward", m, makes=[(4, "temporary")])
        for i, parameter in reversed(list(enumerate(self.parameters))):
            reads = [grad, parameter, self.saved[m][-1], self.inputs[m]]
            (grad_of_input,) = tape.kernel(
                f"mm_backward{i}", "backward", m, reads=reads, makes=[(60, "temporary")]
            )
            (fresh,) = tape.kernel(
                f"weight_grad{i}", "backward", m, reads=[grad], makes=[(100 + i, "temporary")]
            )
            if m == 0:
                fresh.kind = "gradient"
                self.gradients.append(fresh)
            else:
                gradient = self.gradients[len(self.parameters) - 1 - i]
                tape.kernel(f"add_{i}", "backward", m, reads=[fresh], writes=[gradient])
                tape.free(fresh)
            if habits.is_sharded:
                tape.kernel("scatter", "backward", m, reads=[fresh], group="shard")
            tape.free(grad)
            grad = grad_of_input
        if m == self.micro_batches - 1 - habits.stages_after:
            tape.free(*self.held)
            self.held = []
        tape.free(grad, *(p for p in self.saved[m] if p not in self.recent + self.held))
        if len(self.recent) > habits.lag:
            tape.free(self.recent.pop(0))
        if not self.batches:
            tape.free(self.inputs[m])

    def _step(self) -> None:
        tape, habits = self.tape, self.habits
        if habits.losses.startswith(("rebound", "stacked")):
            tape.kernel("log", "other", None, reads=self.losses)
        if habits.losses == "listed, one held":
            tape.free(*self.losses[:-1])
        for parameter, gradient in zip(self.parameters, reversed(self.gradients), strict=True):
            tape.kernel("adam", "optimizer", None, reads=[gradient], writes=[parameter])
        if not habits.frees_gradients_at_top:
            self._free_gradients()
        if habits.losses.startswith(("listed", "stacked")):
            tape.free(*self.losses)
        tape.free(*self.recent)
        self.recent = []

    def _free_gradients(self) -> None:
        self.tape.free(*self.gradients)
        self.gradients = []
