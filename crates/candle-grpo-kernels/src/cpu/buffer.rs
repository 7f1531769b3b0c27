//! Buffers for matrix products.

use std::cell::Cell;
use std::ops::Range;

/// Buffers for one task.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Words from rows of `a` in tiles or blocks, unless its entries are adjacent.
    pub(crate) a: Buffer,
    /// A panel from `b`.
    pub(crate) panel: Buffer,
    /// Values from `b` in f32, as working memory.
    pub(crate) wide: Vec<f32>,
}

impl Scratch {
    /// Calls `f` with this thread's buffers. A small product takes less time than allocating new
    /// ones.
    pub(super) fn with(f: impl FnOnce(&mut Self)) {
        thread_local! {
            static SCRATCH: Cell<Scratch> = Cell::default();
        }
        let mut scratch = SCRATCH.take();
        f(&mut scratch);
        SCRATCH.set(scratch);
    }
}

/// Memory that grows and is reused. It starts at a cache line, so that aligned vectors do not cross
/// lines.
#[derive(Default)]
pub(crate) struct Buffer(Vec<f32>);

impl Buffer {
    /// Cache line size in bytes.
    const LINE: usize = 64;

    /// Returns the first `len` values, which are unspecified.
    pub(crate) fn first(&mut self, len: usize) -> &mut [f32] {
        let most = len + Self::LINE / size_of::<f32>();
        if self.0.len() < most {
            self.0 = Vec::new();
            // The system's zero pages are only written when a thread first uses them.
            self.0 = vec![0.0; most];
        }
        let start = self.start();
        &mut self.0[start..][..len]
    }

    /// Returns a range of values, after a call to [`Self::first`] that covers it.
    #[inline(always)]
    pub(crate) fn get(&self, range: Range<usize>) -> &[f32] {
        &self.0[self.start()..][range]
    }

    #[inline(always)]
    fn start(&self) -> usize {
        self.0.as_ptr().align_offset(Self::LINE)
    }
}
