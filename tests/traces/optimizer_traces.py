"""Hand-made traces of one training step of two parameters, ``a`` before ``b``."""

from __future__ import annotations

from collections.abc import Sequence

from teraio.contracts.plan import Accesses
from teraio.contracts.signatures import kernel_signature
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

PERSISTENT = ("a", "b", "a.step", "b.step", "a.exp_avg", "b.exp_avg")
KINDS = {"step": "optimizer_state", "exp_avg": "optimizer_state", "grad": "gradient"}
SIZES = {"step": 4, "exp_avg": 1000, "grad": 1000}

Kernel = tuple[str, str, str]
"""Phase, operator, and what it touches: ``name:flags``, flags of r, w, n (born here) and none."""

PASSES: tuple[Kernel, ...] = (
    ("forward", "aten.mm", "a:r hidden:n"),
    ("forward", "aten.mm", "b:r hidden:r loss:n"),
    ("backward", "aten.mm_backward", "b:r hidden:r loss:r back:n b.grad:n"),
    ("backward", "aten.relu_backward", "b.grad: back:r further:n"),
    ("backward", "aten.mm_backward", "further:r a.grad:n"),
)
"""Of the gradients, that of b is taken over before kernel 3, that of a after the last one."""

LOOP: tuple[Kernel, ...] = (
    ("optimizer", "aten.add_.Tensor", "a.grad: a.step:rw"),
    ("optimizer", "aten.lerp_.Scalar", "a.exp_avg:rw a.grad:r"),
    ("optimizer", "aten._local_scalar_dense.default", "a.step:r"),
    ("optimizer", "aten.sub_.Tensor", "a:rw a.exp_avg:r"),
    ("optimizer", "aten.add_.Tensor", "b.step:rw"),
    ("optimizer", "aten.lerp_.Scalar", "b.exp_avg:rw b.grad:r"),
    ("optimizer", "aten._local_scalar_dense.default", "b.step:r"),
    ("optimizer", "aten.sub_.Tensor", "b:rw b.exp_avg:r"),
)
LISTS: tuple[Kernel, ...] = (
    ("optimizer", "aten._foreach_add_.Scalar", "a.grad: a.step:rw b.step:rw"),
    ("optimizer", "aten._foreach_lerp_.Scalar", "a.exp_avg:rw a.grad:r"),
    ("optimizer", "aten._foreach_lerp_.Scalar", "b.exp_avg:rw b.grad:r"),
    ("optimizer", "aten._local_scalar_dense.default", "a.step:r"),
    ("optimizer", "aten._local_scalar_dense.default", "b.step:r"),
    ("optimizer", "aten._foreach_sub_.List", "a:rw a.exp_avg:r"),
    ("optimizer", "aten._foreach_sub_.List", "b:rw b.exp_avg:r"),
)


def training_trace(
    kernels: Sequence[Kernel], *, without: str = "", optimizer_steps: int = 1
) -> Trace:
    """The trace of these kernels, a millisecond each; all that is born dies at the end.

    ``without``: suffix of names whose storages the trace does not know.
    """
    touched = [
        [entry.split(":") for entry in text.split() if not (without and without in entry)]
        for _, _, text in kernels
    ]
    names = [name for name in PERSISTENT if not (without and without in name)]
    births = {
        name: (kernel, ordinal)
        for kernel, entries in enumerate(touched)
        for ordinal, (name, flags) in enumerate(entries)
        if "n" in flags
    }
    rows = [_row(name, None, len(kernels)) for name in names]
    rows += [_row(name, birth, len(kernels)) for name, birth in births.items()]
    number = {name: row for row, name in enumerate([*names, *births])}
    accesses = [
        (kernel, number[name], "r" in flags, "w" in flags or "n" in flags)
        for kernel, entries in enumerate(touched)
        for name, flags in entries
    ]
    return Trace(
        kernels=Kernels.from_rows(
            [
                (k, op, "", phase, None, 1e-3, 1e-4, 0, _signature(op, text), 0)
                for k, (phase, op, text) in enumerate(kernels)
            ]
        ),
        storages=Storages.from_rows([(n, *row) for n, row in enumerate(rows)]),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="measured", optimizer_steps=optimizer_steps),
    )


def _row(name: str, birth: tuple[int, int] | None, num_kernels: int) -> tuple[object, ...]:
    suffix = name.rpartition(".")[2]
    kind = KINDS.get(suffix, "parameter" if name in PERSISTENT else "temporary")
    size = SIZES.get(suffix, 1000)
    life = (None, None, None) if birth is None else (*birth, num_kernels - 1)
    return (size, size, kind, name, *life, "float32", True)


def _signature(op: str, text: str) -> int:
    """Real ones of lists over scalars; whatever is unique of the others."""
    if "_foreach_add_" in op:
        count = text.count(".step") or 2
        return kernel_signature(op, [((), "torch.float32")] * count)
    return kernel_signature(f"{op} {text}", [])


def described(trace: Trace) -> list[Kernel]:
    """The trace's kernels in the notation in which they are given."""
    names, accesses = trace.storages.name, trace.accesses
    births = trace.storages.birth
    texts: list[list[str]] = [[] for _ in range(trace.num_kernels)]
    for kernel, storage, reads, writes in zip(
        accesses.kernel, accesses.storage, accesses.reads, accesses.writes, strict=True
    ):
        flags = "n" if births[storage] == kernel else "r" * bool(reads) + "w" * bool(writes)
        texts[kernel].append(f"{names[storage]}:{flags}")
    kernels = zip(trace.kernels.phase, trace.kernels.op, texts, strict=True)
    return [(phase, op, " ".join(text)) for phase, op, text in kernels]


def lifetimes(trace: Trace) -> dict[str, tuple[int, int]]:
    """(birth, death) of the storages that have them, by name."""
    storages = trace.storages
    return {
        name: (int(birth), int(death))
        for name, birth, death in zip(storages.name, storages.birth, storages.death, strict=True)
        if birth >= 0
    }
