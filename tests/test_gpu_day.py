"""The script for a GPU: every section runs on a CPU, at a small size, and a source's script is timed in its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolbox import column, read_rows

GPU = Path(__file__).parent / "gpu"
# What source.py uses of airbench94.py: its names, and what its main() shows at its end; seconds
# pass as it says.
SCRIPT = """
import sys, time
code = open(sys.argv[0]).read()
now = 0.0
time.perf_counter = lambda: now
def spend(seconds):
    global now
    now += seconds
def init_whitening_conv(layer, images):
    spend(0.02)
def evaluate(model, loader, tta_level=0):
    spend(0.04 if tta_level == 2 else 0.5)
    return 0.9401
def print_training_details(variables, is_final_entry):
    raise NotImplementedError("it is replaced")
def main(run):
    start = time.perf_counter()
    init_whitening_conv(None, None)
    spend(0.1)
    total_time_seconds = time.perf_counter() - start
    evaluate(None, None, tta_level=0)
    start = time.perf_counter()
    tta_val_acc = evaluate(None, None, tta_level=2)
    total_time_seconds += time.perf_counter() - start
    print_training_details(locals(), is_final_entry=True)
    return tta_val_acc
if __name__ == "__main__":
    raise NotImplementedError("its own runs are not wanted")
"""


def run(out, *options):
    """Run the script without a GPU, and return its lines by section."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(GPU / "run.sh"), str(out), "--device", "cpu", "--tiny", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = read_rows(out / "results.jsonl")
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert list(map(json.loads, printed)) == lines
    for line in lines:
        assert "failed" not in line
    assert lines[-1]["section"] == "end"
    sections = {}
    for line in lines:
        sections.setdefault(line["section"], []).append(line)
    return sections


@pytest.mark.soak
def test_recipes_and_a_sources_script_are_timed(tmp_path):
    (tmp_path / "airbench94.py").write_text(SCRIPT)
    options = ("--seeds", "1", "--sources", str(tmp_path), "--option", "protocol.fast=off")
    options += ("environment", "workloads", "sources")
    found = run(tmp_path / "out", *options)
    trained = [line for line in found["workloads"] if "seed" in line]
    names = [
        "airbench_cifar",
        "airbench_muon",
        "speedrun_cifar",
        "resnet_cifar_fast",
        "resnet_cifar",
    ]
    assert column(trained, "workload") == names
    assert set(column(trained, "loop")) == {"Lightning's: protocol.fast=off"}
    for line in trained:
        # 640 examples in batches of 64.
        assert line["steps"] == 10
        assert 0.0 <= line["accuracy"] <= 1.0
    summed = [line for line in found["workloads"] if "n" in line]
    assert column(summed, "workload") == names
    assert set(column(summed, "n")) == {1}
    warmup, timed = found["sources"]
    assert (warmup["run"], timed["run"], timed["accuracy"]) == ("warmup", 0, 0.9401)
    assert timed["whitening_seconds"] == pytest.approx(0.02)
    assert timed["training_seconds"] == pytest.approx(0.1)
    assert timed["views_seconds"] == pytest.approx(0.04)
    # 0.02 + 0.1 + 0.5 + 0.04.
    assert timed["wall_seconds"] == pytest.approx(0.66)
    # The evaluation with one view is none of the source's seconds.
    assert timed["seconds"] == pytest.approx(0.16)


@pytest.mark.soak
def test_every_other_section_runs_on_a_cpu(tmp_path):
    found = run(
        tmp_path,
        "--seconds",
        "300",
        "tests",
        "loops",
        "steps",
        "operators",
        "powers",
        "workers",
        "ceiling",
        "own",
        "alignment",
        "studies",
        "table",
    )
    assert column(found["steps"], "fast") == ["off", "auto", "graph"]
    assert column(found["steps"], "loop")[1:] == ["lean", "lean"]
    # Five recipes in three loops.
    assert len(found["loops"]) == 15
    assert set(column(found["loops"][:3], "error")) == {found["loops"][0]["error"]}
    for line in found["operators"]:
        assert line["a_step"]["operators_of"] > 50
    assert column(found["workers"], "workers") == [1, 2]
    (ceiling,) = found["ceiling"]
    assert ceiling["batch_size"] == 1200
    assert found["powers"][0]["rows"]
    (own,) = found["own"]
    assert own["gain"] > 1.0
    assert own["trials"]["reached"] > 0
    assert found["alignment"][0]["rows"]
    # They need a GPU, or the real images.
    for section in ("studies", "table"):
        assert list(found[section][0]) == ["section", "at", "left_out"]
