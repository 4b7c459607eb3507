# Every target makes the environment it needs, from pinned constraints, under .venv/.
#   make demo    restore on 4 processes x 8 devices, stock Orbax beside orbax_ext
#   make test    all tests, on the oldest and on the newest supported Orbax
#   make test-faults    processes that fail, stop, die or disagree in the middle of a restore; prints a table
#   make faults-table   the same, and writes the table into BUILD.md
#   make bench-meetings meetings of up to 1000 clients of the coordination service; writes the table in BUILD.md
#   make check   lint, format check, strict types
#   make fmt     format and mend what can be mended automatically

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest

.PHONY: demo test test-oldest test-newest test-faults test-faults-oldest test-faults-newest faults-table bench-meetings check fmt clean

demo: $(NEWEST)/.ready
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest

test-oldest test-newest: test-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest $(PYTEST_ARGS)

test-faults: test-faults-oldest test-faults-newest

test-faults-oldest test-faults-newest: test-faults-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest tests/faults $(PYTEST_ARGS)

faults-table: export ORBAX_EXT_FAULTS_TABLE = write
faults-table: test-faults

bench-meetings: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m tools.bench_meetings --write

check: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/mypy

fmt: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check --fix .
	$(NEWEST)/bin/ruff format .

clean:
	rm -rf .venv build dist *.egg-info

# An environment is a name in .ci/constraints: oldest, newest.
.venv/%/.ready: .ci/constraints/%.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet -c .ci/constraints/$*.txt -e '.[test,check]'
	@touch $@
