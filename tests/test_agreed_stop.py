"""A wish to stop waits for the next evaluation where several processes train."""

import pytest
from made_parts import make_trainer

from bstune.trial.parts.agreed_stop import AgreedStop


def test_alone_nothing_is_put_off():
    # One process may stop at once: no other one waits for it.
    stop = AgreedStop(alone=True)
    trainer = make_trainer(should_stop=True)
    stop.hold(trainer)
    assert trainer.should_stop
    assert stop.is_asked(trainer)


def test_of_several_a_wish_is_kept_until_the_evaluation():
    stop = AgreedStop(alone=False)
    trainer = make_trainer()
    stop.hold(trainer)
    assert not stop.is_asked(trainer)
    trainer.should_stop = True
    stop.hold(trainer)
    assert not trainer.should_stop
    # A later step without a wish does not take it back.
    stop.hold(trainer)
    assert stop.is_asked(trainer)


def test_a_wish_in_the_evaluation_counts_as_well():
    assert AgreedStop(alone=False).is_asked(make_trainer(should_stop=True))


@pytest.mark.parametrize("stops", [True, False])
def test_what_all_agree_on_is_not_put_off(stops):
    stop = AgreedStop(alone=False)
    trainer = make_trainer(should_stop=not stops)
    stop.decide(trainer, stops)
    stop.hold(trainer)
    assert trainer.should_stop == stops
