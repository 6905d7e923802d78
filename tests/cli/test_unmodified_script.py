"""A plain PyTorch script goes through the command line only, and prints the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    *[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
zero_at = sys.argv[1]
for step in range(int(sys.argv[2])):
    if zero_at == "top":
        optimizer.zero_grad()
    for _ in range(2):
        x = torch.randn(32, 128)
        loss = (model(x) - x).square().mean()
        loss.backward()
    optimizer.step()
    if zero_at == "bottom":
        optimizer.zero_grad()
    print("loss", step, loss.item().hex())
print("parameters", [p.double().sum().item().hex() for p in model.parameters()])
"""


def run(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its output is shown if it fails."""
    result = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result


def teraio(*arguments: Any, cwd: Path) -> tuple[dict[str, Any], str]:
    """(JSON on stdout, what the script printed: it goes to stderr)."""
    result = run("-m", "teraio.cli", *arguments, cwd=cwd)
    return json.loads(result.stdout), result.stderr


def results(text: str) -> list[str]:
    """The script's own lines."""
    return [line for line in text.splitlines() if line.startswith(("loss", "parameters"))]


@pytest.mark.parametrize(("zero_at", "planner"), [("top", "optimal"), ("bottom", "greedy")])
def test_profile_plan_run(zero_at: str, planner: str, tmp_path: Path) -> None:
    """Half of the memory, both ends of the loop: bit-identical, on plan, within the budget."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = results(run(script, zero_at, 6, cwd=tmp_path).stdout)
    assert len(plain) == 7

    profiled, _ = teraio("profile", "--json", "-o", "t.trace", script, zero_at, 12, cwd=tmp_path)
    assert profiled["kernels"] > 100
    budget_bytes = int(profiled["peak_live_bytes"] * 0.6)
    budgets = ("--gpu-memory", budget_bytes, "--host-memory", "80MB")
    planning = ("--hardware", "cpu", "--planner", planner, *budgets)
    teraio("plan", "--json", "t.trace", *planning, "-o", "t.plan", cwd=tmp_path)
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
    tiers = ("--ssd-path", disks[0], "--ssd-path", disks[1], "--ssd-backend", "file")
    report, printed = teraio(
        *("run", "--json", *tiers, "--verify-transfers", "t.plan", script, zero_at, 6),
        cwd=tmp_path,
    )
    assert results(printed) == plain
    assert report["steps"] == 6
    assert report["drift"] == 0
    assert report["peak_bytes"] <= budget_bytes
    assert report["verified_reads"] > 0
    assert [file["path"] for file in report["ssd_files"]] == [str(disk) for disk in disks]
    assert {file["backend"] for file in report["ssd_files"]} <= {"file", "file buffered"}
