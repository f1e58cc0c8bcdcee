# Every target works on a machine that has only Python 3.11+, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Programs that are no Python packages. Without them, and without root to install them, tests are skipped on a
# laptop and fail in CI.
APT := spin gcc strace mariadb-server rabbitmq-server chromium chromium-driver prometheus nodejs
PROGRAMS := spin gcc strace mariadbd rabbitmq-server chromium chromedriver promtool node
SYSTEM := .venv/.system
# 430 MB for one test, so not part of what `make fast` needs.
CDK := .venv/.cdk

# A small environment of the demo's own: a fifth of .venv. Another store or broker adds its server to it.
DEMO := .venv-demo
MARIADB := $(DEMO)/.mariadb
$(MARIADB): APT := mariadb-server
$(MARIADB): PROGRAMS := mariadbd
RABBITMQ := $(DEMO)/.rabbitmq
$(RABBITMQ): APT := rabbitmq-server
$(RABBITMQ): PROGRAMS := rabbitmq-server
SERVERS := $(sort $(patsubst redis-cluster,redis,$(filter redis redis-cluster postgres mariadb,$(STORE) $(BROKER))))
DEMO_INSTALLED := $(patsubst %,$(DEMO)/.installed-%,demo $(addprefix demo-,$(SERVERS)))

# Small environments: one only builds and checks, one only makes the site.
RELEASE := .venv-release
SITE := .venv-site

# make test WORKERS=8: how many processes run tests at once; twice as many where tests wait for Celery workers.
WORKERS ?= 2
# Left out of make test: what is slow and rarely breaks.
TESTS := -m "not nightly"
PYTEST := $(BIN)/pytest $(TESTS) --dist worksteal --numprocesses

OLDER_TRACERS := ddtrace==2.21.12 sentry-sdk==1.14.0 sentry-sdk==1.45.1 sentry-sdk==2.0.1 sentry-sdk==2.20.0

# make compat: each pair where its Python is found, on the PATH or among pyenv's, and otherwise skipped with the reason.
COMPAT := py311-celery54,py313-celery57
EMPTY :=
INTERPRETERS := $(subst $(EMPTY) $(EMPTY),:,$(wildcard $(HOME)/.pyenv/versions/3.*/bin))

.DEFAULT_GOAL := help
.PHONY: help demo example fast compat oldest test nightly lint types pure covered evidence integration prove tracers soak bench docs release clean

help:  ## list the targets; variables follow: make demo STORE=redis
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-8s %s\n", $$1, $$2}'

$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

$(CDK): $(INSTALLED)
	$(BIN)/pip install --quiet --editable '.[cdk]'
	@touch $@

$(DEMO)/bin/pip:
	$(PYTHON) -m venv $(DEMO)

$(DEMO)/.installed-%: setup.cfg pyproject.toml | $(DEMO)/bin/pip
	$(DEMO)/bin/pip install --quiet --editable '.[$*]'
	@touch $@

$(SYSTEM): $(INSTALLED)
$(MARIADB): $(DEMO)/.installed-demo-mariadb
$(RABBITMQ): $(DEMO)/.installed-demo
$(SYSTEM) $(MARIADB) $(RABBITMQ):
	@for each in $(PROGRAMS); do PATH="$$PATH:/usr/sbin" command -v $$each > /dev/null || absent="$$absent $$each"; done; \
	if [ -n "$$absent" ]; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(APT) > /dev/null; } \
	    || echo "not installed:$$absent"; \
	fi
	@touch $@

demo: $(DEMO_INSTALLED) $(if $(filter mariadb,$(SERVERS)),$(MARIADB)) $(if $(filter rabbitmq,$(BROKER)),$(RABBITMQ))  ## plain Celery and IdempotentTask under fire: STORE=redis BROKER=redis
	$(DEMO)/bin/python -m lab.demo $(if $(STORE),--store $(STORE)) $(if $(BROKER),--broker $(BROKER))

example: $(DEMO)/.installed-demo  ## what you copy: run it, and read it in example_project/
	$(DEMO)/bin/python -m example_project.run

fast: lint types pure  ## after every change, a minute: linters, types, unit tests

test: lint types covered evidence integration  ## before a patch: everything that CI runs

nightly:  ## before a release: what is slow and rarely breaks, too
	NIGHTLY=1 $(MAKE) test TESTS=
	$(MAKE) oldest

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: $(INSTALLED)
	$(BIN)/mypy

pure: $(INSTALLED)
	$(PYTEST) $$(($(WORKERS) + 1)) tests/unit

covered: $(SYSTEM)
	@# Apart from the races of the contract: whoever has imported the unit tests has an audit hook, and in its midst
	@# Python 3.11 may end a thread that begins under coverage (tests/unit/conftest.py).
	$(PYTEST) $(WORKERS) tests/unit tests/processes --cov --cov-report=
	$(PYTEST) $$((2 * $(WORKERS))) tests/contract tests/django --ignore=tests/django/live --cov --cov-append --cov-report=
	@# What decides is covered whole; elsewhere answers of servers and drivers may be left that no test can cause.
	$(BIN)/coverage report --skip-covered --fail-under=100 --include="*/protocol/*,*/engine/*"
	$(BIN)/coverage report --skip-covered --fail-under=95 --omit="*/testing/*"

evidence: $(SYSTEM) $(CDK)
	@# Apart, as the pages' tasks are those of every app of their process.
	$(PYTEST) $(WORKERS) tests/docs
	$(PYTEST) $(WORKERS) tests/tools tests/proof

integration: $(SYSTEM)
	@# What a test left open in its own process, Python reports in whichever test is on when it finds it. The library's
	@# processes are others, so here that is told, and fails no innocent test; everywhere else it is an error.
	$(PYTEST) $$((2 * $(WORKERS))) -W default::pytest.PytestUnraisableExceptionWarning tests/integration tests/django/live

compat: $(INSTALLED)  ## the oldest and newest Celery and Python; ALL=1: those between, too
	PATH="$(INTERPRETERS):$$PATH" $(BIN)/tox run $(if $(ALL),,-e $(COMPAT))

oldest: $(INSTALLED)
	@# The other targets run on the newest Celery; this one on the oldest, and on the same Python.
	$(BIN)/tox run -e celery54

prove: $(SYSTEM)  ## attack code and stores: kills, faults, fail-overs; LONG=1: for hours
	$(BIN)/python -m lab.proof all $(if $(LONG),,--quick)

tracers: $(INSTALLED)  ## older tracers beside the library, whose newest run in make test
	for each in $(OLDER_TRACERS); do \
	  rm -rf build/tracer && $(BIN)/pip install --quiet --target build/tracer "$$each" \
	    && PYTHONPATH=$(CURDIR)/build/tracer $(BIN)/pytest tests/integration/test_beats_and_tracers.py -k "$${each%%=*}" || exit 1; \
	done

soak: $(SYSTEM)  ## real workers under fire: MINUTES=5 SEED=1 STORE=redis BROKER=rabbitmq
	$(BIN)/python -m lab.proof soak --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1) --store $(or $(STORE),dynamodb) --broker $(or $(BROKER),sqs)

bench: $(SYSTEM)  ## what it costs, on each store and beside peers; PART=cpu: one part
	$(BIN)/python -m lab.benchmarks $(PART)

docs: $(SITE)/.installed  ## the pages as a site, in build/site; a dead link is an error
	rm -rf build/site
	$(SITE)/bin/sphinx-build -W --keep-going -q docs build/site
	@echo build/site/index.html

$(RELEASE)/.installed: EXTRA := release
$(SITE)/.installed: EXTRA := docs
$(RELEASE)/.installed $(SITE)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --editable '.[$(EXTRA)]'
	@touch $@

release: $(RELEASE)/.installed  ## build the commit, check it, and do the tutorial with it
	rm -rf build/release dist
	mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	$(RELEASE)/bin/python -m build --outdir dist build/release
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl
	cd build/release && $(CURDIR)/$(RELEASE)/bin/python -m tests.support.tutorial $(CURDIR)/dist/*.whl

clean:
	rm -rf .venv .venv-demo $(RELEASE) $(SITE) .tox build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
