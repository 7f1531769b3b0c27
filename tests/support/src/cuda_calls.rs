//! Counts a test's calls to the CUDA driver.

use std::ffi::{CStr, c_char, c_void};

use crate::devices::is_on_cuda;

/// The current thread's calls, counted by the driver emulation on the CPU (`kernels/host/driver`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaCalls {
    /// Kernel launches.
    pub launches: u64,
    /// cuBLAS matrix products.
    pub products: u64,
    /// Copies from the host to the device.
    pub copies_to_device: u64,
    /// Copies from the device to the host, each of which waits for the device.
    pub copies_to_host: u64,
    /// Copies within the device, except those by kernels.
    pub copies_on_device: u64,
    /// Allocations, also of memory that is mapped to addresses.
    pub allocations: u64,
    /// Memory sets.
    pub memsets: u64,
    /// Recordings that can run (CUDA graphs).
    pub recordings: u64,
    /// Operations on events.
    pub events: u64,
    /// Waits of the host for a stream, an event or the device, apart from
    /// [`Self::copies_to_host`].
    pub waits: u64,
    /// Operations of NCCL, one for each tensor.
    pub operations: u64,
    /// The operations of NCCL that a kernel can run beside: it was launched after them, on a
    /// stream that had not waited for them.
    pub hidden: u64,
}

impl std::ops::Sub for CudaCalls {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            launches: self.launches - other.launches,
            products: self.products - other.products,
            copies_to_device: self.copies_to_device - other.copies_to_device,
            copies_to_host: self.copies_to_host - other.copies_to_host,
            copies_on_device: self.copies_on_device - other.copies_on_device,
            allocations: self.allocations - other.allocations,
            memsets: self.memsets - other.memsets,
            recordings: self.recordings - other.recordings,
            events: self.events - other.events,
            waits: self.waits - other.waits,
            operations: self.operations - other.operations,
            hidden: self.hidden - other.hidden,
        }
    }
}

impl CudaCalls {
    /// Returns this thread's calls so far. `None` without the emulation.
    pub fn now() -> Option<Self> {
        Some(Self {
            launches: count(c"launch")?,
            products: count(c"product")?,
            copies_to_device: count(c"cuMemcpyHtoDAsync_v2")?,
            copies_to_host: count(c"cuMemcpyDtoHAsync_v2")?,
            copies_on_device: count(c"cuMemcpyDtoDAsync_v2")?,
            allocations: count(c"allocation")?,
            memsets: count(c"cuMemsetD8Async")?,
            recordings: count(c"cuGraphInstantiateWithFlags")?,
            events: count(c"cuEventCreate")?
                + count(c"cuEventRecord")?
                + count(c"cuEventDestroy_v2")?
                + count(c"cuStreamWaitEvent")?,
            waits: count(c"cuStreamSynchronize")?
                + count(c"cuEventSynchronize")?
                + count(c"cuCtxSynchronize")?,
            operations: count(c"nccl")?,
            hidden: count(c"nccl beside kernels")?,
        })
    }

    /// Returns how often this thread has launched one kernel. `None` without the emulation.
    pub fn launches_of(kernel: &str) -> Option<u64> {
        let name = std::ffi::CString::new(format!("launch:{kernel}")).ok()?;
        count(&name)
    }
}

/// Runs `run` while `count` of this thread's allocations fail for lack of memory, after `before`
/// others. Also returns how many have failed. `None` without the emulation.
pub fn with_failing_allocations<T>(
    before: u64,
    count: u64,
    run: impl FnOnce() -> T,
) -> Option<(T, u64)> {
    with_failing_calls(c"allocation", before, count, run)
}

/// Runs `run` while `count` of this thread's calls of `name` fail, after `before` others:
/// allocations (`allocation`), operations of NCCL (`nccl`), a function of events, such as
/// `cuEventRecord`, `cuMemMap` or `cuMemSetAccess`. Also returns how many have failed. `None`
/// without the emulation.
#[allow(unsafe_code)]
pub fn with_failing_calls<T>(
    name: &CStr,
    before: u64,
    count: u64,
    run: impl FnOnce() -> T,
) -> Option<(T, u64)> {
    let function = symbol(c"cuda_host_fail_calls")?;
    // SAFETY: the function of this name has this signature.
    let fail: unsafe extern "C" fn(*const c_char, u64, u64) -> u64 =
        unsafe { std::mem::transmute(function) };
    // SAFETY: the name is a C string, and the function accepts any numbers.
    unsafe { fail(name.as_ptr(), before, count) };
    let result = run();
    // SAFETY: as before.
    let failed = unsafe { fail(name.as_ptr(), 0, 0) };
    Some((result, failed))
}

/// Returns the most bytes of the GPU that were in use since the last call. `None` without the
/// emulation.
#[allow(unsafe_code)]
pub fn cuda_peak_bytes() -> Option<u64> {
    let function = symbol(c"cuda_host_peak")?;
    // SAFETY: the function of this name has this signature.
    let function: unsafe extern "C" fn() -> u64 = unsafe { std::mem::transmute(function) };
    // SAFETY: the function has no arguments.
    Some(unsafe { function() })
}

/// Requests a count from the emulation.
#[allow(unsafe_code)]
fn count(name: &CStr) -> Option<u64> {
    let function = symbol(c"cuda_host_calls")?;
    // SAFETY: the function of this name has this signature.
    let function: unsafe extern "C" fn(*const c_char) -> u64 =
        unsafe { std::mem::transmute(function) };
    // SAFETY: the name is a C string.
    Some(unsafe { function(name.as_ptr()) })
}

/// Returns a function that the emulation exports, and a real driver does not have. Tests on the CPU
/// may have the emulation, too, but do not use it.
#[allow(unsafe_code)]
fn symbol(name: &CStr) -> Option<*mut c_void> {
    unsafe extern "C" {
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    if !is_on_cuda() {
        return None;
    }
    // SAFETY: a null handle searches all loaded libraries, and the name is a C string.
    let function = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!function.is_null()).then_some(function)
}
