# The image of one replica on CPUs: Python, the packages of [runtime], the compiled CPU ops; no compiler. From the root of the
# repository:
#   docker build -f docker/runtime.Dockerfile -t flyball-runtime:0.1.0 .
# BASE is a Debian or Ubuntu with Python 3.11 or newer in its packages. MARCH is gcc's name of the oldest CPU to run on.
# TORCH_INDEX is where torch comes from; PyPI's torch is a CUDA build, of which what a CPU does not need is left out.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv python3-dev g++
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flyball
ENV PIP="/opt/pip/bin/pip --python /opt/flyball/bin/python --disable-pip-version-check"
# A file of certificates to trust, for registries behind a proxy; mount it with --volume.
ARG PIP_CERT
WORKDIR /src
COPY pyproject.toml docker/requirements.py docker/prune_torch.py ./
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 requirements.py runtime pyproject.toml | grep -v '^triton' > requirements.txt \
    && $PIP install --no-cache-dir --no-compile --index-url ${TORCH_INDEX} "$(grep '^torch' requirements.txt)" \
    && $PIP install --no-cache-dir --no-compile -r requirements.txt
COPY kernels kernels
ARG MARCH=x86-64-v3
RUN PYTHONPATH=kernels /opt/flyball/bin/python -m flyball_kernels.cpu.build \
        --march ${MARCH} --output /opt/flyball/lib/libflyball_kernels.so \
    && /opt/flyball/bin/python prune_torch.py \
    && /opt/flyball/bin/python -c 'import torch, transformers; torch.ops.load_library("/opt/flyball/lib/libflyball_kernels.so")'
COPY . .
# Bytecode now: a pod has no place to keep it, and would compile torch at each start. The folder left out has newer syntax.
RUN $PIP install --no-cache-dir --no-compile --no-deps . \
    && rm -r /opt/flyball/lib/python3*/site-packages/flyball_operator \
    && python3 -m compileall -q -x torch/testing/_internal /opt/flyball/lib

FROM base
COPY --from=build /opt/flyball /opt/flyball
# kopf and torch ask for the user's name
RUN groupadd --gid 65532 flyball && useradd --uid 65532 --gid flyball --home-dir /nonexistent --no-create-home flyball
ENV PATH=/opt/flyball/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 FLYBALL_CPU_LIBRARY=/opt/flyball/lib/libflyball_kernels.so
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["flyball"]
