"""A study's result as a whole."""

from collections.abc import Sequence
from typing import Literal

from pydantic import model_validator

from bstune.core.objectives import Objective
from bstune.core.records import STATUSES, Merit, dump_json
from bstune.result.asked import Reference, SearchPlan, Spend, WorkloadSize
from bstune.result.at_budget import AtBudget
from bstune.result.baseline import BaselineResult, Gain
from bstune.result.critical import (
    CriticalAtTarget,
    CriticalBatchSize,
    Growth,
    MeasuredNoiseScale,
    Regime,
    RegimeName,
)
from bstune.result.curve import Curve, CurvePoint
from bstune.result.devices import DevicePlan
from bstune.result.learning_rate import LearningRateLaw
from bstune.result.scatter import SeedScatter, StepTiming
from bstune.result.unreached import Failures, SoFar, Unreached
from bstune.result.values import BatchSize, Command, Count, Items, Part, Real, Text
from bstune.result.winners import (
    WINNERS,
    AsGood,
    Best,
    NotRunAgain,
    UntoldOthers,
    WinnerName,
    WinnerResult,
)

# The number of curve.json's schema. A change of a key or of its meaning counts it up, but a new key
# that may be missing does not.
SCHEMA_NUMBER = 6


class StudyResult(Part, frozen=True):
    """What a study found; ``curve.json`` is its dump."""

    schema_number: int
    """The number of the schema that the file has: ``SCHEMA_NUMBER``."""
    study: Text
    """The study's name."""
    workload: Text
    """The workload's name."""
    tokens: BatchSize | None
    """Tokens of an example. None where examples have no tokens."""
    size: WorkloadSize | None = None
    """How large data and module are. None where nothing was trained."""
    overrides_lr: bool = False
    """Whether the learning rate was set in the optimizer that the module had built."""
    in_python: bool = False
    """Whether Python objects gave the study: its options are arguments of ``bstune.Study``."""
    in_hydra: bool = False
    """Whether these were a sweep's: its options are keys of ``hydra.sweeper``."""
    objective: Objective
    """What the search sought, such as the least ``time``."""
    target: Text
    """The target in words, such as ``val/loss <= 0.1``."""
    metric: Text
    """The target's metric."""
    target_value: Real | None
    """The target's value. None for the objective loss, which has no target."""
    mode: Literal["min", "max"]
    """Whether a smaller or a larger metric is better."""
    devices: Items[Text]
    """Names of the devices that trials ran on."""
    training_loops: dict[Text, Count]
    """How many trials each training loop took the steps of, by the loop's name."""
    stop_reason: Text | None
    """Why the search ended, in words. None where it has not ended."""
    trials: Count
    """Configurations, runs on fresh seeds and failed ones. A trial in several parts counts once."""
    configurations: Count | None = None
    """Points that were searched, as ``search.trials`` counts them. None in an older file."""
    continued: Count
    """Parts of trials that another one continues, or runs once more from the first step."""
    spend: Spend
    """The seconds and examples of all trials."""
    statuses: dict[Text, Count]
    """How many trials ended with each status. Every status is a key."""
    failures: Failures | None = None
    """The trials that failed by themselves. None where none did, and in an older file."""
    unreached: Unreached | None
    """Why no trial reached the target. None where one did, or none ran."""
    points: Items[CurvePoint]
    """The frontier's points, from the smallest batch size."""
    critical_batch_size: CriticalBatchSize | None
    """By all trials. None where no trial reached the target."""
    regimes: Items[Regime]
    """The regimes within the batch sizes that reached the target."""
    noise_scale: MeasuredNoiseScale | None
    """The gradient noise scale. None where it was not measured."""
    lr_exponent: LearningRateLaw | None
    """How the best learning rate grows. None for less than an octave of batch sizes."""
    best_by_time: WinnerResult | None
    """The winner by seconds of training. None where no trial that reached the target was timed."""
    best_by_steps: WinnerResult | None
    """The winner by steps. None where no trial reached the target."""
    use: WinnerName | None
    """The name of the winner by the study's objective. None where there is none."""
    confirmed: bool
    """Whether fresh seeds confirm the winner to use.

    All of them reached the target, and their times tell it from the other candidates. Under the
    objective loss it is confirmed once it ran on fresh seeds.
    """
    train: Command | None
    """The command that trains the winner to use. None for a study of Python objects."""
    arguments: Items[Text] | None
    """Arguments of the command line that give the study again. None for Python objects."""
    search: SearchPlan
    """What the search was allowed."""
    reference: Reference
    """The pair that the scaling rule goes through."""
    curve: Curve | None
    """S*(B) by all trials. None where no trial reached the target."""
    timing: StepTiming | None
    """How well steps were timed. None without a survey where too few trials were timed."""
    seed_scatter: SeedScatter | None
    """The scatter of steps over seeds. None where no trial reached the target."""
    baseline: BaselineResult | None
    """The user's own configuration. None for a study without one."""
    so_far: SoFar | None
    """The best point so far. None where a trial reached the target, or none has a metric."""
    gain: Gain | None
    """The winner's gain over the baseline. None where the two cannot be compared."""
    gain_in_seconds: Gain | None = None
    """The same in seconds, where steps are sought. None elsewhere, and where none were timed."""
    as_good: AsGood | None
    """The batch sizes that are nearly as good as the best one.

    None where no trial reached the target, or where it takes seconds that the curve lacks.
    """
    smallest_out_of_memory: BatchSize | None = None
    """The smallest batch size whose trial ran out of memory. None where none did."""
    not_run_again: NotRunAgain | None
    """A point that may be better than the winner. None where all such points had fresh seeds."""
    untold_others: UntoldOthers | None = None
    """The other configurations, where one may be better than the user's own, which is the winner.

    None where the own one is known to be the best, or is not the winner.
    """
    at_budget: AtBudget | None = None
    """The answer of the objective loss. None before a trial has run to its budget's end.

    It is None for any other objective.
    """
    only_value: Real | None = None
    """The metric's value where all evaluations of all trials have it. None where they differ."""
    seed_is_unused: bool = False
    """Whether runs of a point on fresh seeds had the same metric, to the last bit."""
    over_target: Items[CriticalAtTarget]
    """The critical batch size at easier targets."""
    over_target_note: Text | None
    """Why ``over_target`` is empty. None where it is not."""
    over_target_growth: Growth | None
    """How the critical batch size grows over the targets. None for fewer than three of them."""
    test: dict[WinnerName, dict[Text, Real | None]]
    """The winners' metrics on the test set, one run of each."""
    scale_out: Items[DevicePlan]
    """Plans for several devices. Empty where the curve does not allow one."""
    few_passed: Text | None = None
    """Why trials that were run for another target tell little of this one. None where they do."""
    run_for_target: Text | None = None
    """What runs a study for this target: a command, or the options that change; else None."""
    notes: Items[Text]
    """What else to know of the result, such as what is missing and why."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "StudyResult":
        """Refuse a result whose parts contradict each other.

        ``use`` must name a winner that is there, every status must be counted, and the smallest
        learning rate that diverged must be known where it explains why nothing reached the target.
        """
        if self.use is not None and self.winner is None:
            raise ValueError(f"use names {self.use!r}, which is no winner of the file")
        if sorted(self.statuses) != sorted(STATUSES):
            raise ValueError(
                f"statuses must be {sorted(STATUSES)}, but got {sorted(self.statuses)}"
            )
        why = self.unreached
        # Without a count of stopped trials it is not known how the trials ended.
        knows_ends = why is not None and why.stopped is not None
        needs_rate = knows_ends and self.statuses["diverged"] > 0
        if why is not None and needs_rate and why.smallest_diverged_lr is None:
            raise ValueError("unreached lacks the smallest_diverged_lr of trials that diverged")
        return self

    @property
    def winner(self) -> WinnerResult | None:
        """The winner by the study's objective, which ``use`` names; None where there is none."""
        if self.use is None:
            return None
        return self.winner_by(WINNERS[self.use].merit)

    @property
    def other_winner(self) -> WinnerResult | None:
        """The winner by steps where the study seeks the least time, and the reverse.

        None where it is the same trial, or there is none.
        """
        winner = self.winner
        if winner is None:
            return None
        other = self.best_by_time
        if self.use == "best_by_time":
            other = self.best_by_steps
        if other is None or other.number == winner.number:
            return None
        return other

    def winner_by(self, merit: Merit) -> WinnerResult | None:
        """Give the winner by seconds of training, or by steps. None where there is none."""
        if merit == "time":
            return self.best_by_time
        return self.best_by_steps

    def best_by(self, merit: Merit) -> Best | None:
        """Give the winner by a merit or, where no trial reached the target, the best one so far.

        The best one so far has the steps and seconds that it is predicted to take to the target.
        Under the objective loss, which seeks the best metric within a budget, it is the winner by
        that metric, whatever the merit. None where no trial has a metric.
        """
        if self.at_budget is not None:
            at_budget = self.at_budget.winner
            return Best(
                batch_size=at_budget.batch_size,
                lr=at_budget.lr,
                hyperparameters=at_budget.hyperparameters,
                steps=at_budget.steps,
                time_to_target=None,
                horizon=at_budget.horizon,
                number=at_budget.number,
                seed=at_budget.seed,
                reached=False,
            )
        winner = self.winner_by(merit)
        if winner is not None:
            return Best(
                batch_size=winner.batch_size,
                lr=winner.lr,
                hyperparameters=winner.hyperparameters,
                steps=winner.steps,
                time_to_target=winner.time_to_target,
                horizon=winner.horizon,
                number=winner.number,
                seed=winner.seed,
                reached=True,
            )
        so_far = self.so_far
        if so_far is None:
            return None
        return Best(
            batch_size=so_far.batch_size,
            lr=so_far.lr,
            hyperparameters=so_far.hyperparameters,
            steps=so_far.predicted_steps,
            time_to_target=so_far.predicted_seconds,
            horizon=so_far.horizon,
            number=so_far.number,
            seed=so_far.seed,
            reached=False,
        )

    def has_regime(self, name: RegimeName) -> bool:
        """Whether a regime lies within the batch sizes that reached the target."""
        return any(regime.name == name for regime in self.regimes)

    def with_notes(self, notes: Sequence[str]) -> "StudyResult":
        """Give the same result with other notes, for what failed after it was built."""
        return self.model_copy(update={"notes": tuple(notes)})

    def to_json(self) -> str:
        """Give the content of ``curve.json``: strict JSON that reads back to an equal result."""
        return dump_json(self.model_dump(), indent=2) + "\n"
