//! Foundation for the CUDA paths: launches, arguments, matrix products, devices.

pub(crate) mod argument;
pub(crate) mod column_sums;
pub(crate) mod device;
pub(crate) mod element;
pub(crate) mod elements;
pub(crate) mod in_place;
pub(crate) mod launch;
pub(crate) mod mapped;
pub(crate) mod matmul;
pub(crate) mod output;
pub(crate) mod recording;
pub(crate) mod tensor_list;

pub(crate) use argument::{In, Out};
pub(crate) use element::{CudaElement, with_cuda_floats};
pub(crate) use launch::{grid, kernels};
pub(crate) use output::{alloc, as_tensor};

/// A row without a place in pages or states, as in `slots.cuh`.
pub(crate) const NO_SLOT: u32 = u32::MAX;
