"""Running a user's training script unmodified, as ``python SCRIPT ARGUMENTS`` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from teraio.errors import InputError


def use_device_of_rank() -> None:
    """Make the GPU of this rank the current one, before anything is allocated or timed there.

    The launcher's ``LOCAL_RANK`` says which; nothing without it. Scripts do the same, but later.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and torch.cuda.is_available():
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())


def run_script(script: str | Path, arguments: Sequence[str] = ()) -> None:
    """Execute a script in this process as ``__main__``, with its own argv and import path.

    A script that ends by ``sys.exit(0)`` has ended well; any other exit status or exception
    propagates. Raises InputError if there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(f"{script}: no such training script")
    saved_argv, saved_path = sys.argv, sys.path.copy()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_request:
        if exit_request.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
