"""Transforms by name, and the trace that a plan is about.

A plan for a transformed trace names the transform and its options, and keeps the hash and the ideal
of the trace as it was recorded. So users pass the recorded trace everywhere, and whoever needs the
transformed one makes it again: :func:`trace_of_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.transforms.cpu_optimizer import cpu_optimizer
from teraio.traces.transforms.optimizer_in_backward import optimizer_in_backward
from teraio.traces.transforms.recompute import recompute

Transform = Callable[[Trace, Mapping[str, Any]], Trace]
"""Makes the transformed trace. Raises InputError where the trace does not allow it, and for options
that it does not know."""

TRANSFORMS: MappingProxyType[str, Transform] = MappingProxyType(
    {
        "cpu-optimizer": cpu_optimizer,
        "optimizer-in-backward": optimizer_in_backward,
        "recompute": recompute,
    }
)
"""Transforms by name, as it stands in plans and on the command line."""


def transform_trace(trace: Trace, name: str, options: Mapping[str, Any] | None = None) -> Trace:
    """The trace of the same training step after the transform ``name``.

    ``options`` must be JSON-able, since plans keep them. The same trace and options give the same
    result, row by row. Raises InputError for an unknown name, and as the transform does.
    """
    transform = TRANSFORMS.get(name)
    if transform is None:
        known = ", ".join(sorted(TRANSFORMS)) or "none"
        raise InputError(f"transform: {name!r} is not known; the known ones are {known}")
    return transform(trace, options or {})


def trace_of_plan(trace: Trace, plan: Plan) -> Trace:
    """The trace that the rows of ``plan`` are about, from the recorded ``trace``.

    It is ``trace`` itself unless the plan names a transform. Raises InputError as
    :func:`transform_trace` does.
    """
    metadata = plan.metadata
    if metadata.transform is None:
        return trace
    return transform_trace(trace, metadata.transform, metadata.transform_options)
