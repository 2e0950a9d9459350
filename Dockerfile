# Images of the coordinator and of workers, from a clone and nothing else:
#
#     docker build --target coordinator -t strata-coordinator .
#     docker build --target worker -t strata-worker .
#
# The dashboard and the wheel are built on the way. Any base with Python 3.11 or newer and its venv
# module will do. Without an image of Node, give its place to one without npm: --build-arg
# NODE=python:3.11-slim-bookworm takes the dashboard that `make dashboard` has left, or none. Behind a
# mirror of the package index, give --build-arg PIP_INDEX_URL; with a wheel of every dependency in
# dist/, --build-arg PIP_NO_INDEX=1.
ARG BASE=python:3.11-slim-bookworm
ARG NODE=node:22-bookworm-slim

FROM ${NODE} AS dashboard
WORKDIR /source/dashboard
COPY scripts/images/dashboard.sh /source/scripts/images/
COPY dashboard/package.json dashboard/package-lock.json ./
RUN ["/bin/sh", "/source/scripts/images/dashboard.sh", "install"]
COPY dashboard ./
COPY src /source/src
RUN ["/bin/sh", "/source/scripts/images/dashboard.sh", "build"]

FROM ${BASE} AS packages
COPY constraints.txt dist/*.whl /wheels/
COPY LICENSE README.md pyproject.toml /source/
COPY src /source/src
COPY --from=dashboard /source/static /source/static
COPY scripts/images/wheel.sh scripts/images/install.sh /source/scripts/images/
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
# Archives and compiled files then carry this, or a hash of their source, instead of the time of
# the build.
ARG SOURCE_DATE_EPOCH=315532800
RUN ["/bin/sh", "/source/scripts/images/wheel.sh"]

FROM packages AS coordinator-packages
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG SOURCE_DATE_EPOCH=315532800
RUN ["/bin/sh", "/source/scripts/images/install.sh", "fast"]

FROM packages AS worker-packages
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG SOURCE_DATE_EPOCH=315532800
RUN ["/bin/sh", "/source/scripts/images/install.sh", "data,fast,zstd"]

FROM ${BASE} AS runtime
# Written rather than made by useradd, which notes the day of the build in /etc/shadow.
RUN echo "strata:x:10001:" >> /etc/group \
    && echo "strata:x:10001:10001:Strata:/var/lib/strata:/usr/sbin/nologin" >> /etc/passwd \
    && install -d -o 10001 -g 10001 /var/lib/strata
ENV PATH=/opt/strata/bin:$PATH \
    HOME=/var/lib/strata \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/strata

FROM runtime AS coordinator
COPY --from=coordinator-packages /opt/strata /opt/strata
COPY scripts/images/healthcheck.py /opt/strata/healthcheck.py
ENV STRATA_DATA_DIR=/var/lib/strata
VOLUME ["/var/lib/strata"]
EXPOSE 50051 3000
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "/opt/strata/healthcheck.py"]
ENTRYPOINT ["strata", "coordinator"]

# What a training image begins with: FROM strata-worker, then your packages and your program.
FROM runtime AS worker
COPY --from=worker-packages /opt/strata /opt/strata
COPY examples/numpy_training.py /opt/strata/examples/
# Whether a worker is well is known to the coordinator, which hears its heartbeats.
HEALTHCHECK NONE
CMD ["python", "/opt/strata/examples/numpy_training.py"]
