"""Gate *projects*: twenty projects as their authors wrote them, each tuned for ``--wall-seconds``.

    OLD_PROJECTS=../tests/projects python tests/benchmarks/twenty_projects.py [--names ...]

``OLD_PROJECTS`` has the projects' code, and in ``conf/workload`` what each trains. Of that file a
study is given data, module, Trainer and target alone (the lines of its adapter are counted): batch
size, rate and length are the project's own, or those of the file where one line asks for them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from common import run_gate

import bstune

FOLDER = Path(os.environ["OLD_PROJECTS"]).absolute()
NEEDED = ("data", "module", "trainer")
CLI = "lightning_cli"
TREE = "hydra_tree"
SWEEP = "hydra_sweep"
LOOP = "own_loop"
# A plain loop; of bstune are the lines that name study or trial.
OF_LOOP = """
import bstune, torch
from projects.own_loop.digits import TRAIN, make_model, validate
study = bstune.Study("own_loop", target="val_loss <= 0.7", baseline=(32, 0.2), scaling="linear",
                     budget={"examples": 20000}, mlflow={"uri": None}, wall_seconds=WALL)
images, labels = TRAIN
for trial in study:
    torch.manual_seed(trial.seed)
    model = make_model()
    if trial.resume_from is not None:
        model.load_state_dict(torch.load(trial.resume_from))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
    step = trial.first_step
    for batch in trial.batches(len(images)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        step += 1
        if step % 5 == 0 and not trial.report(step, validate(model)):
            break
    if trial.worth_saving:
        torch.save(model.state_dict(), trial.save_to)
print(study.result)
"""


# The projects that a file of conf/workload names.
FILES = [*FOLDER.glob("conf/workload/*.yaml"), *FOLDER.glob("fixed_schedule/conf/*/*.yaml")]
WORKLOADS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(FILES)}


def as_hydra(node):
    """A node with LightningCLI's class paths as Hydra has them."""
    if isinstance(node, list):
        return [as_hydra(one) for one in node]
    if not isinstance(node, dict):
        return node
    if "class_path" in node:
        node = {"_target_": node["class_path"], **node.get("init_args", {})}
    return {name: as_hydra(value) for name, value in node.items()}


def adapter_of(old, *further):
    """The lines of a workload's file: what is trained, its target, and further options."""
    target = old["target"]
    sign = "<=" if target["mode"] == "min" else ">="
    new = {name: as_hydra(old[name]) for name in NEEDED if name in old}
    # The study finds the rate itself.
    new["module"] = {key: one for key, one in new["module"].items() if one != "${trial.lr}"}
    new["target"] = f"{target['metric']} {sign} {target['value']}"
    options = old | {"baseline": old["reference"]}
    return new | {name: options[name] for name in further}


def answer_of(place):
    """The verdict and the speedup that a study's folder has; None: it has no answer."""
    for file in place.glob("outputs/*/curve.json"):
        result = bstune.load(file.parent)
        return {
            "verdict": result.verdict,
            "configurations": result.configurations,
            "best": [getattr(result.best, name, None) for name in ("batch_size", "lr")],
            "speedup": [getattr(result.speedup, name, None) for name in ("value", "low", "high")],
        }
    return None


def command_of(name, place, wall, further):
    """What tunes a project, and the lines that it needed."""
    options = [f"wall_seconds={wall:g}", "mlflow.uri=null"]
    module = [sys.executable, "-m", "bstune"]
    if name == CLI:
        file = FOLDER / CLI / "config.yaml"
        return [*module, "lightning", str(file), "target=val_loss <= 0.2", *options], 0
    if name == SWEEP:
        sweeper = [f"hydra.sweeper.wall_seconds={wall:g}", "+hydra.sweeper.mlflow.uri=null"]
        application = Path(__file__).parents[1] / "projects" / "hydra_digits" / "train.py"
        most = ["hydra.sweeper.trials=null", "hydra.sweeper.seeds=3"]
        # The lines below hydra.sweeper in its config, and the one that names it.
        return [sys.executable, str(application), "-m", *sweeper, *most], 10
    if name == LOOP:
        return [sys.executable, "-c", OF_LOOP.replace("WALL", f"{wall:g}")], 12
    if name == TREE:
        conf = FOLDER / TREE / "conf"
        lines = yaml.safe_load((conf / "workload" / "wine.yaml").read_text())
        workload = {"defaults": lines["defaults"]} | adapter_of(lines, *further)
        shutil.copytree(conf, place / "conf", dirs_exist_ok=True)
    else:
        workload = adapter_of(WORKLOADS[name], *further)
    text = yaml.safe_dump(workload, default_flow_style=None, sort_keys=False, width=1000)
    (place / "conf" / "workload").mkdir(parents=True, exist_ok=True)
    (place / "conf" / "workload" / f"{name}.yaml").write_text(text)
    return [*module, "--config-dir", "conf", f"+workload={name}", *options], text.count("\n")


def measure(name, wall_seconds):
    """One study."""
    paths = [str(Path(bstune.__file__).parents[1]), str(FOLDER), str(FOLDER.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    further = []
    with tempfile.TemporaryDirectory() as place:
        while True:
            command, lines = command_of(name, Path(place), wall_seconds, further)
            began = time.monotonic()
            done = subprocess.run(
                command, cwd=place, env=environment, capture_output=True, text=True,
                timeout=3 * wall_seconds,
            )  # fmt: skip
            seconds = time.monotonic() - began
            last = (done.stderr.strip().splitlines() or [""])[-1]
            asked = [one for one in ("baseline", "batch_size", "budget") if f"{one}." in last]
            new = [one for one in asked if one not in further]
            if done.returncode == 0 or not new:
                break
            further += new
        return {
            "status": done.returncode,
            "answer": answer_of(Path(place)),
            "last_line": last if done.returncode else "",
            "adapter_lines": lines,
            "seconds": round(seconds, 1),
        }


if __name__ == "__main__":
    run_gate(
        __doc__,
        "twenty_projects.jsonl",
        measure,
        lambda rows: rows,
        seeds=None,
        names=("name", (*WORKLOADS, CLI, TREE, SWEEP, LOOP)),
        walls=("wall_seconds", (120.0,)),
    )
