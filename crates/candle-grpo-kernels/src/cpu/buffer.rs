//! Buffers of matrix products.

use std::cell::Cell;
use std::ops::Range;

/// Buffers of a task.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Words of rows of `a` in tiles or blocks, unless their entries are adjacent.
    pub(crate) a: Buffer,
    /// A panel of `b`.
    pub(crate) panel: Buffer,
    /// Numbers of `b` in f32, for its own use.
    pub(crate) wide: Vec<f32>,
}

impl Scratch {
    /// Calls `f` with the buffers of this thread. A small product takes less time than the
    /// allocation of new ones.
    pub(super) fn with(f: impl FnOnce(&mut Self)) {
        thread_local! {
            static SCRATCH: Cell<Scratch> = Cell::default();
        }
        let mut scratch = SCRATCH.take();
        f(&mut scratch);
        SCRATCH.set(scratch);
    }
}

/// Memory that grows and is kept. It starts at a cache line, so that aligned vectors do not cross
/// lines.
#[derive(Default)]
pub(crate) struct Buffer(Vec<f32>);

impl Buffer {
    /// Bytes of a cache line.
    const LINE: usize = 64;

    /// Returns the first `len` numbers. Their values are not defined.
    pub(crate) fn first(&mut self, len: usize) -> &mut [f32] {
        let most = len + Self::LINE / size_of::<f32>();
        if self.0.len() < most {
            self.0 = Vec::new();
            // Zeros from the system are written when a thread first uses them.
            self.0 = vec![0.0; most];
        }
        let start = self.start();
        &mut self.0[start..][..len]
    }

    /// Returns some numbers. [`Self::first`] was called for them.
    #[inline(always)]
    pub(crate) fn get(&self, range: Range<usize>) -> &[f32] {
        &self.0[self.start()..][range]
    }

    #[inline(always)]
    fn start(&self) -> usize {
        self.0.as_ptr().align_offset(Self::LINE)
    }
}
