"""What an interruption says depends on how far a study has come."""

import pytest

from bstune import __main__ as command
from bstune.config import compose
from bstune.core.errors import Interrupted
from bstune.study import study
from bstune.system import interruption
from bstune.system.interruption import Stage


@pytest.mark.parametrize("stage", list(Stage))
def test_an_interruption_says_what_is_true_of_its_stage(monkeypatch, stage):
    def interrupted(*_):
        interruption.enter(stage)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_options", interrupted)
    monkeypatch.setattr(interruption, "stage", Stage.PREPARATION)
    composed = compose(["workload=digits", "trial.batch_size=8", "trial.lr=0.1"])
    with pytest.raises(Interrupted) as caught:
        command.run(composed, [])
    assert stage.value in str(caught.value)
    assert sum(other.value in str(caught.value) for other in Stage) == 1
