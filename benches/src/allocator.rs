//! A global allocator that counts.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts the bytes that are alive in `A`, and the most there were.
#[derive(Debug)]
pub struct Counting<A>(pub A);

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call goes to `A` as it came.
#[allow(unsafe_code)]
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as promised to this function.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: as promised to this function.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised to this function.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as promised to this function.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}

/// What `run` gives, and the most bytes that were alive meanwhile beyond those before, in a program whose allocator this is.
/// What other threads take is counted too.
pub fn peak_bytes<T>(run: impl FnOnce() -> T) -> (T, usize) {
    let before = restart_peak();
    let result = run();
    (result, peak().saturating_sub(before))
}

/// Forgets earlier peaks and gives the bytes alive now.
pub(crate) fn restart_peak() -> usize {
    let live = LIVE.load(Ordering::Relaxed);
    PEAK.store(live, Ordering::Relaxed);
    live
}

/// The most bytes that were alive since [`restart_peak`].
pub(crate) fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}
