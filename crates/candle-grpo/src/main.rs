//! The program `grpo`.

use std::process::ExitCode;

mod cli;

/// Reuses the pages of freed tensors. The default allocator returns them to the system each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` in `mimalloc.h`: milliseconds until unused pages return to the system,
/// or -1 for never.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

fn main() -> ExitCode {
    // Candle adds a backtrace to the text of an error wherever it can be captured. `RUST_BACKTRACE`
    // still serves panics. SAFETY: no other thread runs yet.
    #[expect(unsafe_code, reason = "the environment is the only switch")]
    unsafe {
        std::env::set_var("RUST_LIB_BACKTRACE", "0");
    }
    // A step allocates what the step before it freed, and new pages are expensive. The environment
    // variable MIMALLOC_PURGE_DELAY takes precedence. SAFETY: no other thread runs yet.
    #[expect(unsafe_code, reason = "a call of C")]
    unsafe {
        libmimalloc_sys::mi_option_set_default(PURGE_DELAY, -1);
    }
    cli::run()
}
