"""Storages of several iterations ago: as many rows as live at once, though none is seen to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.profiler.test_recorder_lifetimes import (
    BATCH,
    WIDTH,
    Loop,
    accesses_of,
    record,
    rows_born_by,
)

from teraio.profiler import recorder

SUBTRACT = "aten.sub.Tensor"


class History(Loop):
    """Adds the output of three iterations ago."""

    def iterate(self) -> None:
        output = self.model(torch.randn(BATCH, WIDTH))
        if self.kept is not None and len(self.kept) == 3:
            output = output + self.kept[0]
        self.kept = [*(self.kept or [])[-2:], output.detach()]
        output.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:scratch memory inside operators is unknown")
@pytest.mark.parametrize("iterations", [8, 9, 14])
def test_history_of_several_iterations_is_as_many_rows_and_must_not_move(iterations: int) -> None:
    """Of 8 and 9 no storage is seen to its end, but as old ones are read in the last of them."""
    trace = record(History(), iterations)
    (add,) = np.flatnonzero(trace.kernels.op == "aten.add.Tensor")
    rows = [row for row in range(len(trace.storages)) if trace.storages.birth[row] == add]
    assert len(rows) == 4
    lived = (trace.storages.death[rows] - add) % trace.num_kernels + 1
    assert sorted(lived.tolist())[1:] == [trace.num_kernels] * 3
    assert not trace.storages.resizable[rows].any()
    used = [row for row in rows if accesses_of(trace, row)]
    assert len(used) == 2


@pytest.mark.filterwarnings("ignore:scratch memory inside operators is unknown")
@pytest.mark.parametrize("iterations", [6, 7])
def test_history_as_long_as_the_recording_is_told_from_what_is_made(iterations: int) -> None:
    """What is read was made before sums were: nothing tells how long a sum will live."""
    trace = record(History(), iterations)
    (add,) = np.flatnonzero(trace.kernels.op == "aten.add.Tensor")
    read = trace.accesses.storage[(trace.accesses.kernel == add) & trace.accesses.reads]
    assert add not in trace.storages.birth[read]


@pytest.mark.parametrize("apart", [False, True], ids=["one kernel", "two kernels"])
def test_what_is_kept_for_ever_stands_for_older_ones_too(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of losses is read further back than was recorded: too few rows for each to have one.

    A recording is that short only if no iteration is spent on scratch memory.
    """
    monkeypatch.setattr(recorder, "start_workspace_meter", lambda _: None)

    class FarBack(Loop):
        def iterate(self) -> None:
            loss = self.model(torch.randn(BATCH, WIDTH)).mean()
            self.kept = [*(self.kept or [torch.zeros(())] * 4), loss.detach()]
            if apart:
                torch.sub(self.kept[-1], self.kept[-2])
                torch.neg(self.kept[-4])
            else:
                torch.sub(self.kept[-1], self.kept[-4])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(FarBack(), 14)
    rows = rows_born_by(trace, "aten.mean.default")
    (oldest,) = np.flatnonzero(trace.kernels.op == ("aten.neg.default" if apart else SUBTRACT))
    assert any(oldest in accesses_of(trace, row) for row in rows)
    assert not trace.storages.resizable[rows].any()
