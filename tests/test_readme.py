"""The code blocks of README.md and bstune/README.md run as they stand there; links lead somewhere."""

import functools
import inspect
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from builders import prepared_study
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

import bstune

TOP = Path(__file__).parents[1]
README = (TOP / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


class MyModule(LightningModule):
    """A project's own module: what the README's YAML names."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("val/loss", loss)
        self.log("val/accuracy", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class MyData(LightningDataModule):
    """1,200 points on either side of a line; its hook adds a column that the module needs."""

    def setup(self, stage=None):
        points = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
        self.points = TensorDataset(points, (points.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, batch_size=400)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        points, labels = batch
        return torch.cat([points, torch.ones(len(points), 1)], dim=1), labels


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever trains a toy
def test_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = {
        # An eighth of them is the first trial, whose end is the target.
        "seconds": 1.0,
        "trials": 3,
        "workers": 0,
        "survey": False,
        "mlflow": False,
        "options": ["search.replicates=0"],
    }
    monkeypatch.setattr(bstune, "tune", functools.partial(bstune.tune, **quick))
    for block in blocks("python"):
        names = {
            "module": MyModule(0.1),
            "data": MyData(),
            "MyModule": MyModule,
            "MyData": MyData,
        }
        exec(block, names)  # noqa: S102
    assert (tmp_path / "report.html").exists()


@pytest.fixture
def own_command(tmp_path, monkeypatch):
    """The arguments for a project's own workload, which lies in this folder."""
    monkeypatch.chdir(tmp_path)
    (workload,) = blocks("yaml")
    path = tmp_path / re.match(r"# (\S+)\n", workload)[1]
    path.parent.mkdir(parents=True)
    path.write_text(workload)
    monkeypatch.setitem(sys.modules, "my_project", sys.modules[__name__])
    (command,) = [block for block in blocks("sh") if "my_configs" in block]
    _, _, _, *arguments = shlex.split(command)
    # Another process would not find the module.
    return [*arguments, "search.workers=0", "mlflow.enabled=false"]


def test_a_projects_own_workload_is_tried(own_command):
    prepared = prepared_study(*own_command, "hardware.enabled=false")
    target = prepared.protocol.target
    assert (target.metric, target.value, target.mode) == ("val/accuracy", 0.9, "max")
    # The first steps, with which a study begins, have read the data.
    assert prepared.backend.train_examples == 1200
    prepared.close()


@pytest.mark.slow
def test_a_projects_own_workload(own_command, tmp_path, bstune):
    options = ("search.trials=4", "search.replicates=0", "search.objective=steps")
    status, out, err = bstune(*own_command, *options)
    assert (status, err) == (0, "")
    assert "val/accuracy >= 0.9" in out
    winner = yaml.safe_load((tmp_path / "outputs/mine/best.yaml").read_text())["best_by_steps"]
    status, _, err = bstune(*shlex.split(winner["command"])[3:])
    assert (status, err) == (0, "")
    (record,) = tmp_path.glob("outputs/mine/trial-B*/trial.json")
    assert json.loads(record.read_text())["steps"] == winner["single_run"]["steps"]


def test_it_is_short_and_begins_with_its_two_commands():
    assert README.count("\n") < 150
    first, second = blocks("sh")[:2]
    assert "-m bstune +workload=digits" in first
    assert "-m pytest" in second
    # A link, a picture or one of the two commands may be longer.
    long = [line for line in README.splitlines() if len(line) > 110 and "](" not in line]
    assert long == [first.strip(), second.strip()]


def prose(page):
    """Give the sentences of a page's paragraphs, bullets and cells, links as their words."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\n|\n[*|#]| \| ", text)
    for part in parts:
        yield from re.split(r"(?<=[.:;?])\s+", part)


def test_its_sentences_are_short_and_its_links_say_where_they_lead():
    assert [sentence for sentence in prose(README) if len(sentence.split()) > 25] == []
    names = re.findall(r"\[([^\]]*)\]\(", README)
    assert {"how", "what", "here"}.isdisjoint(names)


TUTORIAL = TOP / "bstune" / "README.md"
# Means of the tutorial's studies, besides those that it gives itself.
QUICK = {
    "trials": 3,
    "workers": 0,
    "survey": False,
    "mlflow": False,
    "options": ["search.replicates=0"],
}
QUICK_OPTIONS = (
    *("search.trials=2", "search.replicates=0", "search.workers=0"),
    *("hardware.enabled=false", "mlflow.enabled=false"),
)
QUICK_SWEEP = (
    "hydra.sweeper.n_trials=2",
    'hydra.sweeper.options=["mlflow.enabled=false","search.replicates=0"]',
)


@pytest.fixture
def run_block(monkeypatch, tmp_path, run_verb, hydra_in_process):
    """Return a function that runs a block of the tutorial, and the names that its Python has made.

    A block whose first line names a file is that file. Other Python is one session, in the files'
    folder; each line of sh is a command there.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bstune, "tune", functools.partial(bstune.tune, **QUICK))
    monkeypatch.setattr(bstune, "Study", functools.partial(bstune.Study, **QUICK))
    names = {}

    def run(language, text):
        file = re.match(r"# (\S+\.\w+)\n", text)
        if file is not None:
            path = tmp_path / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif language == "python":
            exec(text, names)  # noqa: S102
        else:
            assert language == "sh", text
            for line in text.splitlines():
                run_command(shlex.split(line))

    def run_command(words):
        if words[:4] == ["python", "-m", "pip", "install"]:
            check_extras(words[4])
        elif words[0] == "python":
            monkeypatch.setattr(sys, "argv", [*words[1:], *QUICK_SWEEP])
            runpy.run_path(words[1], run_name="__main__")
        else:
            assert words[0] == "bstune", words
            options = QUICK_OPTIONS if words[1] == "lightning" else ()
            status, _, err = run_verb(*words[1:], *options)
            assert (status, err) == (0, "")

    yield run, names
    sys.modules.pop("my_project", None)


def check_extras(requirement):
    """Refuse an installation that asks for what the package does not offer."""
    package, _, extras = requirement.removesuffix("]").partition("[")
    offered = tomllib.loads((TOP / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert package == "PATH_OF_BSTUNE"
    assert set(extras.split(",")) <= offered.keys()


# Six studies: each call and each command in it has a quick test of its own.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever trains a toy
def test_every_block_of_the_tutorial(run_block, tmp_path):
    pytest.importorskip("jsonargparse")
    run, names = run_block
    text = TUTORIAL.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    # What a study prints is shown as text.
    to_run = [(language, block) for language, block in found if language != "text"]
    assert len(to_run) == len(found) - 1
    for language, block in to_run:
        run(language, block)
    assert names["result"].best.reached
    assert names["study"].result.best.reached
    left = ("first.html", "curve.pdf", "winner.ckpt", "outputs/cli/report.html")
    assert [name for name in left if not (tmp_path / name).exists()] == []
    assert len(bstune.load(tmp_path / "outputs/train").records) >= 2


def api_reference():
    return runpy.run_path(str(TOP / ".ci" / "api_reference.py"))


def test_the_reference_is_what_the_docstrings_say():
    """If it is not: ``python .ci/api_reference.py`` writes it."""
    made = api_reference()
    written = TUTORIAL.read_text(encoding="utf-8").partition(made["BEGIN"])[2]
    assert written.partition(made["END"])[0].strip() == made["reference"]().strip()


@pytest.mark.parametrize("name", [name for name in bstune.__all__ if name != "__version__"])
def test_a_public_names_docstring_has_all_of_its_arguments(name):
    thing = getattr(bstune, name)
    documented = api_reference()["sections_of"](bstune.Study if name == "tune" else thing)
    assert list(documented["Args"]) == list(inspect.signature(thing).parameters)


def test_an_argument_without_a_word_is_seen():
    def undocumented(one, other):
        """Do something.

        Args:
            one: which
                goes on. And on.
        """

    assert api_reference()["sections_of"](undocumented)["Args"] == {"one": "Which goes on."}


@pytest.mark.parametrize("room", ["search", "trial", "hardware", "study", "report", "workloads"])
def test_a_room_is_told_in_two_screens(room):
    text = (TUTORIAL.parent / room / "README.md").read_text(encoding="utf-8")
    assert 300 < len(text.split()) < 600
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert {"Where to put a new thing", "What does not belong here"} <= set(headings)


PAGES = [
    *[TOP / "README.md", TOP / "tests/benchmarks/README.md"],
    *TOP.glob("*/README.md"),
    *TOP.glob("bstune/*/README.md"),
]


def anchors(page):
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    letters = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in letters}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
