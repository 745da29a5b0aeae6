#!/usr/bin/env bash
# Collect what bstune needs on a machine without a network: bash tests/gpu/wheels.sh DEST [REQUIREMENT ...]
#
# For Python 3.12 with PyTorch, Lightning, torchvision, pandas, matplotlib, rich and scikit-learn, but without Hydra,
# Optuna or MLflow. DEST is emptied first; bstune's own wheel is among what it gets. There: WHEELS=DEST tests/gpu/run.sh.
# mlflow-skinny with SQLAlchemy and Alembic logs to SQLite; MLflow's pages need the whole package.
set -euo pipefail
dest=${1:?usage: wheels.sh DEST [REQUIREMENT ...]}; shift
checkout=$(realpath "$(dirname "$0")/../..")
wanted=(hydra-core optuna mlflow-skinny sqlalchemy alembic greenlet pooch plotly pydantic "$@")
there='annotated-doc anyio certifi charset-normalizer click cloudpickle filelock fsspec h11 idna jinja2 kiwisolver
  markdown-it-py markupsafe matplotlib narwhals networkx numpy packaging pandas pillow pip protobuf psutil pygments
  pyparsing python-dateutil pyyaml requests rich scikit-learn scipy six sympy tqdm typing-extensions
  urllib3 wrapt zipp'
rm -rf "$dest"; mkdir -p "$dest"
python3 -m pip wheel -q --no-deps -w "$dest" antlr4-python3-runtime==4.9.3 "$checkout"
target=(--python-version 3.12 --implementation cp --only-binary=:all:)
for version in 2_34 2_31 2_28 2_27 2_24 2_17 2014 1; do
  case $version in 2_*) target+=(--platform "manylinux_${version}_x86_64") ;; *) target+=(--platform "manylinux${version}_x86_64") ;; esac
done
report=$(mktemp)
trap 'rm -f "$report"' EXIT
python3 -m pip install -q --dry-run --ignore-installed --target /nonexistent --find-links "$dest" \
  "${target[@]}" --report "$report" "${wanted[@]}"
mapfile -t missing < <(python3 - "$report" $there <<'P'
import json, re, sys

def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()

there = {normalised(name) for name in sys.argv[2:]} | {"antlr4-python3-runtime"}
for item in json.load(open(sys.argv[1]))["install"]:
    if normalised(item["metadata"]["name"]) not in there:
        print(f"{item['metadata']['name']}=={item['metadata']['version']}")
P
)
python3 -m pip download -q --no-deps "${target[@]}" -d "$dest" "${missing[@]}"
du -sh "$dest"
