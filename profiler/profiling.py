"""The recorder's doors: a training loop, an unmodified script, a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from teraio.errors import InputError
from teraio.profiler.agreed_end import AgreedEnd
from teraio.profiler.allocator_settings import exact_blocks
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.raw_kernels import RawKernels
from teraio.profiler.recorder import Recorder
from teraio.profiler.scripts import run_script, use_device_of_rank
from teraio.profiler.torch_version import check_torch_version
from teraio.profiler.trace_building import build_trace
from teraio.traces.trace import Trace

Progress = Callable[[str], None]


class Profile:
    """A recording under way: the context manager that :func:`profile` returns."""

    def __init__(self, recorder: Recorder, *, model: str = "") -> None:
        self._recorder = recorder
        self._model = model
        self._trace: Trace | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        check_torch_version()
        with ExitStack() as stack:
            stack.enter_context(exact_blocks(self._recorder.device_type))
            stack.enter_context(self._recorder)
            stack.enter_context(RawKernels(self._recorder))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        self._stack.__exit__(kind, *exception)
        if self._trace is not None:
            # Whoever keeps the profile, or the trace, does not mean to keep the model.
            self._recorder.forget()

    def step(self) -> None:
        """Mark the end of a loop's iteration; needed only where no torch optimizer steps."""
        self._recorder.step()

    @property
    def done(self) -> bool:
        """Whether enough has been seen; further iterations run unwatched."""
        return self._recorder.is_complete

    @property
    def trace(self) -> Trace:
        """The trace of one steady iteration.

        Raises InputError while too little has been seen, or if no iteration was like another; the
        message says what differed first.
        """
        if self._trace is None:
            if not self._recorder.has_ended and not self.done:
                raise InputError("profile: still recording; read .trace once .done, or after it")
            self._trace = build_trace(self._recorder, model=self._model)
            self._recorder.forget()
        return self._trace


def profile(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    device: str | torch.device | None = None,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    describe_calls: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Record the training loop inside the ``with`` block; ``.trace`` is one steady iteration of it.

    Models and optimizers that are not given are noticed as they run. ``device`` defaults to that of
    the model's parameters, else of the first optimizer's. ``bucket_bytes``: size at which
    operators over parameter lists are split. ``describe_calls``: keep what ``teraio time`` needs to
    time each distinct operator call elsewhere. ``progress`` is called with a line of text after
    each optimizer step.

    A steady iteration is preceded by at least one other (the first creates optimizer state) and
    followed by one like it; five optimizer steps give three timed iterations and one in which
    scratch memory is measured. Then three iterations run unwatched, whose length the times must
    sum to; one GPU by itself goes on until its clocks have settled, for some 4 seconds or 13
    iterations. Fewer do, less exactly. Results of training do not change, to the bit.
    """
    recorder = Recorder(
        device_type=_device_type(model, device),
        bucket_bytes=bucket_bytes,
        describe_calls=describe_calls,
        progress=progress,
    )
    for known_model in _as_list(model, torch.nn.Module):
        recorder.names.add_model(known_model)
    for known_optimizer in _as_list(optimizer, torch.optim.Optimizer):
        recorder.names.add_optimizer(known_optimizer)
    return Profile(recorder)


def _as_list(value: Any, kind: type) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, kind) else list(value)


def _device_type(model: Any, device: str | torch.device | None) -> str | None:
    if device is not None:
        return torch.device(device).type
    for known in _as_list(model, torch.nn.Module):
        for parameter in known.parameters():
            return str(parameter.device.type)
    return None


def profile_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    model: str | None = None,
    run_to_end: bool = False,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    progress: Progress | None = None,
) -> Trace:
    """Run a training script, unmodified, under the recorder until enough has been seen.

    Then the script ends as if it had called ``sys.exit(0)`` inside ``Optimizer.step`` (of several
    ranks all at the same step); with ``run_to_end`` it goes on to its own end, unwatched.
    ``model`` labels the trace (default: the script's name). Raises InputError as
    :attr:`Profile.trace` does; what the script raises propagates.
    """
    use_device_of_rank()
    end = AgreedEnd()
    recorder = Recorder(
        bucket_bytes=bucket_bytes,
        progress=progress,
        when_complete=None if run_to_end else end.complete,
    )
    with end, Profile(recorder, model=model or Path(script).stem) as session:
        run_script(script, arguments)
    return session.trace


def profile_model(
    name: str,
    *,
    steps: int = 18,
    sequence: int | None = None,
    micro_batch_size: int | None = None,
    device: str | torch.device = "cpu",
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    describe_calls: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Trace:
    """Train a reference model for at most so many steps under the recorder.

    ``sequence`` and ``micro_batch_size`` default to the model's; ``options`` are fields of
    :class:`teraio.profiler.training.TrainingSetup`, or replace fields of the model's sizes. Raises
    InputError for an unknown model or field, or too few steps (3 is the least; 8 tell all that
    there is to know on a CPU, 18 on a GPU).
    """
    from teraio.profiler.training import build_training, reference_setup

    setup = reference_setup(
        name, sequence=sequence, micro_batch_size=micro_batch_size, options=options
    )
    training = build_training(setup, device)
    recorder = Recorder(
        device_type=torch.device(device).type,
        bucket_bytes=bucket_bytes,
        describe_calls=describe_calls,
        progress=progress,
    )
    recorder.names.add_model(training.model)
    session = Profile(recorder, model=name)
    with session:
        for _ in range(steps):
            training.run_iteration()
            if session.done:
                break
    return session.trace
