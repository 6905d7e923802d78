"""Random training iterations: storages of every lifetime, used by any later kernel."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from tests.traces.micro_batch_programs import ITERATIONS, Piece, Tape, schedule

from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace

MAX_LAG = 2


@dataclass(frozen=True)
class Make:
    """A storage freed after an operation of so many micro-batches later; if none, at the end."""

    nbytes: int
    freed_by: int
    freed_lag: int


@dataclass(frozen=True)
class Use:
    """Access to what an operation of so many micro-batches ago made."""

    made_by: int
    lag: int
    is_written: bool


@dataclass(frozen=True)
class Operation:
    """One kernel; ``is_labelled``: it bears the number of its micro-batch."""

    is_labelled: bool
    is_collective: bool
    makes_gradient: bool
    reads_batch: bool
    makes: tuple[Make, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Program:
    """Operations of a micro-batch, which are numbered through; ``frees_late``: leftovers die in the
    next iteration.
    """

    stages_after: int
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    frees_late: bool

    @property
    def fewest(self) -> int:
        """Micro-batches after which a trace must repeat itself."""
        operations = self.forward + self.backward
        lags = [u.lag for o in operations for u in o.uses]
        lags += [m.freed_lag for o in operations for m in o.makes]
        # Where a storage of the warm-up belongs is known if its kernel's micro-batch is.
        is_labelled = all(o.is_labelled for o in operations)
        warm_up = self.stages_after if is_labelled else 2 * self.stages_after + 1
        fewest = warm_up + 3 + max(lags, default=0)
        return max(fewest, micro_batches_to_trace(self.stages_after))


def programs() -> st.SearchStrategy[Program]:
    """Any program of up to eight operations."""
    number = st.integers(0, 8)
    makes = st.builds(Make, st.sampled_from([10, 20]), number, st.integers(0, MAX_LAG))
    uses = st.builds(Use, number, st.integers(0, MAX_LAG), st.booleans())
    operations = st.builds(
        Operation,
        is_labelled=st.booleans(),
        is_collective=st.booleans(),
        makes_gradient=st.booleans(),
        reads_batch=st.booleans(),
        makes=st.lists(makes, max_size=3).map(tuple),
        uses=st.lists(uses, max_size=3).map(tuple),
    )
    labelled = operations.filter(lambda operation: operation.is_labelled)
    some = st.tuples(labelled, st.lists(operations, max_size=3)).map(lambda t: (t[0], *t[1]))
    return st.builds(Program, st.integers(0, 3), some, some, st.booleans())


def play(program: Program, micro_batches: int) -> Trace:
    """The trace of the program with so many micro-batches."""
    return _Player(program, micro_batches).trace()


class _Player:
    def __init__(self, program: Program, micro_batches: int) -> None:
        self.program, self.micro_batches = program, micro_batches
        self.tape = Tape()
        self.weight = self.tape.persistent(100, "parameter", "weight")
        reads_batches = any(o.reads_batch for o in program.forward)
        self.batches = [
            self.tape.persistent(8, "input") for _ in range(micro_batches if reads_batches else 0)
        ]
        self.made: dict[tuple[int, int], list[Piece]] = {}
        self.to_free: dict[tuple[int, int], list[Piece]] = {}
        self.gradients: dict[int, Piece] = {}
        self.living: list[Piece] = []

    def trace(self) -> Trace:
        for _ in range(ITERATIONS):
            self._iteration()
            self.tape.end_iteration()
        return self.tape.trace(self.micro_batches)

    def _iteration(self) -> None:
        leftover, self.living = self.living, []
        self.made, self.to_free, self.gradients = {}, {}, {}
        self.tape.kernel("begin", "other", None, reads=[self.weight])
        self.tape.free(*leftover)
        for phase, micro_batch in schedule(self.program.stages_after, self.micro_batches):
            offset = 0 if phase == "forward" else len(self.program.forward)
            operations = self.program.forward if phase == "forward" else self.program.backward
            for number, operation in enumerate(operations, offset):
                self._operate(number, operation, phase, micro_batch)
        self.tape.kernel("step", "optimizer", None, reads=list(self.gradients.values()))
        self.tape.free(*self.gradients.values())
        self.tape.kernel("end", "optimizer", None, writes=[self.weight])
        if not self.program.frees_late:
            self.tape.free(*self.living)

    def _operate(self, number: int, operation: Operation, phase: str, m: int) -> None:
        reads = [self.batches[m]] if operation.reads_batch and phase == "forward" else []
        writes: list[Piece] = []
        for use in operation.uses:
            pieces = self.made.get((use.made_by, m - use.lag), [])
            (writes if use.is_written else reads).extend(pieces)
        is_gradient = operation.makes_gradient and phase == "backward"
        makes = [(make.nbytes, "temporary") for make in operation.makes]
        makes += [(100, "gradient" if m == 0 else "temporary")] if is_gradient else []
        pieces = self.tape.kernel(
            f"op{number}",
            phase if operation.is_labelled else "other",
            m if operation.is_labelled else None,
            reads=reads,
            writes=writes,
            makes=makes,
            group=f"group{number % 2}" if operation.is_collective else "",
        )
        self.made[number, m] = pieces
        for make, piece in zip(operation.makes, pieces, strict=False):
            self.to_free.setdefault((make.freed_by, m + make.freed_lag), []).append(piece)
            self.living.append(piece)
        self.tape.free(*self.to_free.pop((number, m), []))
        if is_gradient:
            self._accumulate(number, pieces.pop(), m)

    def _accumulate(self, number: int, fresh: Piece, m: int) -> None:
        if m == 0:
            self.gradients[number] = fresh
        else:
            gradient = self.gradients[number]
            self.tape.kernel("add_", "backward", m, reads=[fresh], writes=[gradient])
            self.tape.free(fresh)
