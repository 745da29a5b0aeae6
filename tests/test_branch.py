"""Branches of a user's run: they go on as the run would have, and what they come to."""

import json
from functools import partial
from itertools import islice

import pytest
import torch
from builders import loaded
from learners import learner, learning_protocol, momentum, same_weights, stream, validation
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from toolbox import column, evaluated_steps, make_spec

from bstune.core.branching import largest_batch
from bstune.core.errors import ConfigError
from bstune.trial.branch import branch, read_checkpoint
from bstune.trial.loop import Workload
from bstune.workloads.averaging import RunningWeightAverage

# A branch is the run itself, gone on with


def workload_of(build):
    return Workload(build, stream, validation(), 20)


def kept(modules, build):
    def built(spec):
        # These weights are others than the checkpoint's.
        torch.manual_seed(1)
        modules.append(build(spec))
        return modules[-1]

    return built


def run_until(path, build, steps):
    """Train as a user does, and write a checkpoint."""
    torch.manual_seed(0)
    module = build(make_spec(8, 0.05))
    quiet = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False
    )
    trainer = Trainer(accelerator="cpu", max_steps=steps, limit_val_batches=0, **quiet)
    trainer.fit(module, stream(make_spec(8, seed=9)), validation())
    trainer.save_checkpoint(path)
    return module, trainer


def evaluated(module):
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    return trainer.validate(module, validation(), verbose=False)[0]["val/loss"]


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


@pytest.mark.parametrize("optimizer", [momentum, torch.optim.AdamW])
@pytest.mark.parametrize(("batch_size", "exponent"), [(8, 0.5), (16, 0.5), (20, 1.0)])
def test_a_branch_goes_on_from_weights_optimizer_and_rate(
    optimizer, batch_size, exponent, tmp_path
):
    path = tmp_path / "run.ckpt"
    modules = []
    build = partial(learner, optimizer=optimizer, schedule=halving)
    module, trainer = run_until(path, build, 12)
    checkpoint = read_checkpoint(path, trusted=False)
    own = make_spec(8, 0.05, seed=3)
    protocol = learning_protocol(7, micro_batch_size=None)
    record, start = branch(
        workload_of(kept(modules, build)),
        protocol,
        path,
        checkpoint,
        own,
        batch_size,
        100,
        exponent,
    )
    assert record.steps == round(100 / batch_size)
    assert record.status == "stopped"
    # It is evaluated at its end alone.
    assert evaluated_steps(record) == [record.steps]
    assert start == pytest.approx(evaluated(module))
    (used,) = trainer.optimizers
    for group in used.param_groups:
        # That is the schedule's rate after 12 steps.
        assert group["lr"] == 0.05 / 4
        group["lr"] *= (batch_size / 8) ** exponent
    for batch in islice(stream(make_spec(batch_size, seed=3)), record.steps):
        used.zero_grad()
        module.training_step(batch, 0).backward()
        used.step()
    assert same_weights(modules[-1], module)


@pytest.mark.parametrize("micro", [None, 8])
def test_averaged_weights_and_their_steps_go_on(micro, tmp_path):
    path = tmp_path / "run.ckpt"
    modules = []
    build = partial(learner, average=partial(RunningWeightAverage, 0.5))
    run_until(path, build, 40)
    checkpoint = read_checkpoint(path, trusted=False)
    values = []
    # These are 10 steps, fewer than the run had.
    for size in (8, 40):
        workload = workload_of(kept(modules, build))
        batches = partial(stream, micro_batch_size=micro)
        workload = Workload(workload.build_module, batches, validation(), 20)
        protocol = learning_protocol(micro_batch_size=micro)
        record, start = branch(workload, protocol, path, checkpoint, make_spec(8), size, 400, 0.5)
        values.append(record.history[-1][1])
        assert modules[-1].trainer.global_step == 40 + record.steps
        averages = WeightAveraging | RunningWeightAverage
        assert any(isinstance(one, averages) for one in modules[-1].trainer.callbacks)
    # As the average moves on.
    assert max(values) < 0.98 * start


class Stopping(Callback):
    def on_train_batch_end(self, trainer, *arguments):
        # A run of 10 steps is left alone: the 11th is the first that this ends after.
        trainer.should_stop = trainer.global_step % 2 == 1


class Impatient(Stopping, EarlyStopping):
    pass


def test_nothing_ends_a_branch_early(tmp_path):
    path = tmp_path / "run.ckpt"
    run_until(path, learner, 10)
    checkpoint = read_checkpoint(path, trusted=False)

    def go_on(stopping):
        build = partial(learner, callbacks=[stopping])
        return branch(
            workload_of(build), learning_protocol(), path, checkpoint, make_spec(8), 8, 40, 0.5
        )[0].steps

    # The call-back is left out.
    assert go_on(partial(Impatient, "val/loss")) == 5
    with pytest.raises(
        ConfigError,
        match=r"a branch at batch size 8 ended after 1 of its 5 steps: .*by the module or",
    ):
        go_on(Stopping)


# What cannot be branched


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda checkpoint: checkpoint.pop("optimizer_states"),
            "it lacks an optimizer's state, as one that is saved with weights alone",
        ),
        (lambda checkpoint: checkpoint.pop("state_dict"), "it lacks weights"),
        (
            lambda checkpoint: checkpoint["state_dict"].pop("model.1.bias"),
            r"of another workload: model.1.bias is no such weight in it",
        ),
        (
            lambda checkpoint: checkpoint["state_dict"].update(more=torch.zeros(2)),
            r"more is one of \(2,\) in it, and no such weight in",
        ),
        (
            lambda checkpoint: checkpoint["state_dict"].update({"model.1.bias": torch.zeros(3)}),
            r"one of \(3,\) in it, and one of \(16,\)",
        ),
        (
            lambda checkpoint: checkpoint["optimizer_states"][0]["param_groups"].append(
                {"params": []}
            ),
            "its optimizer's state is not one",
        ),
        (
            lambda checkpoint: checkpoint["optimizer_states"].append({}),
            "it has 2 optimizers' states, and Classifier 1",
        ),
        (
            lambda checkpoint: checkpoint.update(own=Workload),
            "holds more than plain data.*--trusted reads it all the same",
        ),
    ],
)
def test_a_checkpoint_of_another_workload_is_refused(spoil, message, tmp_path):
    path = tmp_path / "run.ckpt"
    run_until(path, learner, 2)
    checkpoint = torch.load(path, weights_only=True)
    spoil(checkpoint)
    torch.save(checkpoint, path)

    def go_on():
        found = read_checkpoint(path, trusted=False)
        branch(workload_of(learner), learning_protocol(), path, found, make_spec(8), 8, 16, 0.5)

    with pytest.raises(ConfigError, match=f"{path}.*{message}"):
        go_on()


@pytest.fixture
def run(bstune):
    """Run the verb in an empty folder; return its exit status and what it printed."""
    return lambda *arguments: bstune("branch", *map(str, arguments))


OWN = ("--batch-size", 16, "workload=digits")
SIZES = "--batch-sizes"


def test_the_verb_reports_the_largest_batch_size(run, tmp_path):
    from bstune.trial.plain import fit

    workload, protocol = loaded("workload=digits", "mlflow.enabled=false")
    quiet = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False
    )
    _, trainer = fit(workload, make_spec(16, 0.2), protocol, 30, **quiet)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    arguments = ("run.ckpt", *OWN, "--examples", 1001, "--seeds", "0,1", "--json")
    status, out, err = run(*arguments, "--batch-sizes", "64,250")
    assert status == 0
    found = json.loads(out)
    out = err
    assert column(found["branches"], "seed") == [0, 0, 0, 1, 1, 1]
    losses = []
    for seed in (0, 1):
        own = [one for one in found["branches"] if one["seed"] == seed]
        assert column(own, "batch_size") == [16, 64, 250]
        # 1,250 examples over each batch size.
        assert column(own, "steps") == [78, 20, 5]
        at_16, at_64, at_250 = column(own, "value")
        losses.append({16: 0.0, 64: at_64 - at_16, 250: at_250 - at_16})
    # The examples are whole batches of the largest size.
    assert found["examples"] == 1250
    largest = largest_batch(losses, 0.01, 0.9)
    assert found["largest"]["batch_size"] == largest.batch_size < 250
    # The loss rises by more than a third from 16 to 64.
    assert found["largest"]["between"] == [16, 64]
    assert "lies between 16 and 64" in out
    assert found["examples_seen"] == 30 * 16
    status, out, err = run(
        "run.ckpt", *OWN, "workload.module.model.hidden=[64]", "--examples", 1000
    )
    assert status == 2
    assert (
        "error: run.ckpt is of another workload: model.1.weight is one of (128, 64) in it, and "
        "one of (64, 64)" in err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gone.ckpt", *OWN, "--examples", 128), "gone.ckpt cannot be read"),
        (("text.ckpt", *OWN, "--examples", 128), "text.ckpt"),
        (
            (
                "text.ckpt",
                "--batch-size",
                16,
                "workload=replay",
                "workload.table=fashion_mlp",
                "--examples",
                9,
            ),
            "recorded",
        ),
        (
            ("text.ckpt", *OWN, "--examples", 100, "scaling.weight_decay_half_life=1e5"),
            "weight_decay_half_life would not",
        ),
        (("text.ckpt", *OWN, "--examples", 100, "devices=2"), "branches are trained on one device"),
        (("text.ckpt", *OWN, "--examples", 100, "--batch-sizes", "a"), "takes different integers"),
        (("text.ckpt", "--batch-size", 16, "--examples", 100), "no workload was given"),
        (
            ("run.ckpt", *OWN, "--examples", 40),
            "--examples=40 are fewer than 4 steps at batch size 32: give --examples=128",
        ),
        (
            ("run.ckpt", *OWN, "--examples", 99999, SIZES, 2000),
            "batch size 2000 is larger than the training data, 1200",
        ),
        (("run.ckpt", *OWN, "--examples", 99999, SIZES, 16), "--batch-sizes=16 is the run's own"),
        (
            ("run.ckpt", *OWN, "--examples", 99999, SIZES, 8),
            "--batch-sizes must be over the run's own",
        ),
        (
            ("run.ckpt", "--batch-size", 800, "workload=digits", "--examples", 99999),
            (
                "batch size 1600 is larger than the training data, 1200 examples: give "
                "--batch-sizes of at most 1200"
            ),
        ),
        (
            ("text.ckpt", *OWN, "--examples", 0),
            "--examples: takes an integer from 1 to 1e+15, but got '0'",
        ),
        (
            ("text.ckpt", *OWN, "--examples", "many"),
            "argument --examples: takes an integer from 1 to 1e+15, but got 'many'",
        ),
        (
            ("text.ckpt", "--batch-size", 0, "--examples", 9),
            "--batch-size: takes an integer from 1 to 1e+15, but got",
        ),
        (
            ("text.ckpt", *OWN, "--examples", 9, "--tolerance", "nan"),
            "--tolerance: takes a number from 0 to 1e+15",
        ),
        (
            ("text.ckpt", *OWN, "--examples", 9, "--lr-exponent", "nan"),
            "--lr-exponent: takes a number from -2 to 2",
        ),
    ],
)
def test_what_cannot_be_branched_ends_in_a_line(arguments, message, run, tmp_path):
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    torch.save(
        {"state_dict": {"weight": torch.zeros(1)}, "optimizer_states": [{}]}, tmp_path / "run.ckpt"
    )
    status, _, err = run(*arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
