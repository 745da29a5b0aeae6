"""A trial of a loop of one's own, without a study."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolbox import FakeTime, make_spec

from bstune.core.records import Target
from bstune.trial.own_loop.loop_trial import LoopTrial
from bstune.trial.parts.state import TrialState
from bstune.trial.parts.verdict import Verdict


def made_trial(
    goal: float = 0.2,
    clock: Callable[[], float] | None = None,
    schedule_ends: bool = False,
    **changes: Any,
) -> LoopTrial:
    """A trial of at most 20 steps."""
    state = TrialState(first_step=0, last_step=20, steps=0)
    return LoopTrial(
        spec=make_spec(**changes),
        state=state,
        verdict=Verdict(state, Target("loss", goal, "min"), divergence=10.0),
        metric="loss",
        save_to=Path("saved"),
        resume_from=None,
        budget_end=None,
        refuses_further_steps=False,
        needs_seconds=False,
        now=clock or FakeTime(),
        schedule_ends=schedule_ends,
    )
