# syntax=docker/dockerfile:1
# Two images from one file: `--target service` is small and has no torch, `--target worker` (the default) brings SGLang.

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app
RUN useradd --uid 10001 --create-home layertap && mkdir -p /data && chown layertap /data
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY layertap layertap
COPY service service
COPY worker worker
COPY migrations migrations
VOLUME /data
ENV LAYERTAP_STORAGE=/data/storage

FROM base AS service
RUN pip install -c constraints.txt '.[service]'
USER layertap
ENV LAYERTAP_HOST=0.0.0.0 LAYERTAP_DATABASE_URL=sqlite:////data/layertap.sqlite3
EXPOSE 8178
# Bound to every address it starts only with a token: docker run -e LAYERTAP_TOKEN=… -p 8178:8178 -v …:/data
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8178/healthz', timeout=2)"]
ENTRYPOINT ["python", "-m", "service"]

FROM base AS worker
# SGLang compiles some kernels when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
RUN pip install uv && uv pip install --system --no-cache -c constraints.txt '.[worker]'
USER layertap
ENV LAYERTAP_RUN_DIR=/data/worker
# docker run --gpus all --shm-size 16g -v …:/data -v …:/models … --service http://… --model /models
ENTRYPOINT ["python", "-m", "worker"]
