import re
import sys

import optuna
import pytest
import torch
import yaml
from optuna.trial import create_trial
from rich.console import Console
from toolbox import make_result

from bstune import __main__
from bstune.config import compose
from bstune.core.errors import ConfigError, DataError, StudyError
from bstune.options import flat_settings
from bstune.search.sampler import RECORD
from bstune.study import early_checks, run
from bstune.study.planning.wall import SHORTEST_START, STARTS, TAKEN
from bstune.study.storage.opening import open_study
from bstune.workloads import datasets


@pytest.mark.parametrize(
    ("workload", "loaders"),
    [
        ("resnet_cifar", ["load_cifar10"]),
        ("mnist_cnn", ["load_mnist"]),
        # These data come with scikit-learn.
        ("digits", []),
    ],
)
def test_a_workloads_loaders_are_found_without_torch(workload, loaders):
    options = compose([f"workload={workload}"]).options
    found = list(early_checks.known_loaders([options.workload.data]))
    assert found == [(loader, early_checks.ROOT) for loader in loaders]
    assert set(loaders) <= datasets.LOADED.keys()


def test_only_what_is_missing_is_downloaded(tmp_path, monkeypatch):
    asked = []
    said = []
    monkeypatch.setattr(datasets, "_download", lambda source, folder, names: asked.append(names))
    folder = tmp_path / "airfoil"
    folder.mkdir()
    datasets.fetch("load_airfoil", tmp_path, said.append)
    (folder / "airfoil_self_noise.dat").touch()
    datasets.fetch("load_airfoil", tmp_path, said.append)
    datasets.fetch("load_of_the_users", tmp_path, said.append)
    assert asked == [["airfoil_self_noise.dat"]]
    assert len(said) == 1


def test_a_failed_download_is_refused(tmp_path, monkeypatch):
    def fail(*_):
        raise DataError("every download failed")

    monkeypatch.setattr(datasets, "_download", fail)
    options = compose(["workload=resnet_cifar", f"data.root={tmp_path}"]).options
    with pytest.raises(DataError):
        early_checks.check_early(options, lambda line: None)


@pytest.mark.parametrize(("own", "folder"), [([], "a"), (["workload.data.load.root=b"], "b")])
def test_data_are_looked_for_where_the_workload_does(own, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "fetch", lambda loader, root, say: asked.append((loader, root)))
    options = compose(["workload=mnist_cnn", "data.root=a", *own]).options
    early_checks.check_early(options, print)
    assert asked == [("load_mnist", folder)]


def test_an_output_that_cannot_be_used_is_refused_before_any_data_are_asked_for(
    tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(datasets, "fetch", lambda loader, root, say: asked.append(loader))
    dirty = tmp_path / "dirty"
    dirty.mkdir()
    (dirty / "thesis.txt").touch()
    (tmp_path / "file").touch()
    # Not even root makes a file in /proc.
    for output in ("/proc/x", dirty, tmp_path / "file"):
        options = compose(["workload=mnist_cnn", f"output={output}"]).options
        with pytest.raises(StudyError):
            early_checks.check_early(options, print)
    assert asked == []
    # A single trial adds to a folder, whatever else is there.
    single = ["trial.batch_size=32", "trial.lr=0.1", f"output={dirty}"]
    early_checks.check_early(compose(["workload=mnist_cnn", *single]).options, print)
    assert asked == ["load_mnist"]
    assert [path.name for path in dirty.iterdir()] == ["thesis.txt"]


# What a study of the digits stores beside its options.
OF_MACHINE = {"precision": "32-true", "compile": None, "device": "cpu (2 threads)", "threads": 2}
BEGUN = ("workload=digits", "study=begun")


def begin(folder, arguments=BEGUN, of_machine=OF_MACHINE):
    """Begin a study of a command line in a folder; give the arguments that name its places."""
    output = folder / "out"
    output.mkdir()
    url = f"sqlite:///{folder}/study.db"
    settings = {**flat_settings(compose(arguments).options), **of_machine}
    open_study("begun", url, "time", settings, output)
    return (f"storage={url}", f"output={output}")


@pytest.mark.parametrize(
    ("argument", "is_refused"),
    [
        # The lines of a dozen more are looked at in test_command.py.
        ("workload.module.model.hidden=[64]", True),
        ("seed=1", True),
        ("precision=bf16-true", True),
        ("threads=1", True),
        ("output=elsewhere", True),
        # What may change, and what this machine decides.
        ("search.trials=99", False),
        ("search.wall_seconds=99", False),
        ("budget.steps=9", False),
        ("threads=2", False),
        ("device=auto", False),
        # One trial, and another study.
        ("seed=1 trial.batch_size=32 trial.lr=0.1", False),
        ("seed=1 study=other", False),
    ],
)
def test_options_that_a_study_did_not_begin_with_are_refused(tmp_path, argument, is_refused):
    places = begin(tmp_path)
    options = compose([*BEGUN, *places, *argument.split()]).options
    if not is_refused:
        early_checks.check_unchanged(options)
        return
    with pytest.raises(StudyError):
        early_checks.check_unchanged(options)


def test_an_option_that_is_taken_back_is_refused(tmp_path):
    places = begin(tmp_path, (*BEGUN, "scaling.override_lr=true", "+trainer.gradient_clip_val=1"))
    with pytest.raises(StudyError) as error:
        early_checks.check_unchanged(compose([*BEGUN, *places]).options)
    for name in ("scaling.override_lr", "trainer.gradient_clip_val"):
        assert name in str(error.value)


def test_threads_that_nothing_has_decided_may_be_given(tmp_path):
    places = begin(tmp_path, of_machine={**OF_MACHINE, "threads": None})
    early_checks.check_unchanged(compose([*BEGUN, *places, "threads=1"]).options)


def test_the_look_for_a_begun_study_writes_nothing(tmp_path):
    arguments = [*BEGUN, f"storage=sqlite:///{tmp_path}/study.db"]
    options = compose([*arguments, f"output={tmp_path}/out"]).options
    early_checks.check_unchanged(options)
    assert list(tmp_path.iterdir()) == []
    # An empty file is a database without tables.
    (tmp_path / "study.db").touch()
    early_checks.check_unchanged(options)
    assert (tmp_path / "study.db").stat().st_size == 0


def test_a_study_in_the_making_is_left_to_its_opening(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(study_name="begun", storage=url)
    early_checks.check_unchanged(compose([*BEGUN, f"storage={url}", "seed=1"]).options)
    # One of another program is refused at once.
    optuna.create_study(study_name="theirs", storage=url).set_user_attr("mine", 1)
    with pytest.raises(StudyError):
        early_checks.check_unchanged(compose([*BEGUN, f"storage={url}", "study=theirs"]).options)


@pytest.mark.parametrize(
    ("limit", "changes", "is_refused"),
    [
        # The study has taken 300 s, and its shortest start 120 s.
        (400, {}, True),
        (200, {}, True),
        (430, {}, False),
        # The last command had this limit: its answer is asked for once more.
        (300, {}, False),
        # All trials have run; there is no answer yet; no start is known.
        (400, {"trials": 2}, False),
        (400, {"has_answer": False}, False),
        (400, {"start": 0.0}, False),
        (None, {}, False),
    ],
)
def test_a_limit_that_cannot_hold_another_start_is_refused(tmp_path, limit, changes, is_refused):
    start = 120.0
    places = begin(tmp_path)
    study = optuna.load_study(study_name="begun", storage=f"sqlite:///{tmp_path}/study.db")
    study.set_user_attr(TAKEN, 300.0)
    study.set_user_attr(STARTS, 260.0)
    study.set_user_attr(SHORTEST_START, changes.get("start", start))
    for number in range(2):
        record = make_result(number=number, batch_size=32 * (number + 1), wall_seconds=10.0)
        study.add_trial(create_trial(value=1.0, user_attrs={RECORD: record.to_json()}))
    folder = tmp_path / "out"
    (folder / "config.yaml").write_text("search: {wall_seconds: 300.0}")
    if changes.get("has_answer", True):
        (folder / "curve.json").touch()

    def options(seconds):
        given = f"search.wall_seconds={'null' if seconds is None else seconds}"
        plan = f"search.trials={changes.get('trials', 9)}"
        return compose([*BEGUN, *places, given, plan]).options

    if not is_refused:
        early_checks.check_time_left(options(limit))
        return
    with pytest.raises(StudyError) as error:
        early_checks.check_time_left(options(limit))
    enough = int(re.findall(r"search\.wall_seconds=(\d+)", str(error.value))[-1])
    # It has time for the time taken, a start and a trial, and is not refused itself.
    assert enough > 300 + start + 10
    early_checks.check_time_left(options(enough))


def test_a_study_is_continued_only_with_time_before_its_data_are_asked_for(monkeypatch):
    def refuse(options):
        raise StudyError("no time")

    monkeypatch.setattr(early_checks, "check_time_left", refuse)
    monkeypatch.setattr(datasets, "fetch", lambda *_: pytest.fail("the data came first"))
    with pytest.raises(StudyError):
        early_checks.check_early(compose(["workload=mnist_cnn"]).options, print)


def test_a_study_of_python_objects_is_continued_only_with_time_before_it_is_prepared(monkeypatch):
    def refuse(options):
        raise StudyError("no time")

    monkeypatch.setattr(run, "check_unchanged", lambda options: None)
    monkeypatch.setattr(run, "check_time_left", refuse)
    monkeypatch.setattr(run, "prepare", lambda *_: pytest.fail("it was prepared first"))
    composed = compose(BEGUN)
    with pytest.raises(StudyError):
        run.run(composed.options, composed.recipe, None, Console())


def test_torchs_own_file_says_whether_it_has_cuda():
    has_any = torch.version.cuda is not None or torch.version.hip is not None
    assert early_checks.is_built_without_cuda() != has_any


def test_a_device_that_is_not_there_is_refused_where_torch_is_not_imported(monkeypatch):
    options = compose(["workload=digits", "device=cuda"]).options
    monkeypatch.setattr(early_checks, "is_built_without_cuda", lambda: True)
    # With torch at hand the check knows better than the early one.
    early_checks.check_early(options, print)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ConfigError):
        early_checks.check_early(options, print)


def test_mirrors_fail_within_twenty_seconds():
    seconds = datasets.MIRROR_CONNECT_SECONDS + datasets.MIRROR_READ_SECONDS
    # Two mirrors, one after the other.
    assert 2 * seconds <= 20.0
    for source in datasets.LOADED.values():
        assert len(source.mirrors) == 2


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_config_file_begins_by_saying_that_it_loads_the_libraries(
    tmp_path, monkeypatch, capfd, is_loaded
):
    # It lacks nothing that could be refused before.
    file = {
        "model": {"class_path": "mine.Net", "init_args": {"lr": 0.1}},
        "data": {"class_path": "mine.Data"},
        "trainer": {"max_steps": 3},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(file))
    monkeypatch.chdir(tmp_path)

    def load():
        raise ConfigError("it would load them now")

    if not is_loaded:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(__main__, "quieten", load)
    monkeypatch.setattr(sys, "argv", ["bstune", "lightning", "config.yaml"])
    assert __main__.main() == 2
    assert capfd.readouterr().out.count("loading PyTorch") == (not is_loaded)
