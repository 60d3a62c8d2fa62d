#!/usr/bin/env bash
# Everything that needs a GPU: the tests, then the benchmark with the arguments given here (--help lists them).
# Wants no environment of ours: $PYTHON (python3) must find torch, transformers and FlashInfer, and pytest.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}backend_src:client:.
[[ ${1:-} == --help ]] && exec "$PYTHON" -m load_tests.bench.gpu --help
# Plugins that pyproject.toml speaks of may be missing, and warnings of other versions are no errors of ours.
"$PYTHON" -m pytest -o addopts="-ra --import-mode=importlib" -o filterwarnings=default tests/gpu
tests=$?
"$PYTHON" -m load_tests.bench.gpu "$@" && exit "$tests"
