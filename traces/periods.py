"""Where a trace repeats itself: two equal periods in a row, the second of one micro-batch more."""

from __future__ import annotations

from teraio.errors import InputError
from teraio.traces.period_candidates import Search, describe_kernel
from teraio.traces.period_matching import Difference, Period, match
from teraio.traces.trace import Trace

ADVICE = "trace more micro-batches, or directly as many as wanted"


def find_period(trace: Trace) -> Period:
    """The last two equal periods. Raises InputError that names the first difference."""
    search = Search(trace)
    furthest: Difference | None = None
    for start, length in search.candidates():
        outcome = match(search, start, length)
        if isinstance(outcome, Period):
            return outcome
        if furthest is None or outcome.kernel >= furthest.kernel:
            furthest = outcome
    if furthest is None:
        raise InputError(
            f"unroll: none of the {trace.metadata.micro_batches} micro-batches traced has the "
            f"kernels of the one before it: {search.difference()}; {ADVICE}"
        )
    raise not_periodic(trace, furthest.kernel, furthest.what)


def not_periodic(trace: Trace, kernel: int, what: str) -> InputError:
    """The error of a trace that does not repeat itself at this kernel."""
    place = describe_kernel(trace, kernel)
    return InputError(f"unroll: not periodic: first difference at {place}: {what}; {ADVICE}")
