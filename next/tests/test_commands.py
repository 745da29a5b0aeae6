"""What runs a study again that is read from its folder, and what trains its best."""

from refusals import cases

from bstune.config import options_from_python
from bstune.options import with_question
from bstune.study.commands import stored_commands


@cases(
    """
way | command | again | best
command | python -m bstune +workload=w trials=8 | python -m bstune +workload=w trials=8 \
'target=a <= 0.2' study=s-2 | python -m bstune +workload=w 'target=a <= 0.2' \
trial.batch_size=64 trial.lr=0.5
tune | bstune.tune(..., name='s') | bstune.tune(..., name='s-2', target='a <= 0.2') | result.train()
loop | bstune.Study(..., name='s') | bstune.Study(..., name='s-2', target='a <= 0.2') | batch \
size 64 and lr 0.5 in your own loop
application | python train.py -m | python train.py -m 'hydra.sweeper.target="a <= 0.2"' \
hydra.sweeper.study=s-2 | batch size 64 and lr 0.5 in your application
""",
    str,
)
def test_a_stored_study_is_asked_again_the_way_it_was_begun(way, command, again, best):
    own = options_from_python(study="s", target="a <= 0.1", baseline=(64, 0.1), budget=9)
    asked = stored_commands(way, command, own, with_question(own, {"target": 0.2}))
    assert (asked.study({}), asked.train(64, 0.5, None)) == (again, best)
    # Without another question it stays the same study.
    assert stored_commands(way, command, own, own).study({}) == command
