//! The operator benchmarks under the system allocator.

use candle_grpo_bench::Counting;

#[global_allocator]
static ALLOCATOR: Counting<std::alloc::System> = Counting(std::alloc::System);

fn main() -> anyhow::Result<()> {
    candle_grpo_bench::main("system")
}
