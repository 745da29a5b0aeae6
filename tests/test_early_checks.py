import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bstune import __main__
from bstune.config import compose
from bstune.core.errors import ConfigError, DataError, StudyError
from bstune.study import early_checks
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


def test_it_imports_no_training_library():
    code = "import sys, bstune.study.early_checks, bstune.workloads.datasets; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert done.stdout == "False\n"


def test_mirrors_fail_within_twenty_seconds():
    seconds = datasets.MIRROR_CONNECT_SECONDS + datasets.MIRROR_READ_SECONDS
    # Two mirrors, one after the other.
    assert 2 * seconds <= 20.0
    for source in datasets.LOADED.values():
        assert len(source.mirrors) == 2


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_config_file_begins_by_saying_that_it_loads_the_libraries(monkeypatch, capfd, is_loaded):
    def load():
        raise ConfigError("it would load them now")

    if not is_loaded:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(__main__, "quieten", load)
    monkeypatch.setattr(sys, "argv", ["bstune", "lightning", "config.yaml"])
    assert __main__.main() == 2
    assert capfd.readouterr().out.count("loading PyTorch") == (not is_loaded)
