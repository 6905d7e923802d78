"""Where a model to train comes from: a reference model, one's own function, or transformers.

The contract of one's own function is small. It takes no arguments and returns a module whose
``forward(tokens, targets)`` returns the loss, or ``(module, make_batch)`` where the module takes
something else: ``make_batch(micro_batch_size, sequence)`` returns the tensors of one micro-batch, a
tuple for ``module(*batch)`` or a dictionary for ``module(**batch)``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.models import MODELS, build_model, model_config
from teraio.profiler.models.sizes import ModelConfig

if TYPE_CHECKING:
    from teraio.profiler.training.setup import TrainingSetup

MakeBatch: TypeAlias = Callable[[int, int], Any]
"""(micro-batch size, sequence) -> the tensors of one micro-batch, on PyTorch's default device."""

TRANSFORMERS = "transformers"
_FORMS = "MODULE:FUNCTION for your own, transformers:NAME for one of that library"


@dataclass(frozen=True)
class OwnModel:
    """A function that makes a model, and what the trace calls it."""

    name: str
    make: Callable[[], Any]
    unread_values_in: frozenset[str] = frozenset()
    """Modules of Python that ask for values of tensors only to look for a shortcut."""

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, MakeBatch]:
        """The module and its batches. Raises InputError where the function keeps no contract."""
        self._check_options(setup)
        made = self.make()
        model, make_batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model {self.name}: returned {_kind(made)}; it must return a torch.nn.Module, or "
                "(module, make_batch)"
            )
        if next(model.parameters(), None) is None:
            raise InputError(f"model {self.name}: has no parameters to train")
        if make_batch is None:
            return model, self._tokens_of(model)
        if not callable(make_batch):
            raise InputError(
                f"model {self.name}: make_batch is {_kind(make_batch)}, not a function of "
                "(micro_batch_size, sequence)"
            )
        return model, self._checked(make_batch)

    def _check_options(self, setup: TrainingSetup) -> None:
        for option in ("stages", "tensor_parallel"):
            if getattr(setup, option) > 1:
                raise InputError(
                    f"{option}: only reference models can be cut so, not {self.name}; "
                    "give one of the same sizes"
                )
        if setup.checkpoint is not None:
            raise InputError(
                f"checkpoint: {self.name} decides itself what it recomputes "
                "(torch.utils.checkpoint in its forward)"
            )
        check_attention(setup, self.name)

    def _tokens_of(self, model: nn.Module) -> MakeBatch:
        vocabulary = _vocabulary(model)
        if vocabulary is None:
            raise InputError(
                f"model {self.name}: has no nn.Embedding, so it takes no tokens; "
                "return (module, make_batch)"
            )
        return lambda size, sequence: (
            torch.randint(vocabulary, (size, sequence)),
            torch.randint(vocabulary, (size, sequence)),
        )

    def _checked(self, make_batch: MakeBatch) -> MakeBatch:
        def make(size: int, sequence: int) -> Any:
            batch = make_batch(size, sequence)
            if isinstance(batch, Tensor):
                return (batch,)
            if not isinstance(batch, (tuple, list, dict)):
                raise InputError(
                    f"model {self.name}: make_batch returned {_kind(batch)}; it must return a "
                    "tuple or a dictionary of tensors"
                )
            return batch

        return make

    def tracing(self) -> AbstractContextManager[Any]:
        """What has to be in force while the model is traced without a GPU."""
        return contextlib.nullcontext()


def resolve_model(model: Any) -> str | ModelConfig | OwnModel:
    """What ``model`` stands for; a function is imported, which must not happen on fake tensors.

    Raises InputError for a name, a module or a function that does not exist.
    """
    if isinstance(model, str):
        return _resolve_name(model)
    if isinstance(model, ModelConfig | OwnModel):
        return model
    if isinstance(model, nn.Module):
        raise InputError(
            f"model: a {type(model).__name__} that exists already takes the memory that tracing is "
            "to save; give a function that makes it"
        )
    if callable(model):
        return OwnModel(_name_of(model), _checked_function(model, _name_of(model)))
    raise InputError(f"model: {_kind(model)} is no model; give a name, sizes or a function")


def check_attention(setup: TrainingSetup, name: str) -> None:
    """Raise InputError for a kernel that can be forced upon reference models only."""
    if setup.attention not in (None, "auto", "sdpa"):
        raise InputError(
            f"attention: only reference models take {setup.attention!r}; {name} calls what it "
            "likes (torch.nn.attention.sdpa_kernel in its forward restricts PyTorch's choice)"
        )


def model_label(model: Any) -> str:
    """What a trace of the model is called."""
    if isinstance(model, str):
        return model
    if isinstance(model, OwnModel):
        return model.name
    return _name_of(model) if callable(model) else type(model).__name__


def build_source(setup: TrainingSetup) -> tuple[nn.Module, MakeBatch | None]:
    """The whole model on PyTorch's default device; None as batches: tokens as its sizes say.

    Raises InputError for what the model cannot do.
    """
    source = resolve_model(setup.model)
    if isinstance(source, OwnModel):
        return source.build(setup)
    return build_model(source, **setup.model_options), None


def check_sequence(setup: TrainingSetup) -> None:
    """Raise InputError if a reference model knows fewer positions than a sequence has."""
    source = resolve_model(setup.model)
    if isinstance(source, OwnModel):
        return
    positions = getattr(model_config(source), "positions", None)
    if positions is not None and setup.sequence > positions:
        raise InputError(
            f"sequence: {model_label(source)} knows {positions} positions, got {setup.sequence}"
        )


def run_model(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a micro-batch: what the model returns, its ``.loss``, or its first item."""
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    if isinstance(output, Tensor):
        loss = output
    elif isinstance(getattr(output, "loss", None), Tensor):
        loss = output.loss
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError(
            f"model: {type(model).__name__}.forward returned {_kind(output)}; it must return the "
            "loss (a tensor of one element that needs gradients), an object with .loss, or a tuple "
            "that begins with it"
        )
    return loss.reshape(()) if loss.dim() else loss


def load_function(module_name: str, function_name: str) -> Callable[[], Any]:
    """A function of an importable module; the current directory is looked in first.

    Raises InputError if there is none. Whatever the module raises on import propagates.
    """
    text = f"{module_name}:{function_name}"
    if module_name.endswith(".py"):
        raise InputError(f"model {text}: give the module's name, without .py: {module_name[:-3]}")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"model {text}: {module_name!r} is no module name; give {_FORMS}")
    # It stays on the path: a module may import its neighbours only when its function is called.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"model {text}: there is no module {error.name} here or installed"
        ) from None
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise InputError(f"model {text}: {module_name} has no {function_name!r}")
        found = getattr(found, part)
    return _checked_function(found, text)


def _resolve_name(text: str) -> str | OwnModel:
    if text in MODELS:
        return text
    prefix, colon, rest = text.partition(":")
    if not colon:
        raise InputError(f"model {text}: unknown; there are {', '.join(MODELS)}, or give {_FORMS}")
    if prefix == TRANSFORMERS:
        from teraio.profiler.training.transformers_models import transformers_model

        return transformers_model(rest)
    return OwnModel(text, load_function(prefix, rest))


def _checked_function(function: Any, name: str) -> Callable[[], Any]:
    if isinstance(function, nn.Module) or not callable(function):
        raise InputError(
            f"model {name}: is {_kind(function)}, not a function; give one that makes the model"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"model {name}: {error}; give a function that needs no arguments"
        ) from None
    except ValueError:  # Some built-in callables tell no signature.
        pass
    result: Callable[[], Any] = function
    return result


def _vocabulary(model: nn.Module) -> int | None:
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    first = next(embeddings, None)
    return None if first is None else first.num_embeddings


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}:{name}".removeprefix(":")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
