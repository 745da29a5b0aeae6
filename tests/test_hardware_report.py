"""A survey as text, as JSON and as a figure."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bstune.hardware.report import (
    advice,
    bound_text,
    headline,
    survey_json,
    survey_tables,
    write_survey,
)
from bstune.hardware.roofline import (
    AffineCost,
    DeviceLimits,
    LayerCost,
    StepCost,
    misalignments,
    tensor_core_multiple,
)
from bstune.hardware.survey import probe_text
from bstune.report.drawing import figure_of
from bstune.system.files import Output
from tests.toolbox import entries, make_probe_result, make_survey

ODD = LayerCost(
    "fc",
    "Linear",
    AffineCost(0, 1e6),
    AffineCost(0, 9),
    AffineCost(0, 9),
    AffineCost(9, 0),
    (("in_features", 15),),
)


FAST_DEVICE = DeviceLimits("fp32", 1e12, 1e10)


def on_cuda(dtype):
    limits = DeviceLimits(dtype, 1e9, 1e6, 5e8)
    cost = StepCost((ODD,), ())
    multiple = tensor_core_multiple(dtype, "cuda")
    rows = misalignments(cost, limits, multiple, 1000) if multiple else []
    return make_survey(device_type="cuda", limits=limits, cost=cost, misaligned=tuple(rows))


@pytest.mark.parametrize(
    ("survey", "words"),
    [
        (make_survey(), "examples a second still rise at the largest batch size, 1000"),
        (make_survey(((4, 1e-3), (500, 2e-3), (1000, 3.9e-3))), "from batch size 500 on"),
        (make_survey(), "the range ends at 1000, not the memory"),
        (
            make_survey(above=make_probe_result(1010, "training")),
            "1000 fits: no need to fall back to 512, the power",
        ),
        (
            make_survey(bare=0.6),
            "the framework takes 40% of a step at batch size 4, over 20% up to 1000",
        ),
        (
            on_cuda("tf32"),
            "tensor cores take tf32 in multiples of 4, 16 bytes (NVIDIA, Matrix Multiplication",
        ),
        (on_cuda("bf16"), "tensor cores take bf16 in multiples of 8, 16 bytes"),
        (
            on_cuda("bf16"),
            "fc (Linear): pad in_features from 15 to 16: predicted 1.88 times its throughput",
        ),
        (make_survey(limits=FAST_DEVICE), "up to batch size 64 a faster device gains nothing"),
        (
            on_cuda("fp32"),
            "fp32 does not run on tensor cores, so no multiple is asked of layers or batch",
        ),
    ],
)
def test_advice(survey, words):
    assert any(words in line for line in advice(survey))


@pytest.mark.parametrize(
    ("survey", "said", "not_said"),
    [
        # bytes 200 B + 1e5, FLOPs 1e6 B, ridge 1000: it turns at 125
        (make_survey(), ["memory-bound below batch size 125", "compute-bound"], "neither"),
        (make_survey(limits=DeviceLimits("fp32", 1e12, 1e6)), ["memory-bound at any"], "compute"),
        # 4e6 FLOPs at 1e12/s and 1e5 bytes at 1e10/s are allowed 1e-5 s, 6.4e7 FLOPs at 64 6.4e-5 s
        (
            make_survey(limits=FAST_DEVICE),
            ["neither", "up to batch size 64: ", " 5.3% ", "beyond it is compute-bound"],
            "memory-bound",
        ),
        (
            make_survey(((4, 1.0), (64, 1.2)), limits=FAST_DEVICE),
            ["neither", "up to batch size 64: "],
            "beyond",
        ),
    ],
)
def test_what_bounds_a_step_is_one_sentence_everywhere(survey, said, not_said, monkeypatch):
    sentence = bound_text(survey)
    assert all(words in sentence for words in said), sentence
    assert not_said not in sentence
    assert json.loads(survey_json(survey))["derived"]["bound"] == sentence
    titles = list[str]()
    monkeypatch.setattr(
        "bstune.hardware.report.save_figure",
        lambda paint, inches, path: titles.append(figure_of(paint, inches).get_suptitle()),
    )
    monkeypatch.setattr("bstune.hardware.report.write_text", lambda path, text: None)
    write_survey(survey, Output(Path("nowhere")), [])
    assert sentence in " ".join(titles[0].split())


def test_without_its_cost_nothing_is_said_of_what_bounds_a_step():
    assert bound_text(make_survey(cost=None)) is None


def test_advice_that_is_not_needed():
    lines = advice(
        make_survey(((4, 1e-3), (512, 5e-3)), above=make_probe_result(520, "training"), high=600)
    )
    assert not any("power" in line or "tensor cores" in line or "neither" in line for line in lines)


def test_the_tables_fit_eighty_columns():
    out = StringIO()
    Console(file=out, width=80).print(survey_tables(make_survey(limits=FAST_DEVICE)))
    assert "elsewhere, predicted: ridge, turning batch size" in out.getvalue()
    # bytes 200 B + 1e5, FLOPs 1e6 B: B = 201e5/(1e6 - 201 x 200/2) at half the width, which a batch
    # has at least
    assert re.search(r"A100 40 GB +12.5: 1 +100: 10 +201: 10 +201: 10 *\n", out.getvalue())
    # 1e9 FLOPs at 15.7e12 and at 125e12 a second.
    assert "elsewhere, predicted: least time, B = 1000 (here 5.00 ms)" in out.getvalue()
    assert re.search(r"V100 +0.0637 ms +- +- +0.00800 ms *\n", out.getvalue())
    assert "…" not in out.getvalue()


def test_what_follows_from_a_survey():
    survey = make_survey()
    written = json.loads(survey_json(survey))
    derived = written["derived"]
    assert written["ceiling"]["model_error"] is None
    # bytes 200 B + 1e5, FLOPs 1e6 B, ridge 1000: 1e6 B = 1000 (200 B + 1e5)
    assert derived["turning_batch_size"] == pytest.approx(125.0)
    assert (derived["plateau"], len(derived["achieved"])) == (1000, 3)
    assert survey.step_time(64) == pytest.approx(1.2e-3, rel=2e-3)
    assert make_survey(cost=None).turning_batch_size is None
    assert make_survey(limits=None).achieved == []
    one = make_survey(((4, 1e-3),))
    assert (one.step_time, one.left_out_error) == (None, None)
    assert "kept" in headline(one, True)[0]


def test_probes_as_text():
    texts = {
        "fits": "fits",
        "training": "does not fit",
        "evaluation": "trains, but its evaluation does not fit",
        "error": "fails: ValueError: no",
    }
    for outcome, text in texts.items():
        result = replace(make_probe_result(1200, outcome), message="ValueError: no")
        assert probe_text(result) == f"batch size 1,200 {text} (100 of 1,000 MiB)"


@pytest.mark.parametrize("survey", [make_survey(), make_survey(((4, 1e-3),))])
@pytest.mark.usefixtures("rendered")
def test_figure(survey, tmp_path):
    write_survey(make_survey(cost=None), Output(tmp_path), [])
    assert entries(tmp_path) == ["hardware.json"]
    write_survey(survey, Output(tmp_path), [])
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert entries(tmp_path) == ["hardware.json", "roofline.png"]
