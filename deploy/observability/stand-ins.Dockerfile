# syntax=docker/dockerfile:1.7
# What plays the images of the profile `observability` where no registry of images can be reached:
# Debian's Prometheus, and a collector in place of Jaeger. docker-compose.yml names the real ones.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS prometheus
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends prometheus wget \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 65534 -g 65534 /prometheus
USER 65534:65534
ENTRYPOINT ["prometheus"]

# hadolint ignore=DL3006
FROM kaiten-gateway AS jaeger
USER 0
COPY tests /played/tests
COPY tools /played/tools
# What its health check, and who looks into it, call.
RUN printf '#!/bin/sh\nexec python -c "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[-1]).read())" "$@"\n' \
    > /usr/local/bin/wget && chmod 755 /usr/local/bin/wget
ENV PYTHONPATH=/played
USER 10001:10001
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "tools.containers.played_jaeger"]
