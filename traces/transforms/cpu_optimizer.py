"""Transform ``cpu-optimizer``: the optimizer step runs on the host, where its state lives.

Source: ZeRO-Offload (ATC 2021: optimizer state and step on the CPU) and ZeRO-Infinity (SC 2021: the
state streams between SSD and host while the CPU steps).

What changes, kernel indices staying as they are:

1. A *host kernel* is a kernel of phase optimizer, or one outside forward and backward that uses
   gradients which other kernels made (scaling, clipping). It is named ``host::`` and its operator,
   occupies no GPU memory, and no longer touches parameters, gradients or optimizer state there:
   the GPU waits while it runs.
2. Storages that only host kernels touched (optimizer state, their temporaries) are gone.
3. Its time: a host step is bound by host memory, at ``host_rate`` bytes/s. Each parameter and each
   state counts where the last host kernel uses it, read and written once, and each gradient, read
   once: one fused pass, whatever the operators that the trace has. Scaling and clipping cost
   nothing beyond, to the policy's advantage.
4. Storages of ``streamed`` kinds lie on an SSD, read at ``stream_read_rate`` and written at
   ``stream_write_rate`` meanwhile; the slowest of the three sets the time.
5. With ``recompute_layers`` = N, the first N layers are recomputed besides (transform
   ``recompute``), as users of both systems do: the GPU then keeps layer inputs only.

Nothing orders a host kernel after the gradients' arrival or the parameters' return after it: moves
do (see :mod:`teraio.planner.policies.host_step`). The one-step delayed update of ZeRO-Offload
changes the numbers that training computes, and is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teraio.contracts.plan import Accesses
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.transforms.recompute import with_recomputation

HOST_PREFIX = "host::"
"""Begins the operator of a kernel that runs on the host."""

CPU_ADAM_RATE = 109e9
"""Bytes/s of the host's optimizer. ZeRO-Offload, table 4: DeepSpeed's CPU-Adam steps 10 billion
parameters in 2.57 s; 28 bytes each (parameter, gradient, two moments read, three of them written)
make 109 GB/s. Its rows of 1 and 4 billion give 127 and 109 GB/s."""

_MODEL_STATE = ("parameter", "gradient", "optimizer_state")
_OPTIONS = {
    "host_rate",
    "stream_read_rate",
    "stream_write_rate",
    "streamed",
    "recompute_layers",
}


@dataclass(frozen=True)
class HostStep:
    """The accesses of the original trace by host kernels.

    ``is_host`` bool (K,); the arrays, (storages touched,), hold a row for each parameter, gradient
    or optimizer state that they use: ``storage``, the ``first`` and ``last`` host kernel that use
    it, and whether any of them ``writes`` it.
    """

    is_host: BoolArray
    storage: IntArray
    first: IntArray
    last: IntArray
    writes: BoolArray


def find_host_step(trace: Trace) -> HostStep:
    """What the optimizer step touches in the trace as recorded (1)."""
    kernels, storages, accesses = trace.kernels, trace.storages, trace.accesses
    is_state = np.isin(storages.kind, _MODEL_STATE)
    is_host: BoolArray = (kernels.phase == "optimizer").astype(bool)
    outside = (kernels.phase == "other").astype(bool)
    is_gradient = (storages.kind == "gradient").astype(bool)
    of_gradient = is_gradient[accesses.storage]
    uses = np.zeros(trace.num_kernels, dtype=bool)
    uses[accesses.kernel[of_gradient & (accesses.reads | accesses.writes)]] = True
    makes = np.zeros(trace.num_kernels, dtype=bool)
    makes[storages.birth[is_gradient & (storages.birth >= 0)]] = True
    is_host |= outside & uses & ~makes
    rows = np.flatnonzero(is_host[accesses.kernel] & is_state[accesses.storage])
    storage, inverse = np.unique(accesses.storage[rows], return_inverse=True)
    inverse = inverse.reshape(-1)
    first = np.full(len(storage), trace.num_kernels, dtype=np.int64)
    last = np.full(len(storage), -1, dtype=np.int64)
    writes = np.zeros(len(storage), dtype=bool)
    np.minimum.at(first, inverse, accesses.kernel[rows])
    np.maximum.at(last, inverse, accesses.kernel[rows])
    np.logical_or.at(writes, inverse, accesses.writes[rows])
    return HostStep(is_host, storage, first, last, writes)


def cpu_optimizer(trace: Trace, options: Mapping[str, Any]) -> Trace:
    """The trace with its optimizer step on the host; see the module's text.

    Options: ``host_rate`` (bytes/s), ``streamed`` (kinds on an SSD, default none) with
    ``stream_read_rate`` and ``stream_write_rate`` (bytes/s), ``recompute_layers`` (default 0).
    Raises InputError for another option, a rate that is missing or not above 0, and a trace without
    optimizer kernels.
    """
    rates = _checked(options)
    trace = with_recomputation(trace, rates["recompute_layers"])
    step = find_host_step(trace)
    if not step.is_host.any():
        raise InputError("transform cpu-optimizer: the trace has no kernels of phase optimizer")
    kernels = trace.kernels
    op = kernels.op.copy()
    op[step.is_host] = [HOST_PREFIX + name for name in op[step.is_host]]
    changed = replace(
        kernels,
        op=op,
        duration_seconds=np.where(
            step.is_host, _host_seconds(trace, step, rates), kernels.duration_seconds
        ),
        workspace_bytes=np.where(step.is_host, 0, kernels.workspace_bytes),
        call=np.where(step.is_host, -1, kernels.call),
    )
    accesses = trace.accesses
    is_state = np.isin(trace.storages.kind, _MODEL_STATE)
    on_gpu = ~(step.is_host[accesses.kernel] & is_state[accesses.storage])
    return _without_host_storages(replace(trace, kernels=changed), step.is_host, on_gpu)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    if not options:
        raise InputError(
            "transform cpu-optimizer: the planners zero-offload and zero-infinity apply it, with "
            "the moves that it needs; choose one of them and leave the transform out"
        )
    rates: dict[str, Any] = {"streamed": [], "recompute_layers": 0} | dict(options)
    unknown = sorted(set(rates) - _OPTIONS)
    if unknown:
        raise InputError(f"transform cpu-optimizer: option {unknown[0]!r} is not known")
    needed = ["host_rate"]
    if rates["streamed"]:
        needed += ["stream_read_rate", "stream_write_rate"]
    for name in needed:
        rate = rates.get(name)
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not rate > 0:
            raise InputError(
                f"transform cpu-optimizer: {name} must be above 0 bytes/s, got {rate!r}"
            )
    strangers = sorted(set(rates["streamed"]) - set(_MODEL_STATE))
    if strangers:
        raise InputError(
            f"transform cpu-optimizer: streamed may name {', '.join(_MODEL_STATE)}, "
            f"not {strangers[0]!r}"
        )
    return rates


def _host_seconds(trace: Trace, step: HostStep, rates: Mapping[str, Any]) -> FloatArray:
    """Duration of each kernel as a host kernel, float64 (K,) (3, 4)."""
    storages = trace.storages
    read = storages.nbytes[step.storage].astype(float)
    is_gradient = (storages.kind[step.storage] == "gradient").astype(bool)
    written = np.where(step.writes & ~is_gradient, read, 0.0)
    streams = np.isin(storages.kind[step.storage], list(rates["streamed"]))

    def total(num_bytes: FloatArray) -> FloatArray:
        result = np.zeros(trace.num_kernels)
        np.add.at(result, step.last, num_bytes)
        return result

    seconds = total(read + written) / float(rates["host_rate"])
    if streams.any():
        reading = total(np.where(streams, read, 0.0)) / float(rates["stream_read_rate"])
        writing = total(np.where(streams, written, 0.0)) / float(rates["stream_write_rate"])
        seconds = np.maximum(seconds, np.maximum(reading, writing))
    return seconds


def _without_host_storages(trace: Trace, is_host: BoolArray, on_gpu: BoolArray) -> Trace:
    """The trace with the accesses ``on_gpu`` only, and without what lives on the host (2).

    A storage goes if host kernels alone touched it and, unless it is persistent, made it.
    """
    storages, accesses = trace.storages, trace.accesses
    on_host_only = np.zeros(len(storages), dtype=bool)
    on_host_only[accesses.storage] = True
    on_host_only[accesses.storage[~is_host[accesses.kernel]]] = False
    born_there = (storages.birth < 0) | is_host[storages.birth]
    is_model = np.isin(storages.kind, ("parameter", "gradient"))
    kept = ~(on_host_only & born_there & ~is_model)
    number = np.cumsum(kept) - 1
    rows = on_gpu & kept[accesses.storage]
    return replace(
        trace,
        storages=replace(storages.take(kept), storage=np.arange(int(kept.sum()))),
        accesses=Accesses(
            kernel=accesses.kernel[rows],
            storage=number[accesses.storage[rows]],
            reads=accesses.reads[rows],
            writes=accesses.writes[rows],
        ),
    )
