# Microturn on NVIDIA's Triton image: the supervisor as entry point, a user without rights, a model by volume (/model)
# or built in (--build-arg MODEL=smollm2-135m). docs/deploy.md says how it is built, run and tested.
ARG TRITON_VERSION=26.07
ARG BASE=nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3

# What we depend on, apart from our own code: gigabytes, in a layer that changes with constraints.txt only. The empty
# packages stand for ours and name what they need.
FROM ${BASE} AS dependencies
COPY constraints.txt /build/
COPY client/pyproject.toml /build/client/
COPY backend_src/pyproject.toml /build/backend_src/
# [s3] is for snapshots in a bucket; [gpu,s3] adds FlashInfer, whose kernels are compiled below, or by a GPU's first start.
ARG EXTRAS="[s3]"
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
# A virtual environment, since the system's Python belongs to its distribution; Triton's stub runs the first on PATH.
RUN python3 -m venv --without-pip /opt/microturn \
    && python3 -m pip --python /opt/microturn/bin/python install './client[gateway]' "./backend_src${EXTRAS}" \
    && python3 -m pip --python /opt/microturn/bin/python uninstall --yes microturn microturn-client

FROM dependencies AS wheels
# The packages have links to it.
COPY LICENSE /build/
COPY client /build/client
COPY backend_src /build/backend_src
COPY model_repository /build/model_repository
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels ./client ./backend_src

# The model that is built in, if any; the directory is there in any case, for a volume. To fetch one takes a pip of its own,
# which nobody needs later.
FROM dependencies AS model
ARG MODEL=""
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python3 -m pip --python /opt/microturn/bin/python install --no-deps --no-index /wheels/*.whl \
    && mkdir /model \
    && if [ -n "${MODEL}" ]; then \
        python3 -m pip --python /opt/microturn/bin/python install pip \
        && MICROTURN_CACHE=/build/models /opt/microturn/bin/microturn fetch "${MODEL}" \
        && cp -r "/build/models/${MODEL}/." /model; \
    fi

# FlashInfer's kernels for the GPUs of CUDA_ARCHS ("8.0 8.9 9.0a 10.0a"), if any, with EXTRAS of gpu; the directory is there
# in any case. The compiler stays here. What was compiled is kept for the next build: our code, not theirs, changes.
FROM dependencies AS kernels
ARG CUDA_ARCHS=""
ARG KERNELS="--head-dims 64 128 --kv-dtypes bfloat16 float8_e4m3fn"
COPY backend_src/cuda-compiler.txt /build/backend_src/
# hadolint ignore=SC2086
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=cache,target=/build/flashinfer \
    mkdir /kernels \
    && if [ -n "${CUDA_ARCHS}" ]; then \
        python3 -m pip --python /opt/microturn/bin/python install --no-deps --no-index /wheels/*.whl \
        && python3 -m pip install --no-deps --target /build/cuda --requirement backend_src/cuda-compiler.txt \
        && /opt/microturn/bin/microturn kernels --archs ${CUDA_ARCHS} ${KERNELS} \
            --cuda-home /build/cuda/nvidia/cu13 --work /build/flashinfer --out /kernels; \
    fi

FROM ${BASE}
COPY --from=dependencies /opt/microturn /opt/microturn
COPY --from=model /model /model
# Owned by nobody but root, so that the server cannot change its own code; what it writes goes where 1000 may write:
# compiled kernels into the cache, the run directory into /tmp, sessions into /snapshots.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    --mount=type=bind,from=kernels,source=/kernels,target=/kernels \
    python3 -m pip --python /opt/microturn/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl \
    && if [ -n "$(ls /kernels)" ]; then cp -r /kernels "$(echo /opt/microturn/lib/python3*/site-packages/flashinfer/data)/aot"; fi \
    && install --directory --owner=1000 --group=1000 --mode=0700 /var/cache/microturn /snapshots
ENV PATH=/opt/microturn/bin:${PATH} \
    HOME=/var/cache/microturn \
    HF_HUB_OFFLINE=1
WORKDIR /var/cache/microturn
USER 1000:1000
# Triton's gRPC and metrics; the supervisor's health by gRPC, and by HTTP; sessions of other servers, with --peer-port.
EXPOSE 8001 8002 8003 8004 8005
# A first start compiles kernels and probes the model.
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m CMD ["microturn", "health"]
ENTRYPOINT ["microturn", "serve", "--host=0.0.0.0", "--http-health-port=8004", "--model=/model"]
