import json

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from bstune.config import check_settings
from bstune.core.errors import ConfigError


def composed(*overrides):
    with initialize_config_module("bstune.conf", version_base="1.3"):
        return compose("config", list(overrides))


@pytest.mark.parametrize(
    "overrides",
    [[f"+workload={workload}"] for workload in ("digits", "fashion_cnn", "mobilenet_cifar", "resnet_cifar")]
    + [["+workload=digits", f"scaling={rule}"] for rule in ("none", "sqrt", "linear", "saturating", "surge")]
    + [["+workload=digits", f"sampler={sampler}"] for sampler in ("frontier", "random", "tpe", "gp", "qmc")],
)
def test_what_ships_passes_and_stays_as_it_is(overrides):
    config = composed(*overrides)
    checked = check_settings(config)
    assert OmegaConf.to_container(checked, resolve=True) == OmegaConf.to_container(config, resolve=True)


def table_of(folder):
    row = {"seed": 0, "steps": [10, 30], "metric": [0.5, 0.1], "seconds_per_step": 0.01}
    rows = [row | {"batch_size": size, "lr": lr} for size in (8, 32) for lr in (0.1, 0.4)]
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"workload.table={path}"


def test_what_a_replayed_workload_leaves_open_is_its_tables(tmp_path):
    checked = check_settings(composed("+workload=replay", table_of(tmp_path), "workload.target.value=0.1"))
    assert (checked.search.batch_size.low, checked.search.batch_size.high) == (8, 32)
    assert (checked.scaling.batch_size, checked.scaling.lr) == (pytest.approx(16), pytest.approx(0.2))
    assert (checked.budget.steps, checked.budget.examples) == (30, 1)  # the smaller batch's runs took no more steps
    assert (checked.workload.target.metric, checked.workload.target.mode) == ("val/error", "min")


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ("scaling.lr=3", "scaling.lr", 3.0),
        ("workload.reference.lr=3", "scaling.lr", 3.0),
        ("workload.reference.batch_size=8", "scaling.batch_size", 8.0),
        ("search.batch_size.high=16", "search.batch_size.high", 16),
        ("budget.steps=7", "budget.steps", 7),
        ("workload.budget.examples=7", "budget.examples", 7),
    ],
)
def test_what_is_given_stays(tmp_path, override, option, value):
    checked = check_settings(composed("+workload=replay", table_of(tmp_path), "workload.target.value=0.1", override))
    assert OmegaConf.select(checked, option) == value


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["+workload=digits", "+workload.table=t.jsonl"],
            "a workload is trained (workload.data and workload.module) or",
        ),
        (["+workload=replay", "+workload.module={}"], "a workload is trained (workload.data and workload.module) or"),
        (
            ["+workload=replay", "+workload.nope=1"],
            "unknown option workload.nope: Key 'nope' not in 'ReplayedSettings'",
        ),
        (["+workload=replay", "workload.table=[1]"], "workload.table: Cannot convert 'ListConfig' to string"),
        (
            ["+workload=replay", "workload.table=null"],
            "workload.table: Incompatible value 'None' for field of type 'str'",
        ),
        (["+workload=replay", "workload.budget.steps=x"], "workload.budget.steps: Value 'x' of type 'str'"),
    ],
)
def test_refuses_what_is_no_replayed_workload(overrides, text):
    with pytest.raises(ConfigError) as error:
        check_settings(composed(*overrides))
    assert str(error.value).startswith(text)


def test_references_stay_references():
    checked = check_settings(composed("+workload=digits"))
    checked.workload.budget.steps = 7
    assert checked.budget.steps == 7


def test_whole_numbers_become_floats_where_the_type_says_so():
    checked = check_settings(composed("+workload=digits", "search.seconds=5", "workload.reference.batch_size=64"))
    assert isinstance(checked.search.seconds, float)
    assert isinstance(checked.scaling.batch_size, float)


@pytest.mark.parametrize(
    "override",
    [
        "search.seconds=null",
        "search.precision=null",
        "search.confirmations=0",
        "protocol.micro_batch_size=null",
        "protocol.noise_scale_every=null",
        "trial.lr=0.5",
        "~workload.target.bounds",
        "schedule=one_cycle",
        "+trainer.gradient_clip_val=1.0",  # anything that a Trainer takes
        "+sampler.seed=3",  # anything that a sampler takes
        "+workload.module.anything=1",
    ],
)
def test_allows(override):
    check_settings(composed("+workload=digits", override))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("search.trials=many", "search.trials: Value 'many' of type 'str' could not be converted to Integer"),
        ("search.finalists=two", "search.finalists: Value 'two' of type 'str' could not be converted to Integer"),
        ("search.precision=sharp", "search.precision: Value 'sharp' of type 'str' could not be converted to Float"),
        ("scaling.octaves=null", "scaling.octaves: Incompatible value 'None' for field of type 'float'"),
        ("budget.steps=1.5", "budget.steps: Value '1.5' of type 'float' could not be converted to Integer"),
        ("trial.batch_size=3.5", "trial.batch_size: Value '3.5' of type 'float' could not be converted to Integer"),
        (
            "workload.target.value=low",
            "workload.target.value: Value 'low' of type 'str' could not be converted to Float",
        ),
        (
            "budget.steps=${study}",
            "budget.steps: While dereferencing interpolation '${study}': "
            "Value 'digits' of type 'str' could not be converted to Integer",
        ),
        ("seed=null", "seed: Incompatible value 'None' for field of type 'int'"),
        ("debug=maybe", "debug: Value 'maybe' is not a valid bool (type str)"),
        ("trainer=3", "trainer: Cannot assign int to Dict[str, Any]"),
        (
            "+search.trails=3",
            "unknown option search.trails: Key 'trails' not in 'SearchSettings'; --help lists the options",
        ),
        ("+nothing=1", "unknown option nothing: Key 'nothing' not in 'Settings'; --help lists the options"),
        (
            "+workload.target.goal=1",
            "unknown option workload.target.goal: Key 'goal' not in 'TargetSettings'; --help lists the options",
        ),
        ("storage=???", "the configuration gives no value for storage"),
        ("~workload.data", "the configuration gives no value for workload.data"),
        ("~protocol.near", "the configuration gives no value for protocol.near"),
    ],
)
def test_refuses(override, text):
    with pytest.raises(ConfigError) as error:
        check_settings(composed("+workload=digits", override))
    assert str(error.value) == text


def test_names_all_values_that_are_missing():
    config = composed("+workload=digits", "storage=???", "mlflow.uri=???")
    with pytest.raises(ConfigError, match=r"gives no value for mlflow\.uri, storage"):
        check_settings(config)


def test_refuses_a_reference_to_nothing_inside_a_text():
    with pytest.raises(ConfigError, match=r"Interpolation key 'no\.such\.key' not found"):
        check_settings(composed("+workload=digits", "output=outputs/${no.such.key}/x"))


@pytest.mark.parametrize(
    "option",
    ["output", "study", "precision", "storage", "data.root", "mlflow.uri", "sampler._target_", "workload.module.lr"],
)
def test_refuses_a_reference_to_nothing(option):
    with pytest.raises(ConfigError, match=r"Interpolation key 'no\.such\.key' not found"):
        check_settings(composed("+workload=digits", f"{option}=${{no.such.key}}"))


def test_refuses_an_environment_variable_that_is_not_set(monkeypatch):
    monkeypatch.delenv("BSTUNE_TEST_NOT_SET", raising=False)
    with pytest.raises(ConfigError, match="BSTUNE_TEST_NOT_SET"):
        check_settings(composed("+workload=digits", "data.root=${oc.env:BSTUNE_TEST_NOT_SET}"))
