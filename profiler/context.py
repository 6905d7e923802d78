"""Where a kernel comes from: phase, module, micro-batch (notes on sequence numbers below).

In forward, every autograd node takes the next sequence number just before its kernel is dispatched;
in backward, the node under way still has it. So a table from number to module names the module of a
backward kernel exactly, without any backward hook.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from teraio.contracts.table import MISSING
from teraio.profiler.announcements import announced_micro_batch
from teraio.profiler.names import NameBook

_IN_NO_BACKWARD = -1


class NodeModules:
    """Modules of autograd nodes by sequence number, which each thread counts by itself."""

    def __init__(self) -> None:
        self._older: dict[int, str] = {}
        self._recent: dict[int, str] = {}
        self._next = 0

    def note(self, module: str) -> None:
        """All nodes made since the last call belong to this module."""
        number = int(torch._C._autograd._get_sequence_nr())
        # An operator that makes no node finds the number unchanged. The first call knows one node.
        first = self._next if 0 < self._next <= number else number - 1
        for made in range(first, number):
            self._recent[made] = module
        self._next = number

    def find(self, number: int) -> str | None:
        """The module of a node of this segment or the one before."""
        module = self._recent.get(number)
        return self._older.get(number) if module is None else module

    def begin_segment(self) -> None:
        """Forget nodes older than the segment that has just ended."""
        self._older, self._recent = self._recent, {}


class CallContext:
    """Follows module calls and backward passes of one segment at a time."""

    def __init__(self, names: NameBook) -> None:
        self._names = names
        self._name_of_module: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._stack: list[str] = []
        self._has_modules = False
        self._nodes = NodeModules()
        self._recomputed_nodes = NodeModules()
        self._owners: dict[int, str] = {}
        self._outermost_backward = _IN_NO_BACKWARD
        self._micro_batch = 0
        self._backward_has_run = False

    def begin_segment(self) -> None:
        """Forget nodes older than the segment before, and count micro-batches from 0 again."""
        self._nodes.begin_segment()
        self._recomputed_nodes.begin_segment()
        self._owners.clear()
        self._micro_batch = 0
        self._backward_has_run = False

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        self._has_modules = True
        name = self._name_of_module.get(module)
        if name is None:
            name = self._find_name(module)
        self.note_nodes()
        self._stack.append(name)

    def leave_module(self) -> None:
        """It has ended, or raised."""
        if self._stack:
            self.note_nodes()
            self._stack.pop()

    def _find_name(self, module: torch.nn.Module) -> str:
        for name, known in self._names.named_modules():
            self._name_of_module.setdefault(known, name)
        if module not in self._name_of_module:
            parent = self._stack[-1] + "." if self._stack and self._stack[-1] else ""
            self._name_of_module[module] = f"{parent}{type(module).__name__}"
        return self._name_of_module[module]

    def note_nodes(self) -> None:
        """Remember to which module the nodes made since the last call belong."""
        if not torch.is_grad_enabled():
            return
        is_recomputing = torch._C._current_graph_task_id() != _IN_NO_BACKWARD
        nodes = self._recomputed_nodes if is_recomputing else self._nodes
        nodes.note(self._stack[-1] if self._stack else "")

    def phase_and_module(self, *, requires_grad: bool, in_optimizer: bool) -> tuple[str, str]:
        """Phase and module of the kernel about to run."""
        task = torch._C._current_graph_task_id()
        if task != _IN_NO_BACKWARD:
            return "backward", self._module_in_backward(task)
        self._outermost_backward = _IN_NO_BACKWARD
        if in_optimizer:
            return "optimizer", ""
        if self._stack:
            return "forward", self._stack[-1]
        return ("forward" if requires_grad and torch.is_grad_enabled() else "other"), ""

    def _module_in_backward(self, task: int) -> str:
        if self._outermost_backward == _IN_NO_BACKWARD:
            self._outermost_backward = task
        if self._stack:
            return self._stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        if node.name() == "torch::autograd::AccumulateGrad":
            return self._owner_of(node.variable)
        number, module = node._sequence_nr(), None
        if task != self._outermost_backward:
            # Made while recomputing, on a GPU in another thread with numbers of its own.
            module = self._recomputed_nodes.find(number)
        return module or self._nodes.find(number) or ""

    def _owner_of(self, parameter: torch.Tensor) -> str:
        owner = self._owners.get(id(parameter))
        if owner is None:
            # FSDP makes its parameters appear when they are needed.
            self._owners |= self._names.modules_of_parameters()
            owner = self._owners.setdefault(id(parameter), "")
        return owner

    def micro_batch(self, phase: str) -> int:
        """Index of the micro-batch that a kernel of this phase belongs to, MISSING if none.

        It is the one announced, if the loop does that. Else a micro-batch begins with the first
        kernel inside a module after a backward pass.
        """
        announced = announced_micro_batch()
        if announced is not None:
            return MISSING if phase == "optimizer" else announced
        if phase == "backward":
            self._backward_has_run = True
        elif phase != "forward":
            return MISSING
        elif self._backward_has_run and (self._stack or not self._has_modules):
            self._micro_batch += 1
            self._backward_has_run = False
        return self._micro_batch
