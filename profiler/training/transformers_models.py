"""Models of the library transformers, where it is installed: their architecture, never weights.

Nothing is downloaded: a model is named by its type (``llama``), by its class
(``LlamaForCausalLM``), both with the sizes that the library gives by default, or by a local
``config.json``, which has the sizes of a published model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from teraio.errors import InputError, MissingDependencyError
from teraio.profiler.training.model_sources import MakeBatch, OwnModel, check_attention

if TYPE_CHECKING:
    from teraio.profiler.training.setup import TrainingSetup

OLDEST = (4, 56)
"""The first version that takes ``dtype`` in place of ``torch_dtype``."""

_AUTOMATIC_CLASSES = ("AutoModelForMaskedLM", "AutoModelForCausalLM")


@dataclass(frozen=True)
class TransformersModel(OwnModel):
    """An architecture of transformers, with freshly drawn weights in float32."""

    config: Any = None

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, MakeBatch]:
        """The model in training mode, and token ids with labels. Raises InputError."""
        for option in ("stages", "tensor_parallel"):
            if getattr(setup, option) > 1:
                raise InputError(f"{option}: only reference models can be cut so, not {self.name}")
        check_attention(setup, self.name)
        _check_positions(self.config, setup.sequence, self.name)
        model: Any = self.make()
        model.train()
        if setup.checkpoint not in (None, "none"):
            # The library's own, layer by layer; it has changed its name.
            enable = getattr(model, "activation_checkpointing_enable", None)
            enable = enable or model.gradient_checkpointing_enable
            enable({"use_reentrant": setup.checkpoint == "reentrant"})
        vocabulary = int(self.config.get_text_config().vocab_size)
        return model, lambda size, sequence: {
            "input_ids": torch.randint(vocabulary, (size, sequence)),
            "labels": torch.randint(vocabulary, (size, sequence)),
        }

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Keeps the library from taking fake tensors for a compiler's.

        It would then make masks and repeat keys that it leaves out in training.
        """
        helpers = importlib.import_module("transformers.utils.import_utils")
        if not hasattr(helpers, "is_fake_tensor"):  # Before transformers 5 it did not ask.
            yield
            return

        def never(_: Any) -> bool:  # A Mock would keep every tensor that it was asked about.
            return False

        with mock.patch.object(helpers, "is_fake_tensor", never):
            yield


def transformers_model(text: str) -> TransformersModel:
    """The model of a type, a class, or a config.json (or the folder that holds one, with a slash).

    Raises MissingDependencyError without the library, InputError for what it does not know.
    """
    library = _import_library()
    path = Path(text)
    if path.suffix == ".json" or "/" in text:
        config, class_name = _read_config(library, path / "config.json" if path.is_dir() else path)
    elif isinstance(getattr(library, text, None), type):
        config, class_name = _default_config(library, text), text
    else:
        config, class_name = _config_of_type(library, text), None
    config.use_cache = False  # It is for generating text.
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    make = _maker(library, config, class_name, text)
    return TransformersModel(
        name=f"transformers:{text}",
        make=make,
        unread_values_in=frozenset({"transformers.masking_utils"}),
        config=config,
    )


def _import_library() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependencyError(
            "model transformers:...: the library is not installed: pip install transformers"
        ) from None
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if version < OLDEST:
        raise InputError(
            f"transformers {library.__version__} is too old: teraio needs "
            f"{'.'.join(map(str, OLDEST))}; pip install -U transformers"
        )
    return library


def _read_config(library: Any, path: Path) -> tuple[Any, str | None]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise InputError(f"{path}: no JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise InputError(f"{path}: no config of transformers (model_type is missing)")
    kind = type(_config_of_type(library, content["model_type"]))
    architectures = content.get("architectures") or [None]
    class_name = architectures[0] if "For" in (architectures[0] or "") else None
    if class_name is not None and not isinstance(getattr(library, class_name, None), type):
        raise InputError(
            f"{path}: transformers {library.__version__} has no class {class_name} (architectures)"
        )
    return kind.from_dict(content), class_name


def _config_of_type(library: Any, model_type: str) -> Any:
    try:
        return library.AutoConfig.for_model(model_type)
    except ValueError:
        raise InputError(
            f"model transformers:{model_type}: transformers {library.__version__} has no such "
            "model type or class; nothing is downloaded: save the model's config.json and give its "
            "path, such as ./config.json"
        ) from None


def _default_config(library: Any, class_name: str) -> Any:
    kind = getattr(getattr(library, class_name), "config_class", None)
    if kind is None or not issubclass(getattr(library, class_name), nn.Module):
        raise InputError(f"model transformers:{class_name}: is no model class of transformers")
    return kind()


def _maker(library: Any, config: Any, class_name: str | None, text: str) -> Any:
    if class_name is not None:
        kind = getattr(library, class_name)
        return lambda: kind._from_config(config, dtype=torch.float32)
    names = ("AutoModelForSeq2SeqLM",) if config.is_encoder_decoder else _AUTOMATIC_CLASSES
    for name in names:
        automatic = getattr(library, name)
        if type(config) in automatic._model_mapping:
            return lambda: automatic.from_config(config, dtype=torch.float32)
    raise InputError(
        f"model transformers:{text}: no language model that returns its loss; give a class, such "
        "as transformers:LlamaForCausalLM"
    )


def _check_positions(config: Any, sequence: int, name: str) -> None:
    """Rotary positions have no end; tables of positions do."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    is_rotary = any(hasattr(text_config, key) for key in ("rope_parameters", "rope_theta"))
    if isinstance(positions, int) and not is_rotary and sequence > positions:
        raise InputError(f"sequence: {name} knows {positions} positions, got {sequence}")
