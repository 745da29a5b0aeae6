"""Batch sizes that change while training: which ones, on which examples, at which rate; nothing else changes."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from fits import BATCH_SIZE, DATA, EXAMPLES, Regression, protocol_of
from fits import run as run_regression
from learners import (
    IMAGES,
    SCHEDULE,
    learner,
    learning_protocol,
    momentum,
    same_weights,
    stream,
    tensors,
    train,
    validation,
)
from lightning.pytorch import LightningDataModule
from omegaconf import OmegaConf
from toolbox import RESULT, FakeTime, make_spec, make_survey
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from bstune.core.batch_schedule import BatchPlan, BatchSchedule, constant
from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError
from bstune.core.records import Budget, TrialResult
from bstune.hardware.several import open_short_trials
from bstune.study.prepare import compose_checked, frozen_settings, prepare
from bstune.system.files import Output
from bstune.trial.batches import IndexStream, endless, rebatch
from bstune.trial.checkpoint import Stopped
from bstune.trial.loop import Workload
from bstune.trial.plain import fit
from bstune.trial.workers import with_step_time
from bstune.trial.workload import resolve
from bstune.workloads.classifier import Classifier
from bstune.workloads.images import random_crop_flip


def schedule(*switches, factor=2.0, stretch=1.0, exponent=0.5, largest=None):
    return BatchSchedule(factor, switches, stretch, exponent, largest)


# Which batches are how large


@pytest.mark.parametrize(
    ("given", "start", "sizes", "first"),
    [
        (
            schedule(100, 200, 400),
            16,
            (16, 32, 64, 128),
            (0, 7, 10, 13),
        ),  # 112, 208, 400 examples before them
        (schedule(100, 200, 400, largest=50), 16, (16, 32, 50), (0, 7, 10)),
        (schedule(100, 200, 400, stretch=0.5), 16, (16, 32, 64, 128), (0, 4, 6, 8)),
        (schedule(100, 200), 150, (150, 300, 600), (0, 1, 2)),
        (schedule(100, 120), 150, (150, 600), (0, 1)),  # both within the first batch
        (schedule(100, factor=1.0), 16, (16,), (0,)),
        (schedule(100, 200, factor=1.02), 10, (10,), (0,)),  # rounded to what it is
        (schedule(100, factor=1.5), 7, (7, 10), (0, 15)),
        (schedule(100, largest=16), 16, (16,), (0,)),
    ],
)
def test_a_schedules_parts(given, start, sizes, first):
    plan = given.plan(start)
    assert (plan.sizes, plan.first) == (sizes, first)
    assert plan.lr_factors == tuple(math.sqrt(size / start) for size in sizes)
    assert plan.changes == (len(sizes) > 1)


PLANS = [
    constant(7),
    schedule(100, 200, 400).plan(16),
    schedule(30, factor=3.0).plan(9),
    BatchPlan((5, 6, 50), (0, 1, 9)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_counts_as_its_batches_one_by_one_do(plan):
    sizes = [plan.sizes[plan.part(batch)] for batch in range(60)]
    for batches in range(60):
        assert plan.examples(batches) == sum(sizes[:batches])
        assert sum(count for _, count in plan.counts(batches)) == batches
    for examples in range(1, plan.examples(60)):
        until = plan.batches_until(examples)
        assert plan.examples(until - 1) < examples <= plan.examples(until)
        assert plan.batches_until(examples / 4, 0.25) == until
    for n in (128, 150, 1000):
        epochs, start = [], 0
        while start < 50:
            epochs.append(plan.epoch(n, start))
            start = epochs[-1].stop
        for epoch in epochs:
            assert all(plan.epoch(n, batch) == epoch for batch in epoch)
            # As many whole batches as the examples make, and none more.
            assert plan.examples(epoch.stop) - plan.examples(epoch.start) <= n
            assert plan.examples(epoch.stop + 1) - plan.examples(epoch.start) > n


@pytest.mark.parametrize("n", [50, 64])
@pytest.mark.parametrize("first", [0, 1, 6, 7, 8, 12, 30])
def test_examples_are_those_of_one_batch_size_without_a_gap(n, first):
    plan = BatchPlan((5, 10, 40), (0, 7, 12))

    def drawn(sizes, skip=0):
        indices = IndexStream(n, sizes, torch.Generator().manual_seed(3))
        indices.resume({"batches": skip, "random": None})
        return islice(indices, 40)

    whole, parts = torch.cat(list(drawn(constant(5)))), torch.cat(list(drawn(plan, first)))
    start = plan.examples(first)
    count = max(0, min(len(whole) - start, len(parts)))
    assert torch.equal(parts[:count], whole[start : start + count])
    assert [len(one) for one in drawn(plan, first)] == [
        plan.sizes[plan.part(first + i)] for i in range(40)
    ]


# What is trained


GROWING = schedule(40, 100, 260)  # 8, 16, 32 and 60 of the 60 images, at most
PLAN = replace(GROWING, largest=len(IMAGES)).plan(8)
flip = partial(random_crop_flip, padding=1)


def growing(steps=30, **changes):
    return learning_protocol(steps, batch_schedule=replace(GROWING, largest=len(IMAGES)), **changes)


def halving(optimizer):
    return lr_scheduler.StepLR(optimizer, 10, 0.5)


def by_hand(build, steps):
    """Train as a bare loop does: the plan's batches, each at the schedule's rate times its factor."""
    module = build(make_spec(8))
    set_up = module.configure_optimizers()
    optimizer, scheduler = set_up["optimizer"], set_up["lr_scheduler"]["scheduler"]
    batches = iter(stream(make_spec(8), plan=PLAN))
    for step in range(steps):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * PLAN.lr_factors[PLAN.part(step)]
        optimizer.zero_grad()
        module.training_step(next(batches), step).backward()
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.step()
    return module


@pytest.mark.parametrize("fast", ["auto", "off"])
@pytest.mark.parametrize("optimizer", [momentum, torch.optim.Adam])
def test_a_trial_is_the_bare_loop_over_its_batches(optimizer, fast):
    torch.manual_seed(0)
    build = partial(learner, optimizer=optimizer, schedule=halving)

    def seeded(spec):
        torch.manual_seed(5)
        return build(spec)

    record, module = train(make_spec(8), growing(fast=fast), seeded)
    assert same_weights(module, by_hand(seeded, 30))
    assert record.training_loop == ("lean" if fast == "auto" else "Lightning's: protocol.fast=off")
    assert (record.steps, record.examples) == (30, PLAN.examples(30))
    assert (
        [part[:2] for part in record.batch_parts]
        == [(8, 5), (16, 4), (32, 5), (60, 16)]
        == list(PLAN.counts(30))
    )
    constant_size, other = train(make_spec(8), learning_protocol(30, fast=fast), seeded)
    assert constant_size.batch_parts == ()
    assert not same_weights(module, other)


class Manual(Classifier):
    """Steps its optimizer itself."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnRate(Classifier):
    """Lowers its rate in each training step, and notes what it finds there."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.found = []

    def training_step(self, batch, batch_idx):
        (group,) = self.optimizers().param_groups
        self.found.append(group["lr"])
        group["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("fast", ["auto", "off"])
@pytest.mark.parametrize("micro", [None, 16])
def test_a_module_finds_and_sets_its_own_rate_while_a_schedule_raises_it(micro, fast):
    def seeded(rate, **options):
        torch.manual_seed(5)
        return learner(make_spec(8, rate), optimizer=momentum, **options)

    protocol = growing(12, fast=fast, micro_batch_size=micro)
    _, module = train(make_spec(8), protocol, lambda spec: seeded(0.1, kind=OwnRate))
    assert module.found == pytest.approx([0.1 * 0.9**step for step in range(len(module.found))])
    if micro is None:
        falling = partial(lr_scheduler.ExponentialLR, gamma=0.9)
        expected = by_hand(lambda spec: seeded(0.09, schedule=falling), 12)
        for one, other in zip(tensors(module), tensors(expected), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "micro", [16, 7, 3]
)  # from the second part on, the first one, or everywhere
def test_micro_batches_are_the_large_batches(micro):
    def trained(**changes):
        protocol = growing(25, **changes)
        return train(make_spec(8), protocol, partial(learner, optimizer=momentum))

    (record, module), (_, whole) = trained(micro_batch_size=micro), trained()
    for one, other in zip(tensors(module), tensors(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert record.steps == 25
    reason = "accumulation of micro-batches" + ", once batches are large" * (micro > 8)
    assert record.training_loop == f"Lightning's: {reason}"


@pytest.mark.parametrize("micro", [None, 16, 7])
def test_a_plain_fit_is_the_trial(micro):
    build, protocol = (
        partial(learner, optimizer=momentum, schedule=halving),
        growing(25, micro_batch_size=micro),
    )
    batches = partial(stream, micro_batch_size=micro)
    _, expected = train(make_spec(8), protocol, build)
    workload, quiet = (
        Workload(build, batches, validation(), 20),
        {"logger": False, "enable_checkpointing": False},
    )
    module, trainer = fit(workload, make_spec(8), protocol, 25, **quiet)
    assert same_weights(module, expected)
    assert trainer.global_step == 25


class Epochs(Regression):
    """Notes what an epoch looks like to a module, and steps a schedule at each end."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        lengths = trainer.num_training_batches, len(trainer.train_dataloader)
        self.seen.append(
            (trainer.current_epoch, batch_idx, len(batch[0]), trainer.is_last_batch, *lengths)
        )
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = self.optimizer()
        self.promised = self.trainer.estimated_stepping_batches
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.9)]


LOADER = replace(schedule(70, 200), largest=EXAMPLES)  # 8 from 0, 16 from batch 9, 32 from batch 18
OPTIONS = {"batch_schedule": LOADER, "steps": 24}


@pytest.mark.parametrize("fast", ["auto", "off"])
@pytest.mark.parametrize(
    ("start", "given", "micro"),
    [
        (BATCH_SIZE, LOADER, None),
        (BATCH_SIZE, LOADER, 16),
        (BATCH_SIZE, LOADER, 5),
        (26, schedule(60, largest=EXAMPLES), 13),  # 2 micro-batches an epoch, then 4
    ],
)
def test_epochs_of_a_data_loader_have_as_many_batches_as_fit(start, given, micro, fast):
    protocol = protocol_of(steps=24, batch_schedule=given, micro_batch_size=micro, fast=fast)
    record, module = run_regression(Epochs, make_spec(start, seed=3), protocol)
    plan, n = given.plan(start), EXAMPLES
    expected, start, epoch = [], 0, 0
    while start < 24:
        batches = plan.epoch(n, start)
        sizes = [plan.sizes[plan.part(batch)] for batch in batches]
        parts = [
            min(micro or size, size - done)
            for size in sizes
            for done in range(0, size, micro or size)
        ]
        for number, size in enumerate(parts):
            expected.append((epoch, number, size, number == len(parts) - 1, len(parts), len(parts)))
        start, epoch = batches.stop, epoch + 1
    assert module.seen == expected[: len(module.seen)]
    assert sum(size for _, _, size, *_ in module.seen) == record.examples == plan.examples(24)
    assert module.promised == 24
    rates = module.trainer.optimizers[0].param_groups[0]["lr"]
    assert rates == pytest.approx(0.05 * 0.9 ** len({epoch for epoch, *_ in module.seen}), rel=0.12)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_batches_are_the_plans_with_workers_too(workers):
    plan = LOADER.plan(BATCH_SIZE)
    if workers:
        source = DataLoader(DATA, shuffle=True, num_workers=workers, multiprocessing_context="fork")
    else:
        source = DataLoader(DATA, shuffle=True)
    batches = list(islice(endless(rebatch(source, BATCH_SIZE, None, 3, plan)), 22))
    assert [len(x) for x, _ in batches] == [plan.sizes[plan.part(batch)] for batch in range(22)]
    whole = list(islice(endless(rebatch(DataLoader(DATA, shuffle=True), BATCH_SIZE, None, 3)), 60))
    examples = torch.cat([x for x, _ in batches])
    assert torch.equal(examples, torch.cat([x for x, _ in whole])[: len(examples)])


# Going on


@pytest.mark.parametrize("micro", [None, 7])
def test_a_trial_goes_on_anywhere_in_its_schedule(micro, tmp_path):
    build = partial(learner, optimizer=momentum, schedule=halving)
    batches = partial(stream, augment=flip, alternating_flip=True)
    protocol = growing(20, micro_batch_size=micro, warmup_steps=0)
    whole, reference = train(make_spec(8), protocol, build, batches)
    stopped = None
    limits = [1, 4, 5, 6, 9, 12, 14, 15, None]
    for number, limit in enumerate(limits):
        spec = make_spec(
            8, number=number, max_steps=limit, resumed_from=number - 1 if number else None
        )
        state = tmp_path / f"{number}.state"
        record, module = train(spec, protocol, build, batches, state=state, resume=stopped)
        stopped = Stopped(record, state)
    assert same_weights(module, reference)
    assert (record.steps, record.examples) == (whole.steps, whole.examples)
    assert [part[:2] for part in record.batch_parts] == [part[:2] for part in whole.batch_parts]


@pytest.mark.parametrize("micro", [None, 5])
def test_a_trial_on_a_loader_goes_on_through_epochs_of_other_lengths(micro, tmp_path):
    protocol = protocol_of(**OPTIONS, micro_batch_size=micro)
    _, reference = run_regression(Epochs, protocol=protocol)
    stopped = None
    for number, limit in enumerate([6, 8, 9, 11, 12, 16, 18, 19, 20, 22, None]):
        spec = make_spec(
            BATCH_SIZE,
            seed=3,
            number=number,
            max_steps=limit,
            resumed_from=number - 1 if number else None,
        )
        state = tmp_path / f"{number}.state"
        record, module = run_regression(Epochs, spec, protocol, state=state, resume=stopped)
        stopped = Stopped(record, state)
    assert record.steps == 24
    assert same_weights(module, reference)


# What is counted


def test_a_budget_of_examples_is_spent_in_fewer_steps():
    protocol = growing(1, budget=Budget(1, 400))
    record, _ = train(make_spec(8), protocol)
    assert record.steps == PLAN.batches_until(400) < 50 == Budget(1, 400).last_step(8)
    assert PLAN.examples(record.steps - 1) < 400 <= record.examples


def test_seconds_are_the_sum_of_each_sizes_own():
    time = FakeTime()

    def passing(spec, micro_batch_size=None, plan=None):
        for x, y in stream(spec, micro_batch_size, plan=plan):
            yield x, y
            time.sleep(
                1.0 + len(y)
            )  # Lightning and the lean loop ask for the next batch after each step

    record, _ = train(
        make_spec(8), growing(30, warmup_steps=1), batches=passing, clock=TrialClock(time)
    )
    taus = {size: tau for size, _, tau in record.batch_parts}
    for size, tau in taus.items():
        assert tau == pytest.approx(
            1.0 + size, rel=0.35
        )  # a segment's last step may wait for the next size's batch
    total = sum(steps * tau for _, steps, tau in record.batch_parts)
    assert record.seconds_per_step * record.steps == pytest.approx(total)
    surveyed = with_step_time(record, lambda size: 2.0 * size)
    assert surveyed.seconds_per_step * record.steps == pytest.approx(2.0 * record.examples)
    assert surveyed.measured_seconds_per_step == record.seconds_per_step
    assert TrialResult.from_json(surveyed.to_json()) == surveyed


def test_the_first_steps_of_each_size_are_not_timed():
    """They are eager where steps are captured, and choose kernels."""
    time, taken = FakeTime(), Counter()

    class Slow(Classifier):
        def training_step(self, batch, batch_idx):
            size = len(batch[1])
            time.sleep(size + 100.0 * (taken[size] < 2))
            taken[size] += 1
            return super().training_step(batch, batch_idx)

    protocol = growing(30, warmup_steps=2, evaluation_schedule=replace(SCHEDULE, ratio=100.0))
    record, _ = train(make_spec(8), protocol, partial(learner, kind=Slow), clock=TrialClock(time))
    assert [(size, tau) for size, _, tau in record.batch_parts] == [
        (size, size) for size in PLAN.sizes
    ]


def test_a_record_cut_at_an_easier_target_has_its_own_parts():
    record = replace(RESULT, batch_parts=((8, 5, 1.0), (16, 4, 3.0), (32, 91, 4.0)))
    assert record.after(9) == {
        "steps": 9,
        "examples": 104,
        "batch_parts": ((8, 5, 1.0), (16, 4, 3.0)),
        "seconds_per_step": 17 / 9,
    }
    assert record.after(3)["batch_parts"] == ((8, 3, 1.0),)
    assert RESULT.after(3) == {"steps": 3, "examples": 96}


# What cannot be


DIGITS = ["workload=digits", "mlflow.enabled=false", "hardware.enabled=false"]
DOUBLING = [*DIGITS, "batch_schedule=doubling"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["batch_schedule.factor=0.5"],
            r"batch_schedule.factor=0.5 ends below .*: give a factor of at least 1$",
        ),
        (
            ["batch_schedule.switch_examples=[200,100]"],
            r"must be rising numbers of examples.*\[200, 100\]",
        ),
        (["batch_schedule.switch_examples=[]"], r"switch_examples must have at least 1 item"),
        (
            ["batch_schedule.switch_examples=[0]"],
            r"switch_examples.0 must be at least 1, but got 0",
        ),
        (["batch_schedule.stretch=0"], r"batch_schedule.stretch must be at least"),
        (["batch_schedule.factr=2"], r"unknown option batch_schedule.factr"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        compose_checked([*DOUBLING, *options])


def test_what_does_not_go_with_a_schedule_is_refused():
    with pytest.raises(
        ConfigError, match="batch sizes stay: choose a schedule that grows, batch_schedule=doubling"
    ):
        compose_checked([*DIGITS, "search.tune=[batch_schedule]"])
    with pytest.raises(
        ConfigError, match="a replayed workload is not trained, so it has no batch_schedule"
    ):
        compose_checked(
            ["workload=replay", "workload.table=fashion_mlp", "batch_schedule=doubling"]
        )
    with pytest.raises(ConfigError, match=r"Could not find 'batch_schedule/halving'"):
        compose_checked([*DIGITS, "batch_schedule=halving"])


def single(*options):
    return prepare(compose_checked([*DOUBLING, "trial.batch_size=64", "trial.lr=0.4", *options]))


def test_batch_sizes_end_at_the_training_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert single("batch_schedule.factor=8").protocol.plan(64).sizes == (64, 512, 1200)
    with pytest.raises(
        ConfigError, match=r"batch_schedule.largest=32 ends below .*64: raise it, or lower"
    ):
        single("batch_schedule.largest=32")


@pytest.mark.parametrize(("devices", "micro", "where"), [(1, 100, ""), (2, 50, " on each device")])
def test_batches_past_the_memory_ceiling_are_accumulated_and_it_is_said(
    devices, micro, where, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    asked = []

    def surveyed(config, space, protocol, *_):
        asked.append((space.high, protocol.batch_schedule))
        return make_survey(taus=((16, 1e-3), (32, 1.5e-3), (100, 3e-3))), True

    monkeypatch.setattr("bstune.hardware.survey.cached_survey", surveyed)
    options = [
        "hardware.enabled=true",
        "search.batch_size.high=64",
        "budget.steps=200",
        f"devices={devices}",
    ]
    options += [
        "batch_schedule.switch_examples=[200,600]",
        "batch_schedule.factor=3",
        "budget.examples=1",
    ]
    prepared = prepare(compose_checked([*DOUBLING, *options]))
    assert asked == [(576, None)]  # as far as batches grow, at constant sizes
    assert (prepared.space.high, prepared.protocol.micro_batch_size) == (64, micro)
    said = f"batch sizes past the memory ceiling, 100, up to 576, are accumulated from micro-batches of {micro}{where}"
    assert said in prepared.notes
    assert (
        prepared.frozen_settings["protocol.micro_batch_size"] is None
    )  # the ceiling may differ when it goes on
    if devices > 1:
        return
    record = prepared.backend.run(make_spec(64, 0.3), None, None)
    assert [part[:2] for part in record.batch_parts][:2] == [(64, 4), (192, 2)]
    reason = (
        r"up to 576 are past the memory ceiling, 100, and cannot be accumulated, as "
        r".*set batch_schedule.largest=100"
    )
    with pytest.raises(ConfigError, match=reason):
        prepare(
            compose_checked(
                [*DOUBLING, *options, "workload.module._target_=test_batch_schedule.Manual"]
            )
        )
    fitting = ["batch_schedule.largest=100", "workload.module._target_=test_batch_schedule.Manual"]
    assert (
        prepare(compose_checked([*DOUBLING, *options, *fitting])).protocol.micro_batch_size is None
    )
    assert (
        record.training_loop == "Lightning's: accumulation of micro-batches, once batches are large"
    )
    assert "3 times as large after 200, 600 examples" in prepared.caveats[0]


def test_steps_that_several_devices_share_are_timed_at_one_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(
        compose_checked([*DOUBLING, "batch_schedule.switch_examples=[100]", "device=cpu"])
    )
    train = open_short_trials(OmegaConf.to_container(config, resolve=False), None, 1)
    record = train(make_spec(64, max_steps=4), Output(tmp_path), None)
    assert (record.examples, record.batch_parts) == (4 * 64, ())


class Plain(LightningDataModule):
    """Hands out batches of one size."""

    def __init__(self):
        super().__init__()
        self.train_size = self.validation_size = 20

    def train_batches(self, batch_size, micro_batch_size, seed):
        return stream(make_spec(batch_size, seed=seed))

    def val_dataloader(self):
        return validation()


def test_a_data_module_that_takes_no_plan_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose_checked([*DOUBLING, "trial.batch_size=8", "trial.lr=0.4"])
    config.workload.data = {"_target_": f"{__name__}.Plain"}
    with pytest.raises(
        ConfigError, match=r"Plain.train_batches\(\) takes no plan of batch sizes that change"
    ):
        prepare(config)


# Of a study


def test_what_is_searched_of_a_schedule(tmp_path):
    config = compose_checked([*DOUBLING, "search.tune=[momentum,batch_schedule]"])
    assert config.search.tune == ["momentum", "batch_factor", "batch_stretch"]
    settings = frozen_settings(config)
    assert settings["batch_schedule.factor"] == 2.0
    assert settings["workload.tunable.batch_stretch.key"] == "batch_schedule.stretch"
    assert not any(
        "batch_" in name.partition(".")[0] for name in frozen_settings(compose_checked(DIGITS))
    )


# What the curve proposes


def test_a_schedule_that_is_searched_is_not_said_to_be_the_one_of_its_options(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    prepared = prepare(compose_checked([*DOUBLING, "search.tune=[batch_schedule]"]))
    words = "grow, in each trial by its own batch_factor and batch_stretch"
    assert f"batch sizes are where a trial starts: they {words}" in prepared.notes
    assert words.partition(", ")[2] in prepared.caveats[0]
