#!/usr/bin/env bash
# setup.sh NAME: an environment in .frameworks/NAME with what tests/frameworks/NAME.txt pins. Where it has that already, nothing
# is done.
set -euo pipefail
cd "$(dirname "$0")/../.."
pins=tests/frameworks/$1.txt
env=.frameworks/$1
if cmp -s "$pins" "$env/installed.txt"; then exit; fi
echo "installing $env …"
rm -rf "$env"
.venv/bin/python -m venv --without-pip "$env"
# Most of what comes is never imported: what is, is compiled then.
.venv/bin/python -m pip --python "$env/bin/python" install --quiet --disable-pip-version-check --no-compile \
  --requirement "$pins" || { rm -rf "$env"; exit 1; }
cp "$pins" "$env/installed.txt"
