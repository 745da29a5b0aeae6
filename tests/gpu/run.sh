#!/usr/bin/env bash
# What only a GPU shows, in one go: bash tests/gpu/run.sh OUT SECONDS STEP...
#
# steps: tests (those that need CUDA), surveys, powers (of two, under AMP), sources (airbench94.py and its Muon variant,
# from the folder SOURCES, on the files in BSTUNE_DATA), ladder (the sweep dawnbench, one seed), studies (side by side).
# Each step's output goes to OUT/STEP.log, its results to OUT; SECONDS is for all of them: one that has none left is cut
# short. bstune must be installed: the checkout has no configs in the package. The surveys are cached in BSTUNE_CACHE, so
# that studies side by side have seconds per step that were measured alone.
set -u
out=$(realpath "$1"); limit=$2; shift 2
checkout=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"; work=$(mktemp -d); cd "$work"
export PYTHONUNBUFFERED=1 BSTUNE_CACHE=${BSTUNE_CACHE:-$work/cache} TORCHINDUCTOR_CACHE_DIR=$work/inductor
bstune="python3 -m bstune"

left() { echo $((limit - SECONDS)); }

run() { # NAME COMMAND...: with what is left of the time; its status in the last line of its log
  local name=$1 start=$SECONDS; shift
  timeout "$(($(left) > 1 ? $(left) : 1))" "$@" >> "$out/$name.log" 2>&1
  echo "status $?, $((SECONDS - start)) s: $*" | tee -a "$out/$name.log"
}

tests() {
  (cd "$checkout" && PYTHONSAFEPATH=1 run tests python3 -m pytest -q -p no:cacheprovider -p no:benchmark -k cuda \
    tests/test_batches.py tests/test_checkpoint.py tests/test_host_synchronization.py)
}

surveys() {
  for name in resnet_cifar airbench_cifar; do
    run surveys $bstune survey "+workload=$name" "output=$out/survey_$name" hardware.seconds=30
  done
}

powers() { # the source's batch sizes: 100, 156 and the neighbours of 128 and 512
  run powers $bstune sweep powers_of_two workload=mobilenet_cifar precision=16-mixed "sweep.output=$out/powers" \
    'sweep.experiment.centres=[128,512]' sweep.experiment.repeats=6 sweep.experiment.steps=10
}

sources() {
  python3 - <<'P'
import os
from pathlib import Path
import torch
from bstune.workloads.datasets import load_cifar10
data = load_cifar10(os.environ["BSTUNE_DATA"])
Path("cifar10").mkdir()
for part, name in ((data.train, "train.pt"), (data.test, "test.pt")):
    images = torch.from_numpy(part.images).permute(0, 2, 3, 1).contiguous()
    torch.save({"images": images, "labels": torch.from_numpy(part.labels), "classes": list("0123456789")}, f"cifar10/{name}")
P
  sed 's/range(25)/range(6)/' "$SOURCES/airbench94.py" > airbench94.py
  sed 's/range(200)/range(6)/' "$SOURCES/airbench94_muon.py" > airbench94_muon.py
  run sources python3 airbench94.py
  run sources timeout 170 python3 airbench94_muon.py
}

ladder() {
  run ladder $bstune sweep dawnbench device=cuda 'sweep.experiment.seeds=[0]' "sweep.output=$out/ladder"
}

studies() {
  for name in resnet_cifar airbench_cifar; do
    run "study_$name" $bstune "+workload=$name" "output=$out/study_$name" mlflow.enabled=false \
      "search.wall_seconds=$(($(left) * 6 / 10))" search.candidates=1 &
  done
  wait
}

for step in "$@"; do "$step"; done
