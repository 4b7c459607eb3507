# Every target makes the environment it needs, from pinned constraints, under .venv/.
#   make demo    restore on 4 processes x 8 devices, stock Orbax beside orbax_ext
#   make test    all tests, on the oldest and on the newest supported Orbax
#   make check   lint, format check, strict types
#   make fmt     format and mend what can be mended automatically

PYTHON ?= python3
OLDEST := .venv/oldest
NEWEST := .venv/newest

.PHONY: demo test test-oldest test-newest check fmt clean

demo: $(NEWEST)/.ready
	$(NEWEST)/bin/orbax-ext demo

test: test-oldest test-newest

test-oldest test-newest: test-%: .venv/%/.ready .venv/s3server/.ready
	.venv/$*/bin/python -m pytest $(PYTEST_ARGS)

check: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check .
	$(NEWEST)/bin/ruff format --check .
	$(NEWEST)/bin/mypy

fmt: $(NEWEST)/.ready
	$(NEWEST)/bin/ruff check --fix .
	$(NEWEST)/bin/ruff format .

clean:
	rm -rf .venv build dist *.egg-info

# What tests need beside the package: a real S3-compatible server.
.venv/s3server/.ready: .ci/constraints/s3server.txt
	$(PYTHON) -m venv --clear .venv/s3server
	.venv/s3server/bin/python -m pip install --quiet -c .ci/constraints/s3server.txt 'moto[s3]' flask flask-cors
	@touch $@

# An environment is a name in .ci/constraints: oldest, newest.
.venv/%/.ready: .ci/constraints/%.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {v.major}.{v.minor}. Try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv/$*
	.venv/$*/bin/python -m pip install --quiet -c .ci/constraints/$*.txt -e '.[test,check,s3]'
	@touch $@
