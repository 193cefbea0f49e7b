# Horovod with NCCL on NVIDIA GPUs: a Spark driver, worker or executor, or ranks without Spark.
#
#     docker build -f docker/cuda.Dockerfile -t horovod-runner:cuda .
#
# docs/where/docker.md says how to run it. It builds on a machine without a GPU, too.

# Of the major release that torch was built for.
ARG CUDA_VERSION=13.0.1

FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu22.04 AS toolkit
# A folder whose name knows no version.
RUN mv "$(readlink --canonicalize /usr/local/cuda)" /toolkit


# Only the compiler comes from NVIDIA's image: what is built must fit the Python and the C library
# that the last stage has.
FROM python:3.11-slim-bookworm AS build

# Debian's mirrors keep no older version of a package: a version named here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_VERSION=2.13.0
ARG PYSPARK_VERSION=3.5.9
# Where torch's CUDA build comes from: PyPI's is one, so none is named. For an older CUDA release
# https://download.pytorch.org/whl/cu126, and CUDA_VERSION above.
ARG TORCH_INDEX=

WORKDIR /build
COPY constraints/petastorm.txt tested.txt
# All versions are the tested ones, but for those named above.
RUN sed --regexp-extended \
        -e "s/^torch==.*/torch==${TORCH_VERSION}/" \
        -e "s/^pyspark==.*/pyspark==${PYSPARK_VERSION}/" \
        tested.txt > constraints.txt \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Torch alone comes from its own index; CUDA's libraries and NCCL are wheels that it depends on.
# Before the sources: an edit of those leaves this layer.
# The option is taken for a package without a version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}" \
    && pip install --no-cache-dir "torch==${TORCH_VERSION}"

# More of setup.cfg's extras, for example spark,data,examples.
ARG EXTRAS=spark,data
COPY pyproject.toml setup.cfg setup.py ./
# Dependencies come before the sources: an edit of those leaves this layer.
# Every version is in PIP_CONSTRAINT.
# hadolint ignore=DL3013
RUN mkdir horovod_runner \
    && echo '__version__ = "0"' > horovod_runner/__init__.py \
    && touch README.md \
    && pip install --no-cache-dir ".[torch,${EXTRAS},build]" \
    && rm -rf build horovod_runner horovod_runner.egg-info
COPY LICENSE README.md ./
COPY horovod_runner horovod_runner
RUN pip install --no-cache-dir --no-deps --force-reinstall .

COPY --from=toolkit /toolkit /usr/local/cuda
# A machine that builds has no GPU to ask: A100, L4 and L40, H100 and H200, B200.
ARG HOROVOD_BUILD_CUDA_CC_LIST=80,89,90,100
# Named, or they would be those of the machine that builds; empty on ARM.
ARG HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma"
# Ends with two ranks that reduce, on CPUs where there are no GPUs. What the build alone needed
# stays behind.
RUN CUDA_HOME=/usr/local/cuda horovod-runner install --gpu --frameworks torch \
    && pip uninstall --yes cmake wheel


# Torch's wheels bring CUDA's libraries and the container toolkit the driver's: NVIDIA's run-time
# image would add the former once more.
FROM python:3.11-slim-bookworm

LABEL org.opencontainers.image.title="horovod_runner" \
      org.opencontainers.image.description="Horovod ranks on GPUs, in a Spark job or without" \
      org.opencontainers.image.licenses="Apache-2.0"

# procps for Spark's scripts; tini forwards signals and reaps orphans; libnss-wrapper for the entry
# point. Java's package needs the folder of manual pages, which slim images lack. The two links do not
# change with Python's version and the CPU. Spark's own images have the user 185, too. Users that the
# image does not know are in group 0 on OpenShift, and may write where that group may.
# hadolint ignore=DL3008
RUN mkdir --parents /usr/share/man/man1 \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        libnss-wrapper openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s "$(dirname "$(dirname "$(readlink --canonicalize /usr/bin/java)")")" /opt/java \
    && ln -s /opt/venv/lib/python3.11/site-packages/pyspark /opt/spark \
    && groupadd --system --gid 185 spark \
    && useradd --system --uid 185 --gid 185 --create-home spark \
    && chgrp 0 /home/spark \
    && chmod 775 /home/spark

COPY --from=build /opt/venv /opt/venv
COPY docker/entrypoint.sh docker/decom.sh docker/gpu_addresses.sh /opt/
# Which GPUs it sees is said by `--gpus` or by Kubernetes: "all" here would be all of a host's to a
# pod that asked for none.
ENV PATH=/opt/venv/bin:$PATH \
    JAVA_HOME=/opt/java \
    SPARK_HOME=/opt/spark \
    PYSPARK_PYTHON=/opt/venv/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/venv/bin/python \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /home/spark
USER 185:185

# Two ranks reduce a number, which takes some seconds: not often. On CPUs: a check must take no
# memory of a GPU from a training.
HEALTHCHECK --interval=10m --timeout=2m --retries=2 \
    CMD ["env", "CUDA_VISIBLE_DEVICES=", "horovod-runner", "doctor"]
ENTRYPOINT ["tini", "--", "/opt/entrypoint.sh"]
CMD ["horovod-runner", "doctor"]
