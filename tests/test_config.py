"""The options: what each may be, what a mistake leads to, how a config is composed.

And the tables of conf/README.md.
"""

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from bstune import conf
from bstune.config import compose, compose_given, with_settings
from bstune.core.errors import ConfigError, TableError
from bstune.core.scaling import RULES
from bstune.core.search_space import Tunable
from bstune.hydra_versions import VERSION_ARGUMENTS
from bstune.options import (
    ReplayedOptions,
    TrainedOptions,
    flatten,
    option_at,
    overrides,
    with_option,
    with_tuned,
)
from bstune.recipe import TrialValues
from bstune.trial.backend import make_space
from bstune.trial.replay import options_from_table

CONF = Path(conf.__file__).parent
# Every workload, sampler, rule and schedule that ships; those left out are the defaults.
WORKLOADS = sorted(path.stem for path in (CONF / "workload").glob("*.yaml"))
SAMPLERS = ("tpe", "gp", "qmc", "random", "each_batch_size")
SCHEDULES = ("constant", "warmup", "one_cycle", "triangle")
README = CONF / "README.md"
MOMENTUM = "workload.tunable.momentum"
TARGET = "workload.target: the target val/loss <="
MU = f"{MOMENTUM}.key=workload.module.optimizer.mu"


def digits(*arguments):
    return compose(["workload=digits", *arguments]).options


@cache
def option_table():
    return runpy.run_path(str(Path(__file__).parents[1] / ".ci/option_table.py"))


def mistakes(*arguments):
    with pytest.raises(ConfigError) as error:
        compose(arguments, options_from_table)
    return str(error.value).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    # Algorithms with numbers to tune are in test_choices.py.
    [[f"+workload={name}"] for name in WORKLOADS if name != "replay"]
    + [["workload=digits", f"sampler={name}"] for name in SAMPLERS]
    + [["workload=digits", f"scaling={name}"] for name in RULES]
    + [["workload=resnet_cifar", f"schedule={name}"] for name in SCHEDULES],
)
def test_what_ships_is_valid_and_stays_as_it_is(arguments, monkeypatch):
    # A ~ would be expanded.
    monkeypatch.setenv("BSTUNE_DATA", "data")
    composed = compose(arguments)
    with initialize_config_module("bstune.conf", **VERSION_ARGUMENTS):
        # Hydra's own composition of the same arguments is the reference.
        before = hydra_compose("config", [argument.lstrip("+") for argument in arguments])
    raw = OmegaConf.to_container(before, resolve=True)
    schedule = raw.pop("schedule", None)
    # The group schedule fills two arguments of the module.
    if schedule is not None:
        raw["workload"]["module"] |= {"schedule": schedule["rate"], "average": schedule["average"]}
    # What builds a trial has every value as it was written, checked.
    values = OmegaConf.create(dict(composed.recipe.values))
    resolved = OmegaConf.to_container(values, resolve=True)
    for name, value in raw.items():
        if name != "workload":
            assert resolved[name] == value
    tunable = resolved["workload"].pop("tunable")
    stated = raw["workload"].pop("tunable", {})
    # Flags that the YAML leaves out are off, and the user's own value is the one at the key.
    assert tunable == {
        name: {"log": False, "integer": False, "complement": False, "own": None, **one}
        for name, one in stated.items()
    }
    assert resolved["workload"] == raw["workload"]
    # The options have them too, but for references within nodes.
    assert isinstance(composed.options, TrainedOptions)
    for name, value in flatten(raw).items():
        # Data and module refer to values of a trial, which are resolved later.
        if not name.startswith(("workload.data", "workload.module")):
            assert option_at(composed.options, name) == value, name


def test_allows():
    digits(
        "search.seconds=null",
        "search.precision=null",
        "search.replicates=0",
        "device=cuda:3",
        # YAML reads a number here.
        "study=7",
    )
    # Large numbers within their ranges, and bounds that are left out.
    digits("search.seconds=1e9", "~workload.target.bounds")
    digits(
        "schedule=null",
        "study=a/b",
        # The largest seed of torch and NumPy: 2^32 - 1.
        "trial.seed=4294967295",
        "mlflow.uri=''",
        "scaling.lr_octaves=100",
    )
    digits("protocol.micro_batch_size=null", "protocol.noise_scale_every=null", "~workload.tunable")
    # These are for what the targets take.
    digits("+trainer.gradient_clip_val=1.0", "+sampler.seed=3", "+workload.module.anything=1")


@pytest.mark.parametrize(
    ("must", "overrides"),
    {
        # true would be 1.
        "be a number": "search.trials=true",
        "be a valid number": "scaling.lr_octaves=null",
        "be a valid integer": "search.trials=many budget.steps=1.5 trial.batch_size=3.5 seed=null",
        "be a valid boolean": "debug=maybe",
        "be a valid list": "search.tune=momentum",
        "be a valid dictionary": "trainer=3",
        "be a finite number": "prior.exponent_sigma=inf mlflow.seconds=nan "
        "search.wall_seconds=nan mlflow.study_seconds=inf protocol.divergence=inf "
        "trial.lr=nan search.seconds=inf",
        "be at least 0": "search.replicates=-1 search.workers=-1 trial.seed=-1 "
        "protocol.warmup_steps=-1 "
        "hardware.memory.relative.cpu=-1 trial.total_steps=-1",
        "be at least 1": "search.trials=0 search.candidates=0 search.batch_size.multiple=0 "
        "workload.reference.batch_size=0 "
        "budget.examples=0 protocol.micro_batch_size=0 protocol.noise_scale_every=0 "
        "hardware.memory.limit=0",
        "be at least 2": "hardware.step_time.rungs=1",
        # A denormal number is over 0, and its logarithm is of no use.
        "be at least 0.01": "prior.level_sigma=1e-320 prior.exponent_sigma=0",
        "be at least 0.1": "search.lease_seconds=0",
        "be at least 1e-06": "protocol.evaluation_share=1e-320",
        "be at least 1e-15": "trial.lr=1e-320",
        # A lower bound that stands for 0 is not named where 0 or less was meant.
        "be greater than 0": "scaling.lr=-1 scaling.noise_scale=0 protocol.divergence=-1 "
        "protocol.evaluation_cost=0 search.seconds=0 protocol.trial_seconds=0 "
        "hardware.memory.free_share=0",
        "be at least 1.001": "hardware.scale_out.candidate_ratio=1",
        "be at most 1": "search.stratified=1.5 protocol.evaluation_share=2",
        "be at most 10": "mlflow.retries=11",
        "be at most 30": "scaling.lr_octaves_sigma=1e300",
        "be at most 100": "scaling.lr_octaves=101 prior.level_sigma=1e300",
        "be at most 1000": "search.workers=1001 search.replicates=1001 "
        "hardware.step_time.repeats=1001",
        # Past the 32-bit integers.
        "be at most 1000000": "search.trials=2147483648 mlflow.request_seconds=2147483648",
        "be at most 4294967295": "seed=4294967296 trial.seed=9223372036854775808",
        "be at most 1000000000": "hardware.seconds=1e300",
        "be at most 1e+15": "trial.lr=1e300 budget.steps=1000000000000001",
        "be greater than 1": "search.precision=0.5 protocol.evaluation_ratio=1 "
        "protocol.close_to_target=1",
        "be less than 1": "hardware.memory.relative.cpu=1",
        "have at least 1 item": "hardware.scale_out.devices=[]",
        "be 'min' or 'max'": "workload.target.mode=down",
        "be 'time', 'steps', 'both', 'curve' or 'loss'": "search.objective=speed",
        "be 'auto', '32-true', 'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'": "precision=8",
        "be 'default', 'reduce-overhead', 'max-autotune' or 'max-autotune-no-cudagraphs'": "compile=fast",
    }.items(),
)
def test_types_and_bounds(must, overrides):
    values = dict(override.split("=") for override in overrides.split())
    received = {
        # Words are quoted in the message, as they may be empty or have blanks.
        word: f"'{word}'"
        for word in ("many", "maybe", "momentum", "down", "speed", "fast")
    }
    received |= {"true": "True", "1e300": "1e+300", "1e10": "10000000000.0"}
    lines = [
        f"{name} must {must}, but got {received.get(value, value)}"
        for name, value in values.items()
    ]
    assert sorted(mistakes("workload=digits", *overrides.split())) == sorted(lines)


# Whole classes of what is no finite number in range.
@pytest.mark.parametrize("value", ["nan", "inf", "1e16", "low", "null", "[1]"])
def test_a_target_is_a_number_or_auto(value):
    (line,) = mistakes("workload=digits", f"workload.target.value={value}")
    assert line.startswith("workload.target.value: must be a number")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # What a reference resolves to is checked, too.
        ("budget.steps=${study}", "budget.steps must be a valid integer, but got 'digits'"),
        # once, not as scaling.lr
        ("workload.reference.lr=0", "workload.reference.lr must be greater than 0, but got 0"),
        # An element of a list is named by its place.
        (
            "hardware.ceilings.matrix_sizes=[9e9]",
            "hardware.ceilings.matrix_sizes.0 must be at most 32768, but got 90",
        ),
        (
            # Numbers of a sampler have types and ranges, too.
            "sampler.policy.particles=2147483648",
            "sampler.policy.particles must be at most 10000, but got 2147483648",
        ),
        (
            "sampler=tpe sampler.n_startup_trials=x",
            "sampler.n_startup_trials must be a valid integer, but got 'x'",
        ),
        ("sampler.sigma=nan", "sampler.sigma must be a finite number, but got nan"),
        ("workload.batch_size.low=1e300", "workload.batch_size.low is too large, but got 1e+300"),
        # A range must end.
        (f"{MOMENTUM}.high=inf", f"{MOMENTUM}.high must be a finite number, but got inf"),
        ("study=''", "study must not be empty, but got ''"),
        ("output=''", "output must not be empty, but got ''"),
        ("storage=''", "storage must not be empty, but got ''"),
        # No system call takes a zero byte in a path.
        ("data.root='a\0b'", "data.root must not contain control characters, but got 'a\\x00b'"),
        (
            # A study's name is a folder below outputs.
            "study=/a",
            (
                "study must be a name, or names with / between, of at most 200 bytes each, but got "
                "'/a'"
            ),
        ),
        (
            "study=a/../../b",
            (
                "study must be a name, or names with / between, of at most 200 bytes each, but got "
                "'a/.."
            ),
        ),
        ("study=.", "study must be a name, or names with"),
        (f"study={'x' * 201}", "study must be a name, or names with"),
        ("workload.name=../x study=a", "workload.name must be a name"),
        (
            "output=~no-such-user/x",
            "output: there is no home directory ~no-such-user, but got '~no-such-user/x'",
        ),
        # The bracket of an IPv6 address is never closed.
        (
            "mlflow.uri='http://[::1'",
            "mlflow.uri must be a URL: Invalid IPv6 URL, but got 'http://[::1'",
        ),
        # A choice is a file's name.
        ("scaling=[nan]", "scaling must be the name of a choice, but got scaling=[nan]"),
        (f"sampler={'x' * 300}", "sampler must be the name of a choice, but got sampler=xxx"),
        ("sampler=null", "sampler must be the name of a choice, but got sampler=null"),
        (
            "hardware.scale_out.devices=[0]",
            "hardware.scale_out.devices.0 must be at least 1, but got 0",
        ),
        (
            "search.batch_size.low=9999",
            "search.batch_size: low must be at most high, but got low=9999 and high=1200",
        ),
        # once, not as search.batch_size
        (
            "workload.batch_size.low=9999",
            "workload.batch_size: low must be at most high, but got low=9999 and high=1200",
        ),
        # A value in the place of a section is one mistake, though search.batch_size and scaling copy
        # options of the section.
        (
            "workload.batch_size=64",
            "workload.batch_size has options of its own (low, high): give each by itself, as "
            "workload.batch_size.low=..., but got 64",
        ),
        ("workload.reference=null", "workload.reference has options of its own (batch_size, lr):"),
        ("workload.budget=100", "workload.budget has options of its own (steps, examples, "),
        (
            "trial.batch_size=64",
            "trial: to train one trial, give both trial.batch_size and trial.lr, but got",
        ),
        # A loss below zero is out of its bounds.
        (
            "workload.target.value=-0.1",
            f"{TARGET} -0.1 cannot be reached: val/loss lies in [0.0, inf]",
        ),
        # The target would be no target.
        (
            "workload.target.bounds=[0,0.1]",
            f"{TARGET} 0.1 is met by every value in [0.0, 0.1]: check mode and value",
        ),
        (
            "workload.target.bounds=[1,0]",
            "workload.target: bounds must be two increasing numbers, but got [1.0, 0.0]",
        ),
        (
            "search.tune=[dropout]",
            "search.tune names 'dropout', but the workload digits lists momentum, average",
        ),
        (
            # The horizon is the search's own affair.
            "search.tune=[horizon]",
            (
                "search.tune names 'horizon', but the workload digits lists momentum, average, "
                "weight_decay, "
                "label_smoothing under workload.tunable; the search chooses each trial's horizon "
                "without it"
            ),
        ),
        ("search.tune=[momentum,momentum]", "search.tune names 'momentum' twice"),
        (f"{MOMENTUM}.low=0.99", f"{MOMENTUM}: low must be less than high, but got low=0.99"),
        (f"{MOMENTUM}.log=true", f"{MOMENTUM}: low must be over 0 on a log scale, but got low=0"),
        # These parts of a config may be tuned, and no others.
        (
            f"{MOMENTUM}.key=trial.lr",
            f"{MOMENTUM}: key must lie below workload.module or budget, or be scaling.beta2_",
        ),
        (f"{MOMENTUM}.integer=true", f"{MOMENTUM}: low and high of a whole number must be whole"),
        (
            "+workload.tunable.lr={key:workload.module.lr,low:0,high:1}",
            "workload.tunable: a study has lr already",
        ),
        # The key has to exist.
        (
            f"search.tune=[momentum] {MU}",
            f"search: {MU} must name a number of the config, or null, but got nothing",
        ),
        # A trial that cannot be ended cannot have a limit.
        (
            "search.workers=0 protocol.trial_seconds=9",
            "search.workers=0 runs trials in this process, which cannot end",
        ),
        # Two trials share the machine, so their own timings say too little.
        (
            "search.workers=2 hardware.enabled=false",
            "search.workers=2: seconds per step are the survey's, measured",
        ),
        # Whether it is changed or added, the nearest option is named.
        (
            "search.trails=3",
            "unknown option search.trails: did you mean search.trials?",
        ),
        (
            "+search.trails=3",
            "unknown option search.trails: did you mean search.trials?",
        ),
        # What is similar in the same section is meant, not what the section's name makes similar.
        ("+search.wall_second=3", "unknown option search.wall_second: did you mean search.wall_se"),
        ("+workload.trails=3", "unknown option workload.trails: did you mean workload.trials?"),
        (
            "+workload.max_steps=3",
            "unknown option workload.max_steps; workload has name, precision, ",
        ),
        (
            "+workload.budget.step=3",
            "unknown option workload.budget.step: did you mean workload.bu",
        ),
        # A mapping is taken apart: what it has too much is named.
        ("search={trails:3}", "unknown option search.trails: did you mean search.trials?"),
        (
            "workload.batch_size={lowe:16}",
            "unknown option workload.batch_size.lowe: did you mean workload.batch_size.low?",
        ),
        # An object that Hydra builds may take an argument that its config does not have.
        (
            "workload.module.optimizer={momentum:0.3,nesterov:true}",
            "unknown option workload.module.optimizer.nesterov; to give workload.module.optimizer "
            "one more argument, write +workload.module.optimizer.nesterov=VALUE",
        ),
        (
            "workload.module.optimizer.nesterov=true",
            "unknown option workload.module.optimizer.nesterov; to give ",
        ),
        (
            "workload.module.optimizer.momentun=0.3",
            "unknown option workload.module.optimizer.momentun: did you mean workload.module.opti",
        ),
        # An option of the study in a workload's file.
        ("+workload.device=cpu", "workload.device: device is an option of the study, not of its"),
        ("+workload.search.trials=3", "workload.search: search is an option of the study, not of"),
        (
            "+nothing.like=1",
            "unknown option nothing; bstune --cfg job +workload=NAME lists the options",
        ),
        # ??? is OmegaConf's mark of a value that is missing.
        ("storage=???", "storage is missing: give it a value, storage=..."),
        (
            "~workload.precision",
            "workload.precision is missing: give it one of auto, 32-true, bf16-mixed, 16-mixed,",
        ),
        (
            "~workload.target.mode",
            "workload.target.mode is missing: give it one of min, max, as workload.target.mode=min",
        ),
        ("~workload.data", "workload.data is missing: give it a value, workload.data=..."),
        # Loaders are refused by their names, before anything is imported.
        (
            "workload.data._target_=torch.utils.data.DataLoader",
            "workload.data: must build a LightningDataModule, but builds torch.utils.data.DataLoad",
        ),
        (
            "workload.data._target_=builtins.tuple",
            "workload.data: must build a LightningDataModule, but builds builtins.tuple: let ",
        ),
        (
            "~hardware.memory.relative.cuda",
            "hardware.memory.relative.cuda is missing: give it a value, ",
        ),
        (
            "+workload.module.x=???",
            "workload.module.x is missing: give it a value, workload.module.x=...",
        ),
        ("output=outputs/${no.such.key}/x", "output: Interpolation key 'no.such.key' not found"),
        (
            "workload.module.lr=${no.such.key}",
            "workload.module.lr: Interpolation key 'no.such.key' not found",
        ),
        # An environment variable that is not set.
        (
            "data.root=${oc.env:BSTUNE_TEST_NOT_SET}",
            'data.root: KeyError raised while resolving interpolation: "Envir',
        ),
    ],
)
def test_refuses_in_one_line(overrides, line):
    (got,) = mistakes("workload=digits", *overrides.split())
    assert got.startswith(line)


def test_a_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BSTUNE_CACHE", "~/cache")
    options = digits(
        "output=~/out/${study}",
        "data.root=~",
        "storage=sqlite:///~/b.db",
        "mlflow.uri=sqlite:///~/m.db",
    )
    assert (options.output, options.data.root) == ("/home/me/out/digits", "/home/me")
    assert (options.storage, options.mlflow.uri) == (
        "sqlite:////home/me/b.db",
        "sqlite:////home/me/m.db",
    )
    assert options.hardware.cache == "/home/me/cache/hardware"


# By the JSON schema of its type, in which every number needs two ends.
def test_every_number_has_a_range():
    def without_range(schema):
        if isinstance(schema, dict):
            ends = {"minimum", "exclusiveMinimum"} & schema.keys() and {
                "maximum",
                "exclusiveMaximum",
            } & schema.keys()
            yield schema.get("type") in ("integer", "number") and not ends
            for value in schema.values():
                yield from without_range(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from without_range(value)

    options = option_table()["all_options"]()
    endless = []
    for option in options:
        if any(without_range(TypeAdapter(option.type).json_schema())):
            endless.append(option.name)
    # They may be infinite.
    assert endless == ["workload.target.bounds"]


# Unknown names first, then in the order in which they are found, each in a line of its own.
def test_all_mistakes_are_named_at_once():
    bad = ("search.trails=3", "budget.steps=0", "+nope=1", "output=${no}")
    assert mistakes("workload=digits", *bad) == [
        "unknown option search.trails: did you mean search.trials?",
        "unknown option nope; bstune --cfg job +workload=NAME lists the options",
        "output: Interpolation key 'no' not found",
        "budget.steps must be at least 1, but got 0",
    ]


def test_options_are_of_their_types_and_never_change():
    options = digits("search.seconds=5", "workload.reference.batch_size=64", "study=7")
    # 5 and 64 are integers on the command line.
    assert type(options.search.seconds) is float
    assert type(options.scaling.batch_size) is float
    # A name of digits stays a text.
    assert options.study == "7"
    # What a reference gives is turned into the option's type, too.
    assert digits("mlflow.experiment=${seed}").mlflow.experiment == "0"
    with pytest.raises(ValueError, match="frozen"):
        options.search.seconds = 6.0


def test_nodes_keep_what_a_trial_or_a_machine_resolves():
    options = digits("+trainer.default_root_dir=${output}", "output=there", "data.root=here")
    # Only a trial knows its rate, and only a machine its device.
    assert options.workload.module["lr"] == "${trial.lr}"
    assert options.workload.data["device"] == "${device}"
    # Anything else that a node refers to is a value.
    assert options.trainer["default_root_dir"] == "there"
    assert options.workload.data["classes"] == 10


def test_a_recipe_has_the_checked_values_and_the_references():
    recipe = compose(["workload=digits", "workload.reference.lr=3"]).trained_recipe
    assert recipe.values["workload"]["module"]["lr"] == "${trial.lr}"
    assert recipe.values["workload"]["reference"]["lr"] == 3.0
    assert recipe.values["scaling"]["lr"] == "${workload.reference.lr}"
    module = recipe.module(TrialValues(64, lr=0.125, seed=0, total_steps=10))
    assert module.configure_optimizers()["optimizer"].defaults["lr"] == 0.125


def test_a_replayed_workload_has_no_recipe():
    composed = compose(REPLAY, options_from_table)
    assert isinstance(composed.options, ReplayedOptions)
    assert composed.recipe is None
    with pytest.raises(ConfigError, match="replay-fashion_mlp is answered from recorded runs"):
        _ = composed.trained_recipe


def test_settings_are_put_into_a_copy():
    composed = compose(["workload=digits"])
    own = with_settings(
        composed,
        {
            "workload.reference.lr": 3,
            "workload.module.loss": {"_target_": "torch.nn.MSELoss"},
            "+workload.module.optimizer.nesterov": True,
        },
    )
    # What referred to a setting still does.
    assert own.options.scaling.lr == 3.0
    # A node takes the whole place of the former one.
    assert own.options.workload.module["loss"] == {"_target_": "torch.nn.MSELoss"}
    assert own.trained_recipe.values["workload"]["module"]["optimizer"]["nesterov"] is True
    assert composed == compose(["workload=digits"])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"nope": 1}, "the config has no option nope; an argument that is not there is added by"),
        ({"workload.nope.lr": 1}, "the config has no option workload.nope.lr"),
        ({"+study.name": 1}, "the config has no option study.name"),
        ({"+search.nope": 1}, "unknown option search.nope"),
        ({"precision": "8"}, "precision must be 'auto', '32-true'"),
        ({"workload.module.lr": "${nope}"}, "workload.module.lr: Interpolation key 'nope'"),
        ({"workload.module.lr": "${trial"}, "workload.module.lr: no viable alternative"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, line):
    with pytest.raises(ConfigError) as error:
        with_settings(compose(["workload=digits"]), settings)
    assert str(error.value).startswith(line)


def test_a_folder_of_ones_own(tmp_path):
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "mine.yaml").write_text(
        (CONF / "workload" / "digits.yaml").read_text()
    )
    # Hydra takes its option before and after the arguments.
    for order in (
        ["--config-dir", str(tmp_path), "workload=mine"],
        ["workload=mine", "--config-dir", str(tmp_path)],
    ):
        assert compose(order).options.workload.name == "digits"
    assert (
        mistakes("--config-dir", str(tmp_path))[1]
        == f"workloads: {', '.join(sorted([*WORKLOADS, 'mine']))}"
    )
    # A list that is never closed.
    (tmp_path / "workload" / "mine.yaml").write_text("a: [")
    assert (
        "a config file is none that Hydra reads"
        in mistakes("--config-dir", str(tmp_path), "workload=mine")[0]
    )


def test_a_mistake_in_a_file_of_ones_own_names_file_and_line(tmp_path):
    text = (CONF / "workload" / "digits.yaml").read_text()
    file = tmp_path / "workload" / "mine.yaml"
    file.parent.mkdir()
    own = ["--config-dir", str(tmp_path), "workload=mine"]
    file.write_text(re.sub(r"(?m)^trials:.*", "trials: none", text))
    # Lines count from 1.
    number = text.splitlines().index(re.search(r"(?m)^trials:.*", text)[0]) + 1
    (line,) = mistakes(*own)
    assert line.endswith(f"but got 'none' ({file}:{number})")
    # The command line's own are none of the file's.
    assert not mistakes(*own, "workload.trials=few")[0].endswith(")")
    file.write_text(re.sub(r"(?m)^precision:.*\n", "", text))
    (line,) = mistakes(*own)
    assert line.startswith("workload.precision is missing: give it one of auto, 32-true,")
    assert line.endswith(f"({file})")


def test_a_list_of_loaders_is_no_data_module(tmp_path):
    text = (CONF / "workload" / "digits.yaml").read_text()
    file = tmp_path / "workload" / "mine.yaml"
    file.parent.mkdir()
    listed = "data:\n  - _target_: torch.utils.data.DataLoader\n"
    file.write_text(re.sub(r"(?m)^data:\n(  .*\n)+", listed, text))
    (line,) = mistakes("--config-dir", str(tmp_path), "workload=mine")
    assert line.startswith("workload.data: must build a LightningDataModule, but builds a list: ")


def test_the_line_of_a_mistake_is_that_of_its_own_key(tmp_path):
    text = (CONF / "workload" / "airfoil.yaml").read_text()
    file = tmp_path / "workload" / "mine.yaml"
    file.parent.mkdir()
    # A key of this name, the module's, stands at the beginning of a line.
    assert re.search(r"(?m)^ +lr:", text)
    # The key of the batch size is missing now, and the rate is out of range.
    text = text.replace("reference: {batch_size: 100, lr: 0.2}", "reference: {lr: -1}")
    file.write_text(text)
    number = text.splitlines().index("  reference: {lr: -1}") + 1
    rate, size = sorted(mistakes("--config-dir", str(tmp_path), "workload=mine"), reverse=True)
    assert rate.startswith("workload.reference.lr ")
    assert rate.endswith(f" ({file}:{number})")
    assert size.startswith("workload.reference.batch_size is missing")
    assert size.endswith(f" ({file})")


def test_a_mistake_from_elsewhere_names_no_file_of_ones_own(tmp_path):
    folder = tmp_path / "workload"
    folder.mkdir()
    text = (CONF / "workload" / "digits.yaml").read_text()
    (folder / "base.yaml").write_text(re.sub(r"(?m)^trials:.*", "trials: none", text))
    # A workload on top of another one of the user's: the value is in the first file, not in this
    # one.
    (folder / "mine.yaml").write_text("defaults: [base]\nprecision: 32-true\n")
    (line,) = mistakes("--config-dir", str(tmp_path), "workload=mine")
    assert line.endswith("but got 'none'")
    # bstune's own stands before one of the same name.
    (folder / "digits.yaml").write_text(text)
    (line,) = mistakes("--config-dir", str(tmp_path), "workload=digits", "~workload.precision")
    assert line.startswith("workload.precision is missing")
    assert str(tmp_path) not in line


# A replayed workload


# A recorded table in place of a training.
REPLAY = ("workload=replay", "workload.table=fashion_mlp")


def test_what_is_given_stays_where_the_table_would_say_otherwise():
    given = ("workload.reference.lr=3", "search.batch_size.high=16", "workload.budget.examples=7")
    options = compose((*REPLAY, *given), options_from_table).options
    assert options.scaling.lr == 3.0
    assert options.search.batch_size.high == 16
    assert options.budget.examples == 7


@pytest.mark.parametrize(
    ("given", "unknown", "meant"),
    [
        ("~workload.budget +workload.budgett.steps=9", "workload.budgett", "workload.budget"),
        ("~workload.target.mode +workload.target.mod=min", "workload.target.mod", "mode"),
    ],
)
def test_a_misspelled_name_is_one_mistake(given, unknown, meant):
    (line,) = mistakes("workload=digits", *given.split())
    assert line.startswith(f"unknown option {unknown}: did you mean ")
    assert line.endswith(f"{meant}?")


def test_what_is_missing_beside_a_misspelled_name_is_told():
    given = ("~workload.precision", "+search.trails=9")
    assert [line.split(":")[0] for line in mistakes("workload=digits", *given)] == [
        "unknown option search.trails",
        "workload.precision is missing",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "+workload.module={}",
            "workload.module: a workload is trained (data and module) or replayed (table), but",
        ),
        ("+workload.nope=1", "unknown option workload.nope"),
        ("workload.table=[1]", "workload.table must be a valid string, but got [1]"),
        ("workload.budget.steps=x", "workload.budget.steps must be a valid integer, but got 'x'"),
        # A table has one answer at a time.
        (
            "search.workers=2",
            (
                "search.workers=2: workload replay-fashion_mlp is answered from recorded runs, "
                "which need"
            ),
        ),
        ("schedule=linear", "a replayed workload is not trained, so it has no schedule"),
    ],
)
def test_refuses_what_is_no_replayed_workload(override, line):
    (got,) = mistakes(*REPLAY, override)
    assert got.startswith(line)


def test_mistakes_come_before_the_table_is_read():
    # The table is read last, as it may be large.
    nowhere = ("workload=replay", "workload.table=nowhere.jsonl")
    assert mistakes(*nowhere, "seed=-1") == ["seed must be at least 0, but got -1"]
    with pytest.raises(TableError, match=r"workload\.table=nowhere\.jsonl is no file"):
        compose(nowhere, options_from_table)


# Further hyper-parameters


def test_names_pick_from_what_the_workload_lists():
    first, second = make_space(digits("search.tune=[average,momentum]")).tunables
    assert first == Tunable("average", "workload.module.average.fraction", 0.02, 0.5, True, False)
    assert second.name == "momentum"
    assert make_space(digits()).tunables == ()


def test_what_is_tuned_of_bstunes_own_stands_in_a_copy_of_the_options():
    options = digits(
        "+workload.tunable.horizon={key: budget.examples, low: 1, high: 9e9}",
        "+workload.tunable.beta2={key: scaling.beta2_half_life, low: 1, high: 9e9}",
    )
    # 6400 examples are 400 steps of 16.
    values = {"momentum": 0.5, "horizon": 6400, "beta2": 1e5}
    tuned = with_tuned(options, values)
    assert tuned.budget.budget.last_step(16) == 400
    assert tuned.scaling.beta2_half_life == 1e5
    # The recipe builds the module from what lies below it.
    assert tuned.workload == options.workload
    assert options.budget.examples == 60_000
    assert overrides(options, {"momentum": 0.25}) == ["workload.module.optimizer.momentum=0.25"]


def test_what_is_tuned_of_a_module_is_built():
    # What is not tuned is as the config has it.
    recipe = compose(["workload=digits"]).trained_recipe
    for tuned, momentum in (({"momentum": 0.5}, 0.5), ({}, 0.0)):
        values = TrialValues(16, lr=0.1, seed=0, total_steps=10, hyperparameters=tuned)
        optimizer = recipe.module(values).configure_optimizers()["optimizer"]
        assert optimizer.defaults["momentum"] == momentum


def test_an_option_is_replaced_in_a_copy():
    options = digits()
    changed = with_option(options, "hardware.memory.relative.cpu", 0.5)
    assert option_at(changed, "hardware.memory.relative.cpu") == 0.5
    assert option_at(options, "hardware.memory.relative.cpu") == 0.01
    # A name without a value gives None.
    assert option_at(options, "workload.module.optimizer.momentum") == 0.0
    assert option_at(options, "workload.module.nope.deeper") is None
    with pytest.raises(AttributeError, match="SearchOptions has no option nope"):
        with_option(options, "search.nope", 1)


# conf/README.md


def test_the_tables_of_options_are_current():
    """If they are not: ``python .ci/option_table.py`` writes them."""
    # A README's tables are generated, so that they cannot be out of date.
    assert README.read_text(encoding="utf-8").endswith(option_table()["tables"]())


def test_every_option_has_a_line_and_a_default():
    values = option_table()["read_yaml"]("config.yaml")
    default_of = option_table()["default_of"]
    without = []
    for option in option_table()["all_options"]():
        assert option.meaning, option.name
        if not option.name.startswith("workload.") and not default_of(option.name, values):
            without.append(option.name)
    # These come from config groups.
    assert without == ["scaling.rule", "sampler"]


def test_the_table_names_defaults_choices_and_what_is_said_in_two_lines():
    page = option_table()["tables"]()
    # A default that is a number, a reference and an environment variable; then groups in one row.
    for line in (
        "| `seed` | `0` | ",
        "| `search.trials` | `${workload.trials}` | ",
        "| `data.root` | `${oc.env:BSTUNE_DATA,'~/.cache/bstune'}` | ",
        "| `hardware` | `memory.*`, `step_time.*`, ",
        "| `prior` | `level_sigma=2.5`, ",
        (
            "| `budget.seconds` | `null` | With search.objective=loss, training seconds of one trial; "
            "null: its examples, or its steps where examples=1. |"
        ),
    ):
        assert f"\n{line}" in page
    compile_row = re.search(r"^\| `compile` .*$", page, flags=re.MULTILINE)[0]
    assert compile_row.endswith(
        " One of `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`. |"
    )
    # Named in its line already.
    assert "One of" not in re.search(r"^\| `search.objective` .*$", page, flags=re.MULTILINE)[0]


def test_every_option_but_a_workloads_stands_in_the_table():
    made = option_table()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*)$", made["tables"](), flags=re.MULTILINE))
    for option in made["all_options"]():
        section, _, below = option.name.partition(".")
        seldom = made["seldom_name"](option.name)
        if section == "workload" or option.name in ("sampler", "scaling.rule"):
            continue
        if seldom is not None:
            assert re.search(rf"`{re.escape(seldom.partition('.')[2])}[=.]", rows[section])
        elif section in made["SHARED_ROWS"]:
            assert f"`{below}=" in rows[section]
        else:
            assert option.name in rows


def test_every_workload_is_in_the_readme():
    assert set(WORKLOADS) <= set(re.findall(r"`(\w+)`", README.read_text()))


def test_a_workload_that_is_given_as_values_is_not_listed_later():
    # Values that Python gives have a config of their own, which must leave no trace in Hydra's
    # registry.
    compose_given(digits().workload.model_dump(), [], {})
    with pytest.raises(ConfigError) as refused:
        compose([])
    assert "given" not in str(refused.value).split("workloads: ")[1].split("\n")[0]


@pytest.mark.parametrize("name", ["Nan", "1", "on", "1e3"])
def test_a_workloads_file_may_have_the_name_of_a_number(name, tmp_path):
    shipped = Path(conf.__file__).parent / "workload" / "digits.yaml"
    folder = tmp_path / "workload"
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(shipped.read_text())
    options = compose(["--config-dir", str(tmp_path), f"workload={name}"]).options
    assert options.workload == compose(["workload=digits"]).options.workload


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("schedule=1", "Could not find 'schedule/1'"),
        ("scaling=nan", "Could not find 'scaling/nan'"),
        ("workload=on", "there is no workload 'on'"),
    ],
)
def test_a_number_is_looked_for_as_the_name_of_a_file(override, line):
    assert line in mistakes("workload=digits", override)[0]
