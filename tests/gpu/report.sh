#!/usr/bin/env bash
# Everything that needs a GPU: its tests, the oracles of sessions in float32 (those that need no download), then the
# benchmark with the arguments given here (--help lists them).
# Wants no environment of ours: $PYTHON (python3) must find torch, transformers and FlashInfer, and pytest.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}backend_src:client:.
[[ ${1:-} == --help ]] && exec "$PYTHON" -m load_tests.bench.gpu --help
# Plugins that pyproject.toml speaks of may be missing, and warnings of other versions are no errors of ours.
pytest=("$PYTHON" -m pytest -o addopts="-ra --import-mode=importlib" -o filterwarnings=default)
# Not those that need a download, that are made for a CPU, or that would be the same again.
oracles="not smollm2 and not five_hundred and not only_sliding and not the_oracle_sees and not where_all_layers and not native and not torch"
tests=0
"${pytest[@]}" tests/gpu tests/unit/model/gpu/test_sampling.py || tests=$?
"${pytest[@]}" --device cuda -k "$oracles" tests/oracles/test_{incremental,rewind,fork,tiers,window,embeds,sampling}.py || tests=$?
"$PYTHON" -m load_tests.bench.gpu "$@" && exit "$tests"
