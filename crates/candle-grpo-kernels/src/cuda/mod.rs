//! The CUDA paths: each file launches the kernels of the file of the same name in `kernels/`.
//!
//! Nothing checks the arguments of a launch against the kernel's signature: their order and types are those of the
//! kernel, sizes are u64, and a pointer that may be null is a u64 of 0.

mod element;
pub(crate) mod log_prob;
mod tensor;

/// The kernels as PTX, one constant for each `.cu` file.
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

pub(crate) use element::{CudaElement, with_cuda_floats};
