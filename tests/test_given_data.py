"""Data that are taken as a function of the batch size gives them: what of it is refused before the first trial."""

from types import SimpleNamespace

import pytest
import torch
from builders import options_of
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.errors import ConfigError
from bstune.trial.batches.given_batches import GivenBatches, GivenStream
from bstune.trial.checks.given_data import (
    check_batches,
    check_epoch_schedules,
    note_on_given_batches,
    refuse_options_that_cut_batches,
)

DATA = TensorDataset(torch.zeros(40, 3), torch.zeros(40))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("protocol.micro_batch_size=4", "protocol.micro_batch_size=4 cuts batches"),
        ("devices=2", "devices=2 share each batch"),
    ],
)
def test_options_that_would_cut_batches_are_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        refuse_options_that_cut_batches(options_of("workload=digits", argument))
    refuse_options_that_cut_batches(options_of("workload=digits"))


def workload_of(batch_size_of):
    def draw(spec):
        def opened():
            return DataLoader(DATA, batch_sampler=[range(batch_size_of(spec.batch_size))])

        return GivenBatches(GivenStream(opened, spec.batch_size, spec.seed))

    return SimpleNamespace(train_batches=draw)


def test_batches_that_are_alike_at_two_batch_sizes_are_refused():
    with pytest.raises(
        ConfigError, match=r"batch sizes 4 and 8 both .* \(16, 3\) and \(16,\): let their loaders"
    ):
        check_batches(workload_of(lambda batch_size: 16), 4, 8)
    check_batches(workload_of(lambda batch_size: batch_size), 4, 8)
    # Of one batch size nothing is seen.
    check_batches(workload_of(lambda batch_size: 16), 4, 4)


@pytest.mark.parametrize(
    ("batches", "interval", "automatic", "is_refused"),
    [
        (float("inf"), "epoch", True, True),
        (float("inf"), "step", True, False),
        # A module that steps by itself says when its schedule does.
        (float("inf"), "epoch", False, False),
        (7, "epoch", True, False),
    ],
)
def test_schedules_by_epochs_are_refused_where_no_epoch_ends(
    batches, interval, automatic, is_refused
):
    module = SimpleNamespace(automatic_optimization=automatic, configure_optimizers=workload_of)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    config = SimpleNamespace(interval=interval, scheduler=schedule)
    trainer = SimpleNamespace(num_training_batches=batches, lr_scheduler_configs=[config])
    if not is_refused:
        check_epoch_schedules(trainer, module)
        return
    with pytest.raises(
        ConfigError,
        match=r"StepLR of SimpleNamespace \(test_given_data.py:\d+\) .*'interval': 'step'",
    ):
        check_epoch_schedules(trainer, module)


@pytest.mark.parametrize(("loader", "has_epochs"), [(DataLoader(DATA, 4), True), (iter(()), False)])
def test_what_is_assumed_is_said(loader, has_epochs):
    note = note_on_given_batches(loader)
    assert note.startswith("assumed: batches are those that the data made for each")
    assert ("without epochs" in note) is not has_epochs
    assert "skips those that it has seen" in note
