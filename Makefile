# Every target makes the environments that it needs, under .venv/ from the pinned versions in constraints/.

.DEFAULT_GOAL := help

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest
# Other Pythons are found on the path, or else in pyenv.
find_python = $(or $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null),$(shell pyenv prefix $(1) 2>/dev/null)/bin/python$(1))
PYTHON311 ?= $(call find_python,3.11)
PYTHON313 ?= $(call find_python,3.13)

# Tests start a thousand processes: without files of bytecode, each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

# More than two cores need, because tests spend much of their time waiting.
WORKERS ?= 3
PARALLEL = -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# With RETRY=1, tests that failed run once more, one after the other: on a few busy cores, some fail by chance. Both
# results are shown. For .ci/run; a test that needs it often is to be fixed.
retry = $(if $(RETRY), || $(1) -n 0 --last-failed --last-failed-no-failures=none)
# What failed last, by release, because both may run at the same time.
CACHE = -o cache_dir=.venv/$*/pytest-cache

EXAMPLES ?= 300
SEEDS ?= 100000
FROM ?= 0
DAMAGES ?= 500

# Of the rows "auto before" in the benchmark: before slow readers were taken over and direct reads went to TensorStore.
BEFORE ?= df191f7
BEFORE_CHECKOUT = build/before/$(BEFORE)

.PHONY: help demo check fmt docs clean simulate
.PHONY: test test-quick test-oldest test-newest test-long test-long-oldest test-long-newest test-python313 test-matrix
.PHONY: test-stores fuzz fuzz-oldest fuzz-newest
.PHONY: test-property test-property-oldest test-property-newest test-faults test-faults-oldest test-faults-newest faults-table
.PHONY: bench bench-emergency bench-meetings bench-plan bench-placement bench-startup patches patches-check fork test-fork
.PHONY: test-slurm dist bench-first-step

help: ## list the targets
	@awk -F ':.* ## ' '/^[a-z0-9-]+:.* ## / { printf "%-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(NEWEST)/.ready ## in about a minute: stock Orbax and orbax_ext on 4 processes x 8 devices, in five acts
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest ## all tests, on the oldest and on the newest supported Orbax (PYTEST_ARGS='-k name')

# Each of the two releases also restores what the other one saved, so both environments are needed.
test-oldest: ## all tests on the oldest supported Orbax
test-newest: ## all tests on the newest supported Orbax
test-oldest: OTHER := $(NEWEST)
test-oldest: MARKED = -m 'not fork and not long and not once'
test-newest: OTHER := $(OLDEST)
test-oldest test-newest: test-%: $(OLDEST)/.ready $(NEWEST)/.ready .venv/s3server/.ready
	export ORBAX_EXT_OTHER_PYTHON=$(CURDIR)/$(OTHER)/bin/python; \
	.venv/$*/bin/python -m pytest $(CACHE) $(PARALLEL) $(MARKED) $(PYTEST_ARGS)$(call retry,.venv/$*/bin/python -m pytest $(CACHE) $(MARKED) $(PYTEST_ARGS))

# Everything that starts no cluster, and one file that does. The test of the doctor would start another.
QUICK = $(filter-out $(patsubst %,tests/%/,__pycache__ faults fork multiprocess slurm support),$(wildcard tests/*/))
test-quick: $(NEWEST)/.ready .venv/s3server/.ready ## in under 90 seconds: tests of the newest release that need no cluster, and some on one
	$(NEWEST)/bin/python -m pytest $(PARALLEL) $(QUICK) $(wildcard tests/test_*.py) tests/multiprocess/test_entry_points.py \
		--deselect tests/cli/test_doctor.py::test_doctor_finds_the_defects_of_the_installed_orbax $(PYTEST_ARGS)

test-long: test-long-oldest test-long-newest ## larger variants of other tests: more processes, more combinations

test-long-oldest test-long-newest: test-long-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest -m long $(PYTEST_ARGS)

test-property: test-property-oldest test-property-newest ## the property tests with many new examples (EXAMPLES=300)

test-property-oldest test-property-newest: test-property-%: .venv/%/.ready
	ORBAX_EXT_EXAMPLES=$(EXAMPLES) .venv/$*/bin/python -m pytest -m property --hypothesis-show-statistics \
		tests/multiprocess/test_property.py tests/multiprocess/test_job.py \
		tests/multiprocess/test_emergency.py $(PYTEST_ARGS)

fuzz: fuzz-oldest fuzz-newest ## restores of randomly damaged checkpoints (DAMAGES=500, or SEED=17 for one of them)

fuzz-oldest fuzz-newest: fuzz-%: .venv/%/.ready
	ORBAX_EXT_DAMAGES=$(DAMAGES) ORBAX_EXT_SEED=$(SEED) .venv/$*/bin/python -m pytest \
		tests/multiprocess/test_fuzz.py $(PYTEST_ARGS)

test-faults: test-faults-oldest test-faults-newest ## processes that fail, stop, die or disagree during a restore; prints a table

test-faults-oldest test-faults-newest: test-faults-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest $(CACHE) tests/faults $(PYTEST_ARGS)$(call retry,.venv/$*/bin/python -m pytest $(CACHE) tests/faults $(PYTEST_ARGS))

test-slurm: $(NEWEST)/.ready ## jobs of a real Slurm of four nodes on this machine (as root; apt-get install slurm-wlm munge)
	$(NEWEST)/bin/python -m pytest tests/slurm $(PYTEST_ARGS)

faults-table: export ORBAX_EXT_FAULTS_TABLE = write
faults-table: test-faults ## test-faults, and write bench/results/faults.md

simulate: $(NEWEST)/.ready ## the protocol of the meetings in simulated worlds, on all cores (SEEDS=100000, FROM=40000 to go on, SEED=17 for one with its trace)
	$(NEWEST)/bin/python -m tests.simulation $(if $(RECORDED),--recorded $(RECORDED),$(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FROM)))

check: $(NEWEST)/.ready ## lint, format check, strict types
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/mypy

fmt: $(NEWEST)/.ready ## format, and fix what ruff can fix
	$(NEWEST)/bin/ruff check --fix .
	$(NEWEST)/bin/ruff format .

bench: $(NEWEST)/.ready $(OLDEST)/.ready ## restores on hosts with shaped links; writes bench/results (BENCH_ARGS='--only dense')
	$(NEWEST)/bin/python -m pip install --quiet -c constraints/newest.txt -e '.[bench]'
	@$(make_before)
	$(NEWEST)/bin/python -m bench --oldest $(CURDIR)/$(OLDEST)/bin/python --out bench/results $(BENCH_ARGS) \
		$$(test -z '$(BEFORE)' || test ! -d $(BEFORE_CHECKOUT) || echo --before $(BEFORE_CHECKOUT))
	$(NEWEST)/bin/python -m tools.docs
	$(if $(findstring --estimate,$(BENCH_ARGS)),,$(NEWEST)/bin/python -m bench.timeline_picture)

# A clone, so that the results name its commit, and `make clean` leaves nothing behind.
define make_before
if [ -n '$(BEFORE)' ] && [ ! -d $(BEFORE_CHECKOUT) ]; then \
	if git cat-file -e '$(BEFORE)^{commit}' 2>/dev/null; then \
		git clone --quiet --shared --no-checkout . $(BEFORE_CHECKOUT) && \
		git -C $(BEFORE_CHECKOUT) checkout --quiet --detach $(BEFORE); \
	else echo "No rows 'auto before': the commit $(BEFORE) is not in this checkout's history."; fi; \
fi
endef

bench-meetings: $(NEWEST)/.ready ## meetings of up to 1,000 clients of the coordination service; writes bench/results/meetings.md
	$(NEWEST)/bin/python -m bench.meetings --write

bench-plan: $(NEWEST)/.ready ## plans for 671 billion parameters on up to 4,096 processes; writes bench/results/planning.md
	$(NEWEST)/bin/python -m bench.planning --write

bench-emergency: $(NEWEST)/.ready ## restores of the emergency manager after the loss of hosts; writes bench/results/emergency.md (BENCH_ARGS='--only nobody')
	$(NEWEST)/bin/python -m bench.emergency --write $(BENCH_ARGS)

bench-first-step: $(NEWEST)/.ready ## restore, compile and first step, one after the other and overlapped; writes bench/results/first_step.md
	$(NEWEST)/bin/python -m bench.first_step --write

bench-placement: $(NEWEST)/.ready ## memory of jax.device_put and orbax_ext.replicate; writes bench/results/placement.md
	$(NEWEST)/bin/python -m bench.placement --write

bench-startup: $(NEWEST)/.ready ## seconds of commands that need no JAX; writes bench/results/startup.md
	$(NEWEST)/bin/python -m bench.startup --write

docs: $(NEWEST)/.ready ## write the pages and plots that are made from data, without measuring
	$(NEWEST)/bin/python -m pip install --quiet -c constraints/newest.txt -e '.[bench]'
	$(NEWEST)/bin/python -m tools.docs

patches: $(NEWEST)/.ready ## generate patches/ from patches/source
	$(NEWEST)/bin/python -m tools.generate_patches

patches-check: $(NEWEST)/.ready ## patches of every release: download, verify, apply, compile, reverse
	$(NEWEST)/bin/python -m tools.check_patches

fork: $(NEWEST)/.ready ## build a wheel of a patched release in dist/ (ORBAX=0.11.33)
	@test -n "$(ORBAX)" || { echo 'No release given. For example: make fork ORBAX=0.11.33' >&2; exit 2; }
	$(NEWEST)/bin/python -m tools.fork $(ORBAX)

test-fork: $(NEWEST)/.ready ## the forks of three releases pass the scenarios that the releases fail
	$(NEWEST)/bin/python -m pytest -m fork tests/fork $(PYTEST_ARGS)

test-python313: .venv/python313/.ready ## the core tests on Python 3.13 with the newest JAX
	.venv/python313/bin/python -m pytest -m core $(PYTEST_ARGS)

.venv/python313/.ready: PYTHON = $(PYTHON313)

test-stores: $(NEWEST)/.ready .venv/s3server/.ready .venv/swift/.ready ## S3 tests on rclone, radosgw and Swift, gs:// on an emulator; root installs radosgw (STORES_ARGS='--only swift')
	$(NEWEST)/bin/python -m tools.stores --install --write $(STORES_ARGS)

test-matrix: $(NEWEST)/.ready ## the core tests on every release; writes bench/results/releases.md (MATRIX_ARGS='--jobs 2')
	$(NEWEST)/bin/python -m tools.matrix --python 3.11=$(PYTHON311) --python 3.13=$(PYTHON313) $(MATRIX_ARGS)

dist: .venv/dist/.ready $(NEWEST)/.ready ## build sdist and wheel in dist/, check them, use the wheel in a new environment
	$(NEWEST)/bin/python -m tools.dist --builder .venv/dist/bin/python

# Makes .venv/NAME of PACKAGES, from constraints/NAME.txt. Of what pip says, only errors are shown. One that was made of
# the same is kept, whatever the dates of the files: a checkout changes them.
define make_environment
	@made_of() { printf '%s\n' $(PACKAGES); cat $^; }; \
	if [ -e $@ ] && made_of | cmp -s - $@; then touch $@; else \
		echo 'making environment $(1) (about a minute)' && rm -f $@ && \
		$(PYTHON) -m venv --clear .venv/$(1) && \
		PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/$(1)/bin/python -m pip install -qq -c constraints/$(1).txt $(PACKAGES) && \
		made_of > $@; \
	fi
endef

clean: ## remove environments and builds
	rm -rf .venv build dist *.egg-info

# moto, for one S3 test: no server that can be installed without root takes keys that end in a slash. boto3 comes with
# it, for the test of a profile with a credential process.
.venv/s3server/.ready: PACKAGES = 'moto[s3]' flask flask-cors
.venv/s3server/.ready: constraints/s3server.txt
	$(call make_environment,s3server)

.venv/swift/.ready: PACKAGES = swift
.venv/swift/.ready: constraints/swift.txt
	$(call make_environment,swift)

.venv/dist/.ready: PACKAGES = build twine 'readme_renderer[md]'
.venv/dist/.ready: constraints/dist.txt
	$(call make_environment,dist)

# The environments oldest, newest and python313, of what setup.cfg requires. The first two can also run an emulated Google Cloud Storage.
$(OLDEST)/.ready $(NEWEST)/.ready: EXTRAS = ,stores
.venv/%/.ready: PACKAGES = -e '.[test,check,s3$(EXTRAS)]'
.venv/%/.ready: constraints/%.txt setup.cfg
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, but {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.11")'
	$(call make_environment,$*)
