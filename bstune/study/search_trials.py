"""The trials of the search: whether there is one more, until when it runs, and which it is."""

from collections.abc import Sequence

from bstune.core.records import Records, Spec
from bstune.search.decide import Proposal, leading_probe, propose
from bstune.search.grid import propose_of_grid
from bstune.search.other_samplers import propose_by
from bstune.study.critical import critical_batch_size, is_narrow
from bstune.study.deadline import Deadline
from bstune.study.estimates import answer_posterior, step_time_of
from bstune.study.near_baseline import next_near_baseline
from bstune.study.new_seeds import confirmation_seconds
from bstune.study.plan import Ask, Plan, trial_seed
from bstune.study.trials import (
    baseline_of,
    count_configurations,
    first_free,
    record_numbered,
    took_seconds,
    without_new_seeds,
)

# The search may take so many places a configuration: resumptions and sizes that do not fit, too.
PLACES_PER_CONFIGURATION = 3
# Under ``curve`` the search ends once B_crit's interval is narrow, and so many trials have reached
# the target.
LEAST_FOR_CURVE = 8


def search_goes_on(plan: Plan, records: Records, running: Sequence[Spec], now: float) -> bool:
    """Whether the search asks for another trial; then :func:`ask_search` gives it."""
    deadline = plan.deadline
    if deadline is not None:
        end = _search_end(plan, deadline, records, now)
        if confirmation_seconds(plan, deadline, records, now) is None:
            # Without another configuration that reaches the target new seeds have nothing to do.
            end = deadline.end
        if now > end:
            return False
    places = sum(spec.role == "search" for spec in (*records, *running))
    has_room = places < PLACES_PER_CONFIGURATION * plan.trials
    if not has_room:
        return False
    if count_configurations(records, running) >= plan.trials:
        return _leading_probe(plan, records, running) is not None
    return plan.question.seeks_best or not _is_b_crit_known(plan, records)


def _leading_probe(plan: Plan, records: Records, running: Sequence[Spec]) -> Proposal | None:
    """Resume what is predicted to be the best, where no configuration is left; None: nothing is."""
    if not plan.question.seeks_metric or plan.sampler != "frontier":
        return None
    return leading_probe(
        plan.question,
        plan.space,
        step_time_of(plan, records),
        without_new_seeds(records),
        plan.seed,
        running,
        plan.resumable,
    )


def _is_b_crit_known(plan: Plan, records: Records) -> bool:
    """Whether B_crit's 90% interval, as the answer states it, is narrow."""
    if sum(record.reached for record in records) < LEAST_FOR_CURVE:
        return False
    return is_narrow(critical_batch_size(answer_posterior(plan, records), records).interval)


def _search_end(plan: Plan, deadline: Deadline, records: Records, now: float) -> float:
    """When the search ends under a time limit."""
    if not plan.question.seeks_best:
        return deadline.end
    of_baseline = 0.0
    baseline = baseline_of(records)
    if baseline is not None:
        of_baseline = took_seconds(baseline, records)
    confirmation = confirmation_seconds(plan, deadline, records, now)
    return deadline.search_end(of_baseline, confirmation)


def ask_search(plan: Plan, records: Records, running: Sequence[Spec], now: float) -> Ask:
    """The search's next trial, at its first free place."""
    proposal = _next_proposal(plan, records, running)
    place = f"search/{first_free('search', records, running)}"
    until = None
    if plan.deadline is not None:
        end = _search_end(plan, plan.deadline, records, now)
        until = plan.deadline.trial_until(now, end)
    seed = trial_seed(plan.seed, place)
    if proposal.resumed_from is not None:
        parent = record_numbered(records, proposal.resumed_from)
        seed = parent.seed
    schedule_steps = None
    if plan.question.schedule_ends:
        schedule_steps = proposal.max_steps
    return Ask(
        place=place,
        role="search",
        **proposal.model_dump(),
        seed=seed,
        schedule_steps=schedule_steps,
        until=until,
    )


def _next_proposal(plan: Plan, records: Records, running: Sequence[Spec]) -> Proposal:
    """What the study's sampler proposes; the law's search begins near the baseline."""
    known = plan.question, plan.space, step_time_of(plan, records), without_new_seeds(records)
    if plan.sampler == "grid":
        return propose_of_grid(*known, running, plan.fits)
    arguments = (*known, plan.seed, running, plan.resumable, plan.fits)
    if plan.sampler != "frontier":
        return propose_by(plan.sampler, *arguments)
    proposal = next_near_baseline(plan, records, running)
    if proposal is None and count_configurations(records, running) >= plan.trials:
        proposal = _leading_probe(plan, records, running)
    return proposal or propose(*arguments)
