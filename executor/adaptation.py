"""When a run learns from its own iterations where its plan has other kernels than the run."""

from __future__ import annotations

from teraio.contracts.plan import Plan
from teraio.executor.landing import Landing, land
from teraio.executor.observation import Observation


class Adaptation:
    """Observes the first iteration of a run, and those after one that did not go by the plan.

    Kernels that stand in the place of others in the first iteration are believed at once, whatever
    else differs when two iterations in a row are the same: a message now and then comes and goes.

    ``observation``: of the iteration under way, None while there is nothing to learn; ``landing``:
    what the run follows now, None for the plan as it is. ``is_settled``: an
    iteration has gone by it from end to end, so that whatever differs now is no substitution.
    ``num_unlearnt`` counts iterations in a row that differed, the first of the run aside.
    """

    def __init__(self, plan: Plan) -> None:
        self.landing: Landing | None = None
        self.is_settled = False
        self.num_unlearnt = 0
        self._plan = plan
        self.observation: Observation | None = self._new_observation()
        self._kernels_before: int | None = None

    def end_iteration(self, *, is_cold: bool, is_clean: bool) -> Landing | None:
        """How the run should go on, if otherwise than before.

        ``is_cold``: no plan was followed yet; ``is_clean``: every kernel was the expected one.
        """
        observation, self.observation = self.observation, None
        if is_clean:
            self.is_settled, self.num_unlearnt, self._kernels_before = True, 0, None
            return None
        self.observation = self._new_observation()
        if observation is None or not self._is_believed(observation, is_cold=is_cold):
            return None
        landing = land(self._plan, observation, is_cold=is_cold)
        if landing is None or (self.landing is None and not landing.num_substituted):
            return None
        self.landing, self.num_unlearnt = landing, 0
        return landing

    def skip_iteration(self) -> None:
        """Learn nothing from the iteration under way, which no other will be like."""
        self.observation = None

    def _is_believed(self, observation: Observation, *, is_cold: bool) -> bool:
        if is_cold:
            return True
        self.num_unlearnt += 1
        before, self._kernels_before = self._kernels_before, observation.hash_of_kernels()
        return before == self._kernels_before

    def _new_observation(self) -> Observation:
        return Observation(4 * len(self._plan.kernels) + 1000)
