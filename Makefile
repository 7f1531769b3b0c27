# The few commands that a person types. Needs a Rust toolchain, with the C compiler that it links with.

CARGO ?= cargo
SEED ?= 0
DATA ?= data
SECONDS ?= 60

.PHONY: help demo demo-short demo-llm eval-llm model test examples bench bench-peers sanitize fuzz lint cuda-check cuda-toolkit gpu-bundle ci

help: ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

demo: ## train a tiny policy to add two-digit numbers with GRPO (a minute; SEED=1 for another run)
	$(CARGO) run --release --locked -p candle-grpo-example-addition -- --seed $(SEED)

demo-short: ## the demo in half a minute: it only has to learn something
	$(CARGO) run --release --locked -p candle-grpo-example-addition -- --seed $(SEED) --short --force --out target/demo-short

demo-llm: model ## teach SmolLM2-135M-Instruct to add two-digit numbers on the CPU: runs/addition-llm-SEED (docs/llm.md)
	@sed 's/^seed: 0/seed: $(SEED)/; s/^run_dir: .*/&-$(SEED)/' examples/addition-llm/run.yaml > target/addition-llm.yaml
	MIMALLOC_PURGE_DELAY=-1 $(CARGO) run --release --locked -p candle-grpo -- train --resume target/addition-llm.yaml

eval-llm: model ## SmolLM2-135M-Instruct on GSM8K and SVAMP, whose folders gsm8k and svamp lie in DATA=data
	@for name in gsm8k svamp; do \
	  if [ ! -d "$(DATA)/$$name" ]; then echo "$(DATA)/$$name is not there: skipped"; continue; fi; \
	  sed "s# data/# $(DATA)/#" examples/word-problems/$$name.yaml > target/$$name.yaml; \
	  $(CARGO) run --release --locked -p candle-grpo -- eval target/$$name.yaml || exit 1; \
	done

model: ## fetch SmolLM2-135M-Instruct (93 MB) and convert it to a Hugging Face folder in target/models/
	@scripts/model

test: ## every test, golden cases included
	$(CARGO) test --release --locked --workspace

examples: ## the short programs in examples/
	$(CARGO) run --release --locked -p candle-grpo-example-own-loop
	$(CARGO) run --release --locked -p candle-grpo-example-own-model

bench: ## time each fused operator beside its composed twin; ONLY=rms_norm for one, table in target/bench/ops.md
	$(CARGO) run --release --locked -p candle-grpo-bench --bin ops-system -- --only "$(ONLY)"
	$(CARGO) run --release --locked -p candle-grpo-bench --bin ops-mimalloc -- --only "$(ONLY)"

bench-peers: ## time the same shapes beside PyTorch and Liger-Kernel, which it installs: target/bench/peers.json
	$(CARGO) build --release --locked -p candle-grpo-bench
	benches/peers/run

sanitize: ## the tests of the fused operators under AddressSanitizer
	scripts/sanitize

fuzz: ## fuzz what reads files, SECONDS=60 for each target or TARGET=gguf alone; needs g++ and python3 (docs/fuzzing.md)
	SECONDS_EACH=$(SECONDS) scripts/fuzz $(TARGET)

lint: ## format, clippy and docs, warnings denied
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --workspace --no-deps

cuda-check: ## compile every kernel, run it on the CPU, and lint the feature cuda: needs no GPU
	scripts/cuda-check

gpu-bundle: ## tests and benchmarks with CUDA, for a GPU machine without Rust (docs/cuda.md)
	scripts/gpu-bundle

cuda-toolkit: ## fetch NVIDIA's compiler from PyPI, where nvcc is not on PATH
	@scripts/cuda-toolkit

ci: ## what continuous integration runs
	.ci/run
