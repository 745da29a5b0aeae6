"""bstune.Study: typed options and a recipe, of Python objects or of a command line, which run."""

import pickle
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir

import pytest
from builders import changed, hand_critical, options_and_recipe, options_of, result_of
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from pydantic import ValidationError
from test_tune import QUICK, QUIET, Net, loaders
from toolbox import entries, made_table, make_result, make_spec, trials_of

import bstune
from bstune.core.errors import ConfigError
from bstune.options import GivenOptions, ReplayedOptions, TrainedOptions
from bstune.study.given import line_on_lacking_objects
from bstune.study.prepare import compose_checked
from bstune.study.result import Result
from bstune.trial.loop import run_trial
from bstune.trial.processes.fork_server import CONTEXT, start_server
from bstune.trial.workload import load_workload

REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14")
REPLAY += ("search.trials=3", "search.replicates=0", "sampler=random", "mlflow.enabled=false")
OBJECTS = {"module": Net, "data": loaders()}


def arguments(**changes):
    """The arguments of a study in this process, whose objective depends on no clock."""
    own = {
        "target": bstune.Target("val_loss", 1.5, "min"),
        "batch_sizes": (16, 64),
        "reference": (32, 0.5),
        "budget": bstune.Budget(examples=4000),
        "objective": "steps",
        "trials": 3,
        "workers": 0,
        "survey": False,
        "mlflow": False,
        "options": QUICK,
    }
    return own | changes


def of_command_line(*given):
    return bstune.Study.from_composed(compose_checked(given), given)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def without_clock(trial):
    """The values of a trial's record that depend on no clock."""
    return trial.batch_size, trial.lr, trial.seed, trial.status, trial.steps, trial.history


@pytest.mark.slow
def test_a_study_of_a_command_line_is_the_commands(tmp_path, bstune):
    made_table(tmp_path)
    study = of_command_line(*REPLAY, "study=s")
    assert study.arguments == (*REPLAY, "study=s")
    result = study.run()
    trials = result.records
    assert trials == trials_of(tmp_path / "outputs" / "s")
    assert len(trials) == 3
    # The command goes on with the study that objects began.
    status, out, _ = bstune(*REPLAY, "study=s", "search.trials=4")
    assert status == 0
    assert "continues after 3 configurations" in out
    assert trials_of(tmp_path / "outputs" / "s")[:3] == trials
    with pytest.raises(ConfigError, match="a study's folder holds no code"):
        result.train()


def test_options_have_the_type_of_their_workload(tmp_path):
    made_table(tmp_path)
    kinds = {
        GivenOptions: bstune.Study(**arguments(**OBJECTS)),
        TrainedOptions: of_command_line("workload=digits"),
        ReplayedOptions: of_command_line(*REPLAY),
    }
    for kind, study in kinds.items():
        assert type(study.options) is kind
    assert repr(kinds[GivenOptions]) == "Study('Net', workload='Net')"
    assert kinds[GivenOptions].recipe is not None
    assert kinds[TrainedOptions].recipe is not None
    # A table is read: there is nothing to train.
    assert kinds[ReplayedOptions].recipe is None


@pytest.mark.parametrize("place", ["options", "options.search", "options.workload.target"])
def test_options_are_frozen(place):
    section = bstune.Study(**arguments(**OBJECTS))
    for name in place.split("."):
        section = getattr(section, name)
    before = section.model_copy()
    for name in type(section).model_fields:
        with pytest.raises(ValidationError, match="Instance is frozen"):
            setattr(section, name, None)
    with pytest.raises(ValidationError):
        section.not_an_option = 1
    assert section == before


def test_a_study_without_a_module_is_made_and_not_run(tmp_path):
    study = bstune.Study(**arguments(name="mine"))
    assert study.recipe is None
    assert study.options.workload.given_module == "a loop of yours"
    with pytest.raises(
        ConfigError, match=r"no module to train: give module=\.\.\. and data=\.\.\."
    ):
        study.run()
    assert entries(tmp_path) == []
    # One of the two alone.
    for one in OBJECTS:
        with pytest.raises(ConfigError, match="needs module and data, or neither of them"):
            bstune.Study(**arguments(**{one: OBJECTS[one]}))


def history_of(pickled):
    """Train a trial of pickled options and a recipe; return its history."""
    options, recipe = pickle.loads(pickled)  # noqa: S301 (of this test)
    workload, protocol = load_workload(options, recipe)
    return run_trial(workload, make_spec(32, 0.2, seed=3, max_steps=20), protocol).history


@pytest.mark.slow
def test_a_recipe_is_pickled_whole_and_trains_in_another_process():
    """The one of objects with a lambda and all that it refers to, the one of a config with its references."""
    # The lambda below refers to it.
    hidden = 8
    study = bstune.Study(**arguments(module=lambda trial: Net(trial.lr, hidden), data=loaders()))
    digits = options_and_recipe("workload=digits", "device=cpu")
    sent = [pickle.dumps((study.options, study.recipe)), pickle.dumps(digits)]
    here = list(map(history_of, sent))
    for history in here:
        assert history[-1][0] == 20
    start_server()
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        assert list(pool.map(history_of, sent)) == here


def class_of_width(width):
    class Mine(Net):
        def __init__(self, lr):
            super().__init__(lr, width)

    return Mine


@pytest.mark.slow
def test_studies_of_the_same_name_in_one_process_keep_their_objects(tmp_path):
    """Nothing of a study is global: each trains its own class, whichever was made, or run, before."""
    studies = {}
    for width in (8, 24):
        studies[width] = bstune.Study(**arguments(module=class_of_width(width), data=loaders()))
    for study in studies.values():
        assert study.options.study == "Mine"
    results = {}
    # Run in the other order than they were made.
    for width in reversed(studies):
        (tmp_path / str(width)).mkdir()
        with chdir(tmp_path / str(width)):
            results[width] = studies[width].run()
    for width, result in results.items():
        module, _ = result.train(**QUIET)
        assert module.net[0].out_features == width
    first = {width: without_clock(result.records[0]) for width, result in results.items()}
    # The same batch size, rate and seed: the search began alike, and the widths differ.
    assert first[8][:3] == first[24][:3]
    assert first[8] != first[24]


def test_a_folder_is_opened_as_the_result_that_it_is(tmp_path):
    study = bstune.Study(**arguments(**OBJECTS))
    result = study.run()
    opened = bstune.load(result.folder)
    assert opened.summary == result.summary
    assert opened.records == tuple(result.records)
    assert opened.options.search == result.options.search
    assert opened.best == result.best == study.result.best
    assert opened.curve.equals(result.curve)
    assert len(opened.study.trials) == len(result.records)
    with pytest.raises(ConfigError, match="a study's folder holds no code"):
        opened.train()
    _, trainer = opened.train(Net, OBJECTS["data"], **QUIET)
    steps = {trial.number: trial.steps for trial in opened.records}
    # As many as the best trial took.
    assert trainer.global_step == steps[opened.best.number]


def test_a_training_anew_names_the_objects_that_it_lacks():
    trainer = {
        "gradient_clip_val": 1.0,
        "callbacks": [LearningRateMonitor("step"), EarlyStopping("val_loss")],
        "logger": CSVLogger("logs"),
    }
    study = bstune.Study(**arguments(**OBJECTS, trainer=trainer))
    line = line_on_lacking_objects(study.options, {})
    assert "callbacks (LearningRateMonitor and EarlyStopping) and logger (CSVLogger)" in line
    assert "train(module=..., data=..., callbacks=[...], logger=...)" in line
    line = line_on_lacking_objects(study.options, {"callbacks"})
    assert "lacks the study's logger (CSVLogger), which" in line
    assert line_on_lacking_objects(study.options, {"callbacks", "logger"}) is None
    # What a study stores as it is is no object that is lacking.
    stored = bstune.Study(**arguments(**OBJECTS, trainer={"logger": False, "callbacks": []}))
    assert line_on_lacking_objects(stored.options, {}) is None
    # A config names them by nodes.
    callback = "+workload.trainer.callbacks=[{class_path: lightning.pytorch.callbacks.Timer}]"
    options = options_of("workload=digits", callback)
    assert "callbacks (Timer)" in line_on_lacking_objects(options, {})


def test_a_study_that_has_not_ended_is_opened_by_its_trials(tmp_path):
    made_table(tmp_path)
    result = of_command_line(*REPLAY, "study=s").run()
    # It is written when a study ends.
    (result.folder / "curve.json").unlink()
    opened = bstune.load(result.folder)
    assert opened.records == tuple(result.records)
    assert opened.best.batch_size == result.best.batch_size
    assert "the study has not ended" in opened.notes[0]


@pytest.mark.parametrize(
    ("in_python", "name"), [(True, "batch_sizes[1]"), (False, "search.batch_size.high")]
)
def test_a_note_writes_options_as_whoever_ran_the_study_takes_them(tmp_path, in_python, name):
    note = "a larger search.batch_size.high would show more"
    critical = changed(hand_critical(100.0, 50.0, 200.0, 8, 4096), note=note)
    summary = changed(result_of([make_result()]), in_python=in_python, critical_batch_size=critical)
    found = Result(tmp_path, summary, (), None, None).critical_batch_size
    assert found.note == f"a larger {name} would show more"
