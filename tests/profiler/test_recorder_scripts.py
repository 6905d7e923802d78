"""Unmodified scripts, and the two doors to the same trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from teraio.errors import InputError, MissingDependencyError, OffloadWarning
from teraio.profiler import profile, profile_model, profile_script
from teraio.traces.trace import Trace

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)


def iteration(step):
    {top}
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    {bottom}
    print("step", step, loss.item())


def main():
    for step in range(int(sys.argv[1])):
        iteration(step)
    print("finished")


if __name__ == "__main__":
    main()
"""


@pytest.fixture(params=["top", "bottom"])
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A training script with ``zero_grad`` at the top or at the bottom of its loop."""
    lines = {"top": "pass", "bottom": "pass", request.param: "optimizer.zero_grad()"}
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(**lines))
    return path


def through_the_api(script: Path) -> Trace:
    """The same loop, run by hand inside ``profile``."""
    names: dict[str, object] = {"__name__": "not main"}
    exec(script.read_text(), names)
    with profile(names["model"], names["optimizer"]) as session:  # type: ignore[arg-type]
        for step in range(8):
            names["iteration"](step)  # type: ignore[operator]
            session.step()
    return session.trace


def test_both_doors_lead_to_the_same_trace(script: Path) -> None:
    from_script, from_api = profile_script(script, ["8"]), through_the_api(script)
    assert from_script.storages.equals(from_api.storages)
    assert from_script.accesses.equals(from_api.accesses)
    for column in ("op", "module", "phase", "signature", "micro_batch", "workspace_bytes"):
        left, right = (getattr(t.kernels, column).tolist() for t in (from_script, from_api))
        assert left == right, column
    assert from_script.metadata.optimizer_steps == from_api.metadata.optimizer_steps == 1
    assert from_script.metadata.model == "train"


def test_a_script_ends_once_enough_is_seen(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_script(script, ["1000000"])
    output = capsys.readouterr().out
    assert "step 3" in output
    assert "step 9" not in output
    assert "finished" not in output


def test_a_script_may_run_to_its_own_end(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_script(script, ["9"], run_to_end=True)
    assert "finished" in capsys.readouterr().out


def test_a_script_that_is_too_short_is_refused(script: Path) -> None:
    with pytest.raises(InputError, match="2 optimizer steps recorded"):
        profile_script(script, ["2"])


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.py: no such training script"):
        profile_script(tmp_path / "gone.py")


def test_errors_of_a_script_propagate(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        profile_script(path)


def test_reference_models_are_profiled_by_name() -> None:
    trace = profile_model("tiny-llama", micro_batches=2, micro_batch_size=1, sequence=8, layers=1)
    assert trace.metadata.model == "tiny-llama"
    assert trace.metadata.micro_batches == 2
    assert {"forward", "backward", "optimizer"} <= set(trace.kernels.phase)
    assert trace.metadata.attention_kernel == "flash_for_cpu"


def test_unknown_reference_models_are_refused() -> None:
    with pytest.raises(InputError, match="'gpt9' is not one of"):
        profile_model("gpt9")


def test_few_steps_of_a_reference_model_leave_scratch_memory_unknown() -> None:
    with pytest.warns(OffloadWarning, match="too few"):
        profile_model("tiny-llama", steps=3, micro_batch_size=1, sequence=8, layers=1)


def test_importing_needs_no_torch_until_a_name_is_used() -> None:
    """And says what to install where there is none."""
    code = (
        "import sys, importlib.util\n"
        "import teraio.profiler\n"
        "assert 'torch' not in sys.modules\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from teraio.errors import MissingDependencyError\n"
        "try:\n"
        "    teraio.profiler.profile\n"
        "except MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "teraio[torch]"' in run.stdout
    assert issubclass(MissingDependencyError, ImportError)


def test_traces_survive_saving(tmp_path: Path) -> None:
    trace = profile_model("tiny-llama", micro_batch_size=1, sequence=8, layers=1)
    trace.save(tmp_path / "t.trace")
    loaded = Trace.load(tmp_path / "t.trace")
    assert loaded.hash == trace.hash
    assert loaded.kernels.equals(trace.kernels)
