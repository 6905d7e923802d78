"""When a run learns from its own iterations where its plan has other kernels than the run."""

from __future__ import annotations

from teraio.contracts.plan import Plan
from teraio.executor.landing import Landing, land
from teraio.executor.observation import Observation
from teraio.profiler.dispatch import KernelCall

_MAX_ATTEMPTS = 3
"""Iterations in a row that differ and are learnt from: of shapes that depend on the data no two are
alike."""


class Adaptation:
    """Observes the first iteration of a run, and the one after any that did not go by the plan.

    ``landing`` is what the run follows now, None for the plan as it is. ``is_settled``: an
    iteration has gone by it from end to end, so that whatever differs now is no substitution.
    """

    def __init__(self, plan: Plan) -> None:
        self.landing: Landing | None = None
        self.is_settled = False
        self._plan = plan
        self._observation: Observation | None = self._new_observation()
        self._attempts_left = _MAX_ATTEMPTS

    @property
    def may_learn(self) -> bool:
        """Whether the iteration under way is observed."""
        return self._observation is not None

    def note(self, call: KernelCall, *, in_optimizer: bool) -> None:
        """A kernel has run."""
        if self._observation is not None:
            self._observation.note(call, in_optimizer=in_optimizer)

    def end_iteration(self, *, is_cold: bool, is_clean: bool) -> Landing | None:
        """How the run should go on, if otherwise than before; None too if it is another training.

        ``is_cold``: no plan was followed yet; ``is_clean``: every kernel was the expected one.
        """
        observation, self._observation = self._observation, None
        if is_clean:
            self.is_settled, self._attempts_left = True, _MAX_ATTEMPTS
            return None
        if is_cold or self._attempts_left > 0:
            self._observation = self._new_observation()
        if observation is None:
            return None
        self._attempts_left -= not is_cold
        landing = land(self._plan, observation, is_cold=is_cold)
        if landing is None or (self.landing is None and not landing.num_substituted):
            return None
        self.landing = landing
        return landing

    def _new_observation(self) -> Observation:
        return Observation(4 * len(self._plan.kernels) + 1000)
