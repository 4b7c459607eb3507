# Every target makes the environment it needs, from pinned constraints, under .venv/.
#   make demo    restore on 4 processes x 8 devices, stock Orbax beside orbax_ext
#   make test    all tests, on the oldest and on the newest supported Orbax
#   make check   lint, format check, strict types
#   make fmt     format and mend what can be mended automatically
#   make bench-placement    peak memory of jax.device_put and orbax_ext.replicate on 1 to 8 processes

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest

.PHONY: bench-placement demo test test-oldest test-newest check fmt clean

demo: $(NEWEST)/.ready
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest

test-oldest test-newest: test-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest $(PYTEST_ARGS)

check: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/mypy

fmt: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check --fix .
	$(NEWEST)/bin/ruff format .

bench-placement: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m orbax_ext.lab.bench_placement

clean:
	rm -rf .venv build dist *.egg-info

# An environment is a name in .ci/constraints: oldest, newest.
.venv/%/.ready: .ci/constraints/%.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet -c .ci/constraints/$*.txt -e '.[test,check]'
	@touch $@
