"""Every error that teraio raises on purpose, each with the exit code of the command line."""

from __future__ import annotations


class TeraioError(Exception):
    """Base of all errors that a user can act on. The message is one line that says what to do."""

    exit_code = 2


class InputError(TeraioError, ValueError):
    """A file, a field, a row or an argument is wrong. The message names it."""


class InfeasibleError(TeraioError):
    """The question was well put and the answer is no (one kernel needs more than the GPU has)."""

    exit_code = 1


class StoreError(TeraioError, OSError):
    """A transfer to or from a tier failed or fell short. The message names path and bytes."""


class CapacityError(TeraioError, MemoryError):
    """No tier has room left for what must leave the GPU: no answer within these budgets."""

    exit_code = 1


class DriftError(TeraioError, RuntimeError):
    """The run no longer follows its trace, and the user asked to stop in that case."""

    exit_code = 1


class MissingDependencyError(TeraioError, ImportError):
    """An optional library is needed for this call. The message says how to install it."""


class OffloadWarning(UserWarning):
    """A request could not be honoured as asked; training goes on, correct but perhaps slower."""
