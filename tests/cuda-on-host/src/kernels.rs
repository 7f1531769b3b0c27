//! One function for each kernel, with the arguments of `kernels/signatures.rs`.

use candle_core::WithDType;
use half::{bf16, f16};

use crate::{Grid, launch, selected};

/// Elements that a kernel reads.
pub type In<T> = *const T;
/// Elements that a kernel writes.
pub type Out<T> = *mut T;

macro_rules! kernels {
    ($($file:ident { $($kernel:ident($($name:ident: $type:ty),* $(,)?);)* })*) => {
        /// The kernels of an element type. Each runs on the CPU in one of the
        /// [orders](crate::ORDERS).
        ///
        /// # Safety
        ///
        /// The pointers must point to all elements that the kernel reads or writes with these
        /// arguments and this grid.
        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments, missing_docs)]
        pub trait Kernels: WithDType {$($(
            unsafe fn $kernel(grid: Grid, order: u32, $($name: $type),*) -> Result<(), String>;
        )*)*}
        of_dtype! { f32 "_f32" $($($kernel($($name: $type),*);)*)* }
        of_dtype! { bf16 "_bf16" $($($kernel($($name: $type),*);)*)* }
        of_dtype! { f16 "_f16" $($($kernel($($name: $type),*);)*)* }
    };
}

macro_rules! of_dtype {
    ($element:ident $suffix:literal $($kernel:ident($($name:ident: $type:ty),*);)*) => {
        impl Kernels for $element {$(
            unsafe fn $kernel(grid: Grid, order: u32, $($name: $type),*) -> Result<(), String> {
                call!(concat!(stringify!($kernel), $suffix), grid, order, $($name: $type),*)
            }
        )*}
    };
}

macro_rules! plain_kernels {
    ($($file:ident { $($kernel:ident($($name:ident: $type:ty),* $(,)?);)* })*) => {$($(
        /// Runs the kernel of this name on the CPU in one of the [orders](crate::ORDERS).
        ///
        /// # Safety
        ///
        /// The pointers must point to all elements that the kernel reads or writes with these
        /// arguments and this grid.
        #[allow(clippy::too_many_arguments)]
        pub unsafe fn $kernel(grid: Grid, order: u32, $($name: $type),*) -> Result<(), String> {
            call!(stringify!($kernel), grid, order, $($name: $type),*)
        }
    )*)*};
}

macro_rules! call {
    ($link_name:expr, $grid:ident, $order:ident, $($name:ident: $type:ty),*) => {{
        let launched: unsafe extern "C" fn($($type),*) = {
            unsafe extern "C" {
                #[link_name = $link_name]
                fn kernel();
            }
            // SAFETY: function pointers have one representation, and these are the arguments of
            // this function, also of the one for another GPU.
            unsafe { std::mem::transmute(selected($link_name, kernel as *const ())) }
        };
        // SAFETY: the caller's promise.
        unsafe { launch($grid, $order, || launched($($name),*)) }
    }};
}
include!("../../../kernels/signatures.rs");
