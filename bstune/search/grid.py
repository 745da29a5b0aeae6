"""The protocol of Shallue et al. 2018: each batch size is tuned by itself, on a grid of rates.

They tuned powers of two with equally many trials each, and searched again, more widely, where the
best trial lay near the boundary or none reached the goal (arXiv 1811.03600, section 4.1). Here the
rates of a batch size lie octaves around the rule's, the nearest ones first. The grid is extended
until both neighbours of the best rate have been tried, and is then refined around it, the batch
size with the fewest trials first. A trial ends a little beyond the fewest steps at its batch size.
"""

import math
from collections.abc import Sequence

from bstune.core.question import Question
from bstune.core.records import Record, Records, Spec, StepTime, last_of_chains
from bstune.core.space import Space
from bstune.search.decide import Proposal, first_evaluation
from bstune.search.fit import NOTHING, SurveyedSizes, chance_to_fit, sizes_to_try
from bstune.search.limits import limit_beside_best

# Octaves between a batch size's first rates and the rule's, in the order in which they are tried.
FIRST_OCTAVES = (0, 1, -1, 2, -2)
# Further trials of a batch size, where nobody says how many.
FURTHER = 2
# A grid is refined to an octave over 2 to the power of this: rates have three digits.
FINEST = 8


def grid_sizes(space: Space, records: Records = (), fits: SurveyedSizes = NOTHING) -> list[int]:
    """The batch sizes of a grid, ascending: powers of two times the multiple that is allowed.

    The first and the last are those nearest to the range's ends, or the ends.
    """
    allowed = sizes_to_try(space, records, fits)
    low, high = (round(math.log2(end / allowed.multiple)) for end in (allowed.low, allowed.high))
    powers = range(low, high + 1)
    sizes = sorted({allowed.snap(allowed.multiple * 2.0**power) for power in powers})
    chances = chance_to_fit(sizes, records, fits)
    return [size for size, chance in zip(sizes, chances, strict=True) if chance > 0.0] or sizes


def usual_trials(space: Space) -> int:
    """The trials of a grid, where nobody says how many."""
    return len(grid_sizes(space)) * (len(FIRST_OCTAVES) + FURTHER)


def propose_of_grid(
    question: Question,
    space: Space,
    step_time: StepTime,
    records: Records,
    running: Sequence[Spec] = (),
    fits: SurveyedSizes = NOTHING,
) -> Proposal:
    """Choose the next trial of the grid.

    Args:
        question, space, step_time, records, running, fits: as of
            :func:`bstune.search.decide.propose`.
    """
    choices = []
    for batch_size in grid_sizes(space, records, fits):
        done = [one for one in last_of_chains(records) if one.batch_size == batch_size]
        at_work = [one for one in running if one.batch_size == batch_size]
        fineness, lr = _next_rate(question, space, batch_size, done, at_work)
        choices.append((fineness, len(done) + len(at_work), batch_size, lr))
    _, _, batch_size, lr = min(choices)
    best = [one for one in best_of_grid(space, records, fits) if one.batch_size == batch_size]
    best_steps = best[0].steps_to_target if best else math.inf
    last_step = question.last_step(batch_size)
    return Proposal(
        batch_size=batch_size,
        lr=lr,
        max_steps=limit_beside_best(best_steps, last_step),
        first_evaluation=first_evaluation(min(best_steps, last_step)),
    )


def _next_rate(
    question: Question,
    space: Space,
    batch_size: int,
    done: Records,
    at_work: Sequence[Spec],
) -> tuple[int, float]:
    """The next rate of a batch size, and how often the octave is halved to come to it."""
    rule = best = space.rule_lr(batch_size)
    if done:
        best = min(done, key=lambda one: _order_at_size(question, one)).lr

    def place_of(lr: float, parts: int) -> int:
        """In parts of an octave, from the rule's rate."""
        return round(math.log2(lr / rule) * parts)

    places: Sequence[int] = FIRST_OCTAVES
    for fineness in range(FINEST):
        parts = 2**fineness
        tried = {place_of(one.lr, parts) for one in (*done, *at_work)}
        of_best = place_of(best, parts)
        for place in (*places, of_best + 1, of_best - 1):
            # Beyond the ends of the range lie no further rates.
            lr = space.snap_lr(rule * 2.0 ** (place / parts))
            if place_of(lr, parts) not in tried:
                return fineness, lr
        places = ()
    return FINEST, best


def _order_at_size(question: Question, record: Record) -> tuple[int, float]:
    """The order of trials at one batch size, the best first."""
    gaps = [question.target.gap(value) for _, value in record.finite_history]
    if record.status == "reached":
        return 0, record.steps_to_target
    if record.status == "diverged" or not gaps:
        # Of these the lowest rate is nearest to what trains.
        return 2, record.lr
    return 1, min(gaps)


def best_of_grid(space: Space, records: Records, fits: SurveyedSizes = NOTHING) -> list[Record]:
    """The trial of the fewest steps to the target at each batch size of a grid, ascending.

    New seeds are none of them, nor is a baseline at a batch size that is not tuned.
    """
    reached = [one for one in records if one.status == "reached" and one.role != "new seed"]
    best = []
    for batch_size in grid_sizes(space, records, fits):
        of_size = [one for one in reached if one.batch_size == batch_size]
        if of_size:
            best.append(min(of_size, key=lambda one: one.steps_to_target))
    return best
