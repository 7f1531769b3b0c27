//! The program `grpo`.

use std::process::ExitCode;

mod cli;

/// Much of the time would go into pages that are given back to the system and taken again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::run()
}
