"""Command lines: what they compose to, and the line that each mistake ends with."""

import os

import pytest
import yaml
from refusals import cases, refused, text_cases

from bstune.config import CONF, compose, jobs_of_sweep
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.options import OPTION_NAMES
from bstune.recipe.hydra import resolve_nodes
from bstune.recipe.recipe import settings_of

OWN = """
target: val/loss <= 0.5
budget: {steps: 90}
batch_size: {low: 4, high: 64}
baseline: {batch_size: 8, lr: 0.1}
trials: 7
data: {_target_: my.Data, root: "${data_root}"}
module: {_target_: my.Net, lr: "${trial.lr}", widths: [8, 8]}
tunable: {dropout: {key: module.dropout, low: 0, high: 0.5}}
"""
# A file of --config-dir/workload by name.
FILES = {
    "own": OWN,
    "based": "defaults: [own]\nseed: 3\n",
    "tree": OWN.replace("data_root", "paths.data")
    + "paths: {root: /d, data: '${paths.root}/own'}\n",
    "nested": OWN + "lr: {lwo: 0.1}\n",
    "node_missing": OWN.replace("my.Data", "'???'"),
    "alone": OWN[OWN.index("data:") :],
    "reference": OWN + "study: ${nowhere}\n",
    "secret": OWN.replace("root:", "api_key: s3cret, root:"),
    "schedule": OWN + "schedule: ${nowhere}\n",
    "by_name": OWN + "algorithm: latin\n",
    "number": "3\n",
    "deep": 9999 * "[",
    "ranges": OWN.replace("{key: module.dropout, low: 0, high: 0.5}", "[0, 0.5]"),
    "broken": "trials: 7\ntarget: [a\nmodule: 3\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # A space in its name is no obstacle.
    folder = tmp_path_factory.mktemp("my configs")
    (folder / "workload").mkdir()
    for name, text in FILES.items():
        (folder / "workload" / f"{name}.yaml").write_text(text)
    (folder / "workload" / "latin.yaml").write_bytes(b"target: \xe4\n")
    (folder / "algorithm").mkdir()
    (folder / "algorithm" / "latin.yaml").write_bytes(b"x: \xe4\n")
    os.mkfifo(folder / "workload" / "pipe.yaml")
    return folder


def composed(folder, *arguments, workload="own"):
    return compose([f"+workload={workload}", "--config-dir", str(folder), *arguments])


def option(found, name):
    """An option's value, or one inside a node."""
    value = found.options
    for key in name.split("."):
        value = value[key] if isinstance(value, dict) else getattr(value, key)
    return value


def test_config_yaml_has_every_option_and_no_other():
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())
    names = []
    for name, value in defaults.items():
        names += [f"{name}.{key}" for key in value] if isinstance(value, dict) else [name]
    assert sorted(names) == sorted(OPTION_NAMES)


@pytest.mark.parametrize("workload", sorted(file.stem for file in CONF.glob("workload/*.yaml")))
def test_workloads_that_ship(workload):
    table = ["table=fashion_mlp"] if workload == "replay" else []
    options = compose([f"+workload={workload}", *table]).options
    assert options.workload == workload
    assert options.baseline.pair


@text_cases("""
argument | name | value
target='acc >= 0.9' | target | acc >= 0.9
baseline.lr=1e-2 | baseline.lr | 0.01
threads=null | output | outputs/own
storage=p://me:pw@host:5432/db?ssl=on | storage | p://me:pw@host:5432/db?ssl=on
output=~/it's | output | ~/it's
survey=off | survey | off
seed=4 | trial.seed | 4
module.widths=[16] | module.widths | [16]
+trainer.callbacks=[] | trainer.callbacks | []
""")
def test_overrides(folder, argument, name, value):
    assert str(option(composed(folder, argument), name)) == value


@pytest.mark.parametrize("spelling", ["workload=based", "+workload=based"])
def test_a_workload_on_a_base(folder, spelling):
    options = compose(["-cd", str(folder), spelling]).options
    assert (options.study, options.seed, options.trials) == ("based", 3, 7)


def test_groups_of_a_projects_own_stand_beside_the_options(folder):
    found = composed(folder, "paths.root=/e", workload="tree")
    assert resolve_nodes(found.parts, {}, settings_of(8, 0.1, 9), "cpu")["data"]["root"] == "/e/own"


def test_cfg_shows_the_resolved_config_without_secrets(folder):
    storage = "storage=postgresql://me:s3cret@host/db"
    found = composed(folder, "--cfg", "job", storage, workload="secret")
    assert found.show
    assert "s3cret" not in found.yaml
    shown = yaml.safe_load(found.yaml)
    assert shown["study"] == "secret"
    assert shown["module"]["lr"] == "${trial.lr}"
    assert found.options.storage == storage.partition("=")[2]


def test_recorded_runs():
    found = compose(["+workload=replay", "table=fashion_mlp", "baseline.lr=0.1"])
    assert (found.recipe, found.parts["table"]) == (None, "fashion_mlp")
    options = found.options
    assert options.target == Target("val/error", 0.14, "min")
    # The batch sizes are 8, 16 ... 4096, the rates 2^-12 ... 2^-1; their middle is the baseline.
    assert (options.batch_size.low, options.batch_size.high, options.lr.high) == (8, 4096, 0.5)
    assert options.baseline.pair == (256, 0.1)
    assert compose(["+workload=replay", "table=digits_linear"]).options.schedule_ends


@cases("""
command | folders
+workload=digits seed=0,1 | [outputs/digits-0, outputs/digits-1]
# A name that is a value, too.
+workload=digits study=8 seed=8,9 | [outputs/8-8, outputs/8-9]
+workload=a,b seed=3 output=o | [o/a, o/b]
+workload=c table=a,b seed=0,1 output=o | [o/c-a-0, o/c-a-1, o/c-b-0, o/c-b-1]
""")
def test_a_sweep_is_a_study_a_folder(command, folders):
    assert list(jobs_of_sweep(command.split())) == folders


@text_cases("""
command | words
+workload=digits seed=1,1 | outputs/digits-1
+workload=glob(*) | glob
+workload=digits seed=1 | seed=0,1
""")
def test_a_sweep_that_cannot_be_split(command, words):
    with refused(words):
        jobs_of_sweep(command.split())


@text_cases("""
command | words
+workload=onw | onw, did you mean own, digits, based
- | workload is missing, digits
+workload=a/../b | a/../b, own
+workload=own +trails=3 | trails, trials
+workload=own module.depth=3 | +module.depth=VALUE
+workload=own ~target | target is missing
+workload=own ~objective | objective is missing
+workload=own batch_size.low=[1,2 | batch_size.low, OPTION=VALUE
+workload=own +module.token={word | module.token=***
+workload=own +module.token=a,b | module.token=***, Ambiguous
--trials=8 +workload=own | --trials=8, OPTION=VALUE
+workload=own lr={lwo:1} | lr.lwo, lr.low
+workload=deep | deep.yaml
+workload=own --cfg hydra | cfg, hydra, job
+workload=own --multirun | --multirun
+workload=own tune=[[a]] | tune, NAME, LOW
+workload=own --config-dir /nowhere | --config-dir, /nowhere
+workload=nested | lr.lwo, lr.low
+workload=node_missing | data._target_ is missing
+workload=reference | study, nowhere
+workload=ranges | tunable.dropout, [0, 0.5], low:
+workload=broken | broken.yaml, line 3
+workload=latin | latin.yaml, UTF-8
+workload=number | int
+workload=pipe | pipe
+workload=schedule | schedule, nowhere
+workload=by_name | latin.yaml, UTF-8
+workload=replay | table is missing
+workload=replay table=nope | nope, fashion_mlp
+workload=replay table=fashion_mlp budget=3 | budget, steps
+workload=replay table=fashion_mlp schedule_ends=true | schedule_ends, fashion_mlp
+workload=replay table=fashion_mlp noise_scale=true | noise_scale
+workload=replay table=fashion_mlp tune={a:[0,1]} | recorded
""")
def test_mistakes(folder, command, words):
    with refused(words):
        compose(["--config-dir", str(folder), *command.replace("-", "", command == "-").split()])


def test_a_number_that_no_config_holds(folder):
    with refused("survey_seconds, 999"):
        composed(folder, f"survey_seconds={'9' * 5000}")


# Nothing in a file of another study is resolved.
@text_cases("""
text | further | words
trials: 3 | - | trial=, best.yaml
trial: {lr: 2001-01-01} | - | trial.lr, 2001
trial: {batch_size: 16, lr: '${oc.env:HOME}'} | - | trial.lr, ${oc.env:HOME}
trial: {batch_size: 16, lr: 1, 5: 6} | - | trial
trial: {batch_size: 8, lr: 0.1, values: null, steps: 3} | trial=3 | trial.seed
""")
def test_files_of_another_study_that_are_refused(folder, tmp_path, text, further, words):
    (tmp_path / "best.yaml").write_text(text)
    with refused(words):
        composed(folder, f"trial={tmp_path}/best.yaml", *further.strip("-").split())


def test_a_mistake_shows_no_password(folder):
    for value in ("sqlite://me:s3cret@host/a,b", "[sqlite://me:s3cret@host"):
        with pytest.raises(InputError) as error:
            composed(folder, f"storage={value}")
        assert "s3cret" not in str(error.value)
