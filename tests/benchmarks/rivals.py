"""Multi-fidelity searches as rivals of bstune's, for ``bstune sweep search_benchmark``.

A trial of theirs runs to a share of the budget's steps, and a promoted one goes on from there: its
first steps are not paid again. Fidelities are 1/27, 1/9, 1/3 and 1 of the budget, as Hyperband's
default reduction factor of 3 has them (Li et al. 2018, arXiv 1603.06560). In the order of their
promise:

- ``tpe_hyperband``, ``tpe_hyperband_sqrt``: Optuna's TPE with its Hyperband pruner.
- ``smac``, ``smac_sqrt``: SMAC3's MultiFidelityFacade (Lindauer et al. 2022, JMLR 23(54)): a random
  forest and Hyperband's brackets. It needs ``pip install smac==2.4.1`` in an environment that also
  has bstune.

- ``dyhpo``, ``dyhpo_sqrt``: DyHPO (Wistuba et al. 2022, arXiv 2202.09774), which chooses after each
  27th of the budget which of 512 points goes on, by a deep-kernel GP over learning curves. It needs
  the authors' repository (github.com/releaunifreiburg/DyHPO) on PYTHONPATH and gpytorch.

Those that end in ``_sqrt`` search over log2(lr / sqrt-rule(B)), so that the gain of knowing the law
is told apart from the gain of the method. Both minimise one number: a run that met the target has
log(its cost / the budget's cost), which is below 0; one that did not, log(its best metric / the
target), which is above. All rivals have bstune's rule that ends trials which cannot win.

    PYTHONPATH=tests/benchmarks python -m bstune sweep search_benchmark sweep.experiment.seeds=12 \\
        'sweep.experiment.searches=[bstune,tpe/sqrt,"rivals:smac","rivals:tpe_hyperband_sqrt"]'
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import optuna
from optuna.trial import TrialState
from scipy.stats import qmc

from bstune.core.records import TrialResult, TrialSpec
from bstune.sweeps.baselines import LearningRateAxis, rule_of, trial_seed
from bstune.sweeps.search_problem import Problem, Search, least, merit, stopping_step

if TYPE_CHECKING:
    from smac.runhistory import TrialInfo

REDUCTION_FACTOR = 3
SHARES = (1 / 27, 1 / 9, 1 / 3, 1.0)
# Of a run that diverged or was not evaluated yet. Worse than any metric of the tables over its target:
# log(0.9 / 0.02) is 3.8.
WORST_COST = 5.0
# SMAC plans its search by a number of trials; more than any spending here allows.
SMAC_TRIALS = 1000
# That DyHPO chooses among.
CANDIDATES = 512


@dataclass(frozen=True)
class Request:
    """A point that a method wants to see at a share of the budget's steps."""

    batch_size: int
    lr: float
    delta: float | None
    share: float


class Method(Protocol):
    """A multi-fidelity method of another library."""

    def ask(self) -> Request:
        """Choose a point and its fidelity; the same point again promotes it."""

    def tell(self, cost: float, *, is_final: bool) -> None:
        """Take the cost of the request before; a final one cannot be improved by more steps."""


class MultiFidelitySearch(Search):
    """The trials of a multi-fidelity method, promoted ones continued where they stopped."""

    def __init__(self, problem: Problem, seed: int, method: Method) -> None:
        self._problem = problem
        self._seed = seed
        self._method = method
        self._asked: Request | None = None
        # The last trial at each point.
        self._at_point = dict[tuple[int, float], TrialResult]()

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        """Tell the last trial; ask until the method wants steps that no trial has taken."""
        if self._asked is not None:
            trial = finished[-1]
            self._at_point[self._asked.batch_size, self._asked.lr] = trial
            self._tell(trial)
        number = len(finished)
        while True:
            request = self._method.ask()
            self._asked = request
            last = self._last_step(request, finished)
            earlier = self._at_point.get((request.batch_size, request.lr))
            if earlier is None:
                seed = trial_seed(self._seed, number)
                return TrialSpec(
                    number, number, request.batch_size, request.lr, request.delta, seed, last
                )
            if earlier.status == "stopped" and earlier.steps < last:
                return TrialSpec(
                    number,
                    number,
                    earlier.batch_size,
                    earlier.lr,
                    earlier.delta,
                    earlier.seed,
                    last,
                    earlier.number,
                )
            # It has met the target, has diverged, or was stopped as it cannot win: the method gets
            # what is known, at no cost.
            self._tell(earlier)

    def incumbent(self, finished: Sequence[TrialResult]) -> TrialResult | None:
        """Name the trial that is best by the objective."""
        return least(finished, self._problem.objective)

    def _last_step(self, request: Request, finished: Sequence[TrialResult]) -> int:
        whole = self._problem.budget.last_step(request.batch_size)
        wanted = max(1, round(request.share * whole))
        return min(wanted, stopping_step(self._problem, request.batch_size, finished))

    def _tell(self, trial: TrialResult) -> None:
        cost = cost_of(self._problem, trial)
        self._method.tell(cost, is_final=trial.status != "stopped")


def cost_of(problem: Problem, trial: TrialResult) -> float:
    """Give the number that a method minimises: below 0 where the target was met, above elsewhere."""
    cost = trial.time_to_target
    if cost is not None:
        return math.log(merit(problem.objective, cost, trial.batch_size) / _dearest(problem))
    values = [value for _, value in trial.history if value is not None]
    if trial.status == "diverged" or not values:
        return WORST_COST
    return math.log(min(values) / problem.target.value)


def _dearest(problem: Problem) -> float:
    """Give the most that any trial within its budget comes to, in the objective's unit."""
    wholes = list[float]()
    for batch_size in problem.batch_sizes:
        cost = problem.budget.last_step(batch_size) * problem.tau(batch_size)
        wholes.append(merit(problem.objective, cost, batch_size))
    return max(wholes)


def request_on(axis: LearningRateAxis, batch_size: int, coordinate: float, share: float) -> Request:
    """Give the request at a batch size and a coordinate of an axis."""
    lr, delta = axis.rate_at(batch_size, coordinate)
    return Request(batch_size, lr, delta, share)


def spread(axis: LearningRateAxis, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Give the coordinates at shares in [0, 1] of an axis."""
    if axis.is_log:
        return axis.low * (axis.high / axis.low) ** shares
    return axis.low + (axis.high - axis.low) * shares


class OptunaHyperband:
    """Optuna's TPE; its Hyperband pruner ends a trial at the end of a share, or lets it go on."""

    def __init__(self, problem: Problem, seed: int, axis: str) -> None:
        self._problem = problem
        self._axis = LearningRateAxis(problem, rule_of(problem, axis))
        resources = len(SHARES) - 1
        pruner = optuna.pruners.HyperbandPruner(
            min_resource=1,
            max_resource=REDUCTION_FACTOR**resources,
            reduction_factor=REDUCTION_FACTOR,
        )
        sampler = optuna.samplers.TPESampler(seed=trial_seed(seed, 0, purpose=1))
        # A trial's bracket is drawn by the study's name, which otherwise differs from run to run.
        self._study = optuna.create_study(study_name=f"seed {seed}", sampler=sampler, pruner=pruner)
        self._open: optuna.Trial | None = None
        self._rung = 0

    def ask(self) -> Request:
        """Give the open trial's next share, or a new trial's first."""
        if self._open is None:
            self._open = self._study.ask()
            self._rung = 0
        trial = self._open
        sizes = self._problem.batch_sizes
        batch_size = trial.suggest_int("batch_size", sizes[0], sizes[-1], log=True)
        coordinate = self._axis.suggest(trial)
        return request_on(self._axis, batch_size, coordinate, SHARES[self._rung])

    def tell(self, cost: float, *, is_final: bool) -> None:
        """End the open trial, or let it go on."""
        trial = self._open
        assert trial is not None
        trial.report(cost, step=REDUCTION_FACTOR**self._rung)
        has_met_target = cost < 0.0
        is_last = self._rung == len(SHARES) - 1
        if has_met_target or is_last:
            self._study.tell(trial, cost)
            self._open = None
        elif is_final or trial.should_prune():
            self._study.tell(trial, state=TrialState.PRUNED)
            self._open = None
        else:
            self._rung += 1


class Smac:
    """SMAC3's MultiFidelityFacade, asked and told."""

    def __init__(self, problem: Problem, seed: int, axis: str) -> None:
        from ConfigSpace import ConfigurationSpace, Float, Integer
        from smac import MultiFidelityFacade, Scenario

        self._axis = LearningRateAxis(problem, rule_of(problem, axis))
        space = ConfigurationSpace(seed=seed)
        sizes = (problem.batch_sizes[0], problem.batch_sizes[-1])
        space.add(Integer("batch_size", sizes, log=True))
        bounds = (self._axis.low, self._axis.high)
        space.add(Float(self._axis.name, bounds, log=self._axis.is_log))
        self._folder = tempfile.TemporaryDirectory()
        self._most = float(REDUCTION_FACTOR ** (len(SHARES) - 1))
        scenario = Scenario(
            space,
            output_directory=Path(self._folder.name),
            deterministic=True,
            min_budget=1.0,
            max_budget=self._most,
            n_trials=SMAC_TRIALS,
            seed=trial_seed(seed, 0, purpose=1) % 2**31,
        )
        self._facade = MultiFidelityFacade(
            scenario,
            _never_called,
            intensifier=MultiFidelityFacade.get_intensifier(scenario, eta=REDUCTION_FACTOR),
            logging_level=False,
            overwrite=True,
        )
        self._info: TrialInfo | None = None

    def ask(self) -> Request:
        """Choose by the facade."""
        info = self._facade.ask()
        self._info = info
        values = dict(info.config)
        share = float(info.budget) / self._most
        return request_on(self._axis, int(values["batch_size"]), values[self._axis.name], share)

    def tell(self, cost: float, *, is_final: bool) -> None:
        """Tell the facade the request's cost at its budget."""
        from smac.runhistory import TrialValue

        assert self._info is not None
        self._facade.tell(self._info, TrialValue(cost=cost), save=False)


class DyHpo:
    """DyHPO's own algorithm over quasi-random candidates, with its default surrogate."""

    def __init__(self, problem: Problem, seed: int, axis: str) -> None:
        # The repository asks for a name that numpy 2 has not.
        np.NINF = -np.inf  # type: ignore[attr-defined]
        from hpo_method import DyHPOAlgorithm

        self._axis = LearningRateAxis(problem, rule_of(problem, axis))
        self._candidates = self._draw(problem, seed)
        self._folder = tempfile.TemporaryDirectory()
        self._steps = REDUCTION_FACTOR ** (len(SHARES) - 1)
        self._algorithm = DyHPOAlgorithm(
            self._candidates.copy(),
            [True, self._axis.is_log],
            seed=trial_seed(seed, 0, purpose=1) % 2**31,
            max_benchmark_epochs=self._steps,
            minimization=False,
            # The spending ends the search.
            total_budget=10**9,
            device="cpu",
            output_path=self._folder.name,
            verbose=False,
        )
        self._curves = dict[int, list[float]]()
        self._asked = 0

    def ask(self) -> Request:
        """Choose by the algorithm."""
        index, step = self._algorithm.suggest()
        self._asked = int(index)
        batch_size, coordinate = self._candidates[self._asked]
        return request_on(self._axis, int(batch_size), float(coordinate), int(step) / self._steps)

    def tell(self, cost: float, *, is_final: bool) -> None:
        """Tell the algorithm the learning curve so far; what has ended goes on as it is."""
        # It maximises a score in [0, 1].
        score = (WORST_COST - max(cost, -WORST_COST)) / (2 * WORST_COST)
        curve = self._curves.setdefault(self._asked, [])
        curve.append(score)
        if is_final:
            curve.extend([score] * (self._steps - len(curve)))
        self._algorithm.observe(self._asked, len(curve), list(curve))

    def _draw(self, problem: Problem, seed: int) -> npt.NDArray[np.float64]:
        """Draw the candidates: an array of (batch size, coordinate)."""
        sobol = qmc.Sobol(2, seed=trial_seed(seed, 0, purpose=2) % 2**31)
        shares = sobol.random(CANDIDATES)
        smallest = problem.batch_sizes[0]
        largest = problem.batch_sizes[-1]
        sizes = np.round(smallest * (largest / smallest) ** shares[:, 0])
        return np.column_stack([sizes, spread(self._axis, shares[:, 1])])


def _never_called(config: object, seed: int = 0, budget: float = 1.0) -> float:
    """Stand in for the function to minimise: trials are asked for and told."""
    raise NotImplementedError


def tpe_hyperband(problem: Problem, seed: int) -> Search:
    """Optuna's TPE with Hyperband pruning, over batch size and learning rate."""
    return MultiFidelitySearch(problem, seed, OptunaHyperband(problem, seed, "lr"))


def tpe_hyperband_sqrt(problem: Problem, seed: int) -> Search:
    """The same over batch size and octaves off the square-root rule."""
    return MultiFidelitySearch(problem, seed, OptunaHyperband(problem, seed, "sqrt"))


def smac(problem: Problem, seed: int) -> Search:
    """SMAC3's MultiFidelityFacade, over batch size and learning rate."""
    return MultiFidelitySearch(problem, seed, Smac(problem, seed, "lr"))


def smac_sqrt(problem: Problem, seed: int) -> Search:
    """The same over batch size and octaves off the square-root rule."""
    return MultiFidelitySearch(problem, seed, Smac(problem, seed, "sqrt"))


def dyhpo(problem: Problem, seed: int) -> Search:
    """DyHPO, over batch size and learning rate."""
    return MultiFidelitySearch(problem, seed, DyHpo(problem, seed, "lr"))


def dyhpo_sqrt(problem: Problem, seed: int) -> Search:
    """The same over batch size and octaves off the square-root rule."""
    return MultiFidelitySearch(problem, seed, DyHpo(problem, seed, "sqrt"))
