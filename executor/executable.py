"""Whether a plan can be executed at all."""

from __future__ import annotations

import warnings

from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import find_violations
from teraio.errors import InputError, OffloadWarning
from teraio.executor.optimizer_in_backward import NAME as IN_BACKWARD


def check_executable(plan: Plan) -> None:
    """Raise InputError for a plan whose structure is wrong or whose transform only a simulation
    can carry out; warn of one that does not fit.
    """
    transform = plan.metadata.transform
    if transform not in (None, IN_BACKWARD):
        raise InputError(
            f"plan: made for training changed by {transform}, which is simulated only; of "
            f"transforms, {IN_BACKWARD} alone can be executed"
        )
    verdict = find_violations(plan).verification()
    if not verdict.valid:
        first = verdict.violations[0]
        raise InputError(f"plan: {first} ({verdict.num_violations} violations; not executed)")
    if not verdict.fits:
        message = "the plan does not fit its budgets; what is missing is moved on demand"
        warnings.warn(message, OffloadWarning, stacklevel=4)
