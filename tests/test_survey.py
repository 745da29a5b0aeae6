"""The survey of the hardware: its command on a CPU, a trial's memory, and what a study takes from it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders import options_of
from toolbox import column

from bstune.hardware import survey as survey_module
from bstune.hardware.survey import _trial_limit, measure_with
from bstune.hardware.survey_cache import SURVEYS, read_survey
from bstune.study.tune import survey
from tests.toolbox import FAST_SURVEY, entries

MiB = 2**20
FAST = (*FAST_SURVEY, "hardware.memory.verify=0")


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_command_and_the_study_after_it(bstune, tmp_path, monkeypatch):
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path / "cache"))
    status, out, err = bstune("survey", "workload=digits", *FAST)
    assert (status, err) == (0, "")
    words = (
        "batch size 1200, the largest that was tried, fits",
        "tau(B) = ",
        "roofline",
        "written outputs/digits/",
    )
    assert all(part in out for part in words)
    found = json.loads((tmp_path / "outputs/digits/hardware.json").read_text())
    assert found["ceiling"]["at"]["batch_size"] == 1200
    # sqrt(4 x 1200) = 69.
    assert column(found["measured"]["timings"], "batch_size") == [4, 69, 1200]
    assert all(
        0 < timing["low"] <= timing["seconds"] <= timing["high"]
        for timing in found["measured"]["timings"]
    )
    assert found["limits"]["flops_per_second"] > 0
    # 64 x 128 + 128 x 10 weights: 2 FLOPs each forward, and backward for the weights and for all
    # inputs but the data
    assert sum(layer["flops"]["per_example"] for layer in found["cost"]["layers"]) == 2 * (
        64 * 128 * 2 + 128 * 10 * 3
    )
    assert (tmp_path / "outputs/digits/roofline.png").read_bytes()[:4] == b"\x89PNG"
    # the survey is cached, for a study with another target too, whose range it narrows
    (path,) = (tmp_path / "cache/hardware").iterdir()
    cached = read_survey(path)
    assert survey("workload=digits", *FAST) == cached
    low = replace(cached.ceiling, at=replace(cached.ceiling.at, batch_size=700), smallest=5)
    path.write_bytes(SURVEYS.dump_json(replace(cached, ceiling=low)))
    assert "kept from before" in bstune("survey", "workload=digits", *FAST)[1]
    study = ("search.trials=2", "workload.target.value=0.2", "mlflow.enabled=false")
    status, out, err = bstune("workload=digits", *FAST, *study)
    assert (status, err) == (0, "")
    assert "tau(B) at 3 batch sizes from 4 to 1200 (kept from before)" in " ".join(out.split())
    assert "batch sizes 5 to 700, " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("workload=digits", "search.batch_size.high=2000"),
            "batch size 2000 is larger than the training data (1200",
        ),
        (("workload=digits", "hardware.second=3"), "unknown option hardware.second"),
        (("workload=digits", "output=/proc/nowhere"), "output=/proc/nowhere"),
        (
            ("workload=digits", f"hardware.memory.limit={64 * MiB}"),
            "data and the model alone do not fit in 64 MiB",
        ),
    ],
)
def test_bad_input(bstune, tmp_path, arguments, message):
    status, _, err = bstune("survey", *arguments)
    assert (status, message in err, "Traceback" in err) == (2, True, False)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "device", "workers", "limit"),
    [
        ("77", "cpu", 1, 77),
        ("77", "cuda", 1, 77),
        ("null", "cuda", 1, None),
        # Half of the free memory is the limit.
        ("null", "cpu", 1, 500),
        # This process, which keeps the study, takes its share, too.
        ("900", "cpu", 2, 300),
        ("null", "cuda", 3, 20_000),
    ],
)
def test_the_memory_of_a_trial(given, device, workers, limit, monkeypatch):
    monkeypatch.setattr(survey_module, "memory_limit", lambda root, resident: 1000)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80_000)
    )
    options = options_of(
        "workload=digits",
        f"hardware.memory.limit={given}",
        "hardware.memory.free_share=0.5",
        f"search.workers={workers}",
    )
    assert _trial_limit(options, torch.device(device)) == limit


def test_the_time_of_a_survey_is_told_in_three_digits():
    class SaidError(Exception):
        pass

    def say(line):
        raise SaidError(line)

    options = options_of("workload=digits", "device=cpu", "hardware.seconds=13.0025")
    with pytest.raises(SaidError, match=r"at most 13\.0 s$"):
        measure_with(options, *[None] * 7, say)
