//! Runs the CUDA kernels of candle-grpo on the CPU.
//!
//! The build script compiles `kernels/*.cu` as C++ with replacements of nvcc's built-ins. The
//! threads of a block are fibers that synchronize at barriers and shuffles. [`Kernels`] has a
//! function for each kernel with an element type; the other kernels are functions of this crate.
//!
//! The tests show the results of a kernel, that its threads meet at every barrier, that its
//! accesses are aligned and in bounds, and that no threads race. They do not show the speed on a
//! GPU.
#![allow(unsafe_code)]

mod expected;
mod kernels;

pub use expected::{Expected, forward_and_backward};
pub use kernels::*;

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ops::{Deref, DerefMut};

unsafe extern "C" {
    fn cuda_host_launch(
        grid: *const u32,
        block: *const u32,
        shared_bytes: usize,
        order: u32,
        is_loop: bool,
        finds_races: bool,
        body: extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> *const c_char;
    fn cuda_host_buffer(bytes: usize) -> *mut c_void;
    fn cuda_host_free(buffer: *mut c_void, bytes: usize);
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *const ();
}

thread_local! {
    static ON_HOPPER: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run`, with kernels of compute capability 9.0 in place of others where there are two.
pub fn on_hopper<R>(run: impl FnOnce() -> R) -> R {
    ON_HOPPER.set(true);
    let result = run();
    ON_HOPPER.set(false);
    result
}

/// Returns the kernel `name` of the selected GPU; `default` is the one of most GPUs.
pub(crate) fn selected(name: &str, default: *const ()) -> *const () {
    if !ON_HOPPER.get() {
        return default;
    }
    let name = CString::new(format!("hopper_{name}")).expect("the name of a kernel");
    // SAFETY: the name ends with a zero, and a null handle is the whole program.
    let found = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    if found.is_null() { default } else { found }
}

/// Orders of the threads of a block: ascending and random. A result that differs between orders
/// shows a missing barrier, or a sum whose order is not fixed.
pub const ORDERS: [u32; 2] = [FINDS_RACES, 20];

/// The order in which a race is an error: two accesses of the same memory that nothing orders, even
/// if they are right in each order.
pub const FINDS_RACES: u32 = 0;

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
    /// Returns a launch in one dimension without dynamic shared memory.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
        }
    }
}

/// Calls `thread` once for each thread of the grid, with its index in the built-ins of CUDA.
///
/// # Errors
///
/// Fails on a deadlock of threads, and on undefined behavior of C++, with its source location. In
/// the order [`FINDS_RACES`] it fails on a race. An access outside of every [`Buffer`] ends the
/// process with a message.
///
/// # Safety
///
/// `thread` must only call a kernel with valid arguments.
pub unsafe fn launch<F: Fn()>(grid: Grid, order: u32, thread: F) -> Result<(), String> {
    extern "C" fn call<F: Fn()>(thread: *mut c_void) {
        // SAFETY: `launch` passes a pointer to its own `thread`, which outlives the call.
        unsafe { (*thread.cast::<F>())() }
    }
    // SAFETY: the pointers point to three numbers each, and to a closure of the type of `call`.
    let error = unsafe {
        cuda_host_launch(
            grid.grid.as_ptr(),
            grid.block.as_ptr(),
            grid.shared_bytes,
            order,
            false,
            order == FINDS_RACES,
            call::<F>,
            (&raw const thread).cast_mut().cast(),
        )
    };
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: the string is valid until the next launch of this thread.
    Err(unsafe { CStr::from_ptr(error) }
        .to_string_lossy()
        .into_owned())
}

/// Numbers followed by inaccessible memory. A kernel that accesses memory beyond them ends the
/// process.
#[derive(Debug)]
pub struct Buffer<T: Copy> {
    start: *mut T,
    len: usize,
}

impl<T: Copy> Buffer<T> {
    /// Copies `numbers` to a buffer.
    pub fn new(numbers: &[T]) -> Self {
        let len = numbers.len();
        // SAFETY: the buffer has this size, and there is no other pointer to it.
        unsafe {
            let start = cuda_host_buffer(size_of_val(numbers)).cast::<T>();
            start.copy_from_nonoverlapping(numbers.as_ptr(), len);
            Self { start, len }
        }
    }

    /// Returns a buffer of `len` copies of `value`.
    pub fn filled(value: T, len: usize) -> Self {
        Self::new(&vec![value; len])
    }
}

impl<T: Copy> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` wrote `len` numbers.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Copy> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `new` wrote `len` numbers, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `start` is from `cuda_host_buffer` with this size, and is not used again.
        unsafe { cuda_host_free(self.start.cast(), size_of::<T>() * self.len) }
    }
}
