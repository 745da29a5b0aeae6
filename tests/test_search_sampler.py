"""FrontierSampler and StopAtTarget in an Optuna study and a Trainer of one's own."""

import optuna
from lightning.pytorch import Trainer
from refusals import cases, refused
from search_records import QUESTION, history, record, step_time
from small import QUIET, Model, examples
from torch.utils.data import DataLoader

import bstune
from bstune.core.question import Question
from bstune.core.records import Target
from bstune.search.decide import propose
from bstune.search.sampler import FrontierSampler, record_of

optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_sampler(**arguments):
    given = {"target": QUESTION.target, "budget": 4000, "batch_size": (8, 512), "lr": (0.001, 1.0)}
    return FrontierSampler(**(given | {"step_time": step_time} | arguments))


def ask(study):
    trial = study.ask()
    batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
    return trial, batch_size, trial.suggest_float("lr", 0.001, 1.0, log=True)


def test_the_baseline_is_the_first_trial():
    sampler = make_sampler(baseline=(100, 0.02))
    study = optuna.create_study(sampler=sampler)
    trial, *pair = ask(study)
    assert pair == [100, 0.02]
    assert sampler.proposal_of(trial.number).max_steps == 4000
    # The second one counts the first, which still runs, as done.
    running = [record(0, batch_size=100, lr=0.02)]
    expected = propose(QUESTION, sampler.space, step_time, [], 0, running)
    assert ask(study)[1:] == (expected.batch_size, expected.lr)
    assert expected != propose(QUESTION, sampler.space, step_time, [], 0)


def test_ranges_that_do_not_hold_the_proposal():
    sampler = make_sampler()
    study = optuna.create_study(sampler=sampler)
    with refused():
        study.ask().suggest_int("batch_size", 1000, 2000, log=True)
    # What has ended without a report does not run.
    study.tell(0, state=optuna.trial.TrialState.FAIL)
    assert ask(study)[1:] == ask(optuna.create_study(sampler=make_sampler()))[1:]


@cases("""
evaluations | status | steps | steps_low | without_target
10 0.9, 20 0.3, 40 0.1, 50 0.2 | reached | 40 | 20 | pruned
10 0.9, 20 0.3 | pruned | 20 | 10 | pruned
10 0.9, 20 0.3, 4000 0.2 | missed | 4000 | 20 | finished
10 0.9, 20 0.3, 40 nan | diverged | 40 | 20 | diverged
""")
def test_how_a_trial_of_one_s_own_ended(evaluations, status, steps, steps_low, without_target):
    study = optuna.create_study(sampler=make_sampler())
    trial, batch_size, lr = ask(study)
    trial.set_user_attr("seconds_per_step", 0.25)
    for step, value in history(evaluations):
        trial.report(value, step)
    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    got = record_of(study.trials[0], QUESTION)
    assert (got.status, got.steps, got.steps_low) == (status, steps, steps_low)
    assert (got.batch_size, got.lr, got.seconds_per_step) == (batch_size, lr, 0.25)
    metric = Question(Target("val/loss", None, "min"), QUESTION.budget, "metric")
    assert record_of(study.trials[0], metric).status == without_target


def test_arguments_that_cannot_be_used():
    for wrong in ({"lr": None}, {"target": "error < 0.1"}, {"scaling": "square root"}):
        with refused():
            make_sampler(**wrong)


def test_in_an_optuna_study_and_a_trainer_of_one_s_own():
    """The docstring's example: the sampler's trials end at the target, or at their last step."""
    question = {"target": "val/loss <= 0.05", "budget": 800}
    sampler = FrontierSampler(**question, batch_size=(4, 64), baseline=(16, 0.1))

    def objective(trial):
        batch_size = trial.suggest_int("batch_size", 4, 64, log=True)
        lr = trial.suggest_float("lr", sampler.space.lr_low, sampler.space.lr_high, log=True)
        stop = bstune.StopAtTarget(trial, sampler)
        loader = DataLoader(examples(0), batch_size, shuffle=True, drop_last=True)
        trainer = Trainer(
            max_epochs=-1, accumulate_grad_batches=2, callbacks=[stop], accelerator="cpu", **QUIET
        )
        trainer.fit(Model(lr), loader, DataLoader(examples(1), 256))
        return stop.trial.value()

    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=8)
    records = [record_of(trial, sampler.question) for trial in study.trials]
    reached = [record for record in records if record.reached]
    assert study.best_value == min(one.steps * one.seconds_per_step for one in reached)
    for one in records:
        proposal = sampler.proposal_of(one.number)
        assert one.status in ("reached", "diverged") or one.steps == proposal.max_steps
        assert proposal.resumed_from is None
