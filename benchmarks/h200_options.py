"""The command line of benchmarks/h200.py: what is measured, how, and the setting of the table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_rows import Setting
    from benchmarks.h200_tables import TITLES
    from benchmarks.paper_document import ROOT
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import Setting
    from h200_tables import TITLES
    from paper_document import ROOT

HERE = Path(__file__).resolve().parent
OUTPUT = ROOT / "benchmarks" / "reports" / "h200.json"
OURS = ("empty-plan", "teraio", "fake-trace")
SMOKE_ROWS = ("ideal", "empty-plan", "teraio", "save-on-cpu", "checkpointing", "fsdp2")
DEFAULT_BUDGETS = tuple((share, None) for share in (0.8, 0.6, 0.5, 0.4))
DEFAULT_TRANSFORMS = (None, "optimizer-in-backward")


def parse_options(description: str) -> argparse.Namespace:
    """The command line, with the setting that it describes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_what(parser)
    _add_how(parser)
    options = parser.parse_args()
    for name in options.rows or ():
        if name not in TITLES:
            parser.error(f"--rows: {name!r} is not one of {', '.join(TITLES)}")
    # Where files lay tells nothing on another machine.
    options.asked = {
        name: value.name if isinstance(value, Path) else str(value)
        for name, value in vars(options).items()
    }
    options.run = time.strftime("%Y-%m-%dT%H:%M:%S")
    _complete(options)
    return options


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_names, help=f"of {','.join(TITLES)} [default: all]")
    parser.add_argument(
        "--budgets",
        type=_budgets,
        help="shares of the peak, each with its own transform after a colon where it is another "
        "than --transforms says [default: 0.8,0.6,0.5,0.4]",
    )
    parser.add_argument("--fake-budgets", type=_budgets, help="of fake-trace [default: --budgets]")
    parser.add_argument(
        "--transforms",
        type=_transforms,
        help="variants of each plan [default: none,optimizer-in-backward]",
    )
    parser.add_argument("--model", default="bench-3.4b")
    parser.add_argument("--dtype", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--micro-batch-size", type=int, help="[default: 3, in bf16 6]")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument(
        "--optimizer",
        choices=("foreach", "fused", "for-loop"),
        help="AdamW's implementation [default: foreach, in bf16 fused]",
    )
    parser.add_argument("--compiled", action="store_true", help="compile each block")
    parser.add_argument(
        "--exact", action="store_true", help="deterministic algorithms in all steps, timed ones too"
    )
    parser.add_argument(
        "--exact-steps",
        type=int,
        default=0,
        help="deterministic iterations before the timed ones, losses compared bit by bit",
    )
    parser.add_argument("--smoke", action="store_true", help="toy size on the CPU")


def _add_how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="timed of a plan [default: 10, exact 17]")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--baseline-steps", type=int, default=3, help="timed of a baseline")
    parser.add_argument("--baseline-warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--hardware", help="file or preset [default: measure this machine]")
    parser.add_argument("--probe", choices=("quick", "full"), default="quick")
    parser.add_argument("--host-memory", default="90GB", help="what plans may use")
    parser.add_argument("--spare-host", default="2GB", help="pinned beyond what a plan needs")
    parser.add_argument(
        "--headroom",
        type=float,
        default=0.0,
        help="share of the GPU budget that plans leave free, for the allocator's fragments",
    )
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--time-limit", type=float, help="seconds, for the planner")
    parser.add_argument(
        "--time-kernels", action="store_true", help="price the trace made without the GPU by them"
    )
    parser.add_argument(
        "--output-folder", type=Path, default=Path("h200-output"), help="for traces and plans"
    )
    parser.add_argument("--plans-from", type=Path, help="an earlier output folder, used again")
    parser.add_argument(
        "--until",
        choices=("trace", "plan", "run"),
        default="run",
        help="stop teraio's rows before planning, or before execution",
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for each process")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of the rows")
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    parser.add_argument("--merge", type=Path, help="measure nothing, add the rows of this file")
    parser.add_argument("--render-only", action="store_true", help="measure nothing")


def _complete(options: argparse.Namespace) -> None:
    """Fill in what depends on other options."""
    is_bf16 = options.dtype == "bf16"
    given: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "micro_batch_size": options.micro_batch_size or (6 if is_bf16 else 3),
        "sequence": options.sequence,
        "optimizer": options.optimizer or ("fused" if is_bf16 else "foreach"),
        "compiled": options.compiled,
        "exact": options.exact,
    }
    if options.smoke:
        given |= {"model": "tiny-llama", "sequence": 64, "device": "cpu"}
        options.host_memory, options.spare_host = "200MB", "20MB"
        options.budgets = options.budgets or ((0.8, (None,)),)
        options.transforms = options.transforms or (None,)
        options.baseline_steps = options.steps = options.steps or 3
    options.rows = options.rows or (SMOKE_ROWS if options.smoke else tuple(TITLES))
    options.budgets = options.budgets or DEFAULT_BUDGETS
    options.transforms = options.transforms or DEFAULT_TRANSFORMS
    options.fake_budgets = options.fake_budgets or options.budgets
    options.setting = Setting(**given)
    options.steps = options.steps or (17 if options.exact else 10)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _budgets(text: str) -> tuple[tuple[float, tuple[str | None, ...] | None], ...]:
    """Shares, each with its own transforms or None for those of all."""
    found = []
    for part in text.split(","):
        share, colon, transform = part.partition(":")
        found.append((float(share), _transforms(transform) if colon else None))
    return tuple(found)


def _transforms(text: str) -> tuple[str | None, ...]:
    return tuple(None if part == "none" else part for part in text.split(","))
