//! Collective operations between the processes of a job, on Candle tensors.
//!
//! A process is a rank, numbered from 0. All ranks call the same operations in the same order, with
//! tensors of the same shapes.

mod alone;
mod collective;

pub use alone::Alone;
pub use collective::Collective;
