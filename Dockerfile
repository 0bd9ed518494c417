# `make demo` in a container, on the CPU:
#
#   docker build -t trl-multimodal-rft .
#   docker run --rm -v "$PWD/outputs:/app/outputs" trl-multimodal-rft
FROM python:3.11.14-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY . .
# Builds of torch without CUDA
RUN PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make .venv/examples
CMD ["make", "demo"]
