//! Collective operations between a job's processes, on Candle tensors.
//!
//! Each process is a rank, numbered from 0. All ranks call the same operations in the same order,
//! with tensors of equal shapes. [`connect`] finds the ranks in this process's job:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use candle_grpo_collective::connect;
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! let ranks = connect(&device)?;
//! let gradient = Tensor::ones(4, candle_core::DType::F32, &device)?;
//! ranks.all_reduce_sum(&[&gradient])?; // in place
//! assert_eq!(gradient.to_vec1::<f32>()?, [ranks.world_size() as f32; 4]);
//! # Ok(())
//! # }
//! ```
//!
//! # Implementations
//!
//! | type | feature | ranks |
//! | --- | --- | --- |
//! | [`Alone`] | | one process |
//! | `Mpi` | `mpi` | processes started by `mpirun` or `srun`, with tensors on the CPU |
//! | `Nccl` | `nccl` | processes started by any launcher, with an NVIDIA GPU each |
//!
//! You can also implement [`Collective`] outside this crate.
//!
//! [`TransferTransport`] sends bytes to the processes of another program, which are not ranks in
//! this job: `NcclTransfer`, with the feature `nccl`, sends weights to vLLM's workers.
//! [`SharedMemory`] lets those on the same GPU read them in place: `CudaIpc`, with the feature
//! `cuda`.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod alone;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod arguments;
mod collective;
mod connect;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod copies;
#[cfg(feature = "cuda")]
mod cuda_ipc;
#[cfg(feature = "cuda")]
mod gpu;
pub mod launch;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod transfer;

pub use alone::Alone;
pub use collective::{Collective, Ticket};
pub use connect::connect;
#[cfg(feature = "cuda")]
pub use cuda_ipc::CudaIpc;
#[cfg(feature = "mpi")]
pub use mpi::Mpi;
#[cfg(feature = "nccl")]
pub use nccl::{Nccl, NcclTransfer};
pub use transfer::{
    GroupId, MemoryHandle, SharedBuffer, SharedMemory, TransferGroup, TransferTransport, Waiting,
};
