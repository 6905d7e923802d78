"""An unmodified script of two ranks under torchrun: profiled, planned, run, and failing in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

torch = pytest.importorskip("torch", reason="profiler and executor need torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

SOURCE = Path(__file__).resolve().parents[2] / "src"
SCRIPT = """
import os
import sys
import torch
from torch import distributed, nn

steps, failing = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for number in range(steps):
    if rank == failing and number == 3:
        raise ValueError("this rank has had enough")
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * number + rank))
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
total = sum(float(p.detach().double().sum()) for p in model.parameters())
# In one piece: both ranks write into one pipe.
os.write(1, f"outcome of {rank}: {loss.item()!r} {total!r}\\n".encode())
distributed.destroy_process_group()
"""


@pytest.fixture
def torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run two ranks in a folder that holds ``train.py``; the completed process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> Any:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=250, check=False
        )

    return run


def outcomes(done: Any) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"outcome of \d: \S+ \S+", done.stdout))


def test_the_way_of_two_ranks(torchrun: Any, teraio: Callable[..., Result], tmp_path: Path) -> None:
    profiled = torchrun("-m", "teraio.cli", "profile", "-o", "t.trace", "train.py", "40", "-1")
    assert profiled.returncode == 0, profiled.stderr
    traces = [f"t.rank{rank}.trace" for rank in range(2)]
    assert all((tmp_path / trace).is_dir() for trace in traces)
    options = ("--hardware", "cpu", "--planner", "greedy", "--gpu-memory", "1.4MB")
    planned = teraio("plan", *traces, *options, "--host-memory", "100MB", "-o", "t.plan")
    assert planned.exit_code == 0, planned.output

    plain = outcomes(torchrun("train.py", "5", "-1"))
    assert len(plain) == 2
    assert outcomes(torchrun("-m", "teraio.cli", "run", "t.plan", "train.py", "5", "-1")) == plain

    failed = torchrun("-m", "teraio.cli", "run", "t.plan", "train.py", "5", "1")
    assert failed.returncode != 0
    assert "this rank has had enough" in failed.stderr
    assert "teraio: on rank 1 of 2" in failed.stderr

    refused = torchrun("-m", "teraio.cli", "run", "t.rank0.plan", "train.py", "5", "-1")
    assert refused.returncode != 0
    assert "is of rank 0 of 2, this process is rank 1 of 2" in refused.stderr
