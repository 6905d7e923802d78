"""The dispatch mode that recorder and executor share: the same kernels, seen the same way.

Both must agree to the letter on what a kernel is, on its index, on which storage is which, and on
where an iteration ends; so all of it is decided here. An iteration ends right after the last
optimizer kernel of a step: after every ``optimizer_steps`` calls of ``Optimizer.step``. Loops that
use no ``torch.optim`` optimizer end theirs by :meth:`KernelMode.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from teraio.errors import InputError
from teraio.profiler.names import NameBook
from teraio.profiler.operators import (
    AUTOMATIC_BUCKETS,
    Operator,
    OperatorKind,
    SignatureBook,
    bucket_bounds,
    describe_operator,
    list_length,
    nested_tensors,
    slice_lists,
    tensors_with_flags,
)
from teraio.profiler.storages import (
    StorageRegistry,
    StorageState,
    listen_to_resizes,
    stop_listening_to_resizes,
)

READ, WRITE = 1, 2

_entered: list[KernelMode] = []
"""Modes inside their ``with`` block: their hooks are the process's, so one at a time may work."""


class KernelCall:
    """One kernel about to run.

    ``flags`` maps each storage that it touches, in order of appearance, to READ | WRITE (0: a view
    since the last kernel needs it resident). ``born`` lists storages first seen here, in order:
    before the kernel runs the foreign ones among its arguments, afterwards its outputs too.
    """

    __slots__ = (
        "args",
        "born",
        "flags",
        "func",
        "kwargs",
        "operator",
        "requires_grad",
        "signature",
    )

    def __init__(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func = func
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.flags: dict[StorageState, int] = {}
        self.born: list[StorageState] = []
        self.signature = 0
        self.requires_grad = False


class KernelMode(TorchDispatchMode):
    """Counts kernels and iterations, identifies storages, splits list operators into buckets.

    Subclasses override ``before_kernel``, ``run_kernel``, ``after_kernel``, ``on_view``,
    ``on_death`` and ``on_iteration_end``. Use as a context manager around the training loop. While
    ``is_idle`` operators pass unseen, and so do those of a FakeTensorMode that was not there when
    the mode was entered: PyTorch runs them to learn shapes. Only one may be active in a process:
    entering another raises InputError. Strided nested tensors are refused; jagged ones and other
    wrapper subclasses are seen as the plain tensors that they wrap.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run compiled; torch would silently run them eagerly otherwise."""
        return True

    def __init__(
        self,
        *,
        device_type: str = "cpu",
        optimizer_steps: int = 1,
        bucket_bytes: int = AUTOMATIC_BUCKETS,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel = 0
        self.iteration = 0
        self.optimizer_steps = optimizer_steps
        self.bucket_bytes = bucket_bytes
        self.in_optimizer = False
        self.is_idle = False
        self._fake_mode: Any = None
        self.names = NameBook()
        self.registry = StorageRegistry(device_type, self.on_death)
        self._signatures = SignatureBook()
        self._operators: dict[Any, Operator] = {}
        self._viewed: dict[StorageState, int] = {}
        self._born_between: list[StorageState] = []
        self._next_ordinal = 0
        self._steps_in_iteration = 0
        self._has_seen_optimizer = False
        self._hook_handles: list[Any] = []
        self._module_depth = 0

    # What subclasses do at each moment

    def before_kernel(self, call: KernelCall) -> None:
        """Arguments are known, nothing has run."""

    def run_kernel(self, call: KernelCall) -> Any:
        """Run the operator."""
        return call.func(*call.args, **call.kwargs)

    def after_kernel(self, call: KernelCall) -> None:
        """The operator has run (or was launched); ``call.born`` now holds its outputs too."""

    def on_view(self, state: StorageState) -> None:
        """A view of this storage is about to be taken: it must be resident."""

    def on_death(self, state: StorageState) -> None:
        """The storage's memory was freed, after the kernel before ``self.kernel``."""

    def on_iteration_end(self) -> None:
        """An iteration has ended; ``self.iteration`` and ``self.kernel`` still number it."""

    # Entering and leaving

    def __enter__(self) -> Self:
        if any(not other.is_idle for other in _entered):
            raise InputError(
                "teraio: a profile or an executed run is active already; leave it first"
            )
        _entered.append(self)
        self._fake_mode = _active_fake_mode()
        self._hook_handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
            torch.nn.modules.module.register_module_forward_pre_hook(self._note_module_begins),
            torch.nn.modules.module.register_module_forward_hook(
                self._note_module_ends, always_call=True
            ),
        ]
        listen_to_resizes(self._storage_resized)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            self._leave()

    def _leave(self) -> None:
        if self in _entered:
            _entered.remove(self)
        if self._hook_handles:
            stop_listening_to_resizes(self._storage_resized)
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []

    # Iterations

    def step(self) -> None:
        """Mark the end of a loop's iteration; it counts only where no optimizer has stepped."""
        if not self._has_seen_optimizer:
            self._end_iteration()

    def _end_iteration(self) -> None:
        self.on_iteration_end()
        self.iteration += 1
        self.kernel = 0
        self._steps_in_iteration = 0
        for state in self._born_between:
            state.birth_iteration, state.birth_kernel = self.iteration, 0

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.names.add_optimizer(optimizer)
        self.in_optimizer = True

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.in_optimizer = False
        self._has_seen_optimizer = True
        self._steps_in_iteration += 1
        if self._steps_in_iteration >= self.optimizer_steps:
            self._end_iteration()

    # Modules inside a compiled region are no calls of their own: the compiler finds empty hooks.

    def _note_module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._module_begins(module, inputs)

    def _note_module_ends(self, module: torch.nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._module_ends(module, *arguments)

    def _module_begins(self, module: torch.nn.Module, _: Any) -> None:
        # A loss made anew in every step has nothing to name and would be kept for good.
        if self._module_depth == 0 and next(module.parameters(), None) is not None:
            self.names.add_model(module)
        self._module_depth += 1

    def _module_ends(self, module: torch.nn.Module, *_: Any) -> None:
        self._module_depth = max(0, self._module_depth - 1)

    def _storage_resized(self, storage: torch.UntypedStorage) -> None:
        # The old bytes are gone and the new ones are unwritten: another storage to any plan.
        state = self.registry.find_address(storage._cdata)
        # Asked of torch itself: a run says of a storage that is away what it will be again.
        nbytes = torch._C.StorageBase.nbytes(storage)  # type: ignore[attr-defined]
        if state is not None and nbytes != state.nbytes:
            reborn = self.registry.rebirth(state, self._birth())
            if reborn is not None:
                self._born_between.append(reborn)

    # Dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_idle or _active_fake_mode() is not self._fake_mode:
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = describe_operator(func)
        if operator.kind is OperatorKind.IGNORED:
            return func(*args, **kwargs)
        if types and any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor, jagged: what they wrap is dispatched next.
        if operator.kind is OperatorKind.VIEW:
            self._view(args, kwargs)
            return func(*args, **kwargs)
        if operator.kind is OperatorKind.LIST_KERNEL:
            return self._run_in_buckets(func, operator, args, kwargs)
        return self._run(func, operator, args, kwargs)

    def _view(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            for tensor in nested_tensors(value):
                state, is_new = self.registry.find_or_add(tensor, self._birth, is_foreign=True)
                if state is not None and is_new:
                    self._born_between.append(state)
                for viewed in (state,) if state else self._parts(tensor, self._born_between):
                    self._viewed.setdefault(viewed, 0)
                    self.on_view(viewed)

    def _parts(
        self, tensor: torch.Tensor, born: list[StorageState], *, is_foreign: bool = True
    ) -> list[StorageState]:
        """States of the storages that hold a sparse tensor, which has none of its own."""
        states = []
        for part in dense_parts(tensor):
            state, is_new = self.registry.find_or_add(part, self._birth, is_foreign=is_foreign)
            if state is not None:
                states.append(state)
                if is_new:
                    born.append(state)
        return states

    def _run(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self._prepare(func, operator, args, kwargs)
        try:
            self.before_kernel(call)
            result = self.run_kernel(call)
        except BaseException:
            # The operator failed and is no kernel; the next one announces what it brought along.
            self._born_between = call.born
            raise
        self._find_births(call, result)
        self.after_kernel(call)
        self.kernel += 1
        self._next_ordinal = 0
        return result

    def _prepare(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KernelCall:
        call = KernelCall(func, operator, args, kwargs)
        call.born, self._born_between = self._born_between, []
        call.flags, self._viewed = self._viewed, {}
        touched, find_or_add, birth = call.flags, self.registry.find_or_add, self._birth
        tensors = []
        for tensor, reads, writes in tensors_with_flags(operator, args, kwargs):
            tensors.append(tensor)
            if tensor.requires_grad:
                call.requires_grad = True
            flags = (READ if reads else 0) | (WRITE if writes else 0)
            state, is_new = find_or_add(tensor, birth, is_foreign=True)
            if state is None:
                for part in self._parts(tensor, call.born):
                    touched[part] = touched.get(part, 0) | flags
                continue
            if is_new:
                call.born.append(state)
            touched[state] = touched.get(state, 0) | flags
        try:
            call.signature = self._signatures.signature(operator.name, tensors)
        except RuntimeError:
            if any(tensor.is_nested for tensor in tensors):
                raise InputError(
                    f"{operator.name}: strided nested tensors are not supported; "
                    "make them with layout=torch.jagged"
                ) from None
            raise
        return call

    def _find_births(self, call: KernelCall, result: Any) -> None:
        for tensor in nested_tensors(result):
            state, is_new = self.registry.find_or_add(tensor, self._birth, is_foreign=False)
            if state is None:
                known = len(call.born)
                self._parts(tensor, call.born, is_foreign=False)
                call.flags.update(dict.fromkeys(call.born[known:], WRITE))
            elif is_new:
                call.born.append(state)
                call.flags[state] = WRITE
        if call.operator.may_resize:
            self._find_resized(call)

    def _find_resized(self, call: KernelCall) -> None:
        for state, flags in list(call.flags.items()):
            storage = state.reference()
            if storage is None or not flags & WRITE or storage.nbytes() == state.nbytes:
                continue
            reborn = self.registry.rebirth(state, self._birth())
            if reborn is not None:
                call.born.append(reborn)
                del call.flags[state]
                call.flags[reborn] = WRITE

    def _birth(self) -> tuple[int, int, int]:
        ordinal = self._next_ordinal
        self._next_ordinal = ordinal + 1
        return self.iteration, self.kernel, ordinal

    def _run_in_buckets(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        length = list_length(args, kwargs)
        lists = [v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple))]
        first = next((v for v in lists if len(v) == length), [])
        bounds = bucket_bounds(first, self.bucket_bytes)
        if len(bounds) <= 1:
            return self._run(func, operator, args, kwargs)
        results = [
            self._run(
                func,
                operator,
                tuple(slice_lists(v, length, start, stop) for v in args),
                {k: slice_lists(v, length, start, stop) for k, v in kwargs.items()},
            )
            for start, stop in bounds
        ]
        return _join_results(results)


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices and values of a sparse tensor, which has no storage of its own; else nothing."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _active_fake_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def _join_results(results: list[Any]) -> Any:
    if results[0] is None:
        return None
    kind: Callable[[list[Any]], Any] = tuple if isinstance(results[0], tuple) else list
    return kind([item for result in results for item in result])
