# mini_dist: `make lab` opens the course, `make test` proves it. Each sets up what it needs.
#
#   make lab                    set up .venv, open JupyterLab on the first lesson
#   make test                   the whole suite: library, lessons, every notebook, a browser
#   make notebooks              rebuild the notebooks whose lesson changed
#   make check                  ruff: lint and format, on code and notebooks
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

.PHONY: lab test notebooks check everywhere

# As the default address, not as an argument: then the one printed leads there too, which is what
# WSL2 and remote machines have.
lab: $(INSTALLED)
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB_ARGS)

# Three parts, all run, one status. Parts one and three use two workers; between them the tests
# that need the machine to themselves.
PYTEST := $(BIN)/python -m pytest
test: $(INSTALLED)
	@$(BIN)/python -m compileall -q mini_dist tests  # or each rank does it anew, where Python may not
	@status=0; \
	$(PYTEST) -n 2 --dist loadfile -m "not alone" --sample --durations 20 tests || status=1; \
	$(PYTEST) -m alone tests || status=1; \
	$(PYTEST) -n 2 --dist loadfile $(NBVAL) notebooks || status=1; \
	exit $$status
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=90

notebooks: $(INSTALLED)
	$(BIN)/python tools/build_notebooks.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

everywhere: $(INSTALLED)
	$(BIN)/python tools/everywhere.py $(ONLY)

# torch first when its build is chosen; pip then keeps it. The stamp is written last, so an
# interrupted set-up starts over.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "mini_dist needs Python 3.10 or newer, but %s is %s. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" % (sys.executable, sys.version.split()[0]))'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --no-deps -c constraints.txt --index-url https://download.pytorch.org/whl/$(TORCH) torch)
	$(BIN)/pip install -c constraints.txt -e '.[lab,test]'
	@touch $@
