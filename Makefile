# `make help` lists the targets. Everything lands in .venv and in the model cache (~/.cache/microturn).

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# What `make check-deploy` wants besides: in the environment, and as programs in the cache.
DEPLOY_INSTALLED := .venv/.deploy-installed
# What `make sbom` runs: in an environment of its own, so that it does not list itself.
SBOM_INSTALLED := .venv/sbom/.installed
TOOLS := $(or $(MICROTURN_CACHE),$(HOME)/.cache/microturn)/tools
AXE := $(TOOLS)/axe.min.js
# Quiet but for warnings and errors; that an editable installation is one, setuptools need not warn of.
PIP_INSTALL := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# How long OpenMP's threads wait actively; see _SPIN_COUNT in backend_src/microturn/serve/triton_server.py.
export GOMP_SPINCOUNT ?= 10000

# How many processes run the tests of parts and the oracles, and those of real servers (0: pytest's own alone). The
# processors are shared out among them and their servers.
WORKERS ?= 2
E2E_WORKERS ?= 3
# Hundreds of processes of tests import the same sources: what is compiled once is kept, also where the environment
# (as of many containers) asks Python to keep nothing.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# A worker takes a file at a time, in the order of tests/conftest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve gateway simulate test test-fast test-all test-unit test-oracles test-e2e setup-frameworks test-frameworks check client-sync client-messages models-page chart-values sbom check-deploy deploy-tools image-test clean \
	bench-overhead bench-turns bench-beat bench-starts bench-peers llama-server bench-engine bench-prefixes bench-endless bench-kv \
	bench-weights bench-float8 bench-families bench-load-memory bench-parked bench-client bench-telemetry bench-grammars bench-plan bench-host bench-speculation \
	bench-tool-loop bench-edge bench-hand-over gpu-report gpu-kernels fleet soak load load-ui capacity

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## create .venv and install everything pinned in constraints.txt

$(INSTALLED): constraints.txt pyproject.toml backend_src/pyproject.toml client/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else "the server needs Python 3.11 or 3.12, not %d.%d: make PYTHON=..." % v)'
	@echo 'creating .venv …'
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) pip
	@echo 'installing the server, the client and their tools (about 75 s) …'
	@$(PIP_INSTALL) --editable 'client[gateway]' --editable 'backend_src[dynamo,s3]' --group dev
	@echo 'installing Triton …'
	@# The wheel that carries the real server; what it asks for is pytriton's, which we do not use.
	@$(PIP_INSTALL) --no-deps nvidia-pytriton
	@# FlashInfer's functions, for their signatures: no GPU is needed to import them, nor most of what it asks for.
	@$(PIP_INSTALL) --no-deps flashinfer-python apache-tvm-ffi nvidia-ml-py
	@touch $@

model: setup  ## fetch and convert the embedded model (once; cached)
	@$(BIN)/microturn fetch smollm2-135m

demo: setup  ## stream a text to the real server, see the answer come, get a picture
	@$(BIN)/python -m load_tests.demo

serve: setup  ## serve the embedded model on loopback; ARGS='--set key=value …'
	@$(BIN)/microturn serve $(ARGS)

gateway: setup  ## a page and OpenAI's APIs on loopback:8080, before the server of `make serve`; ARGS='--port 8090 …'
	@$(BIN)/microturn gateway $(ARGS)

test: test-parts test-servers  ## run all tests, with few random runs

# In two calls: where a call ends, who has no file left waits for the others, and the next one imports everything again.
.PHONY: test-parts test-servers
test-parts: model
	$(PYTEST) -n $(WORKERS) $(BY_FILE) -m 'not all_processors' tests/unit tests/simulation tests/oracles
	$(PYTEST) -m all_processors tests/oracles

test-servers: model test-programs
	-@$(MAKE) --no-print-directory setup-frameworks
	$(PYTEST) -n $(E2E_WORKERS) $(BY_FILE) tests/e2e tests/frameworks

# Without the two files of the engine that take long: they load a real model and serve a crowd.
test-fast: model  ## the parts that change most, in a minute and a half
	$(PYTEST) -n $(WORKERS) --dist loadfile --engine-runs 20 $(addprefix tests/unit/,client engine hosts kv sessions) \
	  $(addprefix --ignore=tests/unit/engine/test_,loading.py pool_pressure.py)
	$(PYTEST) --seeds 20 tests/simulation/test_simulation.py

test-all: model deploy-tools setup-frameworks  ## run all tests, with all random runs and at full length, one after another
	$(PYTEST) --full tests/unit tests/simulation
	$(PYTEST) --full tests/oracles
	$(PYTEST) --full tests/e2e
	$(PYTEST) tests/frameworks

test-unit: model  ## the parts by themselves
	$(PYTEST) -n $(WORKERS) $(BY_FILE) tests/unit tests/simulation

test-oracles: model  ## what "correct" means: the engine against plain transformers
	$(PYTEST) -n $(WORKERS) $(BY_FILE) -m 'not all_processors' tests/oracles
	$(PYTEST) -m all_processors tests/oracles

test-e2e: model test-programs  ## the real server over real gRPC
	$(PYTEST) -n $(E2E_WORKERS) $(BY_FILE) tests/e2e

# Without npm or apt-get there are no deploy tools: their tests are skipped, and say so.
.PHONY: test-programs
test-programs: $(DEPLOY_INSTALLED)
	-@deploy/tools.sh $(TOOLS)
	-@$(MAKE) --silent axe

.PHONY: axe page-pictures
axe: $(AXE)

# For tests only (MPL-2.0): it is no part of what we ship.
$(AXE):
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && cd "$$work" && npm pack --silent axe-core@4.14.1 >/dev/null && \
	  tar -xzf ./*.tgz package/axe.min.js && install -D package/axe.min.js $@

page-pictures: model  ## draw the pictures of the page in docs/gateway.md anew, in a real browser
	MICROTURN_PAGE_PICTURES=docs $(PYTEST) tests/e2e/gateway/test_page.py -k 'request_per_turn or in_the_docs'

setup-frameworks: setup  ## install agent frameworks as the package index has them (950 MB, half a minute)
	@for name in agents litellm; do tests/frameworks/setup.sh $$name || exit; done

# Without the package index there are no frameworks: their tests are skipped, and say so.
test-frameworks: model  ## agent frameworks, unmodified, before the real gateway
	-@$(MAKE) --no-print-directory setup-frameworks
	$(PYTEST) tests/frameworks

simulate: setup  ## engine, adapter, wire and clients with faults under a virtual clock; SEEDS=0:10000, or SEEDS=17 to see it
	@PYTHONPATH=tests $(BIN)/python -m simulation $(or $(SEEDS),0:1000) $(ARGS)

check: setup  ## lint, strict types, and which room may import which, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python client/generate_sync.py --check
	$(BIN)/python deploy/helm/values_page.py --check

sbom: $(SBOM_INSTALLED)  ## a software bill of materials of .venv, in CycloneDX: out/sbom.json
	@mkdir -p out
	.venv/sbom/bin/cyclonedx-py environment --output-reproducible --output-file out/sbom.json $(BIN)/python

$(SBOM_INSTALLED): $(INSTALLED)
	$(BIN)/python -m venv --without-pip .venv/sbom
	$(BIN)/pip --python .venv/sbom/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt --group sbom
	@touch $@

client-sync: setup  ## generate the client for threads from the one for asyncio
	$(BIN)/python client/generate_sync.py

models-page: setup  ## generate docs/models.md from what loading tiny models of all families comes to (half a minute)
	@PYTHONPATH=tests $(BIN)/python -m support.models_page

chart-values: setup  ## generate docs/chart-values.md from the chart's values.yaml
	@$(BIN)/python deploy/helm/values_page.py

# In an environment of its own: the oldest protoc whose messages every protobuf that the client allows can load.
client-messages:  ## generate the client's protobuf messages from client/microturn_client/_messages.proto
	$(PYTHON) -m venv .venv/protoc
	.venv/protoc/bin/python -m pip install --quiet --disable-pip-version-check 'grpcio-tools==1.66.2'
	cd client && ../.venv/protoc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. microturn_client/_messages.proto

deploy-tools: $(DEPLOY_INSTALLED)
	@deploy/tools.sh $(TOOLS)

$(DEPLOY_INSTALLED): $(INSTALLED)
	@echo 'installing what deploy/ is checked with …'
	@$(PIP_INSTALL) --group deploy
	@touch $@

check-deploy: deploy-tools  ## lint and validate what deploy/ has: image, compose file, chart, Envoy, rules and alerts
	@deploy/check.sh $(TOOLS) $(BIN)

DOCS_INSTALLED := .venv/.docs-installed
.PHONY: docs
docs: $(DOCS_INSTALLED)  ## build the documentation into out/docs; a link that leads nowhere is an error
	$(BIN)/python -m mkdocs build --strict

$(DOCS_INSTALLED): $(INSTALLED)
	@echo 'installing what the documentation is built with …'
	@$(PIP_INSTALL) --group docs
	@touch $@

image-test: model  ## build the image without a Docker engine and run it (root, buildah, debootstrap; ten minutes)
	$(PYTEST) tests/image

bench-overhead: model  ## what Triton, adapter and client add to the engine alone
	@$(BIN)/python -m load_tests.bench overhead

bench-turns: model  ## turn protocol: session, stateless, with prefix reuse, a plain loop; ARGS='--turns 300 …'
	@$(BIN)/python -m load_tests.bench turns $(ARGS)

bench-beat: model  ## beat protocol: how many sessions get each turn within 200 ms
	@$(BIN)/python -m load_tests.bench beat $(ARGS)

bench-peers: model  ## both protocols beside vLLM and llama.cpp; ARGS='--llama-server PATH --gguf FILE …'
	@$(BIN)/python -m load_tests.bench turns --peers $(ARGS)
	@$(BIN)/python -m load_tests.bench beat --peers $(ARGS)

llama-server: model  ## build a llama.cpp server and its models into the cache, for bench-peers (ten minutes)
	@$(BIN)/python -m load_tests.bench build-llama-cpp

bench-starts: model  ## from the start to the first token, and from kill -9 of the model process to serving again
	@$(BIN)/python -m load_tests.bench starts $(ARGS)

bench-edge: model deploy-tools  ## what an edge adds to a turn on a worker, beside Envoy in front of Triton
	@$(BIN)/python -m load_tests.bench edge

bench-hand-over: model  ## how long a turn waits while its session moves to another server with its KV
	@$(BIN)/python -m load_tests.bench hand-over

bench-engine: model  ## steps of the engine without Triton: linears, attention, the rest, against the memory's speed
	@$(BIN)/microturn bench engine --json load_tests/bench/results/engine.json $(ARGS)

bench-prefixes: model  ## fifty sessions that begin with one long prompt, shared and apart
	@$(BIN)/python -m load_tests.bench prefixes

bench-speculation: model  ## tokens a second with and without drafts by prompt lookup, on texts of several kinds
	@$(BIN)/python -m load_tests.bench speculation $(ARGS)

bench-endless: model  ## one session of 20,000 turns (half an hour): latency, memory and quality stay
	@$(BIN)/python -m load_tests.bench endless $(ARGS)

bench-kv: model  ## a KV cache in 16 or 8 bits: what it costs in quality and gains in room and time
	@$(BIN)/python -m load_tests.bench kv

bench-weights: model  ## weights in 8 bits: what they cost in quality and gain in bytes and time
	@$(BIN)/python -m load_tests.bench weights $(ARGS)

bench-float8: model  ## 8-bit floats of a GPU: what they cost in quality, on a CPU
	@$(BIN)/python -m load_tests.bench float8 $(ARGS)

bench-families: setup  ## fast families, mixtures of experts too: decode steps for the bytes that they must read, beside Llama
	@$(BIN)/python -m load_tests.bench families $(ARGS)

bench-load-memory: setup  ## memory that a load takes beside that of serving; ARGS='MODEL …', otherwise random ones in each format (20 minutes)
	@$(BIN)/python -m load_tests.bench load-memory $(ARGS)

bench-parked: model  ## 500 parked sessions on a pool for 20 (half an hour): right tokens, and how long restoring takes
	@$(BIN)/python -m load_tests.bench parked $(ARGS)

bench-grammars: model  ## what a grammar costs an answer's tokens, with two vocabularies
	@$(BIN)/python -m load_tests.bench grammars $(ARGS)

bench-tool-loop: model  ## a loop of twenty tool calls through the gateway, with kept sessions and without
	@$(BIN)/python -m load_tests.bench tool-loop $(ARGS)

bench-telemetry: model  ## what metrics, log lines and spans take of a step, on and off in one server
	@$(BIN)/python -m load_tests.bench telemetry $(ARGS)

bench-client: setup  ## what the client library costs: 200 sessions on the beat in one process (six minutes)
	@$(BIN)/python -m load_tests.bench client $(ARGS)

bench-host: setup  ## what the host takes for a step, whatever the model takes: flat in context and sessions, beside an earlier revision
	@$(BIN)/python -m load_tests.bench host $(ARGS)

bench-plan: model  ## what `microturn plan --measure` says of this machine, and what the real server then does
	@$(BIN)/python -m load_tests.bench plan $(ARGS)

gpu-report: setup  ## on a GPU: its tests, and the engine against the card's memory; ARGS='--shapes llama-3.1-8b …'
	@PYTHON=$(BIN)/python tests/gpu/report.sh $(ARGS)

# Without a GPU; the compiler comes from the package index. What was compiled is taken from out/flashinfer the next time.
CUDA_ARCHS ?= 9.0a
gpu-kernels: setup  ## compile FlashInfer's kernels for CUDA_ARCHS='8.0 9.0a' into out/gpu-kernels; ARGS='--head-dims 128 …'
	@$(PIP_INSTALL) ninja
	@$(PIP_INSTALL) --no-deps --target out/cuda --upgrade --requirement backend_src/cuda-compiler.txt
	@$(BIN)/microturn kernels --archs $(CUDA_ARCHS) --cuda-home out/cuda/nvidia/cu13 --work out/flashinfer --out out/gpu-kernels $(ARGS)

fleet: setup  ## simulate up to 1,000,000 sessions over replicas that are lost and come back; ARGS='--headroom 0.4 …'
	@$(BIN)/python -m load_tests.fleet $(ARGS)

soak: model  ## ten minutes of sessions that talk, interrupt and vanish; memory, pages and places must come back
	@$(BIN)/python -m load_tests.soak $(ARGS)

load: model  ## people under Locust against a server of its own; SCENARIO=beat USERS=4 DURATION=60 ARGS='--shape ramp …'
	@$(BIN)/python -m load_tests.load $(or $(SCENARIO),beat) $(if $(USERS),--users $(USERS)) \
	  $(if $(DURATION),--duration $(DURATION)) $(ARGS)

load-ui: model  ## the same with Locust's page on loopback:8089, to start, stop and watch
	@$(BIN)/python -m load_tests.load $(or $(SCENARIO),beat) $(if $(USERS),--users $(USERS)) --web-port 8089 $(ARGS)

capacity: model  ## how many sessions keep the beat, by bisection, and what limits it; ARGS='--set key=value …'
	@$(BIN)/python -m load_tests.load capacity --duration $(or $(DURATION),20) $(ARGS)

clean:  ## remove .venv and caches of tools; the model cache stays
	rm -rf .venv .frameworks .mypy_cache .ruff_cache .pytest_cache .hypothesis out
