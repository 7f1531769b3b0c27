//! The program `grpo`.

use std::process::ExitCode;

mod cli;

/// Reuses the pages of freed tensors, which the default allocator returns to the system each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Candle adds a backtrace to the text of an error wherever it can be captured. `RUST_BACKTRACE`
    // still serves panics. SAFETY: no other thread runs yet.
    #[expect(unsafe_code, reason = "the environment is the only switch")]
    unsafe {
        std::env::set_var("RUST_LIB_BACKTRACE", "0");
    }
    cli::run()
}
