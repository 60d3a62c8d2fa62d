#!/usr/bin/env bash
# check.sh TOOLS BIN: lints and validates everything in deploy/ and the Dockerfile, without a cluster or an engine.
# TOOLS has helm and promtool (tools.sh), BIN is the bin of the virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$1 bin=$2
KUBERNETES_VERSION=1.35
chart=deploy/helm/microturn
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf '%s\n' "check-deploy: $*"; }

say Dockerfile
"$bin/hadolint" Dockerfile

say Prometheus
"$tools/promtool" check config --syntax-only deploy/prometheus/prometheus.yml
"$tools/promtool" check rules deploy/prometheus/*-rules.yml
"$tools/promtool" test rules deploy/prometheus/rules.test.yml

validate_envoy() {
  # What it reads from its directory of secrets, made up; the rest is as it is.
  sed "s#/etc/envoy/secrets#$work/secrets#" "$1" >"$work/envoy.yaml"
  "$bin/envoy" --mode validate --log-level warn -c "$work/envoy.yaml" 2>"$work/said" || { cat "$work/said"; exit 1; }
  if grep -i deprecated "$work/said"; then exit 1; fi
}
say Envoy
mkdir "$work/secrets"
sed "s#/etc/envoy/secrets#$work/secrets#" deploy/envoy/tls.example.yaml >"$work/secrets/tls.yaml"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=check \
  -keyout "$work/secrets/tls.key" -out "$work/secrets/tls.crt" 2>/dev/null
openssl genrsa -out "$work/tokens.key" 2048 2>/dev/null
"$bin/python" deploy/tokens.py jwks "$work/tokens.key" >"$work/secrets/jwks.json"
validate_envoy deploy/envoy/envoy.yaml

say compose
"$bin/python" -c 'import sys, compose_spec; compose_spec.PyCompose.from_yaml(open(sys.argv[1]).read()).validate()' deploy/compose.yaml

for values in "" $chart/examples/*.yaml; do
  say "chart with ${values:-its defaults}"
  # helm says on stderr that it follows links, which is what they are for
  "$tools/helm" lint --strict --quiet ${values:+--values "$values"} $chart 2>"$work/said" || { cat "$work/said"; exit 1; }
  "$tools/helm" template check --namespace sessions ${values:+--values "$values"} $chart >"$work/chart.yaml" 2>"$work/said" \
    || { cat "$work/said"; exit 1; }
  "$bin/kubernetes-validate" --strict --quiet --no-warn --kubernetes-version $KUBERNETES_VERSION "$work/chart.yaml"
  "$bin/python" -c 'import sys, yaml
for part in yaml.safe_load_all(open(sys.argv[1])):
    if part and part["kind"] == "ConfigMap" and "envoy.yaml" in part["data"]:
        print(part["data"]["envoy.yaml"])' "$work/chart.yaml" >"$work/edge.yaml"
  validate_envoy "$work/edge.yaml"
done
"$tools/helm" template check $chart --set server.replica=3 >/dev/null 2>&1 \
  && { say "a misspelt value passes the chart's schema"; exit 1; }
say "all is well"
