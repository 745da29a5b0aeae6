"""bstune's own trials on fake CUDA tensors: in a segment nothing is read, copied or waited for but what is listed."""

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fake_cuda.library import environment, missing

RUN = Path(__file__).parent / "fake_cuda" / "run.py"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
WORKLOADS = (
    *("digits", "fashion_mlp", "mnist_cnn", "fashion_cnn", "cifar_mlp"),
    *("resnet_cifar", "resnet_cifar_fast", "airbench_cifar", "airbench_muon", "speedrun_cifar"),
    pytest.param(
        "mobilenet_cifar", marks=pytest.mark.skipif(find_spec("torchvision") is None, reason="there is no torchvision")
    ),
)
STEPS = 12
# What torch's scaler itself reads: whether a gradient has overflowed, once a step.
SCALER = "torch/amp/grad_scaler.py:GradScaler._maybe_opt_step.<locals>.<genexpr>"
pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"nothing runs on fake CUDA tensors here: {missing()}"),
    pytest.mark.slow,
]


def seen_in(*cases):
    """Run cases in one process with a fake device, and return what was seen of each."""
    lines = "".join(json.dumps({"steps": STEPS, **case}) + "\n" for case in cases)
    command = [sys.executable, str(RUN), "--cases", "--json"]
    ran = subprocess.run(command, input=lines, env=environment(), capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(cases), ran.stderr[-2000:]
    for one in found:
        assert one["error"] is None, one["error"]
    return found


def within_segments(seen):
    """Return what was asked of the device while it trained, by kind and innermost function; edges are left out."""
    events = [event for event in seen["events"] if event[0] == "training" and event[1] != "synchronize"]
    found = Counter()
    for _, kind, _, place, times in events:
        found[kind, place.split(" < ")[0]] += times
    return dict(found)


def synchronisations(seen, phase="training"):
    return sum(times for where, kind, _, _, times in seen["events"] if (where, kind) == (phase, "synchronize"))


READ = ("read", "bstune/trial/noise_scale.py:_squares")
NOISE = "protocol.noise_scale_every=4"  # of 12 steps three are measured
FREE = {}
CASES = {
    "images in half precision": ({"workload": "airbench_cifar"}, FREE),
    "a scaler": ({"workload": "fashion_mlp", "precision": "16-mixed"}, {("read", SCALER): STEPS}),
    "noise of parts": ({"workload": "fashion_mlp", "overrides": [NOISE]}, FREE),
    "noise of micro-batches": (
        {"workload": "fashion_mlp", "overrides": [NOISE, "protocol.micro_batch_size=48"]},
        {READ: 3},
    ),
    "resumed": ({"workload": "fashion_mlp", "resumes": True}, FREE),
    "surveyed": ({"workload": "fashion_mlp", "surveys": True, "steps": 4}, FREE),
    "surveyed for longer": ({"workload": "fashion_mlp", "surveys": True, "steps": 9}, FREE),
}
READER = {"workload": "resnet_cifar", "overrides": ["workload.module.callbacks=[{_target_: made.Reader}]"]}


@pytest.fixture(scope="module")
def seen_by_case():
    cases = {name: case for name, (case, _) in CASES.items()} | {"a reader": READER}
    return dict(zip(cases, seen_in(*cases.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_segment_waits_for_nothing_but_what_is_listed(seen_by_case, name):
    seen, (case, expected) = seen_by_case[name], CASES[name]
    assert within_segments(seen) == expected
    if not case.get("surveys"):
        assert (seen["status"], seen["steps"]) == ("censored", STEPS)
        # At the edges of the segments, and around what is measured beside the training.
        asides = seen["noise_scales"] if "parts" in name else 0
        trials = 2 if case.get("resumes") else 1  # whose warm-up is a segment of its own
        assert synchronisations(seen) <= seen["evaluations"] + trials + asides


def test_the_noise_scale_is_read_once_a_measurement(seen_by_case):
    seen = seen_by_case["noise of parts"]
    reads = [event[-1] for event in seen["events"] if event[1] == "read" and READ[1] in event[3]]
    assert (seen["noise_scales"], reads) == (3, [3])


def test_the_survey_waits_for_the_device_as_often_for_many_steps_as_for_few(seen_by_case):
    few, many = seen_by_case["surveyed"], seen_by_case["surveyed for longer"]
    assert (len(few["trial"]), len(few["bare"]), len(many["trial"]), len(many["bare"])) == (4, 4, 9, 9)
    phases = ("startup", "training", "evaluation", "closing")
    assert [synchronisations(few, p) for p in phases] == [synchronisations(many, p) for p in phases]


def test_a_read_would_be_found(seen_by_case):
    found = within_segments(seen_by_case["a reader"])
    assert [(kind, times) for (kind, _), times in found.items()] == [("read", STEPS)]


@pytest.mark.soak
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_in_every_precision_waits_for_nothing_in_a_segment(workload, precision):
    fused = ("resnet_cifar", "resnet_cifar_fast", "airbench_cifar")
    refused = precision == "16-mixed" and workload in fused  # as momentum of a fused optimizer goes wrong there
    overrides = ["workload.module.optimizer.fused=false"] if refused else []
    (seen,) = seen_in({"workload": workload, "precision": precision, "overrides": overrides})
    found = within_segments(seen)
    # Ghost normalisation copies its images, so that five convolutions get gradients that cuDNN copies back.
    formats = sum(found.pop(key) for key in [*found] if key[0] == "several memory formats")
    assert formats == (5 * STEPS if workload == "resnet_cifar_fast" else 0)
    assert found == ({("read", SCALER): STEPS} if precision == "16-mixed" else FREE)
    assert synchronisations(seen) <= seen["evaluations"] + 1
