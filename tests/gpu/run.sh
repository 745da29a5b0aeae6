#!/usr/bin/env bash
# What only a GPU shows, in one go of ten minutes, without a network: bash tests/gpu/run.sh OUT [OPTION ...] [SECTION ...]
#
# OUT/results.jsonl gets a line of JSON for each result; day.py beside this says which, and has the options. WHEELS is a
# folder of wheels, bstune's own among them, as wheels.sh collects them; without it bstune is installed already (the
# checkout alone has no configs in the package). PYTHON is the interpreter.
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1"); shift
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$WHEELS"/*.whl
  export PYTHONPATH=$work/site
fi
cd "$work" # studies and caches of this run alone
export PYTHONUNBUFFERED=1 BSTUNE_CACHE=${BSTUNE_CACHE:-$work/cache} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/inductor}
"$python" "$here/day.py" "$out" "$@"
