"""Layers of a model, found in the names of its modules, and the visits that an iteration pays them.

Frameworks that move or recompute by layer (ZeRO-Infinity, activation checkpointing) work on the
elements of the model's lists of blocks. Their names end in a number: ``blocks.3`` is the layer of
``blocks.3.attention.query``. A module outside such a list (``embedding``) is a layer of its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import IntArray, TextArray
from teraio.traces.trace import Trace

_NUMBERED = re.compile(r"^((?:[^.]*\.)*?\d+)(?:\.|$)")


def layer_of_module(module: str) -> str:
    """The module's name up to its first number; without one, its first part."""
    found = _NUMBERED.match(module)
    return found.group(1) if found else module.split(".", 1)[0]


def is_numbered(layer: str) -> bool:
    """Whether a layer is an element of a list of blocks."""
    return _NUMBERED.match(layer) is not None


def layers_of_kernels(trace: Trace) -> TextArray:
    """The layer of each kernel, text (K,); empty where the module is unknown."""
    modules, inverse = np.unique(trace.kernels.module.astype(str), return_inverse=True)
    layers = np.array([layer_of_module(module) for module in modules.tolist()], dtype=object)
    result: TextArray = layers[inverse.reshape(-1)]
    return result


class Visits(NamedTuple):
    """Runs of kernels of one layer, phase and micro-batch, in order.

    ``of_kernel`` int64 (K,) is each kernel's visit, ``first_kernel`` int64 (visits + 1,) where
    each begins; the last entry is K.
    """

    of_kernel: IntArray
    first_kernel: IntArray

    def of(self, kernel: IntArray) -> IntArray:
        """Visit, unrolled, of unrolled kernels."""
        cycle, within = np.divmod(kernel, len(self.of_kernel))
        result: IntArray = self.of_kernel[within] + cycle * (len(self.first_kernel) - 1)
        return result

    def start(self, visit: IntArray) -> IntArray:
        """First kernel, unrolled, of unrolled visits."""
        cycle, within = np.divmod(visit, len(self.first_kernel) - 1)
        result: IntArray = self.first_kernel[within] + cycle * len(self.of_kernel)
        return result


def layer_visits(trace: Trace) -> Visits:
    """The visits of an iteration.

    Kernels without a module join the visit before them in their phase and micro-batch, else the
    one after.
    """
    layers, run = layers_of_kernels(trace), _run_of_kernel(trace)
    index = np.arange(len(layers))
    known = layers != ""
    before = np.maximum.accumulate(np.where(known, index, -1))
    after = np.minimum.accumulate(np.where(known, index, len(layers))[::-1])[::-1]
    has_before = (before >= 0) & (run[before] == run)
    after = np.minimum(after, len(layers) - 1)
    source = np.where(has_before, before, np.where(run[after] == run, after, index))
    layers = layers[source]
    begins = np.ones(len(layers), dtype=bool)
    begins[1:] = (layers[1:] != layers[:-1]) | (run[1:] != run[:-1])
    return Visits(np.cumsum(begins) - 1, np.r_[np.flatnonzero(begins), len(layers)])


def _run_of_kernel(trace: Trace) -> IntArray:
    """Number of each kernel's run of one phase and micro-batch, int64 (K,)."""
    kernels = trace.kernels
    changes = np.zeros(trace.num_kernels, dtype=bool)
    changes[1:] = kernels.phase[1:] != kernels.phase[:-1]
    changes[1:] |= kernels.micro_batch[1:] != kernels.micro_batch[:-1]
    result: IntArray = np.cumsum(changes)
    return result
