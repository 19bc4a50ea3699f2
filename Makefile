# mini_dist: `make lab` opens the course, `make test` proves it. Each sets up what it needs.
#
#   make lab                    set up .venv, open JupyterLab on your copy of the first lesson, in work/
#   make update                 take new versions of the notebooks into work/, say what was done
#   make test                   library, lessons, every notebook, a browser; a sample of the cases
#   make test PART=plan         one room of the library, or several (ls tests), or PART=notebooks
#   make test-all               every case and every round: hours
#   make notebooks              rebuild the notebooks whose lesson changed
#   make zh                     rebuild the Chinese notebooks; what is missing or stale in Chinese
#   make site                   the course as web pages, in out/site; open index.html (wants npm)
#   make workshop               slides and a script for half a day and a day, in out/workshop (wants npm)
#   make check                  ruff on code and notebooks; import-linter: rooms import downwards only
#   make frameworks             DeepSpeed, Megatron, torchtitan, torchft, JAX and Ray in .venv-frameworks,
#                               and the tests that compare them with the course's own
#   make torchtitan             the version 0.3 that our exports are for, in .venv-torchtitan, and the
#                               test that it builds its config from them
#   make everywhere             the suite as on other machines: instruction sets, numbers of cores
#                               (ONLY="notebooks/08*.ipynb" for what changed)
#
#   make lab PYTHON=python3.12  another Python (3.10 or newer)
#   make lab TORCH=cpu          torch without CUDA (cpu, or a folder cu... of download.pytorch.org/whl)
#   make lab LAB_ARGS="--no-browser --port 9000"

PYTHON ?= python3
TORCH ?=
LAB_ARGS ?=
ONLY ?=
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TEST_INSTALLED := $(VENV)/.installed-test
SITE_INSTALLED := $(VENV)/.installed-site

.PHONY: lab update test test-all notebooks zh site site-tools workshop check everywhere frameworks torchtitan

lab: $(INSTALLED)
	$(BIN)/python -m mini_dist lab $(LAB_ARGS)

update: $(INSTALLED)
	@$(BIN)/python -m mini_dist update

# Three parts, all run, one status: the library, then the tests marked `alone` (and, by itself, the
# one marked `solitary`, which attacks the ports of others), then the notebooks.
# SAMPLE takes an eighth of the cases of each test, and another eighth after each commit;
# `make test-all` runs every case. Three workers keep two cores 98 % busy, and a fourth gains nothing.
# `alone` tests read a clock or drive a browser, and share the machine with one other file only: the
# site is built while others wait for deadlines. Notebooks compute more: two workers.
PYTEST := $(BIN)/python -m pytest
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
APART := -n 2 --dist loadfile --no-loadscope-reorder
SAMPLE := --sample
PART ?= library notebooks
LIBRARY := $(if $(filter library,$(PART)),tests,$(patsubst %,tests/%,$(filter-out notebooks,$(PART))))
test: $(TEST_INSTALLED)
	@$(BIN)/python -m compileall -q mini_dist tests  # Or each rank does it anew where Python may not.
	@status=0; \
	if [ -n "$(LIBRARY)" ]; then \
	  $(PYTEST) $(WORKERS) -m "not alone and not solitary" $(SAMPLE) --durations 20 $(LIBRARY) || status=1; \
	  alone=$$(grep -rl --include=*.py mark.alone $(LIBRARY)); \
	  if [ -n "$$alone" ]; then $(PYTEST) $(APART) -m alone $(SAMPLE) $$alone || status=1; fi; \
	  solitary=$$(grep -rl --include=*.py mark.solitary $(LIBRARY)); \
	  if [ -n "$$solitary" ]; then $(PYTEST) -m solitary $$solitary || status=1; fi; \
	fi; \
	if [ -n "$(filter notebooks,$(PART))" ]; then \
	  $(PYTEST) -n 2 --dist loadfile $(NBVAL) notebooks || status=1; \
	fi; \
	exit $$status

test-all: SAMPLE := --long
test-all: test

# (The cells of the Chinese notebooks are those of the English ones: tests/course/test_zh.py.)
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=90 --ignore=notebooks/zh

notebooks: $(TEST_INSTALLED)
	$(BIN)/python tools/build_notebooks.py

zh: $(TEST_INSTALLED)
	$(BIN)/python tools/zh.py

# Nothing is executed: pages show the outputs that notebooks/ keep. Warnings end the build.
site: site-tools
	$(BIN)/python -m sphinx -W --keep-going -q -c site -d out/site-doctrees . out/site
	@echo "open out/site/index.html"

workshop: site-tools
	$(BIN)/python tools/workshop.py half-day
	$(BIN)/python tools/workshop.py day

site-tools: $(SITE_INSTALLED) site/node_modules/.package-lock.json

$(SITE_INSTALLED): $(TEST_INSTALLED)
	$(BIN)/pip install -c constraints.txt -e '.[lab,test,site]'
	@touch $@

site/node_modules/.package-lock.json: site/package.json site/package-lock.json
	@command -v npm >/dev/null || { echo "The site wants npm for two packages (site/package.json). On Debian and Ubuntu: sudo apt install npm"; exit 1; }
	npm ci --prefix site --no-audit --no-fund
	@touch $@

check: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

everywhere: $(TEST_INSTALLED)
	$(BIN)/python tools/everywhere.py $(ONLY)

# An environment of their own: 3 GB that the course does without. These tests are skipped in
# `make test`, where nothing of this is installed.
FRAMEWORKS := .venv-frameworks
frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest tests/course/frameworks
	$(FRAMEWORKS)/bin/python -m pytest tests/course/test_cluster.py -k ray

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(if $(TORCH),$(FRAMEWORKS)/bin/pip install --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/$(TORCH) torch)
	$(FRAMEWORKS)/bin/pip install -c constraints.txt -e '.[lab,test,frameworks]'
	@touch $@

# Our exports are for torchtitan 0.3, the run of lesson 22 for 0.2, and one environment has one of
# them. It wants other versions of other packages, so of ours only torch's is taken.
TITAN := .venv-torchtitan
torchtitan: $(TITAN)/.installed
	$(TITAN)/bin/python -m pytest tests/course/frameworks/test_frameworks.py::test_torchtitan_builds_its_config_from_our_exports

$(TITAN)/.installed: pyproject.toml constraints.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/pip install -c constraints.txt $(if $(TORCH),--no-deps --index-url https://download.pytorch.org/whl/$(TORCH)) torch
	$(TITAN)/bin/pip install -e '.[test]' triton 'torchtitan==0.3.*'
	@touch $@

# torch first when its build is chosen; pip then keeps it. The stamp is written last, so an
# interrupted set-up starts over.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "mini_dist needs Python 3.10 or newer, but %s is %s. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" % (sys.executable, sys.version.split()[0]))'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/$(TORCH) torch)
	$(BIN)/pip install -c constraints.txt -e '.[lab]'
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	$(BIN)/pip install -c constraints.txt -e '.[lab,test]'
	@touch $@
