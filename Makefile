# The few commands that a person types. Needs a Rust toolchain, with the C compiler that it links with.

CARGO ?= cargo
SEED ?= 0

.PHONY: help demo demo-short test examples lint cuda-check cuda-toolkit ci

help: ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

demo: ## train a tiny policy to add two-digit numbers with GRPO (3 minutes; SEED=1 for another run)
	$(CARGO) run --release --locked -p candle-grpo-example-addition -- --seed $(SEED)

demo-short: ## the demo in a minute: it only has to learn something
	$(CARGO) run --release --locked -p candle-grpo-example-addition -- --seed $(SEED) --short --force --out target/demo-short

test: ## every test, golden cases included
	$(CARGO) test --release --locked --workspace

examples: ## the short programs in examples/
	$(CARGO) run --release --locked -p candle-grpo-example-own-loop

lint: ## format, clippy and docs, warnings denied
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --release --locked --workspace --no-deps

cuda-check: ## compile every kernel, run it on the CPU, and lint the feature cuda: needs no GPU
	scripts/cuda-check

cuda-toolkit: ## fetch NVIDIA's compiler from PyPI, where nvcc is not on PATH
	@scripts/cuda-toolkit

ci: ## what continuous integration runs
	.ci/run
