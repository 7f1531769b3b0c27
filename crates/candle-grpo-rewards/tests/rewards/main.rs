//! Tests for reward functions.

#[cfg(all(target_os = "linux", feature = "code"))]
mod code_reward;
#[cfg(feature = "judge")]
mod judge;
#[cfg(unix)]
mod program_reward;
mod rewards;
