"""Transforms: traces of the same training step, done in another order or elsewhere."""

from teraio.traces.transforms.registry import TRANSFORMS, trace_of_plan, transform_trace

__all__ = ["TRANSFORMS", "trace_of_plan", "transform_trace"]
