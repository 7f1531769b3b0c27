//! The CUDA paths: each file launches the kernels of the file of the same name in `kernels/`.

mod argument;
mod element;
mod launch;
pub(crate) mod log_prob;

use argument::{In, Out};
use element::{CudaElement, with_cuda_floats};
use launch::{Kernels, grid};
