# Two commands set up a fresh machine that has Python 3.11 and make:
#   make demo                      train, distil and compare on real data; ends with a table and a picture
#   make test                      the test suite
# Each takes BACKEND=jax (default), tensorflow or torch.
BACKEND ?= jax
PYTHON ?= python3.11
WORKERS ?= 2
VENV := .venv/$(BACKEND)
BIN := $(VENV)/bin
export KERAS_BACKEND := $(BACKEND)
export TF_CPP_MIN_LOG_LEVEL := 3
# On a small machine the thread pools of torch fight one another: one thread each is 10 to 30 times faster.
ifeq ($(BACKEND),torch)
export OMP_NUM_THREADS ?= 1
endif

comma := ,
# What tests on one backend need besides.
ONLY_jax := ,orbax
ONLY_torch := ,interop

.PHONY: help demo test lint wheel clean
help:
	@sed -n '1,4p' Makefile
	@echo "  make lint                      ruff, mypy"
	@echo "  make wheel                     build the wheel and import it in a clean environment"
	@echo "  make clean                     remove environments and outputs"

# torch: the CPU build first, so that no later requirement draws the CUDA build. uv installs in a third of pip's time.
define install
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ "$(BACKEND)" = torch ]; then $(BIN)/pip install -q torch==2.13.0; fi
	@$(BIN)/pip install -q uv
	$(BIN)/uv pip install -q --python $(BIN)/python -e ".[$(BACKEND),$(1)]"
endef

$(VENV)/base: pyproject.toml
	$(call install,demo)
	@touch $@

$(VENV)/test: pyproject.toml
	$(call install,demo$(comma)hub$(comma)test$(ONLY_$(BACKEND)))
	@touch $(VENV)/base $@

demo: $(VENV)/base
	$(BIN)/kdo demo tokens $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(VENV)/test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

wheel: $(VENV)/test
	$(BIN)/python tests/check_wheel.py

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .mypy_cache
