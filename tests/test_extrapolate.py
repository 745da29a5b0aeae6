"""``bstune extrapolate``: which scale studies differ in, what each tells at it, what is refused."""

import json
import math

import numpy as np
import pytest
import yaml
from builders import (
    changed,
    hand_at_budget,
    hand_budget_point,
    hand_critical,
    make_curve,
    result_of,
)
from toolbox import make_trial

from bstune.core.errors import ConfigError, StudyError
from bstune.core.scaling import beta2_of, shrinkage_of
from bstune.report.extrapolation import Reading
from bstune.report.study_folder import read_study
from bstune.result import (
    AsGood,
    BestSizeAtShare,
    BestSizeLater,
    CriticalAtTarget,
    SizeGrowthOverBudget,
    WorkloadSize,
)
from bstune.study.verbs.extrapolate import extrapolate
from bstune.study.verbs.scales import common_scale, log_error

CURVE = make_curve((4, 64, 1024), (1000, 100, 40), lr=(0.1, 0.4, 1.6), lr_low=(0.05, 0.2, 0.8))
CONFIG = {
    "workload": {
        "name": "mine",
        "data": {"train_examples": None, "root": "/a"},
        "module": {"width": 8, "depth": 2},
        "target": {"metric": "val/error", "value": 0.1},
        "reference": {"lr": 0.1},
    },
    "scaling": {"beta2_half_life": None, "weight_decay_half_life": None},
    "search": {"tune": [], "trials": 4},
}


def result(name, b_crit=64.0, low=0.5, high=2.0, **changes):
    """A study whose critical batch size has ends at these shares of it."""
    critical = hand_critical(
        b_crit, None if low is None else low * b_crit, None if high is None else high * b_crit
    )
    return changed(
        result_of([make_trial(0)]), study=name, curve=CURVE, critical_batch_size=critical, **changes
    )


def size(examples=1000, parameters=100):
    return WorkloadSize(examples=examples, parameters=parameters)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a study's folder below outputs/, with options by dotted key."""
    monkeypatch.chdir(tmp_path)

    def written(told, trials=(), **options):
        folder = tmp_path / "outputs" / told.study
        folder.mkdir(parents=True)
        config = json.loads(json.dumps(CONFIG))
        for key, value in options.items():
            *path, last = key.split("__")
            node = config
            for part in path:
                node = node[part]
            node[last] = value
        (folder / "curve.json").write_text(told.to_json())
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = [trial.to_json() for trial in trials]
        (folder / "trials.jsonl").write_text("\n".join([*lines, ""]))
        return read_study(folder)

    return written


@pytest.fixture
def run(run_verb):
    """Run the verb; return its exit status and what it printed."""
    return lambda *arguments: run_verb("extrapolate", *arguments)


def make_as_good(low_open=False, high_open=False):
    """A range of batch sizes that are as good in seconds: 20 to 80 examples."""
    sizes = {"low": 20, "middle": 32, "high": 80}
    rates = dict.fromkeys(("lr_low", "lr_middle", "lr_high"), 0.1)
    ends = {"is_low_open": low_open, "is_high_open": high_open}
    return AsGood(merit="time", within=0.1, **sizes, **rates, **ends)


# Where over_data writes its studies.
OVER_DATA = ("outputs/n1000", "outputs/n4000", "outputs/n16000")


def over_data(write, sizes=(1000, 4000, 16000), **changes):
    """Studies of so many examples, whose critical batch size is 2 sqrt(examples)."""
    studies = []
    for examples in sizes:
        name = f"n{examples}"
        told = result(name, 2.0 * math.sqrt(examples), size=size(examples), **changes)
        studies.append(write(told, workload__data__train_examples=examples))
    return studies


def scales(found):
    """The scale of each study that a law is fitted to."""
    return [row.scale for row in found.rows]


def test_a_power_over_the_data_is_continued(write):
    # 2 sqrt(n) has the exponent 0.5.
    found = extrapolate(over_data(write), "examples", 256_000.0)
    assert found.meaning == "examples of the training data"
    assert found.beyond == pytest.approx(16.0)
    law = found.laws["critical_batch_size"]
    assert law.exponent.value == pytest.approx(0.5, abs=0.1)
    # 256,000 is 16 times the largest of 16,000.
    expected = 2.0 * math.sqrt(256_000)
    assert law.wanted.low < expected < law.wanted.high
    assert law.wanted.value == pytest.approx(expected, rel=0.3)
    # The curve's rate is 0.1 (B/4)^(1/2), read at each critical batch size.
    rates = [row.readings["lr"].value for row in found.rows]
    expected = 0.05 * np.sqrt(2.0 * np.sqrt([1000, 4000, 16000]))
    assert rates == pytest.approx(expected, rel=1e-6)
    assert found.size_to_use == "critical_batch_size"
    assert found.schedule == ()


def test_the_critical_batch_size_is_used_where_the_best_one_is_of_seconds(write):
    found = extrapolate(over_data(write, as_good=make_as_good()), "examples", 256_000.0)
    assert found.laws["batch_size"].wanted.value == pytest.approx(40.0, rel=0.1)
    assert found.size_to_use == "critical_batch_size"
    assert found.batch_size == found.laws["critical_batch_size"].wanted


def test_the_best_batch_sizes_of_several_devices_are_no_law(write):
    studies = []
    for n in (1000, 4000, 16000):
        device = (f"device {n}",)
        told = result(f"n{n}", size=size(n), as_good=make_as_good(), devices=device)
        studies.append(write(told, workload__data__train_examples=n))
    found = extrapolate(studies, "examples", 256_000.0)
    assert set(found.laws) == {"critical_batch_size", "lr"}
    assert "different devices" in "\n".join(found.notes)


def test_tokens_are_examples_times_the_tokens_of_one(write):
    found = extrapolate(over_data(write, tokens=512), "tokens", 1e9)
    # 1,000 examples of 512 tokens each.
    assert scales(found) == [512e3, 2048e3, 8192e3]


def test_parameters_may_come_of_several_options_of_the_module(write):
    studies = []
    for n in (10, 100, 1000):
        told = result(f"w{n}", 50.0, size=size(parameters=n))
        studies.append(write(told, workload__module__width=n, workload__module__depth=n + 1))
    found = extrapolate(studies, "parameters", 1e4)
    assert scales(found) == [10.0, 100.0, 1000.0]
    assert "workload.module.depth and workload.module.width" in "\n".join(found.notes)
    # An option is a scale, too, where it differs alone.
    with pytest.raises(
        StudyError, match=r"in more than workload\.module\.width: in workload\.module\.depth"
    ):
        extrapolate(studies, "width", 1e4)


def test_an_option_is_a_scale(write):
    studies = [write(result(f"w{n}"), workload__module__width=n) for n in (8, 16, 64)]
    found = extrapolate(studies, "module.width", 128.0)
    assert found.meaning == "workload.module.width"
    assert scales(found) == [8.0, 16.0, 64.0]
    assert found.laws["critical_batch_size"].exponent.value == pytest.approx(0.0, abs=0.05)


def test_an_option_that_came_later_is_no_difference_at_its_default(write):
    older = over_data(write)
    later = write(
        result("later", 500.0, size=size(64000)),
        workload__data__train_examples=64000,
        trainer={"deterministic": False},
    )
    assert len(extrapolate([*older, later], "examples", 256_000.0).rows) == 4
    other = write(
        result("other", 500.0, size=size(64000)),
        workload__data__train_examples=64000,
        trainer={"deterministic": True},
    )
    with pytest.raises(StudyError, match=r"in trainer\.deterministic"):
        extrapolate([*older, other], "examples", 256_000.0)


def test_values_stand_for_what_folders_do_not_tell(write):
    studies = [write(result(f"t{n}", 10.0 * n), workload__name=f"t{n}") for n in (1, 2, 4)]
    found = extrapolate(studies, "examples", 16.0, values={"t1": 1.0, "t2": 2.0, "t4": 4.0})
    assert found.laws["critical_batch_size"].exponent.value == pytest.approx(0.9, abs=0.3)
    for values in ({"t1": 1.0, "t2": 2.0}, {"t1": 1.0, "t2": 2.0, "t3": 3.0}):
        with pytest.raises(ConfigError, match="by its name, of t1, t2 and t4, but got t1"):
            extrapolate(studies, "examples", 16.0, values=values)
    with pytest.raises(StudyError, match="two are alike"):
        extrapolate([*studies, studies[0]], "examples", 16.0, values={"t1": 1.0})
    with pytest.raises(StudyError, match="do not tell the examples of their data"):
        extrapolate(studies, "examples", 16.0)


def easier(target, value):
    return CriticalAtTarget(target=target, passed=9, value=value, low=value / 1.5, high=value * 1.5)


def test_easier_targets_of_one_study_are_scales_and_give_a_schedule(write):
    history = ((10, 0.8), (40, 0.4), (160, 0.2), (640, 0.1))
    trial = make_trial(0, batch_size=10, steps=640, steps_low=160, history=history)
    rows = (easier(0.8, 16.0), easier(0.4, 32.0), easier(0.2, 64.0))
    study = write(result("one", 128.0, low=1 / 1.5, high=1.5, over_target=rows), trials=[trial])
    found = extrapolate([study], "examples", 25_600.0)
    # Ten examples a step.
    assert scales(found) == [100.0, 400.0, 1600.0, 6400.0]
    assert found.laws["critical_batch_size"].exponent.value == pytest.approx(0.5, abs=0.05)
    sizes = [step.batch_size for step in found.schedule]
    assert sizes[:4] == [16, 32, 64, 128]
    assert found.schedule[0].start == 0.0
    # Each batch size is used from where the critical one is as large.
    starts = [step.start for step in found.schedule[1:4]]
    assert starts == pytest.approx([400.0, 1600.0, 6400.0], rel=0.2)


def test_shorter_budgets_of_one_study_are_scales(write):
    def best(share, batch_size, is_at_end=False):
        ends = {"low": batch_size / 1.3, "high": batch_size * 1.3}
        return BestSizeAtShare(share=share, batch_size=batch_size, is_at_end=is_at_end, **ends)

    sizes = (best(1.0, 64.0), best(0.5, 45.0), best(0.25, 32.0), best(0.125, 4.0, True))
    later = BestSizeLater(times=4.0, batch_size=128.0, low=100.0, high=160.0)
    growth = SizeGrowthOverBudget(
        exponent=0.5, low=0.3, high=0.7, level=0.9, best_sizes=sizes, later=later
    )
    at_budget = hand_at_budget(growth=growth, winner=hand_budget_point(64, 0.3))
    told = changed(result("b"), objective="loss", critical_batch_size=None, at_budget=at_budget)
    found = extrapolate([write(told)], "seconds", 240.0)
    # Of 60 s; the best size at an eighth of it is the smallest that was tried.
    assert scales(found) == [15.0, 30.0, 60.0]
    assert found.laws["batch_size"].exponent.value == pytest.approx(0.5, abs=0.1)
    assert found.size_to_use == "batch_size"
    with pytest.raises(StudyError, match="are no studies of a budget of examples"):
        common_scale("examples", [write(changed(told, study="c"))], None)


@pytest.mark.parametrize(
    ("reading", "error"),
    [
        (Reading(10.0), None),
        # The mean of both ends' distances in logarithms.
        (Reading(10.0, 5.0, 20.0), math.log(2.0)),
        (Reading(10.0, 5.0, None), 1.5 * math.log(2.0)),
        (Reading(10.0, None, 40.0), 1.5 * math.log(4.0)),
    ],
)
def test_an_open_end_lies_twice_as_far(reading, error):
    assert log_error(reading, 1.0) == (None if error is None else pytest.approx(error))


@pytest.mark.parametrize(
    ("low_open", "high_open", "expected"),
    [
        (False, False, Reading(40.0, 20.0, 80.0)),
        (True, True, None),
        (True, False, Reading(32.0, None, 80.0)),
        (False, True, Reading(32.0, 20.0, None)),
    ],
)
def test_the_best_batch_size_is_the_middle_of_what_is_as_good(write, low_open, high_open, expected):
    as_good = make_as_good(low_open, high_open)
    told = changed(result_of([make_trial(0, batch_size=32)]), as_good=as_good, size=size())
    (rows,) = common_scale("parameters", [write(told)], None).rows
    assert rows[0].readings.get("batch_size") == expected


def test_a_study_whose_critical_batch_size_is_open_to_both_sides_tells_none(write):
    studies = over_data(write)
    studies.append(
        write(
            result("open", 50.0, None, None, size=size(64000)), workload__data__train_examples=64000
        )
    )
    found = extrapolate(studies, "examples", 1e6)
    assert found.laws["critical_batch_size"].scales == 3
    assert found.laws["critical_batch_size"].largest == 16000


def test_half_lives_that_all_share_stand_in_the_card(write, run):
    for n in (1000, 4000, 16000):
        write(
            result(f"n{n}", 64.0, size=size(n)),
            workload__data__train_examples=n,
            scaling__beta2_half_life=1e5,
            scaling__weight_decay_half_life=1e6,
        )
    status, out, _ = run(*OVER_DATA, "--at", "examples=1e6", "--card", "card.yaml")
    assert status == 0
    with open("card.yaml") as file:
        card = yaml.safe_load(file)
    assert card["batch_size"] == 64
    assert card["beta2"] == pytest.approx(beta2_of(64, 1e5), abs=1e-6)
    shrinkage = shrinkage_of(64, 1e6)
    assert card["weight_decay"] == pytest.approx(shrinkage / card["lr"], rel=1e-3)
    # 1e6/16,000 = 62.5.
    assert "CAUTION   examples = 1,000,000 is 62 times" in out
    assert "megatron_lm" not in card


def test_without_a_law_nothing_is_written(write, run, tmp_path):
    for n in (1000, 4000, 16000):
        told = result(f"n{n}", 50.0, None, None, size=size(n))
        write(told, workload__data__train_examples=n)
    status, out, err = run(*OVER_DATA, "--at", "examples=1e6", "--card", "made")
    assert (status, out) == (2, "")
    assert "no law of the critical batch size: 0 of 3 scales tell it" in err
    assert not (tmp_path / "made").exists()


def test_json_has_the_laws_and_the_rows(write, run):
    over_data(write)
    status, out, _ = run(*OVER_DATA, "--at", "examples=64000", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["wanted"], told["beyond"], len(told["rows"])) == (64000.0, 4.0, 3)
    assert told["laws"]["critical_batch_size"]["exponent"]["value"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n1000", "n4000", "--at", "examples=1e6"), ("at least 3 different examples, but the "
        "studies tell 2")),
        (("n1000", "n4000", "n16000", "--at", "parameters=1e6"), "in workload.data.train_examples"),
        (("n1000", "n1000", "n1000", "--at", "parameters=1"), "the studies tell 1: 100"),
        (("n1000", "n4000", "n16000", "--at", "tokens=1e6"), "have no tokens"),
        (("n1000", "n4000", "n16000", "--at", "seconds=1"), "no studies of a budget of seconds"),
        (("n1000", "n4000", "n16000", "--at", "heads=3"), "but got heads"),
        (("n1000", "n4000", "n16000", "--at", "width=3"), "the studies differ in more than"),
        (("n1000", "n4000", "n16000", "--at", "examples"), "takes SCALE=N"),
        (("n1000", "n4000", "n16000", "--at", "examples=-1"), "takes a positive number, but got -1"),
        (("n1000", "n4000", "n16000", "--at", "examples=nan"), "takes a positive number"),
        (("n1000", "n4000", "n16000", "--at", "examples=1e99"), "takes a positive number"),
        (("n1000", "n4000", "n16000", "--at", "examples=1e-300"), "takes a positive number"),
        (("n1000", "n4000", "gone", "--at", "examples=1"), "there is no outputs/gone"),
        (("n1000", "n4000", "empty", "--at", "examples=1"), ("left out: outputs/empty has no "
        "curve.json")),
        (("empty", "--at", "examples=1"), "there is no study to extrapolate"),
        (("n1000", "n4000", "bare", "--at", "examples=1"), "config.yaml is missing"),
        (("n1000", "n4000", "n16000", "other", "--at", "examples=1"), "in workload.module.width; leave out"),
        (("n1000", "empty", "--values", "1,2", "--at", "examples=1"), "--values takes STUDY=N,STUDY=N"),
        (("n1000", "--values", "n1000=1,n1000=2", "--at", "examples=1"), "names a study twice"),
        (("n1000", "--values", "n1000=x", "--at", "examples=1"), ("n1000=N takes a positive "
        "number, but got x")),
    ],
)  # fmt: skip
def test_bad_input_ends_in_a_line_with_nothing_written(write, run, tmp_path, arguments, message):
    over_data(write)
    write(result("other", size=size(64000)), workload__module__width=9)
    bare = write(result("bare", size=size(99)))
    (bare.files.path / "config.yaml").unlink()
    (tmp_path / "outputs" / "empty").mkdir()
    folders = ("n1000", "n4000", "n16000", "other", "bare", "empty", "gone")
    given = []
    for argument in arguments:
        given.append(f"outputs/{argument}" if argument in folders else argument)
    status, _, err = run(*given, "--card", "card.yaml")
    assert (status, message in err) == (2, True), err
    assert not (tmp_path / "card.yaml").exists()
