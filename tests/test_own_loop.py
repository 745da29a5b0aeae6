"""Loops of one's own under a study: the same trials as bstune.tune, kills, and what a loop may do wrong."""

import importlib
import math
import os
import re
import signal
from collections import Counter
from contextlib import chdir
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import once
import pytest
import torch
from lightning.pytorch import LightningModule
from loop_trials import made_trial
from projects.own_loop.digits import TRAIN, VAL, make_model, validate
from test_pieces import example_in
from test_study import without_clock
from toolbox import FakeTime, entries, forked_training, leave_blank, make_spec, statuses
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import bstune
from bstune.config import option_names
from bstune.core.errors import ConfigError, StudyError, UserCodeError
from bstune.core.option_names import in_python
from bstune.core.records import CUT_SHORT, TrialResult
from bstune.report.schema import read_result
from bstune.study.own_loop import OWN_WORK, trials_of
from bstune.system.files import Output, keep_trials, own_mark
from bstune.trial import loop_noise_scale
from bstune.trial.backend import make_protocol
from bstune.trial.own_loop.loop_backend import ANY_LOOP, LoopBackend, LoopLimits
from bstune.trial.own_loop.loop_trial import (
    ENDED_BY_CALLBACK,
    ENDED_SHORT,
    has_ended_short,
    last_report,
    name_what_ends,
)

# The objective loss has a metric as its target, and no value of it.
FOR_LOSS = {"objective": "loss", "target": "loss"}
# A loop evaluates after each step, so tune() has to do the same for equal histories.
EVERY_STEP = [
    "protocol.evaluation_ratio=1.0001",
    "protocol.evaluation_share=1.0",
    "protocol.evaluation_cost=1e-9",
]


def arguments(**changes):
    """The arguments of a study of digits whose objective depends on no clock."""
    own = {
        "target": "val_loss<=1.2",
        "batch_sizes": (16, 256),
        "reference": (32, 0.2),
        "budget": bstune.Budget(steps=1, examples=5_000),
        "objective": "steps",
        "trials": 4,
        "name": "digits",
        "mlflow": False,
        "options": ["search.replicates=1", "protocol.noise_scale_every=null"],
    }
    return own | changes


def loop_of(name):
    """A loop's function; skip where its package is missing."""
    if name == "huggingface":
        pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    return importlib.import_module(f"projects.own_loop.{name}").train


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Digits(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = make_model()

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    # The same loss as the loops', by the name under which they report it.
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The trials of bstune.tune on the model that the loops train, evaluated after each step."""
    data = DataLoader(TensorDataset(*TRAIN), 32), DataLoader(TensorDataset(*VAL), 300)
    stated = arguments()
    stated["options"] = [*stated["options"], *EVERY_STEP]
    # As the slow tests have it that compare other loops with it: which winner runs again is by the
    # posterior.
    with pytest.MonkeyPatch.context() as patch, chdir(tmp_path_factory.mktemp("tuned")):
        patch.setattr("bstune.study.analysis.model.MOVES", once.MOVES_OF_A_REPORT)
        leave_blank(patch)
        return bstune.tune(Digits, data, workers=0, survey=False, **stated).records


def in_tunes_order():
    """A Trainer that reads its data as a study of a module does, in place of an order of its own."""
    from transformers import Trainer

    from bstune.integrations.huggingface import TrialCallback

    class InTunesOrder(Trainer):
        def get_train_dataloader(self):
            callbacks = self.callback_handler.callbacks
            (callback,) = (one for one in callbacks if isinstance(one, TrialCallback))
            batches = callback._trial.batches(len(self.train_dataset))
            # They go on where the trial did.
            self.args.ignore_data_skip = True
            return DataLoader(
                # The sampler of batches is bstune's, the rest is the Trainer's own.
                self.train_dataset,
                batch_sampler=batches,
                collate_fn=self.data_collator,
            )

    return InTunesOrder


def run_loop(name, trials=None):
    """Train a study's trials, or those that are given, by a loop; return their records."""
    train = loop_of(name)
    study = study_of(name)
    # The Trainer shuffles by itself; only in tune's order can the weights agree.
    more = {"trainer_class": in_tunes_order()} if name == "huggingface" else {}
    train(study if trials is None else trials(study), every=1, **more)
    return study.result.records


def study_of(name):
    metric = "eval_loss" if name == "huggingface" else "val_loss"
    return bstune.Study(**arguments(target=f"{metric}<=1.2"))


def assert_same(records, expected, exactly):
    """Compare what depends on no clock."""
    assert len(records) == len(expected)
    for record, other in zip(records, expected, strict=True):
        # The last value is the history, whose floats may differ in their last digits.
        *decided, history = without_clock(record)
        *decided_by_other, history_of_other = without_clock(other)
        assert decided == decided_by_other
        if exactly:
            assert history == history_of_other
        else:
            # The metric is a float32: 1e-6 is about eight of its rounding errors.
            assert np.array(history) == pytest.approx(np.array(history_of_other), rel=1e-6)


# Fabric's loop takes from a trial what the bare one does.
@pytest.mark.parametrize(
    "name", ["bare", pytest.param("fabric", marks=pytest.mark.soak), "huggingface"]
)
# Lightning and transformers give advice to whoever trains a toy.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("precise")
def test_a_loop_has_the_trials_of_tune(name, tuned):
    records = run_loop(name)
    # Something was continued, so that the comparison is of that, too.
    assert {record.resumed_from for record in records} != {None}
    # Hugging Face's Trainer averages the loss of its evaluation once more.
    assert_same(records, tuned, exactly=name != "huggingface")


class Annealed(Digits):
    """The model with a rate that falls along a cosine to the trial's last step."""

    def __init__(self, lr, total_steps):
        super().__init__(lr)
        self.total_steps = total_steps

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = CosineAnnealingLR(optimizer, self.total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def anneal(study):
    """Train the same by a loop, evaluated after each step."""
    images, labels = TRAIN
    for trial in study:
        torch.manual_seed(trial.seed)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
        schedule = CosineAnnealingLR(optimizer, trial.max_steps)
        trial.report(0, validate(model))
        for step, batch in enumerate(trial.batches(len(images)), start=1):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if not trial.report(step, validate(model)):
                break
        trial.finish()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("precise")
def test_a_loop_whose_schedule_ends_with_its_trial_has_the_trials_of_tune(monkeypatch):
    monkeypatch.setattr("bstune.study.analysis.model.MOVES", once.MOVES_OF_A_REPORT)
    leave_blank(monkeypatch)
    stated = arguments(target="val_loss<=0.6")
    data = DataLoader(TensorDataset(*TRAIN), 32), DataLoader(TensorDataset(*VAL), 300)
    by_tune = stated | {"name": "tuned", "options": [*stated["options"], *EVERY_STEP]}
    tuned = bstune.tune(Annealed, data, workers=0, survey=False, **by_tune)
    study = bstune.Study(schedule_ends=True, **stated)
    anneal(study)
    records = study.result.records
    assert_same(records, tuned.records, exactly=True)
    horizons = [record.horizon for record in records]
    assert horizons == [record.horizon for record in tuned.records]
    # The user's own pair has the whole budget, 5,000 examples in batches of 32; the search chooses
    # shorter ones too. No trial goes on.
    assert horizons[0] == 157
    assert min(horizons) < 157
    assert {record.resumed_from for record in records} == {None}
    assert study.result.best == tuned.best


def kill(step, value):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when_continued(study):
    for trial in study:
        if trial.resume_from is not None:
            trial.report = kill
        yield trial


# What is killed is the same in each: the loops differ in what they save.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bare", marks=pytest.mark.slow),
        pytest.param("fabric", marks=pytest.mark.soak),
        pytest.param("huggingface", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_loop_that_is_killed_goes_on_where_it_was(name, tuned):
    # It skips where the package is missing, before a process is started.
    loop_of(name)
    assert forked_training(lambda: run_loop(name, killed_when_continued)) == -signal.SIGKILL
    records = run_loop(name)
    (cut_short,) = (record for record in records if record.status == "failed")
    assert cut_short.resumed_from is not None
    finished = [record for record in records if record.status != "failed"]
    assert_same(finished, tuned, exactly=name != "huggingface")
    # What was saved of trials that nothing continues any more is gone.
    left = entries(Path("outputs/digits/states"))
    for record in finished:
        assert f"trial-{record.resumed_from}.saved" not in left


def quadratic(**changes):
    """A study of a noisy quadratic, whose loop takes no time."""
    own = {"target": "loss<=0.2", "batch_sizes": (8, 1024), "reference": (64, 0.1)}
    own |= {"budget": bstune.Budget(steps=40, examples=20_000), "name": "quadratic"}
    own["options"] = ["search.replicates=0"]
    return bstune.Study(**arguments(**own | {"trials": 4} | changes))


def descend(trial, saves=True, seconds_per_step=None, ends=None, seed=None):
    """Train a trial to its end, or to ``ends``. ``seed`` is the loop's own, in the trial's place."""
    weights = np.ones(10) if trial.resume_from is None else np.load(trial.resume_from)
    step = trial.first_step
    goes_on = True
    seed = trial.seed if seed is None else seed
    if step == 0:
        # A report at step 0 is what the untrained weights come to.
        trial.report(0, (weights**2).mean())
    while goes_on and step != ends:
        # The noise of a mean over a batch falls with the root of its size.
        noise = np.random.default_rng([seed, step]).normal(size=10)
        weights = weights - trial.lr * (weights + 3 * noise / math.sqrt(trial.batch_size))
        step += 1
        goes_on = trial.report(step, (weights**2).mean())
    if saves:
        with open(trial.save_to, "wb") as file:
            np.save(file, weights)
    return None if seconds_per_step is None else seconds_per_step * (step - trial.first_step)


def train_all(study, body):
    for trial in study:
        body(trial)


def scheduled_trial():
    """A trial of at most 20 steps whose schedule ends with it, and its backend, without a study."""
    options = quadratic(schedule_ends=True).options
    limits = LoopLimits(schedule_ends=True)
    backend = LoopBackend(options, make_protocol(options, None), pytest.fail, limits=limits)
    return backend.hand_over(make_spec(max_steps=20), Output(Path.cwd()), None), backend


@pytest.mark.parametrize(
    ("reports", "status", "message"),
    [
        ([(10, 0.5), (20, 0.4)], "stopped", None),
        # A trial may meet the target before its schedule ends, as one of a module does.
        ([(10, 0.1)], "reached", None),
        ([(10, math.nan)], "diverged", None),
        ([(10, 0.5), (19, 0.4)], None, r"report at step 19, .* ends at trial\.max_steps=20"),
        ([(10, 0.5), (21, 0.4)], None, "past the 20 of its schedule"),
    ],
)
def test_how_a_trial_ends_whose_schedule_ends_with_it(reports, status, message):
    trial, backend = scheduled_trial()
    assert (backend.horizon, backend.stops, backend.continues) == (True, False, False)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            train_by(reports, trial)
        return
    train_by(reports, trial)
    # Nothing is said of a trial that is not saved, as none goes on.
    assert not trial.worth_saving
    record = backend.take_back(trial, Output(Path.cwd())).result()
    assert (record.status, record.steps, record.horizon) == (status, reports[-1][0], 20)


def test_what_ends_a_trial_before_its_schedule_does_is_named():
    trial, _ = scheduled_trial()
    name_what_ends(trial, "EarlyStoppingCallback")
    with pytest.raises(
        ConfigError, match="was ended by EarlyStoppingCallback with a report at step 10"
    ):
        train_by([(10, 0.5)], trial)


def train_by(reports, trial):
    for report in reports:
        trial.report(*report)
    trial.finish()


@pytest.mark.parametrize(
    ("sampler", "is_frozen"),
    # bstune's sampler chooses each length; under another one the budget is the length.
    [("frontier", False), ("tpe", True)],
)
def test_the_budget_is_fixed_where_it_is_the_length_of_each_schedule(sampler, is_frozen):
    options = quadratic(options=[f"sampler={sampler}"]).options
    protocol = make_protocol(options, None)
    limits = LoopLimits(schedule_ends=True)
    frozen = LoopBackend(options, protocol, pytest.fail, limits=limits).frozen_settings
    assert frozen["schedule_ends"]
    assert ("budget.examples" in frozen) == is_frozen
    assert set(LoopBackend(options, protocol, pytest.fail).frozen_settings) == {"device"}


@pytest.mark.parametrize("changes", [{"objective": "time"}, FOR_LOSS])
def test_a_study_of_schedules_that_end_goes_on_as_it_began(changes):
    def study():
        return quadratic(schedule_ends=True, **changes)

    asked = []
    for trial in study():
        asked.append(values_of(trial))
        # The third trial is left.
        if len(asked) == 3:
            break
        descend(trial, saves=False)
        trial.finish(seconds=1.0)
    with pytest.raises(StudyError, match="schedule_ends"):
        next(iter(quadratic(**changes)))
    for trial in study():
        asked.append(values_of(trial))
        descend(trial, saves=False)
        trial.finish(seconds=1.0)
    assert asked[3] == asked[2]
    records = [record for record in study().result.records if record.status != "failed"]
    assert [record.horizon for record in records] == [last for *_, last in asked[:2] + asked[3:]]
    assert records[0].horizon == 313
    assert study().result.best.horizon is not None


def values_of(trial):
    return trial.batch_size, trial.lr, trial.seed, trial.max_steps


def test_a_trial_has_what_it_is_to_be_trained_with():
    study = quadratic(tunable={"decay": (0.1, 0.3)}, trials=1)
    for trial in study:
        assert (trial.batch_size, trial.lr, trial.number, trial.first_step) == (64, 0.1, 0, 0)
        # 20,000 examples in batches of 64: 312.5 steps, and the last one counts whole.
        assert trial.max_steps == 313
        assert trial.resume_from is None
        # The middle of the range (0.1, 0.3), where a tunable without a reference begins.
        assert trial.decay == trial.hyperparameters["decay"] == pytest.approx(0.2)
        assert "decay=" in repr(trial)
        with pytest.raises(AttributeError, match="no 'dropout'"):
            _ = trial.dropout
        # The study may ask for 1,024 examples later, and says so before its first step.
        with pytest.raises(ConfigError, match="batch size 1024 is larger than the data set"):
            trial.batches(1023)
        trial.finish(seconds=descend(trial, seconds_per_step=0.5))
    (record,) = study.result.records
    assert record.seconds_per_step == 0.5
    # The loop told the seconds of all steps together.
    assert record.train_seconds == 0.5 * record.steps
    assert record.device == "cpu"


def test_each_batch_has_as_many_examples_and_goes_on_after_a_part():
    for trial in quadratic(batch_sizes=(8, 64), trials=1):
        # 25 batches of 64 are 16 epochs of 100 examples.
        batches = trial.batches(100)
        drawn = [next(batches).tolist() for _ in range(25)]
        assert set(map(len, drawn)) == {64}
        of_epochs = np.array(drawn).reshape(-1, 100)
        # Each epoch has each example once, though batches do not end with it.
        assert (np.sort(of_epochs, axis=1) == np.arange(100)).all()
        # The trial's stream begins at its first step.
        trial._state.first_step = 3
        assert next(trial.batches(100)).tolist() == drawn[3]
        break


def left(body):
    """Leave a study's loop by what a body raises or by a break; return what was asked then, and next."""
    asked = []
    try:
        for trial in quadratic():
            asked.append(values_of(trial))
            # The third trial is the one that is left.
            if len(asked) == 3:
                body(trial)
                break
            descend(trial)
            trial.finish()
    except ValueError:
        pass
    # The study of the same name is opened again, as the next call of a script does.
    again = next(iter(quadratic()))
    return asked, values_of(again)


def raising(error):
    def body(trial):
        raise error

    return body


@pytest.mark.parametrize(
    "body",
    [
        raising(ValueError("mine")),
        # A generator sees as little of the one as of the other.
        pytest.param(lambda trial: None, marks=pytest.mark.slow),
    ],
)
def test_a_trial_whose_loop_is_left_is_said_and_asked_again(body, caplog):
    asked, again = left(body)
    assert "trial 2" in caplog.text
    assert "was cut short" in caplog.text
    assert again == asked[2]
    outcomes = [record.outcome for record in quadratic().result.records]
    # The last one is that of ``again``, whose loop was left as well.
    assert outcomes == ["reached", "reached", "cut short", "cut short"]


@pytest.mark.slow
def test_a_trial_that_is_finished_is_stored_though_its_loop_is_left():
    def finish(trial):
        descend(trial)
        trial.finish()

    asked, again = left(finish)
    assert again not in asked


def test_the_last_report_of_a_trial_is_known_while_it_trains():
    trial = next(iter(quadratic()))
    assert last_report(trial) is None
    trial.report(1, 0.5)
    trial.report(2, math.nan)
    assert last_report(trial) == (2, None)


@pytest.mark.slow
def test_a_loop_that_goes_on_without_finish_is_asked_again_until_it_is_too_often():
    asked = []

    def forget(trial):
        asked.append(values_of(trial))
        trial.report(1, 1.0)

    # Three failures in a row end a study.
    with pytest.raises(StudyError, match=r"first 3 trials all failed, .*without trial\.finish"):
        train_all(quadratic(), forget)
    # The same trial is asked again before the search goes elsewhere.
    assert asked[0] == asked[1]
    assert statuses(quadratic().result.records) == ["failed"] * 3
    # Twice is no end: it is tried elsewhere, and the study goes on.
    for trial in quadratic():
        descend(trial)
        trial.finish()
    assert quadratic().result.records[-1].status == "reached"


# A tensor and a NumPy number are what loops have at hand.
@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan), np.float32("nan")])
def test_a_value_that_is_not_finite_ends_a_trial_as_diverged(value):
    trial = made_trial()
    assert trial.report(1, 1.0)
    assert not trial.report(2, value)
    # A trial that has ended takes no further report.
    assert not trial.report(3, 1.0)
    assert not trial.worth_saving
    trial.finish()
    record = trial.finished.result()
    assert (record.status, record.steps, record.steps_low) == ("diverged", 2, 2)
    assert record.history == ((1, 1.0), (2, None))


# As a double, float32's 0.1 is 0.10000000149: above the target of 0.1.
@pytest.mark.parametrize("value", [np.float32(0.1), torch.tensor([0.1]), torch.tensor(0.1).item()])
def test_a_float32_meets_the_target_that_it_is_written_as(value):
    assert not made_trial(goal=0.1).report(1, value)


@pytest.mark.parametrize(
    ("reports", "status", "steps", "steps_low", "worth_saving"),
    [
        # The metric is over ten times its start.
        ([(0, 1.2), (1, 100.0)], "diverged", 1, 1, False),
        # Without a start there is nothing to be far past of.
        ([(1, 100.0), (3, 0.1)], "reached", 3, 1, False),
        # The target is met by its own value. The last miss is step 0: nothing was reported before.
        ([(2, 0.2)], "reached", 2, 0, False),
        # It stands at its last step without the target, from where a larger budget may go on.
        ([(10, 0.5), (20, 0.4)], "stopped", 20, 20, True),
        # A loop may run past its last step, up to where it reports next.
        ([(10, 0.5), (25, 0.4)], "stopped", 25, 25, True),
    ],
)
def test_how_a_trial_ends(reports, status, steps, steps_low, worth_saving):
    trial = made_trial()
    for report in reports[:-1]:
        assert trial.report(*report)
    assert not trial.report(*reports[-1])
    assert trial.worth_saving == worth_saving
    trial.finish(seconds=0.5)
    record = trial.finished.result()
    assert (record.status, record.steps, record.steps_low) == (status, steps, steps_low)
    # Step 0 is no part of the history.
    assert record.history == tuple(report for report in reports if report[0] > 0)
    # 0.5 s are those of all steps. Only a divergence is explained by a message.
    assert (record.seconds_per_step, record.message is None) == (0.5 / steps, status != "diverged")


@pytest.mark.parametrize("seconds", [1.5, np.float32(1.5), np.array([1.5]), torch.tensor(1.5)])
def test_seconds_may_be_any_number(seconds):
    trial = made_trial()
    trial.report(3, 0.1)
    trial.finish(seconds=seconds)
    record = trial.finished.result()
    assert (record.train_seconds, record.seconds_per_step) == (1.5, 0.5)


@pytest.mark.parametrize("examples", [np.int64(100), 100.0])
def test_the_examples_may_be_any_whole_number(examples):
    batch = next(made_trial().batches(100))
    assert next(made_trial().batches(examples)).tolist() == batch.tolist()


@pytest.mark.parametrize("step", [10.0, np.int64(10), np.float32(10.0), torch.tensor(10.0)])
def test_a_step_may_be_any_whole_number(step):
    trial = made_trial()
    assert trial.report(step, 1.0)
    assert last_report(trial) == (10, 1.0)
    trial = made_trial()
    trial.reach(step)
    trial.finish()
    assert trial.finished.result().steps == 10


@pytest.mark.parametrize(
    ("tell", "status", "steps", "steps_low"),
    [
        # Steps 1 to 6 are taken to have missed the target.
        (lambda trial: trial.reach(7), "reached", 7, 6),
        # max_steps is 20.
        (lambda trial: trial.miss(), "stopped", 20, 20),
    ],
)
def test_a_trial_may_tell_its_steps_alone(tell, status, steps, steps_low):
    trial = made_trial()
    tell(trial)
    assert not trial.report(20, 1.0)
    assert trial.worth_saving == (status == "stopped")
    trial.finish(seconds=1.4)
    record = trial.finished.result()
    assert (record.status, record.steps, record.steps_low) == (status, steps, steps_low)
    assert (record.history, record.seconds_per_step) == ((), 1.4 / steps)


def test_a_loop_that_cannot_stop_has_trials_of_their_whole_budget():
    study = quadratic(trials=2)
    # An optimizer of someone else's sweep: it has no way to stop a job, and a range of rates.
    for trial in trials_of(study.options, limits=LoopLimits(stops=False, lr_range=(0.05, 0.1))):
        assert trial.max_steps == study.options.budget.budget.last_step(trial.batch_size)
        assert 0.05 <= trial.lr <= 0.1
        # It ends where it likes, of which nothing is said.
        descend(trial, ends=trial.max_steps - 1)
        trial.finish()
    records = study.result.records
    assert len(records) == 2
    for record in records:
        assert record.message is None


def test_a_trial_ends_with_the_studys_time():
    clock = FakeTime()
    trial = made_trial(clock=clock, max_seconds=10.0)
    assert trial.report(1, 1.0)
    # The limit was ten seconds.
    clock.sleep(11.0)
    assert not trial.report(2, 1.0)
    trial.finish(seconds=3.0)
    record = trial.finished.result()
    assert (record.status, record.message, record.wall_seconds) == ("stopped", None, 11.0)


def test_a_trial_that_its_loop_ends_early_is_told_how_to_go_on():
    trial = made_trial()
    assert trial.report(15, 1.0)
    trial.finish()
    record = trial.finished.result()
    # The target might have been met after step 15: 15 is no more than a bound.
    assert (record.status, record.steps) == ("stopped", 15)
    assert "before trial.max_steps" in record.message


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda trial: trial.report(1, "0.5"), "needs a number as its value, but got '0.5'"),
        # True is 1 to Python, and no loss to anyone.
        (lambda trial: trial.report(1, True), "needs a number as its value"),
        (lambda trial: trial.report(1, torch.ones(2)), "needs a number as its value"),
        (lambda trial: trial.report(1, None), "needs a number as its value, but got None"),
        # An integer that no float can hold.
        (lambda trial: trial.report(6, 10**400), "needs a number as its value, but got 1000"),
        (lambda trial: trial.report(1.5, 1.0), r"a whole number of steps, but got 1\.5"),
        (lambda trial: trial.report(-1, 1.0), "a whole number of steps, but got -1"),
        # Steps that do not rise would make a history of two trials out of one.
        (lambda trial: trial.report(5, 1.0), "must rise, but step 5 comes after 5"),
        (lambda trial: trial.report(4, 1.0), "must rise, but step 4 comes after 5"),
        (lambda trial: trial.report(0, 1.0), "must rise, but step 0 comes after 5"),
        (lambda trial: trial.finish(seconds="1"), "a positive number, but got '1'"),
        (lambda trial: trial.finish(seconds=0.0), r"a positive number, but got 0\.0"),
        (lambda trial: trial.finish(seconds=math.nan), "a positive number, but got nan"),
        (lambda trial: trial.finish(seconds=True), "a positive number, but got True"),
        (lambda trial: trial.finish(seconds=10**400), "a positive number, but got 1000"),
        (lambda trial: trial.finish(seconds=torch.ones(2)), "a positive number, but got tensor"),
        (lambda trial: trial.batches(100.5), r"a positive integer, but got 100\.5"),
        (lambda trial: trial.batches(0), "a positive integer, but got 0"),
        # A second end would overwrite the record of the first.
        (lambda trial: (trial.finish(), trial.finish()), r"call finish\(\) once a trial"),
        (lambda trial: (trial.finish(), trial.fail(OSError())), r"fail\(\) or finish\(\) once"),
        (lambda trial: (trial.finish(), trial.report(6, 1.0)), r"report before trial\.finish"),
    ],
)
def test_what_a_loop_may_not_do(misuse, message):
    trial = made_trial()
    # Each misuse comes after a good report.
    trial.report(5, 1.0)
    with pytest.raises(ConfigError, match=message):
        misuse(trial)


@pytest.mark.parametrize("start", [1.0, math.nan])
def test_a_loop_that_counts_no_steps_is_refused_at_its_second_report(start):
    trial = made_trial()
    # The start is reported once.
    assert trial.report(0, start)
    with pytest.raises(ConfigError, match="must rise, but step 0 comes after 0"):
        trial.report(trial.first_step, 1.0)
    # A trial that goes on has reported its first step before.
    trial = made_trial()
    trial._state.first_step = trial._state.steps = 5
    trial.resume_from = Path("saved")
    with pytest.raises(ConfigError, match="continues one of 5 steps, but reports step 5"):
        trial.report(trial.first_step, 1.0)


def test_a_target_that_is_met_at_step_0_may_be_a_step_that_was_not_counted():
    with pytest.raises(ConfigError, match="report the steps that it took") as error:
        made_trial().report(0, 0.1)
    # No option of the command line is named to a loop.
    assert in_python(str(error.value)) == str(error.value)


@pytest.mark.parametrize(
    ("changes", "body", "message"),
    [
        # A trial without a report has no metric to end by.
        ({}, lambda trial: trial.finish(), "trial 0 ended without an evaluation"),
        # A start that meets the target leaves nothing to search for.
        ({}, lambda trial: trial.report(0, 0.1), "is met before training"),
        # Without seconds the objective of time has nothing to compare.
        (
            {"objective": "time"},
            lambda trial: (trial.report(1, 0.1), trial.finish()),
            r"objective of time needs the seconds .* objective='steps'",
        ),
        # For the loss trials are compared at their budget's step: what lies past it cannot be.
        (
            {"objective": "loss", "target": "loss"},
            lambda trial: trial.report(trial.max_steps + 1, 1.0),
            r"past the \d+ of its budget",
        ),
    ],
)
def test_what_a_trial_may_not_come_to(changes, body, message):
    with pytest.raises(ConfigError, match=message):
        train_all(quadratic(**changes), body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # A loop trains in its own process, one trial after another.
        ({"workers": 2}, "workers"),
        # What follows is done by bstune's Trainer, which a loop does not have.
        ({"options": ["devices=2"]}, "devices=2: a loop of yours"),
        ({"options": ["compile=default"]}, "compile=default: a loop of yours"),
        (
            {"options": ["trial.batch_size=8", "trial.lr=0.1"]},
            "trial.batch_size asks for one trial",
        ),
        (
            # A budget of seconds needs the time of a step before the trial begins.
            {"objective": "loss", "target": "loss", "options": ["budget.seconds=5"]},
            r"budget\.seconds=5 needs steps that are timed",
        ),
        ({"trainer": {"max_epochs": 1}}, "trainer holds arguments of Lightning's Trainer"),
        ({"precision": "bf16-mixed"}, "precision=bf16-mixed: a loop of yours"),
        ({"precision": "auto"}, "precision=auto: a loop of yours"),
        (
            {"options": ["protocol.micro_batch_size=8"]},
            r"protocol\.micro_batch_size=8: a loop of yours",
        ),
        (
            {"options": ["scaling.beta2_half_life=1e5"]},
            r"scaling\.beta2_half_life=100000\.0: a loop",
        ),
        (
            {"options": ["scaling.weight_decay_half_life=5"]},
            r"scaling\.weight_decay_half_life=5\.0: a",
        ),
        ({"survey": True}, "survey=True: a loop of yours is not surveyed"),
        ({"options": ["hardware.enabled=true"]}, "hardware.enabled=true: a loop of yours is not"),
        ({"options": ["hardware.seconds=5"]}, r"hardware\.seconds=5\.0: a loop of yours is not"),
        (
            {"options": ["hardware.memory.relative.cpu=0.5"]},
            r"hardware\.memory\.relative\.cpu=0\.5: a loop of yours is not",
        ),
        ({"options": ["threads=1"]}, "threads=1: a loop of yours sets"),
        ({"options": ["seconds_of=lean"]}, "seconds_of=lean: a loop of yours tells"),
        ({"options": ["data.root=/data"]}, "data.root=/data: a loop of yours reads"),
        ({"options": ["protocol.trial_seconds=9"]}, r"protocol\.trial_seconds=9\.0: a loop"),
        ({"options": ["protocol.evaluation_ratio=2"]}, r"protocol\.evaluation_ratio=2\.0: a"),
        (
            {"options": ["protocol.noise_scale_every=9"]},
            r"noise_scale_every=9: a loop .*LoopNoise",
        ),
        ({"override_lr": True}, r"^override_lr=True: a loop of yours sets"),
        ({"options": ["+trainer.max_epochs=3"]}, r"trainer\.max_epochs=3: a loop of yours"),
        (
            {"options": ["trainer.deterministic=true"]},
            r"trainer\.deterministic=True: a loop of yours",
        ),
        # The names would hide attributes of a trial.
        ({"tunable": {"metric": (0.1, 0.3)}}, "a trial has metric already"),
        ({"tunable": {"seed": (1, 3), "save_to": (0, 1)}}, "a trial has seed, save_to already"),
        ({"tunable": {"finish": (1, 3)}}, "a trial has finish already"),
        ({"tunable": {"_state": (1, 3)}}, "a trial has _state already"),
    ],
)
def test_what_a_study_for_a_loop_cannot_have(changes, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        # It is refused before a trial is asked for, and before a file is written.
        next(iter(quadratic(**changes)))
    # As the call has it: an option without an argument of its own stands in ``options``.
    assert re.search(message, re.sub(r"options=\['(.*?)'\]", r"\1", str(refused.value)))
    assert not (tmp_path / "outputs").exists()


# What an option of a study for a loop does, by the option or its section: every other one is
# refused.
OF_A_LOOP = {
    *("study", "seed", "output", "storage", "device", "quick", "debug"),
    *("search", "budget", "prior", "sampler", "mlflow", "trial", "workload"),
    *("scaling.batch_size", "scaling.lr", "scaling.noise_scale", "scaling.rule"),
    *("scaling.lr_octaves_sigma", "scaling.lr_octaves", "protocol.divergence"),
    *("hardware.enabled", "hardware.scale_out"),
    # With a line of its own.
    "devices",
}


@pytest.mark.parametrize("name", sorted(option_names()))
def test_no_option_is_ignored_in_a_loop(name):
    if name.startswith(("defaults", "hydra")):
        return
    # An option of a group is the group's.
    parts = name.split(".")
    groups = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    assert groups & {*OWN_WORK, *OF_A_LOOP}


# A loop that ends between its reports is below; this one does so in every trial, and is told.
@pytest.mark.slow
def test_a_loop_for_the_loss_that_never_reports_at_its_last_step_goes_on_afresh(capsys):
    begun = []
    for trial in quadratic(**FOR_LOSS, trials=6):
        begun.append(trial.first_step)
        descend(trial, ends=trial.max_steps - 1)
        trial.finish()
    printed = capsys.readouterr().out
    assert printed.count("trials in a row ended before trial.max_steps") == 1
    assert "reports at trial.max_steps too" in printed
    assert set(begun) == {0}


def test_the_own_value_of_something_tunable_is_asked_of_the_study_not_of_a_module(capsys):
    study = quadratic(tunable={"momentum": (0.0, 0.9)})
    trial = next(iter(study))
    assert trial.momentum == pytest.approx(0.45)
    line, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("assumed: momentum=0.45")
    assert "module" not in line
    assert "trial.momentum" in line


def test_a_study_with_a_module_has_no_loop():
    data = DataLoader(TensorDataset(*TRAIN), 32), DataLoader(TensorDataset(*VAL), 300)
    with pytest.raises(ConfigError, match="schedule_ends=True is for a loop of yours"):
        bstune.Study(Digits, data, **arguments(schedule_ends=True))
    study = bstune.Study(Digits, data, **arguments(workers=0, survey=False))
    with pytest.raises(ConfigError, match=r"trains its trials by itself: study\.run\(\)"):
        iter(study)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        # A batch size that is too large bounds the search; it is no failure.
        (MemoryError("no room"), "out of memory", "no room"),
        (OSError("gone"), "failed", "OSError: gone"),
        (KeyError("mine"), "failed", "KeyError: 'mine'"),
        # An interruption is no failure of the trial's own.
        (KeyboardInterrupt(), "failed", CUT_SHORT),
    ],
)
def test_how_an_error_ends_a_trial(error, status, message):
    trial = made_trial()
    trial.fail(error)
    record = trial.finished.result()
    assert (record.status, record.message) == (status, message)


def test_a_trial_that_an_error_ends_is_stored():
    study = quadratic(trials=2)
    for trial in study:
        if trial.number == 1:
            trial.fail(MemoryError("no room"))
            continue
        descend(trial)
        trial.finish()
    record = study.result.records[1]
    assert (record.status, record.message) == ("out of memory", "no room")


def fail_with_a_missing_key(trial):
    try:
        {}["mine"]
    except KeyError as error:
        trial.fail(error)


@pytest.mark.slow
def test_errors_that_end_a_study_are_told_with_their_cause():
    with pytest.raises(UserCodeError, match="in fail_with_a_missing_key") as raised:
        train_all(quadratic(), fail_with_a_missing_key)
    # The user's own exception keeps its type and its traceback.
    cause = raised.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.args == ("mine",)
    assert f"{Path(__file__)}:{cause.__traceback__.tb_lineno} " in str(raised.value)
    records = quadratic().result.records
    assert records
    for record in records:
        assert record.message.startswith("KeyError: 'mine' (")


@pytest.mark.slow
def test_a_loop_that_saves_nothing_starts_afresh_which_is_said_once(capsys):
    asked = []
    stopped = []
    for call in range(2):
        for trial in quadratic(trials=12, target="loss<=0.01", reference=(64, 0.02)):
            asked.append(trial.resume_from)
            descend(trial, saves=False)
            trial.finish()
            stopped += [trial.number] * trial.worth_saving
            # Another process knows of the trials before by the study alone.
            if call == 0 and len(stopped) == 2:
                # Some trials were worth saving, or there would be nothing to say.
                break
    assert len(stopped) > 2
    assert set(asked) == {None}
    # The second call finds by the records that nothing was saved, and says nothing again.
    assert capsys.readouterr().out.count("nothing was saved at trial.save_to") == 1


@pytest.mark.parametrize("objective", ["steps", "loss"])
@pytest.mark.parametrize("own_seed", [None, 0])
def test_a_loop_that_does_not_use_the_trials_seed_is_told(objective, own_seed):
    changes = FOR_LOSS if objective == "loss" else {}
    options = ["search.replicates=2"]
    study = quadratic(options=options, batch_sizes=(32, 64), trials=3, **changes)
    for trial in study:
        descend(trial, seed=own_seed)
        trial.finish()
    result = read_result(Path("outputs/quadratic/curve.json").read_text(), "curve.json")
    assert result.seed_is_unused == (own_seed is not None)
    # That all of its runs end with the same loss says nothing of other batch sizes.
    assert result.at_budget is None or result.at_budget.same is None


def test_a_loop_that_stops_by_itself_is_not_asked_the_same_for_ever(capsys):
    """Its patience ends each trial at step 15, and it saves nothing."""
    runs = Counter()
    numbers = []
    study = quadratic(target="loss<=1e-6", trials=2)
    for trial in study:
        descend(trial, saves=False, ends=15)
        trial.finish()
        runs[values_of(trial)[:3]] += 1
        numbers.append(trial.number)
        assert max(runs.values()) <= 3
    # Some were asked again.
    assert len(runs) == 2 < len(numbers)
    summary = study.result.summary
    assert (summary.configurations, summary.trials) == (2, 2)
    assert summary.continued == len(numbers) - 2
    assert summary.spend.examples == sum(record.examples for record in study.result.records)
    assert [record.number for record in study.result.records] == numbers
    assert capsys.readouterr().out.count("its configuration is not asked again") == 1
    # A longer search tries other configurations.
    longer = quadratic(target="loss<=1e-6", trials=3)
    for trial in longer:
        descend(trial, saves=False, ends=15)
        trial.finish()
    assert longer.result.summary.configurations == 3


def test_seconds_to_go_are_told_only_where_trials_take_longer_than_what_lies_between(capsys):
    for trials in (2, 3):
        for trial in quadratic(trials=trials):
            descend(trial)
            trial.finish()
    printed = capsys.readouterr().out
    assert "  continues after 2 configurations\n" in printed
    # One more trial of some milliseconds says nothing of the decision before and the report after.
    assert " ms to go" not in printed


@pytest.mark.parametrize("replicates", [0, 1])
def test_of_two_that_come_to_the_same_metric_the_users_own_is_used(replicates, capsys):
    """The recall saturates at 0.3, and small batch sizes are there a little earlier."""
    options = [f"search.replicates={replicates}"]
    study = quadratic(**FOR_LOSS | {"target": "recall"}, batch_sizes=(8, 64), options=options)
    for trial in study:
        step = trial.first_step
        goes_on = True
        while goes_on:
            step = min(step + 10, trial.max_steps)
            goes_on = trial.report(step, 0.3 * (1.0 - math.exp(-0.05 * step)))
        trial.save_to.write_text("saved")
        trial.finish(seconds=0.1 * (step - trial.first_step))
    at_budget = study.result.summary.at_budget
    # The others are better by some 1e-7 only.
    assert max(record.best_value("max") for record in study.result.records) > at_budget.winner.value
    assert (at_budget.winner.batch_size, study.result.best.batch_size) == (64, 64)
    assert at_budget.gain is None
    assert "GAIN      none: your batch size 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (
            {"tunable": {"decay": (0.1, 0.3)}},
            "best.batch_size, best.lr, best.hyperparameters['decay']",
        ),
        ({"schedule_ends": True}, "best.batch_size, best.lr, best.horizon as max_steps"),
        (FOR_LOSS, "best.batch_size, best.lr"),
        # What no trial reached is not to be trained with.
        ({"target": "loss<=1e-9"}, None),
    ],
)
def test_a_loop_is_told_how_to_train_with_what_was_found(changes, values, capsys):
    study = quadratic(**changes, trials=1)
    last_step = {}
    for trial in study:
        descend(trial)
        trial.finish()
        last_step[trial.batch_size] = trial.max_steps
    _, _, following = capsys.readouterr().out.partition("NEXT")
    if values is None:
        assert "best = " not in following
        return
    rows = [row.strip() for row in following.splitlines()]
    (reads,) = (row for row in rows if row.startswith("best = "))
    assert f"train your loop with {values} in place of the trial's" in rows
    # The line runs as it stands, in another program, too.
    found = {"bstune": bstune}
    exec(reads, found)  # noqa: S102 (bstune wrote it)
    assert found["best"] == study.result.best
    # How long it trains: until the target, or to the budget's end.
    assert "best.steps" in rows[rows.index(reads) + 2]
    assert ("loss <= 0.2" in rows[rows.index(reads) + 2]) == ("objective" not in changes)
    assert found["best"].steps <= last_step[found["best"].batch_size]
    # There is no module that result.train() could train.
    for result in (study.result, bstune.load(study.result.folder)):
        with pytest.raises(ConfigError, match=r"train your loop with best\.batch_size") as refusal:
            result.train()
        assert "best.steps" in str(refusal.value)


def test_an_application_of_hydra_trains_in_another_program():
    options = quadratic().options
    for in_hindsight in (False, True):
        limits = LoopLimits(in_hindsight=in_hindsight)
        backend = LoopBackend(options, make_protocol(options, None), pytest.fail, limits=limits)
        assert backend.trains_in_loop == (not in_hindsight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seconds": 1.5}, ("search.seconds", 1.5)),
        ({"seconds": 1000.0}, (None, None)),
    ],
)
def test_what_ended_a_search_is_told_with_its_value(changes, expected):
    study = quadratic(trials=4, objective="time", **changes)
    for trial in study:
        descend(trial, seconds_per_step=1e-9)
        trial.finish(seconds=1.0)
    search = study.result.summary.search
    assert (search.limit, search.limit_value) == expected


# A test that says nothing of lines fails at the first one.
def backend_for_loss(say=pytest.fail):
    """A backend that hands out trials of 20,000 examples each, and its folder here."""
    options = quadratic(**FOR_LOSS).options
    return LoopBackend(options, make_protocol(options, None), say), Output(Path.cwd())


@pytest.mark.parametrize(
    ("limits", "saves", "continues", "said"),
    [
        (ANY_LOOP, True, True, ()),
        (ANY_LOOP, False, False, ("trial.save_to",)),
        # It is said in the loop's own terms, such as those of an application of Hydra.
        (LoopLimits(save_place="last.pt"), False, False, ("saved at last.pt when",)),
        # A loop that cannot go on has nothing to save, whatever it saved.
        (LoopLimits(continues=False), False, False, ()),
        (LoopLimits(continues=False), True, False, ()),
    ],
)
def test_a_loop_is_told_that_nothing_was_saved_where_it_could_go_on(limits, saves, continues, said):
    options = quadratic().options
    lines = []
    backend = LoopBackend(options, make_protocol(options, None), lines.append, limits=limits)
    folder = Output(Path.cwd())
    trial = backend.hand_over(make_spec(64, max_steps=10), folder, None)
    trial.report(10, 1.0)
    trial.finish()
    if saves:
        trial.save_to.write_text("weights")
    record = backend.take_back(trial, folder).result()
    assert backend.continues == continues
    # The next call knows it by what was saved.
    backend.look_back([record], folder)
    assert backend.continues == continues
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("steps", "limits", "said"),
    [
        ([10, 10], ANY_LOOP, []),
        # It is said once, of the first trial that runs past its end.
        ([10, 17, 25], ANY_LOOP, ["trial 1 reported step 17, past trial.max_steps=10"]),
        # Neither loop can stop at a step that the study chooses.
        ([17], LoopLimits(stops=False), []),
        ([17], LoopLimits(in_hindsight=True), []),
    ],
)
def test_steps_past_a_trials_end_are_told_once(steps, limits, said):
    options = quadratic().options
    lines = []
    backend = LoopBackend(options, make_protocol(options, None), lines.append, limits=limits)
    folder = Output(Path.cwd())
    for number, step in enumerate(steps):
        trial = backend.hand_over(make_spec(64, number=number, max_steps=10), folder, None)
        assert not trial.report(step, 1.0)
        trial.save_to.write_text("weights")
        trial.finish()
        # The steps that it took count.
        assert backend.take_back(trial, folder).result().steps == step
    assert [line.partition(":")[0] for line in lines] == said


@pytest.mark.parametrize(
    ("seconds", "limits", "said"),
    [
        # Ten seconds pass in each trial, evaluations included.
        ([8.0, 9.0], ANY_LOOP, []),
        ([None], ANY_LOOP, []),
        # Two clocks differ a little.
        ([10.05], ANY_LOOP, []),
        # Seconds of all trials so far, and milliseconds, which are told once.
        ([8.0, 16.0, 24.0], ANY_LOOP, ["trial 1 gave 16.0 s of training, but only 10.0 s had"]),
        ([8000.0], ANY_LOOP, ["trial 0 gave 2.22 h of training, but only 10.0 s had"]),
        # A job of another program has ended before its trial is told.
        ([8000.0], LoopLimits(in_hindsight=True), []),
    ],
)
def test_more_seconds_than_have_passed_are_told_once(seconds, limits, said):
    options = quadratic().options
    lines = []
    clock = FakeTime()
    protocol = make_protocol(options, None)
    backend = LoopBackend(options, protocol, lines.append, now=clock, limits=limits)
    folder = Output(Path.cwd())
    for number, own_seconds in enumerate(seconds):
        trial = backend.hand_over(make_spec(64, number=number, max_steps=10), folder, None)
        clock.sleep(10.0)
        assert not trial.report(10, 1.0)
        trial.save_to.write_text("weights")
        trial.finish(seconds=own_seconds)
        # They are taken as they are given, as they may be those of a recorded run.
        record = backend.take_back(trial, folder).result()
        assert record.train_seconds == (own_seconds or 10.0)
    assert [line.partition(" passed")[0] for line in lines] == said


@pytest.mark.parametrize(
    ("target", "value", "percent"),
    [
        ("recall>=0.2", 4.3, "20 is meant"),
        # A share, which tells that the target is one.
        ("recall>=0.2", 0.43, None),
        # No percentage is as large.
        ("reward>=0.2", 430.0, None),
        ("perplexity<=4.5", 4.3, None),
    ],
)
def test_a_first_evaluation_in_percent_tells_the_targets_scale(target, value, percent):
    options = quadratic(target=target).options
    said = []
    backend = LoopBackend(options, make_protocol(options, None), said.append)
    folder = Output(Path.cwd())
    trial = backend.hand_over(make_spec(64, number=0), folder, None)
    trial.report(20, value)
    trial.finish()
    backend.take_back(trial, folder)
    (line,) = said
    assert ("in percent" in line) == (percent is not None)
    assert percent is None or line.endswith(percent)


@pytest.mark.parametrize(("objective", "notes"), [("time", 1), ("both", 1), ("steps", 0)])
def test_seconds_are_spoken_of_where_the_objective_has_them(objective, notes):
    options = quadratic(objective=objective).options
    backend = LoopBackend(options, make_protocol(options, None), pytest.fail)
    assert len(backend.notes) == notes


@pytest.mark.parametrize(
    ("number", "reports", "limits", "is_told", "may_be_wrong_way"),
    [
        (0, [(5, 3.0)], ANY_LOOP, True, True),
        # The start has missed the target, so that it is the right way round.
        (0, [(0, 2.0), (5, 3.0)], ANY_LOOP, True, False),
        # A job that is told in hindsight reports no start.
        (0, [(5, 3.0)], LoopLimits(in_hindsight=True), True, False),
        # An evaluation missed the target before.
        (0, [(5, 2.0), (10, 3.0)], ANY_LOOP, False, False),
        # It never met the target.
        (0, [(313, 2.0)], ANY_LOOP, False, False),
        # The first trial says it for all.
        (1, [(5, 3.0)], ANY_LOOP, False, False),
    ],
)
def test_a_target_that_the_first_evaluation_meets_is_told_once(
    number, reports, limits, is_told, may_be_wrong_way
):
    options = quadratic(target="loss>=2.2").options
    said = []
    backend = LoopBackend(options, make_protocol(options, None), said.append, limits=limits)
    folder = Output(Path.cwd())
    trial = backend.hand_over(make_spec(64, number=number), folder, None)
    for report in reports:
        trial.report(*report)
    trial.save_to.write_text("weights")
    trial.finish()
    backend.take_back(trial, folder)
    assert len(said) == is_told
    assert ["trial.report(0, value)" in line for line in said] == [may_be_wrong_way] * is_told


@pytest.mark.slow
def test_an_own_run_that_is_no_better_than_untrained_weights_sets_no_target():
    """Nothing of the study is half stored: the next call asks trial 0 again, and goes on."""
    trials = iter(quadratic(target="loss"))
    trial = next(trials)
    trial.report(0, 0.5)
    # It ends by its budget, worse than it began.
    trial.report(trial.max_steps, 0.6)
    trial.finish()
    with pytest.raises(StudyError, match="untrained weights meet"):
        next(trials)
    study = quadratic(target="loss", trials=2)
    for trial in study:
        descend(trial)
        trial.finish()
    records = study.result.records
    assert statuses(records)[:2] == ["failed", "reached"]
    # No history has the metric before training.
    assert [record.history[0][0] for record in records[1:]] == [1] * (len(records) - 1)


@pytest.mark.parametrize(
    ("reports_start", "first", "is_told"), [(0, 0.3, 1), (1, 0.3, 0), (0, 0.9, 0)]
)
def test_an_own_target_that_the_first_evaluation_meets_is_doubted(
    capsys, reports_start, first, is_told
):
    trials = iter(quadratic(target="loss"))
    trial = next(trials)
    if reports_start:
        trial.report(0, 0.9)
    trial.report(1, first)
    trial.report(trial.max_steps, 0.3)
    trial.finish()
    next(trials)
    trials.close()
    assert capsys.readouterr().out.count("trial.report(0, value)") == is_told


@pytest.mark.slow
def test_a_loop_that_ends_between_reports_stands_at_its_last_one():
    study = quadratic(**FOR_LOSS, trials=6)
    # The step after which each trial was asked to end for now.
    ends = {}
    for trial in study:
        ends[trial.number] = trial.max_steps
        for step in range(trial.first_step + 1, trial.max_steps + 1):
            if step % 6 == 0 and not trial.report(step, 1.0 / step):
                break
        assert not trial.worth_saving
        trial.finish()
    records = study.result.records
    # By examples, as the objective loss counts a trial's budget.
    budgets = {record.number: math.ceil(20_000 / record.batch_size) for record in records}
    # At least one trial was stopped before its budget: else this shows nothing.
    assert any(ends[number] < budget for number, budget in budgets.items())
    for record in records:
        # At its budget's end it counts as one that EarlyStopping has ended.
        is_held = ends[record.number] == budgets[record.number]
        # Its last report came at the last multiple of 6.
        expected = budgets[record.number] if is_held else ends[record.number] // 6 * 6
        assert record.steps == record.history[-1][0] == expected


@pytest.mark.parametrize(
    ("changes", "reports", "worth_saving", "goes_on"),
    [
        # A trial for the loss was cut at step 100 of 313.
        ({"max_steps": 100}, [100], True, False),
        # It is not saved, for it stands at step 90, where nothing can be compared.
        ({"max_steps": 100}, [90], False, True),
        # At 313 of 313 there is nothing to go on with.
        ({"max_steps": 313}, [313], False, True),
        ({"max_steps": 313}, [300], False, True),
        # A run on a fresh seed is never asked to go on.
        ({"max_steps": 100, "replicate_of": 1}, [100], False, True),
    ],
)
def test_trials_that_cannot_go_on_need_not_be_saved(changes, reports, worth_saving, goes_on):
    said = []
    backend, folder = backend_for_loss(said.append)
    trial = backend.hand_over(make_spec(64, **changes), folder, None)
    for step in reports:
        trial.report(step, 1.0)
    assert trial.worth_saving == worth_saving
    # Nothing was saved: a line says so exactly where saving was worth it.
    trial.finish()
    backend.take_back(trial, folder)
    assert (backend.continues, said == []) == (goes_on, goes_on)


@pytest.mark.slow
def test_a_larger_budget_continues_the_trials_of_a_smaller_one():
    continued = []
    for examples in (5_000, 10_000):
        budget = bstune.Budget(examples=examples)
        for trial in quadratic(target="loss<=1e-9", trials=2, budget=budget):
            first = trial.first_step
            # What the first budget had done, the second one did not train again.
            continued += [trial.spec.resumed_from] * (first >= 5_000 / trial.batch_size)
            assert not trial.report(trial.max_steps, 1.0 / trial.max_steps)
            assert trial.worth_saving
            trial.save_to.write_text("weights")
            trial.finish()
    assert continued


# At a batch size of 64 the 20,000 examples are 313 steps.
STOPPED = {"number": 1, "steps": 100}
FULL = {"number": 2, "steps": 313}
FAILED = {"number": 3, "status": "failed", "resumed_from": 1}


@pytest.mark.parametrize(
    ("done", "saved", "continues"),
    [
        # Nothing has been trained yet: loops are trusted to save.
        ([], (), True),
        # The loop saved nothing of a trial that may go on, so none of its trials will.
        ([STOPPED], (), False),
        ([STOPPED], (1,), True),
        # At its budget's end it was not to be saved.
        ([FULL], (), True),
        ([STOPPED, FULL], (1,), True),
        ([STOPPED, FULL], (), False),
        # A fresh seed's run was not to be saved.
        ([{**STOPPED, "replicate_of": 0}], (), True),
        ([{**STOPPED, "message": ENDED_SHORT}], (), True),
        # A continuation that was cut short is asked again, and needs what was saved.
        ([STOPPED, FULL, FAILED], (1,), True),
        ([STOPPED, FAILED], (), False),
        # Trial 1 has been continued already: its saved state is not needed any more.
        ([STOPPED, {**FULL, "resumed_from": 1}], (), True),
    ],
)
def test_a_study_that_goes_on_continues_trials_where_what_is_needed_was_saved(
    done, saved, continues
):
    backend, folder = backend_for_loss()
    for number in saved:
        trial = backend.hand_over(make_spec(64, number=number, max_steps=100), folder, None)
        trial.save_to.write_text("weights")
    records = []
    for one in done:
        rest = dict(one)
        spec = {}
        for name in ("number", "replicate_of", "resumed_from"):
            if name in rest:
                spec[name] = rest.pop(name)
        status = rest.pop("status", "stopped")
        records.append(TrialResult.unmeasured(make_spec(64, **spec), status, **rest))
    backend.look_back(records, folder)
    assert backend.continues == continues


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_hugging_faces_trainer(monkeypatch):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from projects.own_loop.huggingface import Classifier, rows

    from bstune.integrations import huggingface

    # The example in the docstring names none of these, as a reader's study would not.
    quick = {"trials": 4, "objective": "steps", "mlflow": False}
    quick["options"] = ["search.replicates=0"]
    monkeypatch.setattr(bstune, "Study", partial(bstune.Study, **quick))
    names = {"make_model": Classifier, "train": rows(*TRAIN), "val": rows(*VAL)}
    exec(example_in(huggingface), names)  # noqa: S102
    (folder,) = Path("outputs").iterdir()
    assert bstune.load(folder).records[0].batch_size == 64


def test_the_example_of_the_noise_scale():
    model = make_model()
    names = {
        "LoopNoiseScale": bstune.LoopNoiseScale,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_of": lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        "steps": steps_of_two(8),
    }
    exec(example_in(loop_noise_scale), names)  # noqa: S102
    assert names["noise"].estimate.measurements == 8


def steps_of_two(count):
    """So many steps of two micro-batches of 32 examples."""
    images, labels = TRAIN
    micro_batches = zip(images[: 64 * count].split(32), labels[: 64 * count].split(32), strict=True)
    # Neighbours of one iterator make the pairs.
    return [list(step) for step in zip(micro_batches, micro_batches, strict=True)]


# Whatever the callback reads of the Trainer's arguments, all as a trial asks for it.
ARGUMENTS = {
    "eval_strategy": "steps",
    "auto_find_batch_size": False,
    "world_size": 1,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.1,
    "seed": 0,
    "max_steps": 20,
    "dataloader_drop_last": True,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0.1,
    # As the TrainingArguments of Hugging Face's transformers 5 have it, for a share of 0.1.
    "get_warmup_steps": lambda steps: math.ceil(steps * 0.1),
}
# Thirty steps, however many the trial has.
WHOLE = {"warmup_steps": 30, "get_warmup_steps": lambda steps: 30}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"eval_strategy": "no"}, "the Trainer evaluates nothing, .*eval_strategy='steps'"),
        ({"auto_find_batch_size": True}, "leave auto_find_batch_size out"),
        # Two processes would take two batches a step.
        ({"world_size": 2}, "runs in 2 processes"),
        # 4 examples on the device times 2 accumulated.
        ({"train_batch_size": 4}, "takes 8 examples a step, but the trial's batch size is 4"),
        # Hugging Face's own defaults: they would train every trial alike.
        ({"learning_rate": 5e-5}, r"learning_rate=5e-05, but the trial 0\.1: .*=trial\.lr"),
        ({"seed": 42}, r"seed=trial\.seed"),
        ({"max_steps": -1}, r"max_steps=trial\.max_steps"),
        # The last, smaller batch of an epoch would be a step of another size.
        ({"dataloader_drop_last": False}, "dataloader_drop_last=True"),
        # A schedule with a horizon would change whenever a trial goes on.
        (
            {"lr_scheduler_type": "linear"},
            r"^lr_scheduler_type=linear depends on max_steps.*schedule_ends=True",
        ),
        # So would a warm-up that is a share of it.
        (
            {"lr_scheduler_type": "constant_with_warmup"},
            r"warmup_steps=0\.1 is a share of max_steps.*schedule_ends=True",
        ),
        ({"lr_scheduler_type": "inverse_sqrt"}, r"warmup_steps=0\.1 is a share of max_steps"),
        ({"lr_scheduler_type": "constant_with_warmup", **WHOLE}, None),
        ({"lr_scheduler_type": "inverse_sqrt", **WHOLE}, None),
        # All are told at once.
        (
            {"lr_scheduler_type": "cosine", "dataloader_drop_last": False, "seed": 42},
            r"(?s)seed=trial\.seed\n.*dataloader_drop_last=True\n.*=cosine depends on max_steps",
        ),
    ],
)
def test_what_hugging_faces_trainer_may_not_have(changes, message):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    given = SimpleNamespace(**(ARGUMENTS | changes))
    callback = TrialCallback(made_trial())
    loader = DataLoader(range(40), 2)
    if message is None:
        callback.on_train_begin(given, None, None, train_dataloader=loader)
        return
    with pytest.raises(ConfigError, match=message):
        callback.on_train_begin(given, None, None, train_dataloader=loader)


# The warm-up is a share of the trial's steps.
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
def test_hugging_faces_trainer_may_have_any_schedule_that_ends_with_its_trial(schedule):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    trial = made_trial(schedule_ends=True)
    given = SimpleNamespace(**(ARGUMENTS | {"lr_scheduler_type": schedule}))
    loader = DataLoader(range(40), 2)
    TrialCallback(trial).on_train_begin(given, None, None, train_dataloader=loader)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(40))


@pytest.mark.parametrize(
    ("micro_batches", "data", "message"),
    [
        # Without accumulation each batch is a step, whatever the epoch's length.
        (1, range(39), None),
        (1, Endless(), None),
        (2, range(40), None),
        # Of 39 examples the last one is dropped, and 19 micro-batches are left. Another batch size
        # may do, so that this trial alone has failed.
        (2, range(39), "an epoch of 19 micro-batches ends with a step of 1"),
        (4, range(38), "an epoch of 19 micro-batches ends with a step of 3"),
        (2, Endless(), "gradient_accumulation_steps=2 needs training data with a length"),
    ],
)
def test_each_step_of_hugging_faces_trainer_has_the_trials_batch_size(micro_batches, data, message):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    stated = {"train_batch_size": 2, "gradient_accumulation_steps": micro_batches}
    given = SimpleNamespace(**(ARGUMENTS | stated))
    # Two examples on the device in each micro-batch.
    callback = TrialCallback(made_trial(batch_size=2 * micro_batches))
    loader = DataLoader(data, 2, drop_last=True)
    control = SimpleNamespace(should_training_stop=False)
    if isinstance(data, Endless) and message is not None:
        with pytest.raises(ConfigError, match=message):
            callback.on_train_begin(given, None, control, train_dataloader=loader)
        return
    callback.on_train_begin(given, None, control, train_dataloader=loader)
    finished = callback._trial.finished
    assert control.should_training_stop == (finished is not None) == (message is not None)
    if finished is not None:
        assert finished.result().status == "failed"
        assert re.search(message, finished.result().message)


# Transformers gives advice to whoever trains a toy.
@pytest.mark.filterwarnings("ignore")
# 72 examples leave a micro-batch that has no partner.
@pytest.mark.parametrize("examples", [64, 72])
def test_hugging_faces_trainer_accumulates_whole_batches_and_evaluates_afterwards(examples):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from projects.own_loop.huggingface import Classifier, rows
    from transformers import Trainer, TrainingArguments

    from bstune.integrations.huggingface import TrialCallback

    trial = made_trial(batch_size=16)
    trial.metric = "eval_loss"
    arguments = TrainingArguments(
        output_dir=str(trial.save_to),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=trial.lr,
        seed=trial.seed,
        max_steps=trial.max_steps,
        lr_scheduler_type="constant",
        dataloader_drop_last=True,
        # It evaluates at the trial's last step alone.
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    images, labels = TRAIN
    images = images[:examples]
    labels = labels[:examples]
    callbacks = [TrialCallback(trial)]
    data = {"train_dataset": rows(images, labels), "eval_dataset": rows(*VAL)}
    trainer = Trainer(Classifier(), arguments, callbacks=callbacks, **data)
    trainer.train()
    finished = trial.finished
    if examples % trial.batch_size:
        message = finished.result().message
        assert "an epoch of 9 micro-batches ends with a step of 1" in message
        return
    assert finished.result().steps == 20
    assert "eval_loss" in trainer.evaluate()
    # An evaluation after the training changes nothing.
    assert trial.finished is finished


def test_a_batch_size_that_hugging_faces_trainer_cannot_take_fails_its_trial_alone():
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    control = SimpleNamespace(should_training_stop=False)
    statuses_of = []
    for trial in quadratic(trials=2):
        callback = TrialCallback(trial)
        # The data are not known, as those of an iterable data set, and have no batch for trial 1.
        if trial.number == 1:
            callback.on_train_end(None, None, control)
            statuses_of.append(trial.finished.result().status)
            continue
        descend(trial)
        trial.finish()
        statuses_of.append("reached")
    # The point failed, another one took its place, and the same call asks neither again.
    assert statuses_of == ["reached", "failed", "reached"]
    assert list(quadratic(trials=2)) == []


@pytest.mark.parametrize(("examples", "is_refused"), [(1023, True), (1024, False)])
def test_hugging_faces_first_trial_refuses_batch_sizes_beyond_the_data(examples, is_refused):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    trial = next(iter(quadratic()))
    stated = {"train_batch_size": 64, "gradient_accumulation_steps": 1, "seed": trial.seed}
    given = SimpleNamespace(**(ARGUMENTS | stated | {"max_steps": trial.max_steps}))
    loader = DataLoader(range(examples), 64, drop_last=True)
    if not is_refused:
        TrialCallback(trial).on_train_begin(given, None, None, train_dataloader=loader)
        return
    with pytest.raises(ConfigError, match="batch size 1024 is larger than the data set"):
        TrialCallback(trial).on_train_begin(given, None, None, train_dataloader=loader)


@pytest.mark.parametrize(
    ("rows", "batch_size", "drop_last", "named"),
    [
        # 533 = 13 * 41: of two batches of 256 the last 21 rows are left out.
        (533, 256, True, ("leaves out 21 of 533 rows", "per_device_eval_batch_size=41,")),
        # No divisor of a prime number is a batch size but itself.
        (523, 256, True, ("leaves out 11 of 523 rows", "per_device_eval_batch_size=523,")),
        (512, 256, True, None),
        (533, 256, False, None),
        (Endless(), 8, True, None),
    ],
)
def test_rows_that_hugging_faces_evaluation_leaves_out_are_told_once(
    rows, batch_size, drop_last, named, warned
):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations import huggingface

    data = range(rows) if isinstance(rows, int) else rows
    loader = DataLoader(data, batch_size, drop_last=drop_last)
    given = SimpleNamespace(**ARGUMENTS, eval_batch_size=batch_size)
    for step in (1, 2):
        callback = huggingface.TrialCallback(made_trial())
        state = SimpleNamespace(global_step=step)
        callback.on_evaluate(given, state, None, {"loss": 1.0}, eval_dataloader=loader)
    lines = warned()
    assert len(lines) == (named is not None)
    for part in named or ():
        assert part in lines[0]


@pytest.mark.parametrize(
    ("rows", "metrics", "message"),
    [
        # All rows lie in the one batch that is dropped.
        (533, {}, "leaves out 533 of 533 rows.*per_device_eval_batch_size=533,"),
        (1024, {}, "the Trainer's evaluation has no metric: give compute_metrics"),
        (1024, {"eval_loss": 1.0}, "but the Trainer evaluates eval_loss: let the target"),
    ],
)
def test_an_evaluation_without_the_targets_metric_says_what_it_lacks(rows, metrics, message):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    loader = DataLoader(range(rows), 1024, drop_last=True)
    given = SimpleNamespace(**ARGUMENTS, eval_batch_size=1024)
    # The Trainer's times and epochs are no metrics to aim at.
    told = {"epoch": 1.0, "eval_runtime": 0.1, "eval_samples_per_second": 5.0, **metrics}
    with pytest.raises(ConfigError, match=message):
        TrialCallback(made_trial()).on_evaluate(given, None, None, told, eval_dataloader=loader)


@pytest.mark.parametrize(
    ("last_step", "callbacks", "message"),
    [
        (10, {"EarlyStoppingCallback": {}}, ENDED_BY_CALLBACK.format(name="EarlyStoppingCallback")),
        (10, {"TrainerControl": {}}, ENDED_SHORT),
        # The trial has ended by itself.
        (20, {"EarlyStoppingCallback": {}}, None),
    ],
)
def test_a_call_back_that_stops_early_is_named(last_step, callbacks, message):
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations import huggingface

    given = SimpleNamespace(output_dir="saved", **ARGUMENTS)
    control = SimpleNamespace(should_evaluate=True, should_training_stop=False)
    state = SimpleNamespace(global_step=last_step, stateful_callbacks=callbacks)
    clock = FakeTime()
    callback = huggingface.TrialCallback(made_trial(), clock)
    callback.on_step_begin(given, state, control)
    clock.sleep(1.0)
    callback.on_step_end(given, state, control)
    callback.on_evaluate(given, state, control, {"loss": 1.0})
    callback.on_train_end(given, state, control)
    record = callback._trial.finished.result()
    assert (record.message, has_ended_short(record)) == (message, last_step < 20)


def test_hugging_faces_seconds_are_those_between_evaluations():
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    clock = FakeTime()
    trial = made_trial()
    callback = TrialCallback(trial, clock)
    given = SimpleNamespace(output_dir="saved", **ARGUMENTS)
    control = SimpleNamespace(should_evaluate=False, should_training_stop=False, should_save=False)
    for step in range(1, 21):
        callback.on_step_begin(given, None, control)
        clock.sleep(0.5)
        control.should_evaluate = step == 10
        callback.on_step_end(given, SimpleNamespace(global_step=step), control)
        if control.should_evaluate:
            # The seconds of an evaluation are none of the training's.
            clock.sleep(100.0)
            callback.on_evaluate(given, SimpleNamespace(global_step=step), control, {"loss": 1.0})
    assert control.should_training_stop
    assert control.should_save
    callback.on_train_end(given, SimpleNamespace(stateful_callbacks={}), control)
    record = trial.finished.result()
    # Twenty steps of 0.5 s, without the 100 s of the evaluation.
    assert (record.steps, record.train_seconds) == (20, 10.0)
    with pytest.raises(ConfigError, match="but the Trainer evaluates accuracy"):
        TrialCallback(made_trial()).on_evaluate(given, None, control, {"accuracy": 1.0})


def test_hugging_faces_start_is_reported_once():
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    from bstune.integrations.huggingface import TrialCallback

    trial = made_trial()
    callback = TrialCallback(trial)
    given = SimpleNamespace(output_dir="saved", **ARGUMENTS)
    control = SimpleNamespace(should_training_stop=False)
    # By eval_on_start, and by the user's code.
    for _ in range(2):
        callback.on_evaluate(given, SimpleNamespace(global_step=0), control, {"loss": 1.0})
    assert trial.start_gap == pytest.approx(0.8)
    assert not control.should_training_stop


def test_a_trial_that_goes_on_counts_and_compares_from_its_first_step(tmp_path):
    options = quadratic().options
    folder = Output(tmp_path)
    clock = FakeTime()
    backend = LoopBackend(options, make_protocol(options, None), say=pytest.fail, now=clock)
    first = backend.hand_over(make_spec(64, max_steps=3), folder, None)
    descend(first)
    first.finish()
    stopped = backend.take_back(first, folder).result()
    assert (stopped.status, stopped.steps) == ("stopped", 3)
    spec = make_spec(64, number=4, max_steps=6, resumed_from=stopped.number)
    trial = backend.hand_over(spec, folder, stopped)
    assert trial.resume_from == first.save_to
    assert (trial.first_step, trial.max_steps) == (3, 6)
    with pytest.raises(ConfigError, match=r"reports step 1: load trial\.resume_from"):
        trial.report(1, 0.5)
    # 1,000 is over ten times the gap at the start, which was told in the first part alone.
    assert not trial.report(4, 1000.0)
    clock.sleep(2.0)
    trial.finish(seconds=2.0)
    record = backend.take_back(trial, folder).result()
    # Its own part was one step, so the 2 s are those of one.
    assert (record.status, record.resumed_from, record.seconds_per_step) == ("diverged", 3, 2.0)
    assert record.history[:3] == stopped.history
    # Without what was saved the trial begins afresh.
    first.save_to.unlink()
    afresh = backend.hand_over(spec, folder, stopped)
    assert (afresh.resume_from, afresh.first_step, afresh.spec.resumed_from) == (None, 0, None)


def test_what_was_saved_goes_with_the_studys_own_file_alone(tmp_path):
    states = tmp_path / "states"
    states.mkdir()
    # Only the first one has bstune's mark.
    for number, ending in ((1, own_mark(states / "trial-1.ckpt")), (2, b"somebody's")):
        (states / f"trial-{number}.ckpt").write_bytes(b"{}\n" + ending)
        saved = states / f"trial-{number}.saved"
        saved.mkdir()
        (saved / "weights").write_text("")
    keep_trials(states, {1, 2}, set)
    # Trial 1's were bstune's own and needed no more by anyone; trial 2's look like a user's.
    assert entries(states) == ["trial-2.ckpt", "trial-2.saved"]


def test_a_trial_that_is_told_in_hindsight_is_not_cut_by_the_clock(tmp_path):
    study = quadratic()
    # The study of a sweeper hears of a job when it has ended.
    protocol = make_protocol(study.options, None)
    spec = make_spec(max_steps=20, max_seconds=0.5)
    taken = {}
    for in_hindsight in (False, True):
        clock = FakeTime()
        limits = LoopLimits(in_hindsight=in_hindsight)
        backend = LoopBackend(study.options, protocol, print, now=clock, limits=limits)
        trial = backend.hand_over(spec, Output(tmp_path), None)
        # Ten seconds pass before the first report, where half of one is the limit.
        clock.now += 10.0
        for step in range(5, 21, 5):
            trial.report(step, 0.9)
        taken[in_hindsight] = trial.abandon().result().steps
    # Without hindsight the first report comes too late, and the trial ends there.
    assert taken == {False: 5, True: 20}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        # The step, |G|^2 and tr Sigma.
        (None, (1, 3)),
        (((5, 1.0, 2.0),), (1, 3, 5)),
        # What a loop has kept itself of the part before counts once.
        (((1, 2.0, 3.0), (3, 2.5, 3.5), (5, 1.0, 2.0)), (1, 3, 5)),
    ],
)
def test_a_trial_that_goes_on_has_all_of_its_noise_scale(own, expected, tmp_path):
    options = quadratic().options
    folder = Output(tmp_path)
    backend = LoopBackend(options, make_protocol(options, None), say=pytest.fail)
    first = backend.hand_over(make_spec(64, max_steps=3), folder, None)
    descend(first)
    measured = ((1, 2.0, 3.0), (3, 2.5, 3.5))
    first.finish(noise=SimpleNamespace(measurements=measured))
    stopped = backend.take_back(first, folder).result()
    spec = make_spec(64, number=4, max_steps=6, resumed_from=stopped.number)
    trial = backend.hand_over(spec, folder, stopped)
    trial.report(6, 0.5)
    trial.finish(noise=None if own is None else SimpleNamespace(measurements=own))
    found = trial.finished.result().noise_scale
    assert tuple(step for step, _, _ in found) == expected
    assert found[:2] == measured


def test_a_measured_noise_scale_is_the_records():
    trial = made_trial()
    trial.report(1, 0.1)
    trial.finish(noise=SimpleNamespace(measurements=((1, 2.0, 3.0),)))
    assert trial.finished.result().noise_scale == ((1, 2.0, 3.0),)
