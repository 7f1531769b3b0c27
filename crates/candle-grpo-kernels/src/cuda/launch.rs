//! One function for each kernel, with the arguments of `kernels/signatures.rs`.

use candle_core::Result;
use candle_core::bail;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use super::argument::{Argument, In, Out};
use super::element::CudaElement;

/// The kernels as PTX, one constant for each `.cu` file.
#[allow(unreachable_pub)]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

macro_rules! kernels {
    ($($file:ident $ptx:ident { $($kernel:ident($($name:ident: $type:ty),* $(,)?);)* })*) => {
        /// The kernels of an element type. Each function launches the one of its name.
        ///
        /// # Safety
        ///
        /// The pointers must be to as many elements as the kernel reads or writes, given its numbers and the grid.
        #[allow(unsafe_code, clippy::too_many_arguments)]
        pub(crate) trait Kernels: CudaElement {$($(
            unsafe fn $kernel(device: &CudaDevice, grid: LaunchConfig, $($name: $type),*) -> Result<()> {
                let function = device.get_or_load_custom_func(
                    &format!("{}_{}", stringify!($kernel), Self::SUFFIX),
                    // Modules are cached by name across crates.
                    concat!("candle-grpo/", stringify!($file)),
                    ptx::$ptx,
                )?;
                let mut launch = function.builder();
                $(launch.arg($name.bits());)*
                // SAFETY: order and types are those of the signature, by which the kernel is called in tests, too.
                unsafe { launch.launch(grid) }.w()?;
                Ok(())
            }
        )*)*}
    };
}
include!("../../kernels/signatures.rs");

impl<T: CudaElement> Kernels for T {}

/// `blocks` in a row of `threads` each.
pub(crate) fn grid(blocks: usize, threads: u32) -> Result<LaunchConfig> {
    match u32::try_from(blocks) {
        Ok(blocks) if blocks <= i32::MAX as u32 => Ok(LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        }),
        _ => bail!("{blocks} blocks are more than a grid has"),
    }
}
