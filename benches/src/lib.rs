//! Times each fused operator next to its composed twin, in alternation, and writes the results.
//!
//! `make bench` runs this under the system allocator and under mimalloc, because page faults on
//! fresh memory take much of the composed operators' time. `make bench-peers` runs the same cases
//! next to PyTorch and Liger-Kernel.

mod allocator;
mod args;
mod bandwidth;
mod case;
mod cases;
mod connection;
mod median;
mod memory;
mod model;
mod noise;
mod region;
mod results;
mod run;
mod serve;
mod training;

pub use allocator::{Counting, peak, peak_bytes, restart_peak};
pub use connection::Connection;
pub use median::median;
pub use model::{decoder_in, read_model, small_model};
pub use run::main;
pub use training::training_main;
