//! One struct for each kernel, with the arguments of `kernels/signatures.rs` as fields. Named
//! arguments cannot be swapped.

use candle_core::Result;
use candle_core::bail;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use super::argument::{Argument, In, Out};
use super::element::CudaElement;

/// The kernels as PTX, one constant for each `.cu` file.
#[allow(unreachable_pub)]
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}

/// The type of an argument: `argument!('a T In<Self>)`.
macro_rules! argument {
    ($a:lifetime $t:ident In<Self>) => { In<$a, $t> };
    ($a:lifetime $t:ident Out<Self>) => { Out<$a, $t> };
    ($a:lifetime $t:ident $pointer:ident<$element:ident>) => { $pointer<$a, $element> };
    ($a:lifetime $t:ident $number:ident) => { $number };
}

/// Defines the structs of kernels with an element type.
macro_rules! kernels {
    ($($file:ident $ptx:ident {
        $($kernel:ident($($name:ident: $kind:ident $(<$element:ident>)?),* $(,)?);)*
    })*) => {$($(
        /// Arguments of the kernel of this name.
        #[allow(non_camel_case_types)]
        pub(crate) struct $kernel<'a, T> {
            $(pub(crate) $name: argument!('a T $kind $(<$element>)?)),*
        }

        impl<T: CudaElement> $kernel<'_, T> {
            /// Launches the kernel.
            ///
            /// # Safety
            ///
            /// The pointers must point to all elements that the kernel reads or writes with
            /// these arguments and this grid.
            #[allow(unsafe_code)]
            pub(crate) unsafe fn launch(self, device: &CudaDevice, grid: LaunchConfig) -> Result<()> {
                super::super::device::check(device)?;
                let name = concat!(stringify!($kernel), "_").to_owned() + T::SUFFIX;
                // Modules are cached by name across crates.
                let module = concat!("candle-grpo/", stringify!($file));
                let function = device.get_or_load_custom_func(&name, module, ptx::$ptx)?;
                allow_shared_memory(&function, grid.shared_mem_bytes)?;
                let mut launch = function.builder();
                $(launch.arg(self.$name.bits());)*
                // SAFETY: order and types are those of the signature, which the tests use too.
                unsafe { launch.launch(grid) }.w()?;
                Ok(())
            }
        }
    )*)*};
}

/// Defines the structs of kernels without an element type.
macro_rules! plain_kernels {
    ($($file:ident $ptx:ident {
        $($kernel:ident($($name:ident: $kind:ident $(<$element:ident>)?),* $(,)?);)*
    })*) => {$($(
        /// Arguments of the kernel of this name.
        #[allow(non_camel_case_types)]
        pub(crate) struct $kernel<'a> {
            $(pub(crate) $name: argument!('a T $kind $(<$element>)?)),*
        }

        impl $kernel<'_> {
            /// Launches the kernel.
            ///
            /// # Safety
            ///
            /// The pointers must point to all elements that the kernel reads or writes with
            /// these arguments and this grid.
            #[allow(unsafe_code)]
            pub(crate) unsafe fn launch(self, device: &CudaDevice, grid: LaunchConfig) -> Result<()> {
                super::super::device::check(device)?;
                let module = concat!("candle-grpo/", stringify!($file));
                let function = device.get_or_load_custom_func(stringify!($kernel), module, ptx::$ptx)?;
                allow_shared_memory(&function, grid.shared_mem_bytes)?;
                let mut launch = function.builder();
                $(launch.arg(self.$name.bits());)*
                // SAFETY: order and types are those of the signature, which the tests use too.
                unsafe { launch.launch(grid) }.w()?;
                Ok(())
            }
        }
    )*)*};
}

/// A struct with the arguments of each kernel.
pub(crate) mod kernels {
    use super::*;

    include!("../../kernels/signatures.rs");
}

/// Shared memory of a block that needs no attribute of the kernel.
const SHARED_BYTES: u32 = 48 << 10;

fn allow_shared_memory(function: &CudaFunction, bytes: u32) -> Result<()> {
    if bytes > SHARED_BYTES {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, bytes as i32).w()?;
    }
    Ok(())
}

/// Returns a launch of `blocks` blocks of `threads` threads in one dimension.
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
