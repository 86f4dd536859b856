# The image of one replica: Python, the packages of [runtime], the compiled CPU ops. From the root of the repository, for GPUs:
#   docker build -f docker/runtime.Dockerfile -t flyball-runtime:0.1.0 .
# and a smaller one for CPUs alone:
#   docker build -f docker/runtime.Dockerfile -t flyball-runtime:0.1.0-cpu --build-arg DEVICE=cpu \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# BASE is a Debian or Ubuntu with Python 3.11 or newer in its packages. VARIANTS are the instruction sets to compile the CPU ops
# for, all of them if empty; the best one that a CPU has is chosen when it starts (flyball_kernels/cpu/variants.py).
# TORCH_INDEX is where torch comes from; PyPI's torch is a CUDA build, of which DEVICE=cpu leaves out what a CPU does not need.
ARG BASE=docker.io/library/debian:bookworm-slim
ARG DEVICE=cuda

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv python3-dev g++
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flyball
ENV PIP="/opt/pip/bin/pip --python /opt/flyball/bin/python --disable-pip-version-check"
# A file of certificates to trust, for registries behind a proxy; mount it with --volume.
ARG PIP_CERT
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py docker/prune_torch.py ./
ARG DEVICE
ARG TORCH_INDEX=https://pypi.org/simple
RUN python3 requirements.py runtime pyproject.toml $([ ${DEVICE} = cuda ] || echo triton) > requirements.txt \
    && $PIP install --no-cache-dir --no-compile --index-url ${TORCH_INDEX} -c constraints.txt "$(grep '^torch' requirements.txt)" \
    && $PIP install --no-cache-dir --no-compile -c constraints.txt -r requirements.txt \
    && if [ ${DEVICE} = cpu ]; then /opt/flyball/bin/python prune_torch.py; fi
COPY kernels kernels
ARG VARIANTS=
ENV FLYBALL_CPU_LIBRARY=/opt/flyball/lib/flyball_kernels
RUN PYTHONPATH=kernels /opt/flyball/bin/python -m flyball_kernels.cpu.build \
        --variants ${VARIANTS} --output ${FLYBALL_CPU_LIBRARY} \
    && if [ ${DEVICE} = cpu ]; then rm -r /opt/flyball/lib/python3*/site-packages/torch/include; fi \
    && PYTHONPATH=kernels /opt/flyball/bin/python -c 'import transformers; from flyball_kernels.cpu import library; library.load()'
COPY . .
# Bytecode now: a pod has no place to keep it, and would compile torch at each start. The folder left out has newer syntax.
RUN $PIP install --no-cache-dir --no-compile --no-deps . \
    && rm -r /opt/flyball/lib/python3*/site-packages/flyball_operator /opt/flyball/lib/python3*/site-packages/flyball_simulation \
    && python3 -m compileall -q -x torch/testing/_internal /opt/flyball/lib \
    && for command in serve listener bench; do /opt/flyball/bin/flyball $command --help >/dev/null || exit 1; done

FROM base
ARG DEVICE
# Triton compiles what launches a kernel when the kernel is first used.
RUN if [ ${DEVICE} = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*; \
    fi
COPY --from=build /opt/flyball /opt/flyball
# kopf and torch ask for the user's name
RUN groupadd --gid 65532 flyball && useradd --uid 65532 --gid flyball --home-dir /nonexistent --no-create-home flyball
ENV PATH=/opt/flyball/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 \
    FLYBALL_CPU_LIBRARY=/opt/flyball/lib/flyball_kernels NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
EXPOSE 8000 8001
ENTRYPOINT ["flyball"]
