"""DeepSpeed ZeRO-3 as a contender in benchmarks/h200.py, configured as its documentation advises.

Its C++ operators are compiled on first use. ``TORCH_EXTENSIONS_DIR`` should outlive the process; a
build that was killed leaves a lock for which the next one would wait without end, so locks are
removed before the operators are loaded (nobody else uses the folder). The libraries and headers of
``libaio`` that ``libaio`` in the folder holds (``dpkg -x``) are found.

    python benchmarks/h200_deepspeed.py h200-output    # compiles them ahead, beside other work
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_rows import SWAP_FOLDER, Setting, say
    from benchmarks.h200_training import LEARNING_RATE, Step, Trainee
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import SWAP_FOLDER, Setting, say
    from h200_training import LEARNING_RATE, Step, Trainee

from torch import Tensor

from teraio.profiler.product_precision import product_precision_of

ADAMW = {"lr": LEARNING_RATE, "weight_decay": 0.01}
"""As AdamW of PyTorch is by default; DeepSpeed takes its own version on the CPU."""

BUFFER_COUNT = 12
"""Of optimizer states on NVMe: with pipelined reads and writes fewer end in an assertion."""

HOPPER = "9.0"


def deepspeed_step(setting: Setting, folder: Path, *, nvme: bool) -> Step:
    """An engine around the same model, and its training step."""
    folder = folder.resolve()
    _set_environment(folder)
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    _load_operators(nvme=nvme)
    trainee = Trainee(setting)
    config = configuration(setting, folder if nvme else None)
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=trainee.model, config=config)

    def step(number: int) -> Tensor:
        with product_precision_of(trainee.setup.dtype):
            loss: Tensor = engine(*trainee.batch(number))
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


def configuration(setting: Setting, nvme_folder: Path | None) -> dict[str, Any]:
    """The engine's configuration: parameters and optimizer in pinned host memory, or the optimizer
    in files under a folder. Parameters stay in host memory then, which is the faster way.
    """
    parameters: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    optimizer = dict(parameters)
    if nvme_folder is not None:
        path = nvme_folder / SWAP_FOLDER
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFER_COUNT}
        optimizer |= {"device": "nvme", "nvme_path": str(path)} | pipeline
    return {
        "train_micro_batch_size_per_gpu": setting.micro_batch_size,
        "gradient_accumulation_steps": 1,
        # As users of DeepSpeed do, which keeps parameters in bfloat16 and their masters in float32.
        "bf16": {"enabled": setting.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            "offload_param": parameters,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "aio": {
            "block_size": 8 * 2**20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _set_environment(folder: Path) -> None:
    extensions = folder / "torch_extensions"
    # Set on some machines to 9.0a, which DeepSpeed cannot read.
    os.environ["TORCH_CUDA_ARCH_LIST"] = HOPPER
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions))
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/lock"):
        lock.unlink()
    prefix = folder / "libaio"
    if not prefix.exists():
        return
    include = prefix / "usr" / "include"
    libraries = sorted({str(path.parent) for path in prefix.glob("**/libaio.so.1")})
    _prepend("CPATH", [str(include)], ":")
    _prepend("LIBRARY_PATH", libraries, ":")
    # The loader read its search path when the process began; what is loaded already, it finds.
    for library in libraries:
        ctypes.CDLL(f"{library}/libaio.so.1", mode=ctypes.RTLD_GLOBAL)
    _prepend("CFLAGS", [f"-I{include}"], " ")
    _prepend("LDFLAGS", [f"-L{library}" for library in libraries], " ")


def _prepend(name: str, values: list[str], separator: str) -> None:
    before = os.environ.get(name)
    os.environ[name] = separator.join([*values, *([before] if before else [])])


def _load_operators(*, nvme: bool) -> None:
    """Compile (or find) them before anything is timed."""
    from deepspeed.ops import op_builder  # type: ignore[import-not-found,unused-ignore]

    say("DeepSpeed: loading operators, compiled on first use")
    op_builder.CPUAdamBuilder().load()
    if nvme:
        op_builder.AsyncIOBuilder().load()


def main() -> None:
    """Compile the operators into the output folder of benchmarks/h200.py."""
    folder = Path(sys.argv[1]).resolve()
    _set_environment(folder)
    _load_operators(nvme=(folder / "libaio").exists())


if __name__ == "__main__":
    main()
