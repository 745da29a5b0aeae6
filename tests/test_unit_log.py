"""What a sweep has measured is kept: nothing is measured twice, and a file of something else is not mixed in."""

import json

import pytest
from toolbox import FakeTime, entries
from unit_logs import StoppedError, headers_in, log_at, printed, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError, StudyError
from bstune.sweeps.unit_log import (
    UnfinishedError,
    UnitPlan,
    UnitProgress,
    check_only,
    is_chosen,
    read_units,
)

NAMES = ("a/0", "a/1", "b/0", "b/1")


def plan_of(names=NAMES, **changes):
    return UnitPlan(**{"names": names, "only": (), "noun": "trial", "read": float, **changes})


def complete(log, measure, plan=None, device="cpu", may_change=()):
    """Return the values of all units of a plan."""
    plan = plan or plan_of()
    log.begin(device, may_change)
    values = log.measure(plan, measure)
    log.check_finished(plan.names, values)
    return values


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "runs.jsonl"


def number_of(name):
    return float(NAMES.index(name))


EVERY = {name: number_of(name) for name in NAMES}


@pytest.mark.parametrize("counts", [(0, 1), (1, 1), (3, 0), (2, 1)])
def test_a_sweep_that_is_stopped_twice_measures_each_unit_once(path, counts):
    for count in counts:
        with pytest.raises(StoppedError):
            complete(log_at(path), stopping_after(count, number_of))
    asked = []
    values = complete(log_at(path), lambda name: asked.append(name) or number_of(name))
    assert (values, list(values)) == (EVERY, list(NAMES))
    assert asked == list(NAMES[sum(counts) :])
    assert units_in(path) == list(NAMES)
    assert complete(log_at(path), None) == EVERY
    assert len(headers_in(path)) == 1


def test_what_is_not_kept_is_the_same():
    log = unkept()
    assert complete(log, number_of) == EVERY
    # Within a command it need not be measured twice either.
    assert log.measure(plan_of(), None) == EVERY


def test_before_the_first_unit_ends_there_is_no_file(path):
    with pytest.raises(StoppedError):
        complete(log_at(path), stopping_after(0, number_of))
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_line_that_was_cut_short_is_dropped_and_said(path, cut):
    complete(log_at(path), number_of)
    whole = path.read_text()
    path.write_text(whole[:-cut])
    console, text = printed()
    asked = []
    values = complete(log_at(path, console), lambda name: asked.append(name) or number_of(name))
    assert (values, asked) == (EVERY, ["b/1"])
    assert "was cut short and is dropped" in text()
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "content",
    [
        # As the record of searches has it.
        '{"key": {"search": "zeus"}, "run": {}}\n',
        "no JSON\n",
        "[1]\n",
        # The header of a later format.
        '{"format": 2, "sweep": "made", "settings": {}, "device": null, "versions": {}, "commit": null}\n',
        # A record without a header.
        '{"unit": "a/0", "inputs": null, "seconds": 1.0, "value": 0.0}\n',
    ],
)
def test_records_of_another_format_are_set_aside_and_measured_again(path, content):
    path.parent.mkdir()
    for number in (1, 2):
        path.write_text(content)
        console, text = printed()
        assert complete(log_at(path, console), number_of) == EVERY
        assert f"it is runs.other-{number}.jsonl now" in text()
        assert path.with_name(f"runs.other-{number}.jsonl").read_text() == content
    assert units_in(path) == list(NAMES)


def test_a_record_that_cannot_be_read_is_measured_again(path):
    complete(log_at(path), number_of)
    path.write_text(path.read_text().replace('"value": 1.0', '"value": "x"'))
    asked = []
    values = complete(log_at(path), lambda name: asked.append(name) or number_of(name))
    assert (values, asked) == (EVERY, ["a/1"])
    assert complete(log_at(path), None) == EVERY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 8}, "sweep.experiment.steps: was 7, now 8"),
        ({"rate": 0.1}, "sweep.experiment.rate: was None, now 0.1"),
        ({"sweep": "another"}, "is of the sweep made: choose another folder with sweep.output=DIR"),
        ({"device": "NVIDIA H100"}, "device: was 'cpu', now 'NVIDIA H100'"),
    ],
)
def test_a_sweep_of_other_options_is_refused_and_nothing_is_written(path, changes, message):
    options = {"steps": 7, "seeds": [0], "only": []}
    complete(log_at(path, **options), number_of, may_change=("seeds",))
    before = path.read_text()[:-1]
    # One that would be mended if it were this sweep's.
    path.write_text(before)
    changes = dict(changes)
    device = changes.pop("device", "cpu")
    with pytest.raises(StudyError) as caught:
        complete(
            log_at(path, **{**options, **changes}), number_of, device=device, may_change=("seeds",)
        )
    assert message in str(caught.value)
    assert (path.read_text(), entries(path.parent)) == (before, ["runs.jsonl"])
    # What may change, and the choice of units.
    others = {"seeds": [0, 1], "only": ["a"]}
    complete(log_at(path, **{**options, **others}), number_of, may_change=("seeds",))


def test_the_header_has_what_the_units_were_measured_with(path):
    plan = plan_of(NAMES[:2])
    complete(log_at(path, steps=7, loader={"rounds": 3}), number_of, plan)
    console, text = printed()
    complete(log_at(path, console, commit="4567def", steps=7, loader={"rounds": 3}), number_of)
    assert "goes on with other versions, or at another commit" in text()
    first, second = headers_in(path)
    assert (first["commit"], second["commit"]) == ("0123abc", "4567def")
    assert {**first, "commit": None} == {**second, "commit": None}
    assert (first["device"], first["versions"]) == ("cpu", {"bstune": "1"})
    assert first["settings"] == {
        "sweep.experiment.steps": 7,
        "sweep.experiment.loader": {"rounds": 3},
    }


def test_parameters_within_others_may_change(path):
    log = log_at(path)
    log._settings = {"sweep.experiment.loader.rounds": 3, "sweep.experiment.loader.steps": 2}
    complete(log, number_of, may_change=("loader.rounds",))
    assert headers_in(path)[0]["settings"] == {"sweep.experiment.loader.steps": 2}


def test_other_inputs_are_measured_again(path):
    complete(log_at(path), number_of, plan_of(inputs={"a/0": {"digest": "x"}}))
    asked = []
    complete(
        log_at(path),
        lambda name: asked.append(name) or number_of(name),
        plan_of(inputs={"a/0": {"digest": "y"}}),
    )
    assert asked == ["a/0"]


def test_what_is_dropped_is_measured_again(path):
    complete(log_at(path), number_of)
    log = log_at(path)
    log.begin("cpu", ())
    log.drop(lambda record: record.unit.startswith("b/"))
    assert units_in(path) == ["a/0", "a/1"]
    assert log.recorded(plan_of()) == {"a/0": 0.0, "a/1": 1.0}


def test_a_choice_measures_those_units_alone(path):
    with pytest.raises(UnfinishedError, match=r"1 of 4 units are measured in .*without"):
        complete(log_at(path), number_of, plan_of(only=["b/1"]))
    with pytest.raises(UnfinishedError, match="3 of 4"):
        complete(log_at(path), number_of, plan_of(only=["a"]))
    assert units_in(path) == ["b/1", "a/0", "a/1"]
    values = complete(log_at(path), number_of, plan_of(only=["b"]))
    # In the plan's order, whatever the order in which they were measured.
    assert list(values.items()) == list(EVERY.items())


def test_a_unit_that_is_not_there_is_refused_with_those_that_are(path):
    log = log_at(path)
    log.begin("cpu", ())
    with pytest.raises(ConfigError) as caught:
        log.measure(plan_of(only=["a", "c", "b/7"]), number_of)
    assert "names c; b/7, which is no unit of this sweep; units: a/0; a/1; b/0; b/1" in str(
        caught.value
    )
    assert not path.exists()
    many = [f"{letter}/{number}" for letter in "xy" for number in range(50)]
    # Of many units the groups are named.
    with pytest.raises(ConfigError, match=r"units: x; y$"):
        check_only(["z"], many)


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ([], NAMES),
        (["a"], ("a/0", "a/1")),
        (["a/1", "b/0"], ("a/1", "b/0")),
        (["a/"], ()),
        (["A"], ()),
    ],
)
def test_a_choice_is_a_name_or_what_stands_before_a_slash(only, chosen):
    assert tuple(name for name in NAMES if is_chosen(name, only)) == chosen


def test_units_may_end_in_any_order(path):
    log = log_at(path)
    log.begin(None, ())
    values = log.measure_as_they_end(
        plan_of(), lambda names: [(name, number_of(name)) for name in reversed(names)]
    )
    assert list(values.items()) == list(EVERY.items())
    assert units_in(path) == list(reversed(NAMES))


@pytest.mark.parametrize(
    ("seconds", "work", "left", "expected"),
    [
        ({}, {}, ["a"], None),
        ({"a": 2.0, "b": 4.0}, {}, ["c", "d", "e"], 9.0),
        # Five times the work of the one that took 2 s.
        ({"a": 2.0}, {"a": 1.0, "b": 5.0}, ["b"], 10.0),
        # A unit whose work is not given counts as 1.
        ({"a": 2.0}, {"a": 4.0}, ["b", "c"], 1.0),
        # Units that are not alike: the seconds of one tell nothing of another's.
        ({"a": 2.0}, None, ["b", "c"], None),
    ],
)
def test_the_time_to_go_is_in_proportion_to_the_work(seconds, work, left, expected):
    console, _ = printed()
    progress = UnitProgress(plan_of(work=work), seconds, left, console)
    assert progress.seconds_to_go() == expected


def test_lines_say_how_far_it_is_and_what_is_to_go(path):
    time = FakeTime()

    def slowly(name):
        time.sleep(60.0)
        return number_of(name)

    console, text = printed()
    plan = plan_of(shown="accuracy {:.1f}".format)
    with pytest.raises(StoppedError):
        complete(log_at(path, console, now=time), stopping_after(2, slowly), plan)
    assert text().splitlines() == [
        "4 of 4 units to measure",
        "trial 1 of 4, a/0: accuracy 0.0; about 3.00 min to go",
        "trial 2 of 4, a/1: accuracy 1.0; about 2.00 min to go",
    ]
    console, text = printed()
    complete(log_at(path, console, now=time), slowly, plan)
    assert text().splitlines() == [
        "2 of 4 units to measure; about 2.00 min to go",
        "trial 3 of 4, b/0: accuracy 2.0; about 60.0 s to go",
        "trial 4 of 4, b/1: accuracy 3.0",
    ]
    assert [record.seconds for record in read_units(path).records.values()] == [60.0] * 4


@pytest.mark.parametrize(("seconds", "lines"), [(0.5, 2), (6.0, 3), (11.0, 4)])
def test_short_units_have_few_lines(path, seconds, lines):
    """The first and the last, and one every ten seconds."""
    time = FakeTime()
    console, text = printed()
    complete(
        log_at(path, console, now=time),
        lambda name: time.sleep(seconds) or number_of(name),
    )
    assert sum(line.startswith("trial ") for line in text().splitlines()) == lines


def test_values_are_the_same_measured_and_recorded(path):
    plan = plan_of(["a"], read=lambda value: value)
    first = complete(log_at(path), lambda name: {1: (0.1 + 0.2, float("nan"))}, plan)
    assert first == complete(log_at(path), None, plan) == {"a": {"1": [0.1 + 0.2, None]}}
    assert json.loads(path.read_text().splitlines()[1])["value"] == {"1": [0.1 + 0.2, None]}
