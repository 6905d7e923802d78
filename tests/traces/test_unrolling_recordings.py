"""Unrolling recorded training scripts: equal, row by row, to recording all micro-batches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from teraio.profiler.models import build_model  # noqa: E402
from teraio.profiler.profiling import Profile  # noqa: E402
from teraio.profiler.recorder import Recorder  # noqa: E402
from teraio.traces.trace import Trace  # noqa: E402
from teraio.traces.unrolling import micro_batches_to_trace, unroll  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:scratch memory inside operators is unknown")

UNTIMED = ("duration_seconds", "gap_before_seconds", "workspace_bytes")
FEW, MANY = micro_batches_to_trace(0), 7


class Small(nn.Module):
    """Two blocks between an embedding and its transpose, each recomputed or not."""

    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.checkpoint = checkpoint

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpoint:
                use_reentrant = self.checkpoint == "reentrant"
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            else:
                hidden = torch.tanh(block(hidden))
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def draw_batch() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (2, 3)), torch.randint(11, (2, 3))


@dataclass(frozen=True)
class Script:
    """A training script. ``losses``: "listed" until the step, or overwritten; ``total``: a running
    loss, "in place", "anew" or ""; ``batches``: "listed" before training or "drawn" each time.
    """

    model: str = "small"
    checkpoint: str = ""
    optimizer: str = "fused"
    clips: bool = False
    frees_gradients_first: bool = False
    keeps_gradients: bool = False
    losses: str = ""
    total: str = ""
    batches: str = "listed"
    is_fake: bool = False


@cache
def record(script: Script, micro_batches: int) -> Trace:
    torch.manual_seed(0)
    recorder = Recorder(device_type="cpu")
    with FakeTensorMode() if script.is_fake else contextlib.nullcontext():
        if script.model == "small":
            model: nn.Module = Small(script.checkpoint)
        else:
            model = build_model(script.model, layers=1, vocabulary=11)
        chosen = {} if script.optimizer == "default" else {script.optimizer: True}
        optimizer = torch.optim.AdamW(model.parameters(), **chosen)
        recorder.names.add_model(model)
        session = Profile(recorder, model=script.model)
        listed = [draw_batch() for _ in range(micro_batches)]
        with session:
            for _ in range(3):
                run_iteration(script, model, optimizer, listed)
    return session.trace


def run_iteration(
    script: Script,
    model: nn.Module,
    optimizer: Optimizer,
    batches: list[tuple[Tensor, Tensor]],
) -> None:
    losses: list[Tensor] = []
    total = torch.zeros(())
    if script.frees_gradients_first:
        optimizer.zero_grad()
    for batch in batches:
        tokens, targets = batch if script.batches == "listed" else draw_batch()
        loss = model(tokens, targets) / 4
        loss.backward()
        if script.losses == "listed":
            losses.append(loss.detach())
        if script.total == "in place":
            total += loss.detach()
        elif script.total == "anew":
            total = total + loss.detach()
    if script.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    if not script.frees_gradients_first:
        optimizer.zero_grad(set_to_none=not script.keeps_gradients)


SCRIPTS = {
    "llama": Script(model="tiny-llama"),
    "small": Script(),
    "batches drawn": Script(batches="drawn"),
    "clipping": Script(clips=True),
    "foreach": Script(optimizer="foreach", batches="drawn"),
    "for-loop": Script(optimizer="default"),
    "reentrant": Script(checkpoint="reentrant"),
    "non-reentrant": Script(checkpoint="non-reentrant"),
    "gradients freed at the top": Script(frees_gradients_first=True),
    "gradients kept": Script(keeps_gradients=True),
    "losses listed": Script(losses="listed", batches="drawn"),
    "running loss in place": Script(total="in place"),
    "running loss anew": Script(total="anew"),
    "fake": Script(is_fake=True, batches="drawn", optimizer="foreach"),
    "fake reentrant": Script(is_fake=True, checkpoint="reentrant"),
    "fake gpt2": Script(is_fake=True, model="tiny-gpt2", clips=True),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_equals_a_recording_of_all_micro_batches(script: Script) -> None:
    unrolled = unroll(record(script, FEW), MANY)
    recorded = record(script, MANY)
    for name in ("kernels", "storages", "accesses"):
        table, other = getattr(unrolled, name), getattr(recorded, name)
        for column in table.COLUMNS:
            if column.name not in UNTIMED:
                found = getattr(table, column.name).tolist()
                assert found == getattr(other, column.name).tolist(), f"{name}.{column.name}"
    metadata = replace(unrolled.metadata, traced_micro_batches=0)
    assert metadata.micro_batches == recorded.metadata.micro_batches == MANY
    assert replace(metadata, dispatch_seconds=0.0) == replace(
        recorded.metadata, dispatch_seconds=0.0
    )
