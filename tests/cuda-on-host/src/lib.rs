//! Runs the CUDA kernels of candle-grpo on the CPU.
//!
//! The files in `kernels/` are compiled as C++ with a stand-in for nvcc's built-ins, in which the
//! threads of a block are fibers that meet at barriers and shuffles as they do on a GPU.
//! [`Kernels`] has each of them as a function; those without an element type are functions of this
//! crate. [`Expected`] is what their results are held to. What this proves is what a kernel
//! computes, that its threads meet, that its loads are aligned and inside their buffers. It proves
//! nothing of the GPU itself: neither speed nor races between warps that no order of the fibers
//! shows.
#![allow(unsafe_code)]

mod expected;
mod kernels;

pub use expected::{Expected, forward_and_backward};
pub use kernels::*;

use std::ffi::{CStr, c_char, c_void};
use std::ops::{Deref, DerefMut};

unsafe extern "C" {
    fn cuda_host_launch(
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        order: u32,
        body: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> *const c_char;
    fn cuda_host_buffer(bytes: usize) -> *mut c_void;
    fn cuda_host_free(buffer: *mut c_void, bytes: usize);
}

/// The orders in which the threads of a block run: upwards, downwards and a random one. A result
/// that differs between them shows a barrier that is missing.
pub const ORDERS: [u32; 3] = [0, 1, 20];

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Grid {
    /// A launch of one dimension without dynamic shared memory.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// Calls `thread` once for each thread of the grid, with its index in the kernel's built-ins.
///
/// Errs where threads wait for each other in vain, and on what C++ leaves undefined, with the
/// place. An access outside of every [`Buffer`] ends the process with a message.
///
/// # Safety
///
/// `thread` does nothing but call a kernel, whose arguments are right for it.
pub unsafe fn launch<F: Fn()>(grid: Grid, order: u32, thread: F) -> Result<(), String> {
    extern "C" fn call<F: Fn()>(thread: *mut c_void) {
        // SAFETY: `launch` hands over a pointer to its own `thread`, which outlives the call.
        unsafe { (*thread.cast::<F>())() }
    }
    // SAFETY: the pointers are to three numbers each, and to a closure of the type that `call`
    // expects.
    let error = unsafe {
        cuda_host_launch(
            grid.grid.as_ptr(),
            grid.block.as_ptr(),
            grid.shared_bytes,
            order,
            call::<F>,
            (&raw const thread).cast_mut().cast(),
        )
    };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a string that is valid until this thread launches again.
    Err(unsafe { CStr::from_ptr(error) }
        .to_string_lossy()
        .into_owned())
}

/// Numbers with forbidden memory behind the last one: a kernel that goes beyond them ends the
/// process.
#[derive(Debug)]
pub struct Buffer<T: Copy> {
    start: *mut T,
    len: usize,
}

impl<T: Copy> Buffer<T> {
    /// A copy of `numbers`.
    pub fn of(numbers: &[T]) -> Self {
        let len = numbers.len();
        // SAFETY: the buffer has this size and is nobody else's yet.
        unsafe {
            let start = cuda_host_buffer(size_of_val(numbers)).cast::<T>();
            start.copy_from_nonoverlapping(numbers.as_ptr(), len);
            Self { start, len }
        }
    }

    /// `len` times `value`.
    pub fn filled(value: T, len: usize) -> Self {
        Self::of(&vec![value; len])
    }
}

impl<T: Copy> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `of` wrote `len` numbers there.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Copy> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `start` came from `cuda_host_buffer` with this size, and this is its end.
        unsafe { cuda_host_free(self.start.cast(), size_of::<T>() * self.len) }
    }
}
