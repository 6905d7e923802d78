"""The versions of PyTorch that this package works with."""

from __future__ import annotations

import torch

from teraio.errors import MissingDependencyError

OLDEST = (2, 11)
"""The oldest that was tried on a GPU. In 2.9 a weak reference to a storage may die before that
does: a run would take it for freed, and give its copy in host memory to another.
"""


def check_torch_version() -> None:
    """Raise MissingDependencyError for an older PyTorch."""
    parts = torch.__version__.split(".")[:2]
    if tuple(int(part) for part in parts) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} is too old, teraio needs {oldest} or newer: pip install "
            f'"torch>={oldest}"'
        )
