# Horovod on CPUs: a Spark driver, master, worker or executor, or ranks without Spark.
#
#     docker build -f docker/cpu.Dockerfile -t horovod-runner:cpu .
#
# docs/where/docker.md says how to run it.

FROM python:3.11-slim-bookworm AS build

# Debian's mirrors keep no older version of a package: a version named here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

# torch, tensorflow, or both with a comma between them.
ARG FRAMEWORK=torch
ARG TORCH_VERSION=2.13.0
ARG TENSORFLOW_VERSION=2.21.0
ARG PYSPARK_VERSION=3.5.9
# Where torch's CPU build comes from; empty for the index that pip is set up with.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /build
COPY constraints/petastorm.txt tested.txt
# All versions are the tested ones, but for those named above.
RUN sed --regexp-extended \
        -e "s/^torch==.*/torch==${TORCH_VERSION}/" \
        -e "s/^tensorflow==.*/tensorflow==${TENSORFLOW_VERSION}/" \
        -e "s/^pyspark==.*/pyspark==${PYSPARK_VERSION}/" \
        tested.txt > constraints.txt \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# Torch alone comes from its own index, and before the sources: an edit of those leaves this layer.
# The option is taken for a package without a version.
# hadolint ignore=DL3013
RUN case ",${FRAMEWORK}," in \
        *,torch,*) pip install --no-cache-dir --no-deps \
            ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}" ;; \
    esac
# 1: accept a torch that is built for CUDA, which brings five gigabytes of libraries.
ARG ALLOW_CUDA=
RUN if [ -z "${ALLOW_CUDA}" ] \
        && [ -e /opt/venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so ]; then \
        echo "torch ${TORCH_VERSION} from this index is built for CUDA: the image would take 7 GB" \
            "instead of 2. Name an index of builds for CPUs," \
            "--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu or a mirror of it." \
            "To accept the size: --build-arg ALLOW_CUDA=1." >&2; \
        exit 1; \
    fi

# More of setup.cfg's extras, for example spark,data,mpich,examples.
ARG EXTRAS=spark,data,mpich
COPY pyproject.toml setup.cfg setup.py ./
# Dependencies come before the sources: an edit of those leaves this layer.
# Every version is in PIP_CONSTRAINT.
# hadolint ignore=DL3013
RUN mkdir horovod_runner \
    && echo '__version__ = "0"' > horovod_runner/__init__.py \
    && touch README.md \
    && pip install --no-cache-dir ".[${FRAMEWORK},${EXTRAS},build]" \
    && rm -rf build horovod_runner horovod_runner.egg-info
COPY LICENSE README.md ./
COPY horovod_runner horovod_runner
RUN pip install --no-cache-dir --no-deps --force-reinstall .

# Named, or they would be those of the machine that builds; empty on ARM.
ARG HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma"
# Ends with two ranks that reduce. What the build alone needed stays behind.
RUN horovod-runner install --cpu --frameworks "${FRAMEWORK}" \
    && pip uninstall --yes cmake wheel


FROM python:3.11-slim-bookworm

LABEL org.opencontainers.image.title="horovod_runner" \
      org.opencontainers.image.description="Horovod ranks on CPUs, in a Spark job or without" \
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
ENV PATH=/opt/venv/bin:$PATH \
    JAVA_HOME=/opt/java \
    SPARK_HOME=/opt/spark \
    PYSPARK_PYTHON=/opt/venv/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/venv/bin/python \
    PYTHONUNBUFFERED=1

WORKDIR /home/spark
USER 185:185

# Two ranks reduce a number, which takes both some cores and some seconds: not often.
HEALTHCHECK --interval=10m --timeout=2m --retries=2 CMD ["horovod-runner", "doctor"]
ENTRYPOINT ["tini", "--", "/opt/entrypoint.sh"]
CMD ["horovod-runner", "doctor"]
