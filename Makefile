# Every target makes the environment it needs, from pinned constraints, under .venv/.
#   make demo    restore on 4 processes x 8 devices, stock Orbax beside orbax_ext
#   make test    all tests, on the oldest and on the newest supported Orbax
#   make test-long      more of the same: other numbers of processes, more combinations
#   make test-property   many more examples of the property test, new ones each time (EXAMPLES=300)
#   make test-faults    processes that fail, stop, die or disagree in the middle of a restore; prints a table
#   make faults-table   the same, and writes the table into BUILD.md
#   make bench-meetings meetings of up to 1000 clients of the coordination service; writes the table in BUILD.md
#   make check   lint, format check, strict types
#   make fmt     format and mend what can be mended automatically
#   make bench   restores on hosts with shaped links: plain and stock Orbax beside orbax_ext (BENCH_ARGS='--only dense')
#   make bench-plan     plans for 671 billion parameters on up to 4,096 processes; writes the table in BUILD.md
#   make bench-placement    peak memory of jax.device_put and orbax_ext.replicate on 1 to 8 processes
#   make docs    rewrite the parts of the documents that are made from data
#   make patches-check          every release: download, verify, patch, compile, take back
#   make fork ORBAX=0.11.33     an installable wheel of that release with the patches, in dist/
#   make test-fork              the forks of three releases pass what the releases fail
#   make test-python313         the core tests on Python 3.13 with the newest JAX
#   make test-matrix            the core tests on every release; writes the table in BUILD.md (MATRIX_ARGS="--jobs 2")

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest
# Other Pythons are looked for on the path, then among pyenv's.
find_python = $(or $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null),$(shell pyenv prefix $(1) 2>/dev/null)/bin/python$(1))
PYTHON311 ?= $(call find_python,3.11)
PYTHON313 ?= $(call find_python,3.13)

EXAMPLES ?= 300

.PHONY: bench bench-placement bench-plan demo test test-oldest test-newest test-property test-property-oldest test-property-newest
.PHONY: test-long test-long-oldest test-long-newest test-python313 test-fork test-matrix check fmt docs patches patches-check fork clean
.PHONY: test-faults test-faults-oldest test-faults-newest faults-table bench-meetings

demo: $(NEWEST)/.ready
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest

# Each end of the supported releases also restores what the other one has saved, so both environments are needed.
# Two workers, because much of a test's time is waiting.
test-oldest: OTHER := $(NEWEST)
test-oldest: PYTEST_ARGS += -m 'not fork and not long and not once'
test-newest: OTHER := $(OLDEST)
test-oldest test-newest: test-%: $(OLDEST)/.ready $(NEWEST)/.ready .venv/s3server/.ready
	ORBAX_EXT_OTHER_PYTHON=$(CURDIR)/$(OTHER)/bin/python .venv/$*/bin/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

test-long: test-long-oldest test-long-newest

test-long-oldest test-long-newest: test-long-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest -m long $(PYTEST_ARGS)

test-property: test-property-oldest test-property-newest

test-property-oldest test-property-newest: test-property-%: .venv/%/.ready
	ORBAX_EXT_EXAMPLES=$(EXAMPLES) .venv/$*/bin/python -m pytest --hypothesis-show-statistics \
		tests/multiprocess/test_property.py $(PYTEST_ARGS)

test-faults: test-faults-oldest test-faults-newest

test-faults-oldest test-faults-newest: test-faults-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest tests/faults $(PYTEST_ARGS)

faults-table: export ORBAX_EXT_FAULTS_TABLE = write
faults-table: test-faults

bench-meetings: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m bench.meetings --write

check: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/mypy

fmt: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check --fix .
	$(NEWEST)/bin/ruff format .

bench: $(NEWEST)/.ready $(OLDEST)/.ready
	$(NEWEST)/bin/python -m pip install --quiet -c constraints/newest.txt -e '.[bench]'
	$(NEWEST)/bin/python -m bench --oldest $(CURDIR)/$(OLDEST)/bin/python --out bench/results $(BENCH_ARGS)
	$(NEWEST)/bin/python -m bench.tables

bench-plan: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m bench.planning

bench-placement: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m bench.placement

docs: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tools.docs

patches: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tools.generate_patches

patches-check: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tools.check_patches

fork: $(NEWEST)/.ready
	@test -n "$(ORBAX)" || { echo 'Which release? Say, for example: make fork ORBAX=0.11.33' >&2; exit 2; }
	$(NEWEST)/bin/python -m tools.fork $(ORBAX)

test-fork: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pytest -m fork tests/fork $(PYTEST_ARGS)

test-python313: .venv/python313/.ready
	.venv/python313/bin/python -m pytest -m core $(PYTEST_ARGS)

.venv/python313/.ready: PYTHON = $(PYTHON313)

test-matrix: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tools.matrix --python 3.11=$(PYTHON311) --python 3.13=$(PYTHON313) $(MATRIX_ARGS)

clean:
	rm -rf .venv build dist *.egg-info

# What tests need beside the package: a real S3-compatible server.
.venv/s3server/.ready: constraints/s3server.txt
	$(PYTHON) -m venv --clear .venv/s3server
	.venv/s3server/bin/python -m pip install --quiet -c constraints/s3server.txt 'moto[s3]' flask flask-cors
	@touch $@

# An environment is a name in constraints: oldest, newest, python313.
.venv/%/.ready: constraints/%.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet -c constraints/$*.txt -e '.[test,check,s3]'
	@touch $@
