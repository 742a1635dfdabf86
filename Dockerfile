# syntax=docker/dockerfile:1
# The image that pods and containers run bigtrain in:
#   docker build -t bigtrain .                          # CUDA: torch's wheels bring its libraries
#   docker build -t bigtrain --build-arg DEVICE=cpu .
#   docker build -t bigtrain --build-arg DEVICE=cpu --build-arg TORCH_INDEX= .   # pip's own index
# Compiling DeepSpeed's own CUDA kernels needs nvcc; bigtrain's defaults use none. Where they are
# wanted, give a base with both: --build-arg BASE_IMAGE=...
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG DEVICE=cuda
# Of torch for CPUs; empty where pip's own index, such as a company's mirror, has those builds.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# g++: DeepSpeed compiles a CPU operator at its first use. ssh and pdsh: its launcher.
# Debian keeps no old versions, so pins would break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git openssh-client pdsh \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/bigtrain
COPY constraints.txt ./
# torch comes first and alone: the largest layer, and DeepSpeed's setup looks at it.
RUN case "${DEVICE}" in \
      cpu) set -- ${TORCH_INDEX:+--index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple} ;; \
      cuda) set -- ;; \
      *) echo "DEVICE=${DEVICE} is neither cpu nor cuda" >&2; exit 2 ;; \
    esac \
 && pip install -c constraints.txt setuptools wheel \
 && pip install "$@" -c constraints.txt torch ninja numpy

COPY pyproject.toml README.md LICENSE ./
COPY bigtrain bigtrain
COPY ds_configs ds_configs
COPY slurm slurm
COPY hostfiles hostfiles
RUN DS_BUILD_OPS=0 pip install --no-build-isolation -c constraints.txt -e .

# Writable for whatever user the cluster runs it as.
ENV HOME=/tmp TORCH_EXTENSIONS_DIR=/tmp/torch_extensions
USER 1000:1000
CMD ["bigtrain", "--help"]
