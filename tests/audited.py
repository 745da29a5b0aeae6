"""Runs report and compare on crafted folders under an audit hook: ``audited.py FOLDER VERBS [CRAFT ...]``.

It prints a line of JSON for each command; VERBS are ``report``, or ``report,compare``. An honest study is run in FOLDER
first; each craft changes a copy of its folder. Each command runs in a fork of this process, which has imported what an
honest report needs: what it imports, starts or opens for writing is then a line of its own. Nothing of what a crafted
folder names may be among that.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from toolbox import made_table

from bstune.__main__ import main

SECONDS = 60  # of one command
STUDY = ["workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14", "study=honest"]
STUDY += ["search.trials=6", "search.replicates=0", "sampler=random", "mlflow.enabled=false"]
# Audit events of what starts a program, a connection or code.
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
STARTS += ("socket.connect", "ctypes.dlopen", "pickle.find_class")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MARK = "bstune_was_here"  # the file that every payload would make


class Payload:
    """Touches a file as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def config_with(place: str, value: Any) -> Callable[[Path], None]:
    """Set a value at a dotted place of config.yaml."""

    def craft(folder: Path) -> None:
        file = folder / "config.yaml"
        config = yaml.safe_load(file.read_text())
        *parents, last = place.split(".")
        node = config
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
        file.write_text(yaml.safe_dump(config))

    return craft


def curve_with(**values: Any) -> Callable[[Path], None]:
    """Set values of curve.json."""

    def craft(folder: Path) -> None:
        file = folder / "curve.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return craft


def text_in(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Put a text in place of a file."""

    def craft(folder: Path) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name).write_bytes(data)

    return craft


def payload_pickle(folder: Path) -> None:
    """Let the scaling rule load a pickle that runs a command."""
    file = folder.parent / "payload.pt"
    file.write_bytes(pickle.dumps(Payload(folder.parent / MARK)))
    rule = {"_target_": "torch.load", "f": str(file), "weights_only": False, "_partial_": False}
    config_with("scaling.rule", rule)(folder)


def payload_states(folder: Path) -> None:
    """Put pickles where trials leave their states and weights."""
    for name in ("states", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
        for number in range(3):
            file = folder / name / f"trial-{number}.ckpt"
            file.write_bytes(pickle.dumps(Payload(folder.parent / MARK)))


def own_module(folder: Path) -> None:
    """Put a module beside the folder and into it, and name it as the rule."""
    for place in (folder, folder.parent):
        (place / "owned_rule.py").write_text(f"open({MARK!r}, 'w')\ndef rule(size): return 0.1\n")
    config_with("scaling.rule", {"_target_": "owned_rule.rule", "_partial_": True})(folder)


def fifo_table(folder: Path) -> None:
    """Let the table be a FIFO, which would wait for ever."""
    os.mkfifo(folder / "table.jsonl")
    config_with("workload.table", str(folder / "table.jsonl"))(folder)


def follows_itself(folder: Path) -> None:
    """Let each trial go on from itself."""
    file = folder / "trials.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(row | {"resumed_from": row["number"]}) for row in rows]
    file.write_text("\n".join(lines) + "\n")


def links(folder: Path) -> None:
    """Let the files that a report writes be links to a file of the user's."""
    victim = folder.parent / "victim"
    victim.write_text("mine")
    for name in ("report.html", "report-0.2.html"):
        for link in (folder / name, folder / f"{name}.partial"):
            link.unlink(missing_ok=True)
            link.symlink_to(victim)


TOUCH = f"touch {MARK}"
WRITE = {"_target_": "pathlib.Path.write_text", "_args_": [{"_target_": "pathlib.Path"}, "x"]}
SYSTEM = {"_target_": "os.system", "command": TOUCH}
NESTED = {
    "_target_": "bstune.core.scaling.sqrt",
    "_partial_": True,
    "reference_batch_size": SYSTEM,
    "reference_lr": 0.1,
}
CRAFTS: dict[str, Callable[[Path], None]] = {
    "honest": lambda folder: None,
    "rule unpickles": payload_pickle,
    "rule writes": config_with("scaling.rule", WRITE),
    "rule runs": config_with("scaling.rule", SYSTEM),
    "rule executes": config_with(
        "scaling.rule", {"_target_": "builtins.exec", "_args_": [f"open({MARK!r}, 'w')"]}
    ),
    "rule of the folder": own_module,
    "rule with code for an argument": config_with("scaling.rule", NESTED),
    "rule with arguments": config_with("scaling.rule._args_", [SYSTEM]),
    "rule at once": config_with("scaling.rule._partial_", False),
    "rule by class path": config_with(
        "scaling.rule", {"class_path": "os.system", "init_args": {"command": TOUCH}}
    ),
    "rule that is a helper": config_with("scaling.rule._target_", "bstune.core.scaling.math.sqrt"),
    "rule by reference": config_with("scaling.rule._target_", "${oc.env:HOME}"),
    "sampler runs": config_with("sampler", SYSTEM),
    "sampler with code for an argument": config_with("sampler.policy", SYSTEM),
    "sampler imports": config_with("sampler._target_", "antigravity.fly"),
    "trainer runs": config_with("trainer", {"callbacks": [SYSTEM]}),
    "the workload's trainer runs": config_with("workload.trainer", SYSTEM),
    "module and data run": lambda folder: (
        config_with("workload.module", SYSTEM)(folder),
        config_with("workload.data", SYSTEM)(folder),
    )[0],
    # A report that shows it would hand a secret on.
    "reads the environment": config_with("study", "${oc.env:PATH}"),
    "decodes": config_with("workload.name", "${oc.decode:${oc.env:PATH}}"),
    "refers to itself": config_with("scaling.lr", "${scaling.lr}"),
    "grows by references": config_with("study", "${output}${output}"),
    "YAML with objects": text_in("config.yaml", f"!!python/object/apply:os.system ['{TOUCH}']"),
    "best.yaml with objects": text_in("best.yaml", f"!!python/object/apply:os.system ['{TOUCH}']"),
    # 9^9 texts once it is expanded.
    "YAML of a billion": text_in(
        "config.yaml",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
    ),
    "states with pickles": payload_states,
    "table without end": config_with("workload.table", "/dev/zero"),
    "table that is a FIFO": fifo_table,
    "a command of a shell": curve_with(train=f"bstune; {TOUCH}"),
    # A list of them all would fill the memory.
    "many batch sizes": config_with("search.batch_size.high", 10**15),
    "references in a circle": lambda folder: (
        config_with("scaling.lr", "${scaling.batch_size}")(folder),
        config_with("scaling.batch_size", "${scaling.lr}")(folder),
    )[0],
    "code under a class path": config_with(
        "sampler", {"class_path": "os.system", "init_args": {"command": TOUCH}}
    ),
    "trials that follow themselves": follows_itself,
    "curve nested deep": text_in("curve.json", "[" * 100_000),
    "curve with negative sizes": curve_with(
        points=[{"batch_size": -8, "lr": 0.1, "steps": 5, "time_to_target": 1.0}]
    ),
    "hardware with texts": text_in("hardware.json", '{"high": "x", "ceiling": []}'),
    "trials that are binary": text_in("trials.jsonl", bytes(range(256)) * 100),
    "names with escapes": curve_with(study="\x1b]0;evil\x07", workload="\x1b[2J"),
    "links": links,
}


def audited(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run a command in a fork and give its status, what it printed, and what it started, imported and wrote."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        report = _run(folder, arguments)
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(report))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"status": "hangs", "events": [], "output": ""}


def _run(folder: Path, arguments: list[str]) -> dict[str, Any]:
    events: list[str] = []
    inside = f"{folder}{os.sep}"

    # A hook stays for the life of its process, which is the fork's.
    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in STARTS:
            events.append(f"{event} {values[:2]!r}"[:300])
        elif event == "import":
            events.append(f"import {values[0]}")
        elif event == "open" and isinstance(values[0], int):
            # A file may be open already.
            pass
        elif event == "open" and values[2] is not None and values[2] & WRITES:
            path = os.path.abspath(str(values[0]))
            if not path.startswith(inside):
                events.append(f"open {path}")

    # A command that waits for ever is killed, and prints nothing.
    signal.alarm(SECONDS)
    sys.argv = ["bstune", *arguments]
    printed = io.StringIO()
    sys.addaudithook(hook)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status: Any = main()
    seen = list(events)
    return {"status": status, "events": seen, "output": printed.getvalue()}


def run_all(folder: Path, verbs: Sequence[str], names: Sequence[str]) -> None:
    """Run every command on the crafted folders of these names and print what each did."""
    os.chdir(folder)
    made_table(folder)
    sys.argv = ["bstune", *STUDY]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main() == 0
    honest = folder / "outputs" / "honest"
    # More trials than the results tell of: a report reads the config and computes anew.
    curve = json.loads((honest / "curve.json").read_text())
    (honest / "curve.json").write_text(json.dumps(curve | {"trials": curve["trials"] - 1}))
    # So that what an honest command imports is there before the forks.
    preparing = [["report", str(honest)], ["compare", str(honest), "--output", str(honest)]]
    for command in (one for one in preparing if one[0] in verbs):
        sys.argv = ["bstune", *command]
        with contextlib.redirect_stdout(io.StringIO()):
            assert main() == 0
    for number, name in enumerate(names):
        crafted = folder / f"case{number}" / "s"
        shutil.copytree(honest, crafted)
        CRAFTS[name](crafted)
        os.chdir(crafted.parent)
        # The config names its table by a relative path.
        shutil.copy(folder / "t.jsonl", crafted.parent)
        commands = (
            ["report", str(crafted)],
            ["report", str(crafted), "target=0.2"],
            ["compare", str(crafted), str(honest), "--output", str(crafted)],
            [
                "extrapolate",
                str(crafted),
                str(honest),
                "--at",
                "examples=9",
                "--values",
                "s=1,honest=2",
            ],
        )
        for command in (one for one in commands if one[0] in verbs):
            found = audited(crafted, command)
            marked = bool(list(crafted.parent.rglob(MARK)))
            victim = crafted.parent / "victim"
            kept = not victim.exists() or victim.read_text() == "mine"
            line = {
                "craft": name,
                "command": " ".join([command[0], *command[2:3]]),
                "marked": marked,
            }
            print(json.dumps({**line, "victim kept": kept, **found}), flush=True)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:] or list(CRAFTS))
