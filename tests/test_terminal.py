"""Control characters of names, messages and folders are shown, on every way to a terminal, and not obeyed."""

import json
import logging
import re
import threading
import warnings
from io import StringIO

import pytest
from rich.table import Table
from rich.text import Text
from toolbox import made_table

from bstune.core.errors import StudyError
from bstune.system import secrets
from bstune.system.console import plain_console
from bstune.system.secrets import remember
from bstune.system.terminal import filtered, safe_console, visible, write_error, write_out

# A title, C1's CSI, text turned round, a deletion, and a return to the line's start.
EVIL = "\x1b]0;evil\x07\x9b31m\u202egpj.exe\x7f\r"
SHOWN = r"\x1b]0;evil\x07\x9b31m\u202egpj.exe\x7f\x0d"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (EVIL, SHOWN),
        # It clears the screen, and puts rm -rf / into the clipboard.
        ("\x1b[2J\x1b]52;c;cm0gLXJmIC8=\x07", r"\x1b[2J\x1b]52;c;cm0gLXJmIC8=\x07"),
        ("\u2066a\u2069\u202b", r"\u2066a\u2069\u202b"),
        ("a\x00b\x08c\x85d", r"a\x00b\x08c\x85d"),
        ("Windows\r\nlines\n", "Windows\nlines\n"),
        # These are harmless as they are.
        ("größe 数 🙂\tx\n\u200d \\x1b", "größe 数 🙂\tx\n\u200d \\x1b"),
    ],
)
def test_control_characters_become_visible(text, shown):
    assert visible(text) == visible(shown) == shown


def test_what_is_written_is_filtered(capsys):
    write_out(f"a {EVIL}")
    write_error(f"b {EVIL}.\n")
    assert capsys.readouterr() == (f"a {SHOWN}\n", f"b {SHOWN}.\n")


def test_a_console_filters_text_and_keeps_its_colours():
    table = Table()
    table.add_column(f"head {EVIL}", no_wrap=True)
    table.add_row(Text(f"cell {EVIL}", style="red"))
    console = safe_console(file=StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(table)
    console.print(f"line {EVIL}", Text("plain", style="bold red"), soft_wrap=True, markup=False)
    written = console.file.getvalue()
    assert not OBEYED.search(re.sub(r"\x1b\[[\d;]*m", "", written))
    assert "\x1b[31m" in written
    assert "\x1b[1;31mplain" in written
    # rich itself drops a few of these from a Text; what it leaves is shown.
    for line in ("head ", "cell ", "line "):
        assert rf"{line}\x1b]0;evil" in re.sub(r"\x1b\[[\d;]*m", "", written)


def test_logs_warnings_and_threads_are_filtered_while_it_is_asked_for(capsys, caplog, monkeypatch):
    monkeypatch.setattr(secrets, "_forms", {})
    # What is secret is left out on the same way.
    remember({"token": "zebra-41-word"})
    said = f"{EVIL} zebra-41-word"
    handler = logging.StreamHandler(stream := StringIO())
    logger = logging.getLogger("somebody.elses")
    logger.addHandler(handler)
    before = logging.getLogRecordFactory(), warnings.showwarning, threading.excepthook

    def fail():
        raise RuntimeError(said)

    try:
        with filtered(), warnings.catch_warnings():
            warnings.simplefilter("always")
            logger.warning("got %s and %d", said, 3)
            logger.warning("got %s", "numbers", extra={"args_stay": 1})
            try:
                fail()
            except RuntimeError:
                logger.exception("goes on")
            hook = threading.excepthook
            hook(threading.ExceptHookArgs((RuntimeError, RuntimeError(said), None, None)))
    finally:
        logger.removeHandler(handler)
    assert (logging.getLogRecordFactory(), warnings.showwarning, threading.excepthook) == before
    printed = stream.getvalue() + capsys.readouterr().err
    assert not OBEYED.search(printed)
    assert "zebra" not in printed + caplog.text
    assert f"got {SHOWN} *** and 3\n" in printed
    assert f"RuntimeError: {SHOWN} ***" in printed
    assert [record.args for record in caplog.records][1] == ("numbers",)


def test_an_error_of_bstune_and_its_causes_are_filtered(monkeypatch):
    monkeypatch.setattr(secrets, "_forms", {})
    remember({"password": "zebra-crossing"})
    failed = StudyError("storage=x://me:zebra-crossing@h does not answer")
    with pytest.raises(StudyError) as caught, filtered():
        raise failed from OSError("no route to x://me:zebra-crossing@h")
    assert str(caught.value) == "storage=x://me:***@h does not answer"
    assert str(caught.value.__cause__) == "no route to x://me:***@h"


def test_a_warning_is_filtered(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _print_warning
        with filtered():
            warnings.warn(f"of {EVIL}", UserWarning, stacklevel=1)
    assert capsys.readouterr().out == f"UserWarning: of {SHOWN}\n"


class TwoPartWarning(UserWarning):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def test_a_warning_of_a_class_with_other_arguments_is_filtered(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _print_warning
        with filtered():
            warnings.warn(TwoPartWarning("of", EVIL), stacklevel=1)
    assert capsys.readouterr().out == f"TwoPartWarning: of {SHOWN}\n"


class Unprintable:
    def __str__(self):
        raise AttributeError


def test_what_cannot_be_formatted_is_loggings_own_matter(caplog):
    # Whatever a test before has set up, nobody listens.
    caplog.set_level(logging.WARNING)
    with filtered():
        logging.getLogger("bstune.test").info("of %s", Unprintable())


def _print_warning(message, category, *where):
    print(f"{category.__name__}: {message}")


@pytest.mark.parametrize(
    "command",
    [
        ["fit", f"{EVIL}.csv"],
        ["fit", "points.csv", "--law", EVIL],
        ["compare", f"outputs/{EVIL}"],
        ["report", EVIL],
        ["report", ".", EVIL],
        ["record", EVIL, EVIL],
        ["branch", f"{EVIL}.ckpt"],
        ["worker", f"storage=sqlite:///{EVIL}.db", f"study={EVIL}"],
        ["sweep", EVIL],
        [EVIL],
        [f"+workload={EVIL}"],
        ["workload=digits", f"{EVIL}=1"],
        ["workload=digits", f"storage={EVIL}"],
        ["workload=digits", f"sampler={EVIL}", "--multirun"],
        ["lightning", EVIL, "--target", EVIL],
    ],
)
def test_mistakes_are_shown_and_not_obeyed(bstune, command):
    status, out, err = bstune(*command)
    assert status in (1, 2)
    assert not OBEYED.search(out + err)


def test_a_folder_of_somebody_else_is_shown_and_not_obeyed(bstune, tmp_path):
    made_table(tmp_path)
    study = ["workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14"]
    study += [
        "search.trials=4",
        "search.replicates=0",
        "search.objective=steps",
        "mlflow.enabled=false",
    ]
    assert bstune(*study, "workload.name=replay")[0] == 0
    folder = tmp_path / "outputs" / "replay"
    for path in (folder / "curve.json", folder / "trials.jsonl", folder / "study.json"):
        lines = []
        for line in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            lines.append(json.dumps(_poisoned(json.loads(line))))
        path.write_text("\n".join(lines) + "\n")
    moved = folder.rename(tmp_path / f"of {EVIL}"[:-1])
    # The folder's name is evil, too.
    for command in (["report", moved], ["compare", moved, moved], ["report", moved, "target=0.2"]):
        status, out, err = bstune(*command)
        assert status in (0, 2)
        assert "Traceback" not in err
        assert not OBEYED.search(out + err)


def _poisoned(value):
    """Values with control characters in the texts that are no words of bstune's own."""
    if isinstance(value, dict):
        return {
            key: _poisoned(one) if key not in ("status", "mode") else one
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_poisoned(one) for one in value]
    if isinstance(value, str) and " " in value:
        return f"{value} {EVIL}"
    return value


EVIL_MODULE = f"""
from bstune.workloads.classifier import Classifier


class Evil(Classifier):
    def training_step(self, batch, batch_idx):
        raise ValueError({EVIL!r})
"""


def test_the_users_error_is_shown_and_not_obeyed(bstune, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_module.py").write_text(EVIL_MODULE)
    options = ["workload=digits", "workload.module._target_=evil_module.Evil", "search.workers=0"]
    for debug in ("false", "true"):
        status, out, err = bstune(*options, f"debug={debug}")
        assert status == 1
        assert r"ValueError: \x1b]0;evil\x07" in err
        assert not OBEYED.search(out + err)


def test_a_plain_console_prints_names_as_they_are(capsys):
    plain_console().print("größe [red]x[/red] :heart: <b> 12", soft_wrap=True)
    assert capsys.readouterr().out == "größe [red]x[/red] :heart: <b> 12\n"
