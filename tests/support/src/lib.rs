//! Helpers for tests and benchmarks in all crates: devices, inputs, comparisons, defaults in doc
//! comments, an HTTP server, a hub, lines from other processes, agents, and ranks that are threads.
//!
//! A test runs on every device:
//!
//! ```
//! use candle_core::{DType, Result};
//! use candle_grpo_test_support::{assert_close, devices, noise_tensor, numbers};
//!
//! fn the_sum_of_a_tensor_is_the_sum_of_its_entries() -> Result<()> {
//!     for device in devices() {
//!         let x = noise_tensor((3, 4), 1, DType::F64, device)?;
//!         let expected: f64 = numbers(&x)?.iter().sum();
//!         assert_close(&numbers(&x.sum_all()?)?, &[expected], 1e-12);
//!     }
//!     Ok(())
//! }
//! # the_sum_of_a_tensor_is_the_sum_of_its_entries()?;
//! # Ok::<(), candle_core::Error>(())
//! ```

use std::time::Duration;

mod agent;
mod compare;
mod cuda_calls;
mod decoder;
mod devices;
mod documented_defaults;
mod gguf;
mod http;
mod hub;
mod lines;
mod lone_rank;
mod noise;
#[cfg(unix)]
mod reserved_port;
mod thread_ranks;

pub use agent::AGENT_START;
pub use candle_grpo_kernels::cuda_device;
pub use compare::{assert_close, gradient, message, numbers};
pub use cuda_calls::{CudaCalls, cuda_peak_bytes, with_failing_allocations, with_failing_calls};
pub use decoder::TINY_DECODER;
pub use devices::{cases, cuda, device, devices, is_long, stay_on_cpu};
pub use documented_defaults::{assert_defaults_are_documented, other_fields, serialized};
pub use gguf::gguf_bytes;
pub use http::{ClosedPort, HttpServer, Reply, Request};
pub use hub::{FakeHub, HubRepository};
pub use lines::{Lines, named_pipe};
pub use lone_rank::LoneRank;
pub use noise::{noise, noise_tensor, token_ids, words};
#[cfg(unix)]
pub use reserved_port::ReservedPort;
pub use thread_ranks::on_ranks;

/// Maximum time for a test to wait for an event, long enough for any machine under any load. It
/// ends a test that would otherwise never end. No test waits for it to pass.
pub const WATCHDOG: Duration = Duration::from_secs(300);
