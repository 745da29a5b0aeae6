"""bstune's own sampler among the searches that the bench compares: a study in memory, asked as anyone would ask it.

It is told the problem's budget as a scale, tau(B), the target and the range of learning rates, and no noise scale.
``bstune/none`` and ``bstune/linear`` take another scaling rule as prior mean than the square root.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import optuna
from optuna.distributions import FloatDistribution, IntDistribution

from bstune.baselines import Entry, OptunaSearch, rule_of, trial_seed
from bstune.contest import Problem, Search
from bstune.records import TrialResult
from bstune.search.frontier import BATCH_SIZE, LR, PARENT, RECORD, FrontierSampler
from bstune.search.mapping import b_crit_quantiles

OWN = "bstune"
RULES = ("none", "linear")  # besides the square root


def own_searches() -> tuple[Entry, ...]:
    """Return bstune's own search, and those with other rules as prior mean."""
    others = (Entry(OWN, rule, None, partial(OwnSearch, rule=rule)) for rule in RULES)
    return (Entry(OWN, None, None, OwnSearch), *others)


class OwnSearch(OptunaSearch):
    """A :class:`bstune.search.frontier.FrontierSampler` that is asked and told in memory.

    Its B_crit is the posterior's median. Every stopped trial can be continued, but for one that ended before its limit:
    its record goes no further.

    Args:
        problem: what is searched.
        seed: of the trials; the sampler has its own.
        rule: of the prior mean of the best learning rate, through the problem's reference.
    """

    def __init__(self, problem: Problem, seed: int, rule: str = "sqrt") -> None:
        self._ended: set[int] = set()
        self._incumbent: TrialResult | None = None
        self.sampler = FrontierSampler(
            objective=problem.objective,
            rule=rule_of(problem, rule),
            budget=lambda batch_size: problem.budget.last_step(round(batch_size)),
            target=problem.target,
            ideal=0.0,  # the metric of a table is an error
            resumable=lambda number: number not in self._ended,
            lr_range=(problem.lr_low, problem.lr_high),
            step_time=problem.tau,
            search_space={
                BATCH_SIZE: IntDistribution(problem.batch_sizes[0], problem.batch_sizes[-1], log=True),
                LR: FloatDistribution(problem.lr_low, problem.lr_high, log=True),
            },
            seed=trial_seed(seed, 0, purpose=1),
        )
        super().__init__(problem, seed, self.sampler, None, "pruned")

    def ending(self, trial: optuna.Trial, batch_size: int, finished: Sequence[TrialResult]) -> tuple[int, int | None]:
        """Return the sampler's limit, and the trial that it continues."""
        limit, parent = self.sampler.limit(trial.number), self.sampler.parent(trial.number)
        if parent is not None:
            trial.set_user_attr(PARENT, parent)
        return super().ending(trial, batch_size, finished)[0] if limit is None else limit, parent

    def tell(self, trial: optuna.Trial, last: int, result: TrialResult) -> None:
        """Tell the study what a trial came to, with its record."""
        if result.status == "budget" and result.steps < last:
            self._ended.add(result.number)
        trial.set_user_attr(RECORD, result.to_json())
        super().tell(trial, last, result)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Return the trial whose point the posterior's mean likes best, rather than the luckiest one."""
        if not finished or not finished[-1].reached:  # only a trial that reached the target changes it
            return self._incumbent
        if self._asked is not None:  # the last trial is told at the next proposal, which is too late here
            self.tell(*self._asked, finished[-1])
            self._asked = None
        number = self.sampler.recommended(self.study)
        self._incumbent = None if number is None else finished[number]
        return self._incumbent

    def b_crit_quantiles(self, shares: Sequence[float]) -> list[float] | None:
        """Return quantiles of the posterior of B_crit; None while no trial has reached the target.

        The trials are those that the study has been told, all that had finished when the last one was proposed.
        """
        found = self.sampler.posterior(self.study)
        if found is None or not any(arm.status == "reached" for arm in found.arms):
            return None
        rng = np.random.default_rng(len(found.arms))
        return [float(value) for value in b_crit_quantiles(found, shares, rng)]

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Return the posterior's median."""
        quantiles = self.b_crit_quantiles((0.5,))
        return None if quantiles is None else quantiles[0]


class FittedSearch(OwnSearch):
    """The same search with B_crit from the fit to the frontier points, as of the other searches.

    On the tables that the sampler was tuned on the fit scatters more, most of all after once the frontier's cost: it
    sees the best reached trial of each half octave, the drawn frontiers see all trials.
    ``--searches bstune.own_search:FittedSearch --objective curve`` shows it.
    """

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        """Return the fit's B_crit."""
        return Search.b_crit(self, finished)
