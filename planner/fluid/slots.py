"""Slots of time for the fluid program.

An iteration is cut into 2K *pieces*: piece 2k is kernel k running, piece 2k + 1 is the time between
the ends of kernel k and the start of kernel k + 1 (its gap, and any stall). A slot is a run of
pieces; each slot begins at the start of a kernel, or (``fine``) at a kernel's end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.traces.trace import Trace
from teraio.traces.turns import Turns

FINE_KERNELS = 400
"""Traces with at most this many kernels get two slots per kernel, as fine as stalls can be told."""

NANOSECONDS = 10**9
"""In a second."""

_LAYER = re.compile(r"^(.*?\.\d+)(\.|$)")


@dataclass(frozen=True)
class Slots:
    """``of_piece`` int64 (2K,): the slot of each piece. Per slot: ``seconds`` float64, the ideal
    length; ``may_stretch`` bool, whether a schedule can spend longer in it.
    """

    of_piece: IntArray
    seconds: FloatArray
    may_stretch: BoolArray

    def __len__(self) -> int:
        return len(self.seconds)

    def unrolled(self, piece: IntArray) -> IntArray:
        """Slots of pieces that may lie in a later iteration; a cycle adds ``len(self)``."""
        cycle, within = np.divmod(piece, len(self.of_piece))
        result: IntArray = self.of_piece[within] + cycle * len(self)
        return result


def cut_into_slots(
    trace: Trace,
    max_seconds: float | None,
    *,
    runs_may_stretch: bool,
    turns: Turns | None = None,
    max_bytes: float | None = None,
) -> Slots:
    """Two slots per kernel (``max_seconds`` None), or slots that end where micro-batch, phase or
    layer change, where ``max_seconds`` of ideal time are full, and before the kernels of the
    optimizer in one slot touch more than ``max_bytes``.

    Parameters and their state are many storages that each one kernel needs at once, briefly if they
    are on the GPU: what leaves it and comes back within one slot costs nothing in the program.
    ``runs_may_stretch``: kernels may take longer than the trace says (slowdown under transfers).
    ``turns`` are all cut alike, by the mean times of their kernels.
    """
    kernels, num_kernels = trace.kernels, trace.num_kernels
    seconds = np.empty(2 * num_kernels)
    seconds[0::2] = kernels.duration_seconds
    seconds[1::2] = np.roll(kernels.gap_before_seconds, -1)
    begins = np.zeros(2 * num_kernels, dtype=bool)
    if max_seconds is None:
        begins[:] = True
    else:
        begins[0::2] = _group_begins(trace, seconds[0::2] + seconds[1::2], max_seconds, turns)
        if max_bytes is not None:
            _cut_large(begins[0::2], trace, max_bytes, turns)
    of_piece = np.cumsum(begins) - 1
    num_slots = int(of_piece[-1]) + 1
    has_gap = np.zeros(num_slots, dtype=bool)
    has_gap[of_piece[1::2]] = True
    length: FloatArray = np.zeros(num_slots)
    np.add.at(length, of_piece, seconds)
    return Slots(
        of_piece=of_piece,
        seconds=length,
        may_stretch=has_gap | runs_may_stretch,
    )


@dataclass(frozen=True)
class SlotTurns:
    """``count`` turns of ``length`` slots each, from slot ``first``."""

    first: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """The first slot after the last turn."""
        return self.first + self.length * self.count

    def inner(self, apart: int) -> SlotTurns:
        """Without ``apart`` turns at either end."""
        return SlotTurns(self.first + apart * self.length, self.length, self.count - 2 * apart)


def turns_of_slots(slots: Slots, turns: Turns) -> SlotTurns:
    """The turns of kernels as turns of slots; the slots must have been cut by them."""
    first = int(slots.of_piece[2 * turns.first_kernel])
    second = int(slots.of_piece[2 * (turns.first_kernel + turns.length)])
    return SlotTurns(first, second - first, turns.count)


def merged(slots: Slots, turns: SlotTurns | None, factor: int) -> tuple[Slots, SlotTurns | None]:
    """Coarser slots: up to ``factor`` successive ones become one, alike in all turns."""
    place = np.arange(len(slots))
    if turns is not None:
        inside = slice(turns.first, turns.end)
        place[inside] = (place[inside] - turns.first) % turns.length
        place[turns.end :] -= turns.end
        first = -(-turns.first // factor)
        turns = SlotTurns(first, -(-turns.length // factor), turns.count)
    becomes = np.cumsum(place % factor == 0) - 1
    num_slots = int(becomes[-1]) + 1
    seconds, stretches = np.zeros(num_slots), np.zeros(num_slots, dtype=bool)
    np.add.at(seconds, becomes, slots.seconds)
    np.logical_or.at(stretches, becomes, slots.may_stretch)
    result = Slots(
        of_piece=becomes[slots.of_piece],
        seconds=seconds,
        may_stretch=stretches,
    )
    return result, turns


def _group_begins(
    trace: Trace, seconds: FloatArray, max_seconds: float, turns: Turns | None
) -> BoolArray:
    """Kernels at which a slot begins, bool (K,)."""
    kernels = trace.kernels
    layer = {module: _layer_of(module) for module in set(kernels.module.tolist())}
    layers = np.array([layer[module] for module in kernels.module.tolist()], dtype=object)
    begins: BoolArray = np.ones(trace.num_kernels, dtype=bool)
    same = (
        (kernels.micro_batch[1:] == kernels.micro_batch[:-1])
        & (kernels.phase[1:] == kernels.phase[:-1])
        & (layers[1:] == layers[:-1])
    )
    begins[1:] = ~same
    if turns is not None:
        inside = slice(turns.first_kernel, turns.end_kernel)
        shape = (turns.count, turns.length)
        some = np.logical_or.reduce(begins[inside].reshape(shape), axis=0)
        some[0] = True
        begins[inside] = np.tile(some, turns.count)
        begins[turns.end_kernel : turns.end_kernel + 1] = True
        seconds = seconds.copy()
        seconds[inside] = np.tile(seconds[inside].reshape(shape).mean(axis=0), turns.count)
    _cut_long(begins, seconds, max_seconds)
    return begins


def _cut_long(begins: BoolArray, seconds: FloatArray, max_seconds: float) -> None:
    """Let a further slot begin wherever the next kernel no longer fits into ``max_seconds``."""
    # Whole nanoseconds: alike layers are cut alike, whatever sums came before.
    ends = np.cumsum(np.rint(seconds * NANOSECONDS).astype(np.int64))
    most = round(max_seconds * NANOSECONDS)
    group_ends = [*np.flatnonzero(begins)[1:].tolist(), len(begins)]
    first = 0
    for group_end in group_ends:
        while first < group_end:
            begins[first] = True
            start = int(ends[first - 1]) if first else 0
            fits = int(np.searchsorted(ends, start + most, side="right"))
            first = min(max(fits, first + 1), group_end)


def _cut_large(begins: BoolArray, trace: Trace, max_bytes: float, turns: Turns | None) -> None:
    """Let a further slot begin wherever the next kernel of the optimizer would touch too much; not
    within turns.
    """
    touched = np.zeros(trace.num_kernels)
    accesses = trace.accesses
    np.add.at(touched, accesses.kernel, trace.storages.allocated_bytes[accesses.storage])
    is_step = trace.kernels.phase == "optimizer"
    if turns is not None:
        is_step[turns.first_kernel : turns.end_kernel] = False
    filled = 0.0
    for k in np.flatnonzero(is_step).tolist():
        if begins[k] or filled + touched[k] > max_bytes:
            begins[k], filled = True, 0.0
        filled += touched[k]


def _layer_of(module: str) -> str:
    """The module up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.up``."""
    match = _LAYER.match(module)
    return match.group(1) if match else module
