"""The versions of PyTorch that this package works with."""

from __future__ import annotations

import re

import torch

from teraio.errors import MissingDependencyError

OLDEST = (2, 11)
"""The oldest that was tried on a GPU. In 2.9 a weak reference to a storage may die before that
does: a run would take it for freed, and give its copy in host memory to another.
"""


def check_torch_version() -> None:
    """Raise MissingDependencyError for an older PyTorch."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} is too old, teraio needs {oldest} or newer: pip install "
            f'"torch>={oldest}"'
        )
