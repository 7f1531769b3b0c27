//! The operator benchmarks under mimalloc.

use candle_grpo_bench::Counting;
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: Counting<MiMalloc> = Counting(MiMalloc);

fn main() -> anyhow::Result<()> {
    candle_grpo_bench::main("mimalloc")
}
