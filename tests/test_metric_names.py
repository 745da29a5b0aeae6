"""What the name of a metric tells."""

import pytest

from bstune.core.errors import ConfigError
from bstune.core.metric_names import choose_loss, mode_of, parse_target


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("val_loss", "min"),
        ("val/error", "min"),
        ("Valid/RMSE", "min"),
        ("val_acc", "max"),
        ("val/top1-accuracy", "max"),
        ("macro_f1", "max"),
        ("reward", None),
        # Its words contradict each other.
        ("accuracy_loss", None),
        # A part of a word is none.
        ("glossary", None),
    ],
)
def test_the_words_of_a_name_say_which_way_is_better(metric, mode):
    assert mode_of(metric) == mode


@pytest.mark.parametrize(
    ("metrics", "chosen"),
    [
        (["reward"], "reward"),
        (["val_acc", "val_loss"], "val_loss"),
        (["val_loss_epoch", "val_loss", "val_acc"], "val_loss"),
        (["b/loss", "a/loss"], "a/loss"),
        (["valid_acc", "valid_bce"], "valid_bce"),
        (["val_mae", "val_rmse"], None),
        (["val_acc", "val_f1"], None),
        ([], None),
    ],
)
def test_of_several_metrics_the_loss_is_meant(metrics, chosen):
    assert choose_loss(metrics) == chosen


def test_a_message_names_the_option_that_was_given():
    with pytest.raises(ConfigError, match=r"^goal must be a metric and a number"):
        parse_target("reward<=x", "goal")
    with pytest.raises(ConfigError, match=r"^goal reward=3: the name reward does not say"):
        parse_target("reward=3", "goal")
    assert parse_target("reward<=3", "goal") == ("reward", 3.0, "min")
