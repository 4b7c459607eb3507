# Every target makes the environment it needs, from pinned constraints, under .venv/.
#   make demo    restore on 4 processes x 8 devices, stock Orbax beside orbax_ext
#   make test    all tests, on the oldest and on the newest supported Orbax
#   make test-property   many more examples of the property test, new ones each time (EXAMPLES=300)
#   make check   lint, format check, strict types
#   make fmt     format and mend what can be mended automatically

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest

EXAMPLES ?= 300

.PHONY: demo test test-oldest test-newest test-property test-property-oldest test-property-newest check fmt clean

demo: $(NEWEST)/.ready
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest

# Each end of the supported releases also restores what the other one has saved, so both environments are needed.
test-oldest: OTHER := $(NEWEST)
test-newest: OTHER := $(OLDEST)
test-oldest test-newest: test-%: $(OLDEST)/.ready $(NEWEST)/.ready
	ORBAX_EXT_OTHER_PYTHON=$(CURDIR)/$(OTHER)/bin/python .venv/$*/bin/python -m pytest $(PYTEST_ARGS)

test-property: test-property-oldest test-property-newest

test-property-oldest test-property-newest: test-property-%: .venv/%/.ready
	ORBAX_EXT_EXAMPLES=$(EXAMPLES) .venv/$*/bin/python -m pytest --hypothesis-show-statistics \
		tests/multiprocess/test_property.py $(PYTEST_ARGS)

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
