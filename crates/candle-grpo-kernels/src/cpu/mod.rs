//! Foundation for the CPU paths: SIMD chosen at run time, matrix products, tensor access.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod blocks;
mod buffer;
pub(crate) mod element;
pub(crate) mod instructions;
pub(crate) mod matmul;
pub(crate) mod matrix;
pub(crate) mod output;
pub(crate) mod panel;
#[cfg(target_arch = "x86_64")]
pub(crate) mod row_product;
pub(crate) mod simd;
pub(crate) mod slice;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiles;
pub(crate) mod transpose;
pub(crate) mod word;

pub(crate) use slice::{with_element, with_floats};
