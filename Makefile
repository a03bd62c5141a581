# The targets that people and CI use. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
# Of `make docs`, which reads the sources and needs neither torch nor Horovod.
DOCS_VENV ?= .venv-docs
SITE ?= site
# torch decides what Horovod is compiled against. On a machine without a GPU that
# reaches the Internet, a much smaller torch comes with
#   make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX_URL ?=
EXTRAS ?= dev,train,bench
PYTEST_ARGS ?=
# Files of tests that run side by side, one more of them with jobs than there are cores (tests/support/slots.py); no test
# depends on how fast it gets on.
TEST_JOBS ?= 4
# Unit tests that run side by side in `test-quick`, where no job of several processes competes: one per core.
QUICK_JOBS ?= auto
SEEDS ?= 20
# Of `make fuzz`: its seed, and inputs of all targets together.
SEED ?= 1
INPUTS ?= 1000000

export PYTHON VENV TORCH_SPEC TORCH_INDEX_URL EXTRAS

BIN := $(VENV)/bin
comma := ,
blank := $(subst x,,x x)
# The name holds what the environment was made of: another torch, another stamp. The signs of versions, which the shell
# would take for redirections and the like, become words, so that two specifications do not share a name.
torch_name = $(subst <,lt,$(subst >,gt,$(subst !,not,$(subst ~,like,$(subst $(blank),_,$(TORCH_SPEC))))))
STAMP := $(VENV)/.setup-$(subst $(comma),-,$(subst =,-,$(torch_name)-$(EXTRAS)))
SETUP_INPUTS := pyproject.toml $(wildcard patches/*.patch) scripts/setup.sh \
	scripts/build_horovod.py scripts/gpu_build.py scripts/unified_diff.py scripts/lock.py requirements.lock

.PHONY: help setup lock demo test test-quick stress nemesis fuzz lint docs docs-venv bench clean

help:
	@echo "make setup   environment in $(VENV): torch, the project, the patched Horovod"
	@echo "make demo    training with a slow worker, Horovod against STAR, on this machine"
	@echo "make test    lint, types, and all tests (TEST_EFFORT=10: ten times as many random cases)"
	@echo "make test-quick  lint, types, and the unit tests that take no time, with fewer random cases"
	@echo "make stress  random switches among all modes, ranks with moods; SEEDS=20 jobs, or until one fails"
	@echo "make nemesis  jobs whose processes are stopped and killed and whose connections break; as root"
	@echo "make fuzz    damaged input for every decoder and state machine (INPUTS=1000000 SEED=1)"
	@echo "make lock    resolve anew: requirements.lock, every archive with its hash"
	@echo "make lint    ruff and mypy alone"
	@echo "make docs    the pages of docs/ and the API reference, as a site in site/"
	@echo "make bench   overhead and time to accuracy; tables here, figures as JSON in benchmarks/out"
	@echo "make clean   remove the environment, caches and build results; benchmarks/out stays"

setup: $(STAMP)

# The stamps of earlier settings go first: the environment is no longer theirs, nor anybody's if the set-up fails.
$(STAMP): $(SETUP_INPUTS)
	@rm -f $(VENV)/.setup-*
	@bash scripts/setup.sh
	@touch '$@'

lock: setup
	$(BIN)/python scripts/lock.py write "$(TORCH_SPEC)"

demo: setup
	@$(BIN)/python -m benchmarks.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy --strict star_hvd scheduler star_hvd_command.py

$(DOCS_VENV)/.made: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet $$(sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml)
	@touch $@

docs-venv: $(DOCS_VENV)/.made

docs: docs-venv
	$(PYTHON) scripts/protocol_tables.py --check
	$(DOCS_VENV)/bin/python -m mkdocs build --strict --site-dir "$(abspath $(SITE))"

# mypy uses one core for half a minute, so it runs beside the tests.
test: setup
	$(BIN)/ruff check .
	@$(BIN)/mypy --strict star_hvd scheduler star_hvd_command.py & types=$$!; status=0; \
	  $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 4 --durations=25 $(PYTEST_ARGS) || status=$$?; \
	  wait $$types || { echo "mypy found errors, see above" >&2; status=1; }; exit $$status

test-quick: lint
	TEST_EFFORT=$${TEST_EFFORT:-0.3} $(BIN)/python -m pytest -n $(QUICK_JOBS) --dist worksteal -m "not slow" tests/unit tests/tools tests/fuzz $(PYTEST_ARGS)

stress: setup
	@for seed in $$(seq 1 $(SEEDS)); do echo "seed $$seed of $(SEEDS)"; \
	  PYTHONPATH=. OMP_NUM_THREADS=1 STAR_RUN_LOG=0 $(BIN)/horovodrun -np 4 --gloo \
	    "$(abspath $(BIN))/python" -m tests.multiproc.modes switch:$$seed:70:moody || exit 1; done

nemesis: setup
	@$(BIN)/python -m tests.nemesis --seeds $(SEEDS)

fuzz: setup
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED)

bench: setup
	@mkdir -p benchmarks/out
	$(BIN)/python -m benchmarks.overhead --json benchmarks/out/overhead.json
	$(BIN)/python -m benchmarks.tta --json benchmarks/out/tta.json

clean:
	rm -rf $(VENV) $(DOCS_VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
