# Short commands. They need Rust, and the C compiler that Rust links with.

CARGO ?= cargo
SEED ?= 0
DATA ?= data
SECONDS ?= 60
# The random cases of the tests. Another number draws others.
export PROPTEST_RNG_SEED ?= 0

.PHONY: help demo demo-short demo-llm demo-qlora eval-llm model test test-long test-candle-transformers test-model test-vllm test-llama test-agents test-tinker test-hub test-config-defaults test-readers mpi test-mpi examples bench bench-raw bench-peers bench-agents bench-tinker bench-breakdown bench-staleness bench-scaling sanitize fuzz fmt lint prose package wheel deny cuda-check cuda-test cuda-toolkit gpu-bundle ci

help: ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

# The dev profile compiles in half the time of the release profile, and optimizes what computes.
demo: ## train a tiny policy with GRPO to add two-digit numbers: two minutes; SEED=1 for another run, MODEL=examples/addition/models/qwen3_5.json for another family
	$(CARGO) run --locked -p candle-grpo-example-addition -- --seed $(SEED) $(if $(MODEL),--model $(MODEL))

demo-short: ## a shorter demo, half a minute: fails unless the policy learns
	$(CARGO) run --locked -p candle-grpo-example-addition -- --seed $(SEED) --short --force --out target/demo-short

demo-llm: model ## train SmolLM2-135M-Instruct to add two-digit numbers on the CPU: runs/addition-llm-SEED (docs/llm.md); DTYPE=bf16 is faster on processors with avx512_bf16
	@sed 's/^seed: 0/seed: $(SEED)/; s/^run_dir: .*/&-$(SEED)$(DTYPE:%=-%)/$(DTYPE:%=; s|^model:|compute_dtype: %\n&|)' examples/addition-llm/run.yaml > target/addition-llm.yaml
	$(CARGO) run --release --locked -p candle-grpo -- train --resume target/addition-llm.yaml

demo-qlora: model ## the same with adapters over weights in Q8_0: runs/addition-qlora-SEED
	@sed 's/^seed: 0/seed: $(SEED)/; s/^run_dir: .*/&-$(SEED)/' examples/addition-llm/qlora.yaml > target/addition-qlora.yaml
	$(CARGO) run --release --locked -p candle-grpo -- train --resume target/addition-qlora.yaml

eval-llm: model ## evaluate SmolLM2-135M-Instruct on GSM8K and SVAMP; DATA=data has the folders gsm8k and svamp
	@for name in gsm8k svamp; do \
	  if [ ! -d "$(DATA)/$$name" ]; then echo "skipped: $(DATA)/$$name does not exist"; continue; fi; \
	  sed "s# data/# $(DATA)/#" examples/word-problems/$$name.yaml > target/$$name.yaml; \
	  $(CARGO) run --release --locked -p candle-grpo -- eval target/$$name.yaml || exit 1; \
	done

model: ## download SmolLM2-135M-Instruct (93 MB) and convert it to a Hugging Face folder in target/models/
	@scripts/model

test: ## run every test, golden cases included
	$(CARGO) test --locked --workspace

test-long: ## the same with many random cases, killed processes and loads: an hour
	CANDLE_GRPO_TEST_LONG=1 $(CARGO) test --locked --workspace

test-model: ## run the tests that need the model of `make model`
	$(CARGO) test --locked --workspace --test train real_model -- --ignored

test-candle-transformers: ## count the variables of models of candle-transformers that receive a gradient (docs/candle.md)
	cd tests/candle-transformers && $(CARGO) test --locked --target-dir "$(CURDIR)/target/candle-transformers"

test-vllm: ## run the tests against a real vLLM, which it installs in .engines/ (docs/engines.md)
	@CARGO="$(CARGO)" scripts/test-engine vllm

test-llama: ## run the tests against llama.cpp's server, which it compiles in .engines/: needs a C++ compiler
	@CARGO="$(CARGO)" scripts/test-engine llama

test-agents: ## run the tests with packages of others: the clients of OpenAI and Anthropic, openai-agents, fastmcp, OpenEnv and verifiers, which it installs in .engines/; skips without a network
	@CARGO="$(CARGO)" scripts/test-agents

test-tinker: model ## run Tinker's client and recipes of its cookbook against grpo serve, which it installs in .engines/: 6 GB; skips without a network
	@CARGO="$(CARGO)" scripts/test-tinker

test-hub: ## compare the client of the hub with Hugging Face's Python library, which it installs in .engines/; skips without a network
	@CARGO="$(CARGO)" scripts/test-hub

test-config-defaults: ## compare config.json files without a key with transformers, which it installs in .engines/; skips without a network
	@CARGO="$(CARGO)" scripts/test-config-defaults

test-readers: ## read what `grpo convert` writes with transformers and llama-cpp-python, which it installs in .engines/
	@CARGO="$(CARGO)" scripts/test-readers

mpi: ## download Open MPI and libclang into .mpi/ if there is no mpicc, and print the environment of a build with MPI
	@scripts/mpi

test-mpi: ## run the tests with the feature mpi on several ranks; downloads Open MPI if there is no mpicc
	@CARGO="$(CARGO)" scripts/test-mpi

examples: ## run the short programs in examples/
	$(CARGO) run --release --locked -p candle-grpo-example-custom-surrogate
	$(CARGO) run --release --locked -p candle-grpo-example-own-loop
	$(CARGO) run --release --locked -p candle-grpo-example-transformer-loop
	$(CARGO) run --release --locked -p candle-grpo-example-own-model
	$(CARGO) run --release --locked -p candle-grpo-example-custom-generator
	$(CARGO) run --release --locked -p candle-grpo-example-reward-model
	$(CARGO) run --release --locked -p candle-grpo-example-environments --bin guessing -- --short --force --out target/examples
	$(CARGO) run --release --locked -p candle-grpo-example-environments --bin calculator -- --short --force --out target/examples

bench: ## time each operator beside plain Candle operations: target/bench/ops.md; ONLY=rms_norm for one
	$(CARGO) run --release --locked -p candle-grpo-bench --bin ops-system -- --only "$(ONLY)"
	$(CARGO) run --release --locked -p candle-grpo-bench --bin ops-mimalloc -- --only "$(ONLY)"

bench-raw: ## copy target/bench/ops.md into docs/benchmarks-raw.md
	sed -i '/^<!-- target\/bench\/ops.md -->$$/q' docs/benchmarks-raw.md
	cat target/bench/ops.md >> docs/benchmarks-raw.md

bench-peers: ## time the same shapes beside PyTorch and Liger-Kernel, which it installs, and vLLM if it is installed: target/bench/peers.md
	$(CARGO) build --release --locked -p candle-grpo-bench
	benches/peers/run

bench-agents: ## time agents behind the server beside built-in tools, 64 at once (docs/agents.md); needs python3
	$(CARGO) run --release --locked -p candle-grpo-bench --bin agents

bench-tinker: ## time a loop through the API of grpo serve --tinker beside the same loop without a server (docs/tinker.md)
	$(CARGO) run --release --locked -p candle-grpo-bench --bin tinker

bench-breakdown: ## divide the time of training and generation among their parts: target/bench/breakdown.md; needs Linux's perf
	@CARGO="$(CARGO)" benches/breakdown/run

bench-staleness: model ## compare ways to sample while the policy trains, with the policy itself and vLLM, which it installs: target/staleness/table.md
	scripts/vllm install
	$(CARGO) build --release --locked -p candle-grpo
	scripts/staleness

bench-scaling: model ## compare one process with several ranks of MPI: target/scaling/table.md (docs/scaling.md)
	environment="$$(scripts/mpi)" && eval "$$environment" && \
	  $(CARGO) build --release --locked --workspace --features candle-grpo/mpi --bin grpo --bin addition && scripts/scaling

sanitize: ## run the tests of the operators under AddressSanitizer
	scripts/sanitize

fuzz: ## fuzz the file parsers, SECONDS=60 each, or TARGET=gguf alone; needs a C++ compiler and python3 (docs/fuzzing.md)
	SECONDS_EACH=$(SECONDS) scripts/fuzz $(TARGET)

fmt: ## format the code and wrap comments at 100 columns
	RUSTC_BOOTSTRAP=1 $(CARGO) fmt --all -- --config wrap_comments=true,comment_width=100

lint: ## check formatting, clippy, rustdoc, licenses and prose; warnings are errors; needs python3
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps
	scripts/licenses
	scripts/prose

prose: ## check the prose against the rules in CONTRIBUTING.md; needs python3
	scripts/prose

package: ## compile each crate from its package, as on crates.io; publishes nothing
	@CARGO="$(CARGO)" scripts/package

wheel: ## build a Python wheel with the program grpo in target/wheels/, and try it; installs maturin in .engines/ (docs/install.md)
	@CARGO="$(CARGO)" scripts/wheel

deny: ## check licenses, advisories and sources of dependencies; needs cargo-deny
	$(CARGO) deny --workspace check

cuda-check: ## compile every kernel, run it on the CPU, and lint the feature cuda: needs no GPU
	scripts/cuda-kernels
	$(CARGO) test --locked --workspace --test on_host
	scripts/cuda-lint

cuda-test: ## run the tests on an emulated GPU: needs g++ and python3, and no GPU (docs/cuda.md)
	scripts/cuda-test

gpu-bundle: ## pack tests and benchmarks with CUDA for a GPU machine without Rust (docs/cuda.md)
	scripts/gpu-bundle

cuda-toolkit: ## download NVIDIA's compiler from PyPI if nvcc is not on PATH
	@scripts/cuda-toolkit

ci: ## run everything that continuous integration runs
	.ci/run
