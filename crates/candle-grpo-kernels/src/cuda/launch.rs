//! One struct per kernel, with the arguments in `kernels/signatures.rs` as fields. Named arguments
//! cannot be swapped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};

use super::argument::{Argument, In, Out};
use super::element::CudaElement;

/// Each `.cu` file's name and fatbin.
const FATBINS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Kernels loaded by this process. The modules keep their contexts alive.
#[derive(Default)]
struct Loaded {
    /// By context and file.
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    /// By context, kernel and element type suffix.
    functions: HashMap<(usize, &'static str, &'static str), CudaFunction>,
}

static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);

/// An argument's type: `argument!('a T In<Self>)`.
macro_rules! argument {
    ($a:lifetime $t:ident In<Self>) => { In<$a, $t> };
    ($a:lifetime $t:ident Out<Self>) => { Out<$a, $t> };
    ($a:lifetime $t:ident $pointer:ident<$element:ident>) => { $pointer<$a, $element> };
    ($a:lifetime $t:ident $number:ident) => { $number };
}

/// Defines the structs for kernels with an element type.
macro_rules! kernels {
    ($($file:ident {
        $($kernel:ident($($name:ident: $kind:ident $(<$element:ident>)?),* $(,)?);)*
    })*) => {$($(
        /// Arguments for the kernel with this name.
        #[allow(non_camel_case_types)]
        pub(crate) struct $kernel<'a, T> {
            $(pub(crate) $name: argument!('a T $kind $(<$element>)?)),*
        }

        impl<T: CudaElement> $kernel<'_, T> {
            /// Launches the kernel.
            ///
            /// # Safety
            ///
            /// The pointers must cover all elements that the kernel reads or writes with these
            /// arguments and this grid.
            #[allow(unsafe_code)]
            pub(crate) unsafe fn launch(self, device: &CudaDevice, grid: LaunchConfig) -> Result<()> {
                let stream = super::super::device::stream(device)?;
                let name = [stringify!($file), stringify!($kernel), T::SUFFIX];
                let function = function(&stream, name)?;
                allow_shared_memory(&function, grid.shared_mem_bytes)?;
                let mut launch = stream.launch_builder(&function);
                $(launch.arg(self.$name.bits());)*
                // SAFETY: order and types match the signature, which the tests use too.
                unsafe { launch.launch(grid) }.w()?;
                Ok(())
            }
        }
    )*)*};
}

/// Defines the structs for kernels without an element type.
macro_rules! plain_kernels {
    ($($file:ident {
        $($kernel:ident($($name:ident: $kind:ident $(<$element:ident>)?),* $(,)?);)*
    })*) => {$($(
        /// Arguments for the kernel with this name.
        #[allow(non_camel_case_types)]
        pub(crate) struct $kernel<'a> {
            $(pub(crate) $name: argument!('a T $kind $(<$element>)?)),*
        }

        impl $kernel<'_> {
            /// Launches the kernel.
            ///
            /// # Safety
            ///
            /// The pointers must cover all elements that the kernel reads or writes with these
            /// arguments and this grid.
            #[allow(unsafe_code)]
            pub(crate) unsafe fn launch(self, device: &CudaDevice, grid: LaunchConfig) -> Result<()> {
                let stream = super::super::device::stream(device)?;
                let name = [stringify!($file), stringify!($kernel), ""];
                let function = function(&stream, name)?;
                allow_shared_memory(&function, grid.shared_mem_bytes)?;
                let mut launch = stream.launch_builder(&function);
                $(launch.arg(self.$name.bits());)*
                // SAFETY: order and types match the signature, which the tests use too.
                unsafe { launch.launch(grid) }.w()?;
                Ok(())
            }
        }
    )*)*};
}

/// A struct with the arguments for each kernel.
pub(crate) mod kernels {
    use super::*;

    include!("../../kernels/signatures.rs");
}

/// Returns the kernel with this file, name and suffix, loading it on first use.
pub(crate) fn function(stream: &CudaStream, name: [&'static str; 3]) -> Result<CudaFunction> {
    let [file, kernel, suffix] = name;
    let context = stream.context().cu_ctx() as usize;
    let key = (context, kernel, suffix);
    let loaded = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(function) = loaded.functions.get(&key) {
        return Ok(function.clone());
    }
    drop(loaded);

    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let module = match loaded.modules.entry((context, file)) {
        Entry::Occupied(module) => module.into_mut(),
        Entry::Vacant(place) => {
            let Some((_, fatbin)) = FATBINS.iter().find(|(name, _)| *name == file) else {
                bail!("no kernels of {file}");
            };
            let image = Ptx::from_binary(fatbin.to_vec());
            place.insert(stream.context().load_module(image).w()?)
        }
    };
    let function = module.load_function(&[kernel, suffix].concat()).w()?;
    loaded.functions.insert(key, function.clone());
    Ok(function)
}

/// Shared memory that a block can use without a kernel attribute.
const SHARED_BYTES: u32 = 48 << 10;

fn allow_shared_memory(function: &CudaFunction, bytes: u32) -> Result<()> {
    if bytes > SHARED_BYTES {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, bytes as i32).w()?;
    }
    Ok(())
}

/// Returns a one-dimensional launch with `blocks` blocks and `threads` threads each.
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
