"""Options of never_fits.py."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

SMOKE_MODEL = "tiny-llama"

_SPARE_HELP = (
    "planned for so much less: what kernels use inside themselves, no trace without a GPU tells"
)

SUBJECT = (
    *("model", "micro_batch_size", "sequence", "checkpoint", "optimizer", "transform"),
    *("gpu_memory", "spare_gpu", "host_memory", "planner", "time_kernels", "steps", "device"),
    "watch_disk",
)
"""Options that decide what is found."""

OF_THE_RUN = ("steps", "watch_disk")
"""Those among them that a prediction of a run that is over takes from its file."""


def arguments(description: str | None) -> argparse.Namespace:
    """Of the command line; those of a smoke run are set."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--checkpoint", default="non-reentrant", help="none: keep activations")
    parser.add_argument("--optimizer", default="fused", help="fused, foreach or for-loop")
    parser.add_argument("--transform", help="e.g. optimizer-in-backward")
    parser.add_argument("--gpu-memory", default="40GB")
    parser.add_argument("--spare-gpu", default="500MB", help=_SPARE_HELP)
    parser.add_argument("--host-memory", default="85GB")
    parser.add_argument("--ssd-path", type=Path, help="folder on the disk [a temporary one]")
    parser.add_argument("--hardware", default="probe", help="file or preset; probe: measure it")
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--time-limit", type=float, default=120, help="of the planner, seconds")
    parser.add_argument(
        "--kept", type=Path, help="folder for trace and plan, used if they are there"
    )
    parser.add_argument("--output", type=Path, help="file of what is known after every step")
    parser.add_argument("--time-kernels", action="store_true", help="predict with their times here")
    parser.add_argument(
        "--watch-disk", type=int, metavar="N", help="measure it again after every N steps"
    )
    parser.add_argument("--timeline", type=Path, help="folder for what a late step did")
    parser.add_argument("--until", choices=("plan", "run"), default="run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, help="save the state there at the end, and time it")
    parser.add_argument("--reference", action="store_true", help="train without offloading too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    options.ssd_path = options.ssd_path or Path(tempfile.gettempdir())
    if options.watch_disk is not None and options.watch_disk < 2:
        parser.error("--watch-disk: at least 2 steps, since the first after a pause does not count")
    if options.smoke:
        options.model, options.device, options.sequence = SMOKE_MODEL, "cpu", 32
        options.planner, options.hardware, options.reference = "greedy", "cpu", True
    return options


def subject_of(options: argparse.Namespace) -> dict[str, object]:
    """What decides what is found."""
    subject = {name: getattr(options, name) for name in SUBJECT}
    if options.until == "plan" and options.output is not None and options.output.exists():
        earlier = json.loads(options.output.read_text()).get("subject", {})
        subject |= {name: earlier.get(name) for name in OF_THE_RUN}
    return subject
