"""FrontierSampler and StopAtTarget in an Optuna study and a Trainer of one's own."""

import optuna
from lightning.pytorch import Trainer
from small import QUIET, Model, examples
from torch.utils.data import DataLoader

import bstune
from bstune.search.sampler import record_of


def test_in_an_optuna_study_and_a_trainer_of_one_s_own():
    """The docstring's example: the sampler's trials end at the target, or at their last step."""
    sampler = bstune.FrontierSampler(
        target="val/loss <= 0.05", budget=800, batch_size=(4, 64), baseline=(16, 0.1)
    )

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

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=8)
    records = [record_of(trial, sampler.question) for trial in study.trials]
    reached = [record for record in records if record.reached]
    assert study.best_value == min(one.steps * one.seconds_per_step for one in reached)
    for record in records:
        proposal = sampler.proposal_of(record.number)
        assert record.reached or record.steps == proposal.max_steps
        assert proposal.resumed_from is None
