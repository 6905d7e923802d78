"""Traces of the G10 artifact (MICRO'23), in normalised form: one gzipped JSON per iteration.

The file holds ``model``, ``batch``, ``clock_hz`` and two tables. ``tensors`` has the rows
``[id, bytes, is_weight, birth, death]``: alive for birth <= kernel < death, and only at birth where
death is -1 (never read); a weight is always alive. ``kernels`` has the rows ``[id, name, exec_ms,
input_fault_ms, all_fault_ms, inputs, outputs, workspace_tensor]`` in order of execution on one
stream; a workspace tensor is also one of the outputs, so it is an ordinary temporary. Times with
page faults belong to unified memory and are not used.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teraio.contracts.plan import Accesses
from teraio.errors import InputError
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

_TENSOR_COLUMNS = ["id", "bytes", "is_weight", "birth", "death"]
_KERNEL_COLUMNS = [
    "id",
    "name",
    "exec_ms",
    "input_fault_ms",
    "all_fault_ms",
    "inputs",
    "outputs",
    "workspace_tensor",
]
_LOSS_KERNEL = "makeLoss"
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class _Tensor:
    nbytes: int
    is_weight: bool
    birth: int
    death: int  # kernel after which it is freed, unlike the file's exclusive end


@dataclass(frozen=True)
class _Kernel:
    name: str
    cycles: int
    inputs: list[int]
    outputs: list[int]
    workspace: int


def import_g10(path: str | Path) -> Trace:
    """Read a normalised G10 trace. The ideal time is exactly the artifact's cycles at its clock.

    Kernels up to the loss are forward, later ones backward (the artifact updates each weight as
    soon as its gradient exists, and has no optimizer state). Raises InputError that names the file
    and the row.
    """
    file = Path(path)
    data = _read(file)
    clock_hz = _positive_integer(data, "clock_hz", file)
    tensors = _read_tensors(_table(data, "tensors", _TENSOR_COLUMNS, file), file)
    kernels = _read_kernels(_table(data, "kernels", _KERNEL_COLUMNS, file), clock_hz, file)
    _check_references(kernels, tensors, file)
    try:
        return Trace(
            kernels=_kernel_table(kernels, tensors, clock_hz),
            storages=_storage_table(kernels, tensors),
            accesses=_access_table(kernels),
            metadata=TraceMetadata(
                source="imported",
                device="cuda",
                allocator_rounding_bytes=_PAGE_BYTES,
                model=f"{data.get('model', 'unknown')}-{data.get('batch', '?')}",
                optimizer="in-place update",
                known_differences=[
                    "no optimizer state; weights are updated during the backward pass",
                    "kernel times were measured on one A100, or interpolated from such",
                ],
            ),
        )
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(gzip.decompress(file.read_bytes()))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except OSError as error:
        raise InputError(f"{file}: not readable as gzip ({error})") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: not a gzipped JSON file ({error})") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: must hold one JSON object with tensors and kernels")
    return data


def _positive_integer(data: dict[str, Any], field: str, file: Path) -> int:
    value = data.get(field)
    if not _is_count(value) or value == 0:
        raise InputError(f"{file}: {field} must be a positive integer, got {value!r}")
    return int(value)  # type: ignore[arg-type]


def _table(data: dict[str, Any], field: str, columns: list[str], file: Path) -> list[list[Any]]:
    rows = data.get(field)
    if not isinstance(rows, list):
        raise InputError(f"{file}: {field} is missing or not a list of rows")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise InputError(f"{file}: {field}, row {index}: expected {columns}, got {row!r}")
        if row[0] != index:
            raise InputError(
                f"{file}: {field}, row {index}: ids must run 0, 1, 2, ..., got {row[0]!r}"
            )
    return rows


def _read_tensors(rows: list[list[Any]], file: Path) -> list[_Tensor]:
    tensors = []
    for index, (_, nbytes, is_weight, birth, death) in enumerate(rows):
        where = f"{file}: tensors, row {index}"
        if not _is_count(nbytes):
            raise InputError(f"{where}: bytes must be an integer of at least 0, got {nbytes!r}")
        if is_weight not in (0, 1):
            raise InputError(f"{where}: is_weight must be 0 or 1, got {is_weight!r}")
        if not _is_count(birth) or not (_is_count(death) or death == -1):
            raise InputError(f"{where}: birth and death must be kernels, got {birth!r}, {death!r}")
        if death != -1 and death <= birth:
            raise InputError(f"{where}: dies at {death}, not after its birth {birth}")
        last_kernel = birth if death == -1 else death - 1
        tensors.append(_Tensor(nbytes, bool(is_weight), birth, last_kernel))
    return tensors


def _read_kernels(rows: list[list[Any]], clock_hz: int, file: Path) -> list[_Kernel]:
    kernels = []
    for index, (_, name, exec_ms, _, _, inputs, outputs, workspace) in enumerate(rows):
        where = f"{file}: kernels, row {index}"
        if not isinstance(name, str) or not name:
            raise InputError(f"{where}: name must be text, got {name!r}")
        is_number = isinstance(exec_ms, (int, float)) and not isinstance(exec_ms, bool)
        if not is_number or not math.isfinite(exec_ms) or exec_ms < 0:
            raise InputError(f"{where}: exec_ms must be a time of at least 0, got {exec_ms!r}")
        for column, ids in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(ids, list) or not all(_is_count(i) for i in ids):
                raise InputError(f"{where}: {column} must be a list of tensor ids, got {ids!r}")
        if workspace != -1 and workspace not in outputs:
            raise InputError(f"{where}: workspace tensor {workspace!r} is not among its outputs")
        # The artifact's own truncation: with it the sum is exactly the published ideal.
        cycles = int(exec_ms * clock_hz / 1000)
        kernels.append(_Kernel(name, cycles, inputs, outputs, workspace))
    if sum(kernel.name == _LOSS_KERNEL for kernel in kernels) != 1:
        raise InputError(f"{file}: kernels must hold {_LOSS_KERNEL} exactly once; it ends forward")
    return kernels


def _check_references(kernels: Sequence[_Kernel], tensors: Sequence[_Tensor], file: Path) -> None:
    for index, kernel in enumerate(kernels):
        for tensor in (*kernel.inputs, *kernel.outputs):
            if tensor >= len(tensors):
                raise InputError(f"{file}: kernels, row {index}: there is no tensor {tensor}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _loss_index(kernels: Sequence[_Kernel]) -> int:
    return next(i for i, kernel in enumerate(kernels) if kernel.name == _LOSS_KERNEL)


def _kernel_table(kernels: Sequence[_Kernel], tensors: Sequence[_Tensor], clock_hz: int) -> Kernels:
    loss = _loss_index(kernels)
    return Kernels.from_rows(
        [
            (
                index,
                kernel.name,
                None,
                "forward" if index <= loss else "backward",
                0,
                kernel.cycles / clock_hz,
                0.0,
                0,
                _signature(kernel, tensors),
                0,
                None,
                None,
                None,
            )
            for index, kernel in enumerate(kernels)
        ]
    )


def _signature(kernel: _Kernel, tensors: Sequence[_Tensor]) -> int:
    """63 bits over what the file says about shapes: the operator and the sizes that it touches."""
    sizes = [[tensors[i].nbytes for i in ids] for ids in (kernel.inputs, kernel.outputs)]
    digest = hashlib.sha256(json.dumps([kernel.name, sizes]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _storage_table(kernels: Sequence[_Kernel], tensors: Sequence[_Tensor]) -> Storages:
    kinds = _kinds(kernels, tensors)
    births: dict[int, int] = {}
    rows: list[tuple[Any, ...]] = []
    for index, tensor in enumerate(tensors):
        nbytes = tensor.nbytes
        if tensor.is_weight:
            identity: tuple[Any, ...] = (f"weight_{index}", None, None, None)
        else:
            ordinal = births.get(tensor.birth, 0)
            births[tensor.birth] = ordinal + 1
            identity = (f"tensor_{index}", tensor.birth, ordinal, tensor.death)
        rows.append((index, nbytes, nbytes, kinds[index], *identity, "float32", True))
    return Storages.from_rows(rows)


def _kinds(kernels: Sequence[_Kernel], tensors: Sequence[_Tensor]) -> list[str]:
    loss = _loss_index(kernels)
    kinds = [
        "parameter" if t.is_weight else "activation" if t.birth < loss < t.death else "temporary"
        for t in tensors
    ]
    for kernel in kernels:
        if "Apply_Grad" in kernel.name:
            for tensor in kernel.inputs:
                if not tensors[tensor].is_weight:
                    kinds[tensor] = "gradient"
        if kernel.name.startswith("LoadData"):
            for tensor in kernel.outputs:
                kinds[tensor] = "input"
    return kinds


def _access_table(kernels: Sequence[_Kernel]) -> Accesses:
    rows = []
    for index, kernel in enumerate(kernels):
        reads, writes = set(kernel.inputs), set(kernel.outputs)
        for tensor in sorted(reads | writes):
            rows.append((index, tensor, tensor in reads, tensor in writes))
    return Accesses.from_rows(rows)
