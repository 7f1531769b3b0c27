//! A counting global allocator.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts bytes allocated by `A`, and their peak.
#[derive(Debug)]
pub struct Counting<A>(pub A);

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call is forwarded to `A` unchanged.
#[allow(unsafe_code)]
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller upholds the `GlobalAlloc` contract.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller upholds the `GlobalAlloc` contract.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the `GlobalAlloc` contract.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the `GlobalAlloc` contract.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}

/// Returns the result of `run` and its peak of newly allocated bytes.
///
/// The program must use this allocator. Allocations from other threads count too.
pub fn peak_bytes<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = restart_peak();
    let result = run();
    (result, peak().saturating_sub(before))
}

/// Resets the peak and returns the allocated bytes.
pub fn restart_peak() -> usize {
    let live = LIVE.load(Ordering::Relaxed);
    PEAK.store(live, Ordering::Relaxed);
    live
}

/// Returns the peak of allocated bytes since [`restart_peak`].
pub fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}
