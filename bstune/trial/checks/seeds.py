"""Checks that fresh seeds have an effect: a module may seed the random generators itself."""

from collections.abc import Iterator

from bstune.system.console import listing
from bstune.trial.checks.attributes import fingerprint
from bstune.trial.checks.recorder import BUILT, FIRST_STEP, SEEDING_HOOKS
from bstune.trial.checks.short_trial import ShortTrial


def seed_notes(trial: ShortTrial, other: ShortTrial) -> Iterator[str]:
    """Yield a line on the generators that have the same state in two trials of different seeds.

    Their states are compared at the first step. Nothing is yielded where all of them differ.
    """
    if FIRST_STEP not in trial.generators or FIRST_STEP not in other.generators:
        return
    same = _same_generators(trial, other, FIRST_STEP)
    if not same:
        return
    # The moments before the first step are gone through backwards, to the earliest one from which
    # on the states are the same: the module's code before it has seeded them.
    where = FIRST_STEP
    for moment in reversed((BUILT, *SEEDING_HOOKS)):
        if not set(same) <= set(_same_generators(trial, other, moment)):
            break
        where = moment
    seen = f"at {where}" if where == FIRST_STEP else f"after {where}"
    yield (
        f"fresh seeds are not fresh: {trial.module.name} seeds {listing(same)} itself (two seeds "
        f"of a trial have one state of the generator {seen}): leave the seed to bstune, or take "
        "the trial's (trial.seed in Python, ${trial.seed} in YAML)"
    )


def _same_generators(trial: ShortTrial, other: ShortTrial, moment: str) -> list[str]:
    """Name the libraries whose generator has the same state in both trials at a moment."""
    others = other.generators[moment]
    same = list[str]()
    for name, state in trial.generators[moment].items():
        if name in others and fingerprint(state) == fingerprint(others[name]):
            same.append(name)
    return same
