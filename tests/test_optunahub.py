"""What lies in OptunaHub's layout: the registry's rules, its examples, and the benchmark's numbers."""

import importlib.util
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import optuna
import pytest
import yaml
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState
from test_pieces import TOP, python_blocks
from toolbox import entries

from bstune.trial.replay import read_index, read_table

REGISTRY = TOP / "bstune" / "integrations" / "optunahub" / "package"
PACKAGES = {"samplers/frontier": "sampler", "benchmarks/batch_size": "benchmark"}
# The best point of fashion_mlp, by the time of its two seeds.
BEST = {"batch_size": 512, "lr": 0.125}
CHANGES = {"SEEDS = 3": "SEEDS = 1", "COSTS = (25, 50, 100, 200)": "COSTS = (5, 10)"}


def load_local_module(package, *, registry_root):
    """Load a package as optunahub does."""
    folder = Path(registry_root) / package
    name = "optunahub_registry.package." + package.replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stand_in():
    """The part of optunahub that a package uses, where that is not installed."""
    module = ModuleType("optunahub")
    module.load_local_module = load_local_module
    module.benchmarks = SimpleNamespace(BaseProblem=object)
    return module


@pytest.fixture
def hub(monkeypatch):
    """Optunahub, whose registry is the folder here."""
    try:
        import optunahub
    except ImportError:
        optunahub = stand_in()
        monkeypatch.setitem(sys.modules, "optunahub", optunahub)
    load = partial(optunahub.load_local_module, registry_root=str(REGISTRY))
    monkeypatch.setattr(optunahub, "load_module", load, raising=False)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optunahub


@pytest.fixture
def benchmark(hub):
    return hub.load_module("benchmarks/batch_size")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_registrys_layout(package):
    folder = REGISTRY / package
    names = {"README.md", "LICENSE", "__init__.py", "example.py", "requirements.txt"}
    assert names <= set(entries(folder))
    terms = (folder / "LICENSE").read_text()
    assert terms.startswith("MIT License\n\nCopyright (c) 2026 The bstune maintainers\n")
    assert "without restriction, including without limitation the rights" in terms
    lines = (folder / "requirements.txt").read_text().splitlines()
    required = [re.split("[>=]", line)[0] for line in lines if not line.startswith("#")]
    assert {"bstune", "optuna"} <= set(required)
    # YAML between two lines of dashes, then the page.
    _, front, page = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert list(metadata) == [
        "author", "title", "description", "tags", "optuna_versions", "license"
    ]  # fmt: skip
    assert metadata["license"] == "MIT License"
    assert PACKAGES[package] in metadata["tags"]
    assert optuna.__version__ in metadata["optuna_versions"]
    assert re.findall("^## (.*)$", page, flags=re.MULTILINE) == [
        "Abstract", "APIs", "Installation", "Example", "Others"
    ]  # fmt: skip
    # The registry's page shows Markdown alone.
    assert not re.search("<[a-z/]", page)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_readmes_examples_run(package, hub, capsys):
    for block in python_blocks(REGISTRY / package / "README.md", "Example"):
        names = {}
        exec(block, names)  # noqa: S102
        assert len(names["study"].trials) == 20


# The READMEs' examples above run the same sampler.
@pytest.mark.slow
def test_the_samplers_example_runs(hub, capsys):
    names = {}
    exec((REGISTRY / "samplers/frontier/example.py").read_text(encoding="utf-8"), names)  # noqa: S102
    best = names["study"].best_trial
    assert 32 <= best.params["batch_size"] <= 512, "the made law's is 113"
    states = {trial.state for trial in names["study"].trials}
    assert TrialState.PRUNED in states


def test_the_benchmarks_example_runs(hub, capsys):
    text = (REGISTRY / "benchmarks/batch_size/example.py").read_text(encoding="utf-8")
    for before, after in CHANGES.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    exec(text, {})  # noqa: S102
    rows = []
    for line in capsys.readouterr().out.splitlines():
        name, early, late = line.rsplit(maxsplit=2)
        rows.append((name.strip(), early, late))
    assert [name for name, _, _ in rows] == ["cost", "random", "tpe", "tpe, median"]
    for _, early, late in rows[1:]:
        # Times over the best point's, which one lucky seed may beat.
        assert 0.9 < float(late) <= float(early)


def test_the_benchmarks_example_of_a_sampler_that_stops_trials_runs(hub, capsys):
    names = {}
    path = REGISTRY / "benchmarks/batch_size/example_frontier.py"
    exec(path.read_text(encoding="utf-8"), names)  # noqa: S102
    study = names["study"]
    assert len(study.trials) == 20
    # It goes on with trials that it stopped.
    continued = [trial.user_attrs["bstune:resumed_from"] for trial in study.trials]
    assert any(number is not None for number in continued)
    assert study.best_value < names["problem"].penalty


LOADED = """
import importlib.util, sys, types

sys.modules["optunahub"] = types.ModuleType("optunahub")
sys.modules["optunahub"].benchmarks = types.SimpleNamespace(BaseProblem=object)
spec = importlib.util.spec_from_file_location("batch_size", {place!r})
sys.modules["batch_size"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["batch_size"])
sys.modules["batch_size"].Problem()
print(sorted(sys.modules.keys() & {{"torch", "lightning"}}))
"""


@pytest.mark.slow
def test_the_benchmark_needs_no_torch():
    script = LOADED.format(place=str(REGISTRY / "benchmarks/batch_size/__init__.py"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


def test_a_recorded_point_is_answered_as_it_was_recorded(benchmark):
    source = read_index()["fashion_mlp"]
    cell = read_table(source.path).cells[512, 0.125]
    steps = []
    times = []
    for run in cell:
        steps.append(run.steps_to(source.target))
        times.append(steps[-1] * run.seconds_per_step)
    problem = benchmark.Problem("fashion_mlp")
    assert problem.best_params == BEST
    # Its two seeds.
    assert problem.best_value == pytest.approx(sum(times) / 2)
    assert problem.evaluate(BEST) == problem.evaluate(BEST) == pytest.approx(times[0])
    assert problem.spent == pytest.approx(2 * times[0])
    # With a seed of its own a problem draws which recorded run answers.
    drawn = benchmark.Problem("fashion_mlp", seed=0)
    assert sorted({drawn.evaluate(BEST) for _ in range(20)}) == pytest.approx(sorted(times))
    in_steps = benchmark.Problem("fashion_mlp", objective="steps")
    assert in_steps.evaluate(BEST) == in_steps.spent == steps[0]


def test_the_space_is_the_tables(benchmark):
    problem = benchmark.Problem("mnist_mlp")
    assert problem.search_space == {
        "batch_size": IntDistribution(8, 4096, log=True),
        "lr": FloatDistribution(0.05, 0.8, log=True),
    }
    (direction,) = problem.directions
    assert direction.name == "MINIMIZE"
    assert set(problem.available_tables) == set(read_index())


# Far too small a rate: its record ends before the target.
MISSED = {"batch_size": 4096, "lr": 0.000244140625}


def test_a_miss_is_censored_and_costs_what_it_took(benchmark):
    table = read_table(read_index()["fashion_mlp"].path)
    longest = max(run.end * run.seconds_per_step for run in table.runs)
    recorded = table.cells[4096, MISSED["lr"]][0]
    problem = benchmark.Problem("fashion_mlp")
    # No run that reached the target took as long.
    assert problem.evaluate(MISSED) == problem.penalty == pytest.approx(2 * longest)
    assert problem.spent == pytest.approx(recorded.end * recorded.seconds_per_step)
    assert problem.spent < longest
    assert benchmark.Problem("fashion_mlp", miss="inf").evaluate(MISSED) == math.inf
    run = problem.run(MISSED)
    assert (run.status, run.is_censored, run.can_go_on) == ("stopped", True, False)


def test_a_run_is_stopped_and_continued_for_what_is_added(benchmark):
    problem = benchmark.Problem("fashion_mlp", seed=3)
    first = problem.run(BEST, max_steps=20)
    assert (first.status, first.steps, first.can_go_on) == ("stopped", 20, True)
    assert first.cost == problem.spent == pytest.approx(20 * first.seconds_per_step)
    rest = problem.run(BEST, resumed_from=first)
    assert rest.status == "reached"
    assert rest.history[: len(first.history)] == first.history
    assert problem.spent == pytest.approx(problem.value(rest))
    assert rest.cost == pytest.approx(problem.value(rest) - first.cost)
    # One that is asked to end before it has begun again adds nothing.
    assert problem.run(BEST, max_steps=5, resumed_from=first).cost == 0.0


class AtFirst(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return True


def test_a_pruner_stops_a_run_at_the_first_cost(benchmark):
    problem = benchmark.Problem("fashion_mlp")
    study = optuna.create_study(directions=problem.directions, pruner=AtFirst())
    study.enqueue_trial(MISSED)
    study.enqueue_trial(BEST)
    study.optimize(problem, n_trials=2)
    for trial in study.trials:
        run = problem.runs[trial.number]
        assert (trial.state, run.can_go_on) == (TrialState.PRUNED, True)
        (place,) = trial.intermediate_values
        # Costs double from place to place, up to the longest run at the seventh.
        limit = problem.penalty / 2 * 2.0 ** (place - 7)
        assert limit - run.seconds_per_step < run.cost <= limit
        assert trial.user_attrs["cost"] == run.cost
        assert trial.user_attrs["censored"]
    assert study.trials[-1].user_attrs["spent"] == pytest.approx(problem.spent)


def test_without_a_pruner_a_trial_is_an_evaluation(benchmark):
    problem = benchmark.Problem("fashion_mlp")
    study = optuna.create_study(directions=problem.directions, pruner=optuna.pruners.NopPruner())
    study.enqueue_trial(BEST)
    study.enqueue_trial(MISSED)
    study.optimize(problem, n_trials=2)
    again = benchmark.Problem("fashion_mlp")
    hit, miss = study.trials
    assert (hit.value, miss.value) == (again.evaluate(BEST), again.penalty)
    assert (hit.user_attrs["censored"], miss.user_attrs["censored"]) == (False, True)
    assert (hit.user_attrs["status"], miss.user_attrs["status"]) == ("reached", "stopped")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "nope"}, "table must be one of cifar_mlp, .*, but got 'nope'"),
        ({"table": "digits_linear"}, "table must be one of"),
        ({"objective": "loss"}, "objective must be time or steps, but got 'loss'"),
        ({"miss": "zero"}, "miss must be one of penalty, inf, but got 'zero'"),
    ],
)
def test_what_a_problem_may_not_be(arguments, message, benchmark):
    with pytest.raises(ValueError, match=message):
        benchmark.Problem(**arguments)
