# The operator's image: Python and the packages of [operator]; no torch. From the root of the repository:
#   docker build -f docker/operator.Dockerfile -t flyball-operator:0.1.0 .
# BASE is a Debian or Ubuntu with Python 3.11 or newer in its packages.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

FROM base AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/flyball
ENV PIP="/opt/pip/bin/pip --python /opt/flyball/bin/python --disable-pip-version-check"
# A file of certificates to trust, for registries behind a proxy; mount it with --volume.
ARG PIP_CERT
WORKDIR /src
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN python3 requirements.py operator pyproject.toml > requirements.txt \
    && $PIP install --no-cache-dir --no-compile -c constraints.txt -r requirements.txt
COPY . .
# Bytecode now: a pod has no place to keep it, and would compile everything at each start.
RUN $PIP install --no-cache-dir --no-compile --no-deps . \
    && (cd /opt/flyball/lib/python3*/site-packages && rm -r flyball_runtime flyball_kernels flyball_clients flyball_simulation) \
    && python3 -m compileall -q /opt/flyball/lib \
    && /opt/flyball/bin/flyball-operator run --help >/dev/null

FROM base
COPY --from=build /opt/flyball /opt/flyball
# kopf and torch ask for the user's name
RUN groupadd --gid 65532 flyball && useradd --uid 65532 --gid flyball --home-dir /nonexistent --no-create-home flyball
ENV PATH=/opt/flyball/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["flyball-operator"]
CMD ["run", "--all-namespaces"]
