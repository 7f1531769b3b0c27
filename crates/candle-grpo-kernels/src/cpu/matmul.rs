//! Matrix products of f32, or of bf16 with sums in f32.
//!
//! Each entry of a product is one chain of multiply-adds over the inner dimension, in order. So its
//! bits are a function of one row of `a` and one column of `b`: they do not depend on the other
//! rows and columns, or on the number of cores. In f32, they do not depend on the width of the
//! vectors.
//!
//! bf16 are multiplied in tiles or in pairs on processors with instructions for it ([`amx`],
//! [`pairs`]), and in f32 on others.
//!
//! [`amx`]: super::amx
//! [`pairs`]: super::word::multiplies_pairs
//!
//! A task multiplies some rows by some columns. It packs up to [`WIDEST`] columns into a panel,
//! whose entries of one inner index are adjacent, and keeps a tile of sums in registers.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{Layout, Result, Tensor};
use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::element::Element;
use super::panel::{Columns, UNIT, WIDEST, panels};
use super::slice;
#[cfg(target_arch = "x86_64")]
use super::tiles::{RunTiles, TileTarget};
#[cfg(target_arch = "x86_64")]
use super::word::multiplies_in_tiles;
use super::word::{Numbers, Word};

/// Rows of a task, at most. Packed, they and a panel fit in the L2 cache.
const ROWS: usize = 256;

/// Words that are packed at a time. A chain continues from the sum in memory.
const DEPTH: usize = 1024;

/// Rows of a task for which the time is that of packing.
const FEW: usize = 4;

/// Words that are packed at a time for few rows: a multiple of each quantized block.
const SHORT: usize = 256;

/// Numbers that are packed at a time for tiles of AMX, at most. A panel of them has the size of the
/// L1 cache.
#[cfg(target_arch = "x86_64")]
const TILE_DEPTH: usize = 3 * SHORT;

/// Rows of a tile with 32 vector registers. With 3 vectors of columns these are 24 sums.
const TILE: usize = 8;

/// Tasks for each core, so that all cores end at about the same time.
const TASKS_PER_CORE: usize = 4;

/// Minimum number of multiplications for more than one core.
const WORTH_SHARING: usize = 1 << 16;

/// A matrix in a slice, with entry (i, j) at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(super) numbers: Numbers<'a>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Returns a matrix whose rows start `row_stride` apart.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self::of(Numbers::Singles(values), rows, columns, row_stride)
    }

    /// [`Self::new`] for numbers of any dtype.
    pub(super) fn of(numbers: Numbers<'a>, rows: usize, columns: usize, row_stride: usize) -> Self {
        Self {
            numbers,
            rows,
            columns,
            row_stride,
            column_stride: 1,
        }
    }

    /// Returns the matrix of a tensor. `values` is the whole storage. `buffer` is for numbers in
    /// f32.
    fn from_layout<T: Element>(
        values: &'a [T],
        layout: &Layout,
        buffer: &'a mut Vec<f32>,
    ) -> Result<Self> {
        let (rows, columns) = layout.shape().dims2()?;
        let mut matrix = Self {
            numbers: Numbers::Singles(&[]),
            rows,
            columns,
            row_stride: layout.stride()[0],
            column_stride: layout.stride()[1],
        };
        let values = &values[layout.start_offset()..][..matrix.span()];
        matrix.numbers = Numbers::of(values, buffer);
        Ok(matrix)
    }

    /// Returns the transpose, in the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the numbers from the first entry to the last.
    fn span(&self) -> usize {
        match (self.rows, self.columns) {
            (0, _) | (_, 0) => 0,
            _ => (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1,
        }
    }

    pub(super) fn in_bounds(&self) -> bool {
        self.span() <= self.numbers.len()
    }
}

/// Computes `target = a b`, or `target += a b` if `add` is set, on all cores.
///
/// The rows of `target` start `row_stride` apart.
///
/// # Panics
///
/// Panics if the matrices do not fit each other or `target`.
pub(crate) fn matmul(target: &mut [f32], row_stride: usize, add: bool, a: Matrix, b: Matrix) {
    run(&[Product::new(target, row_stride, add, a, b)], true);
}

/// [`matmul`] on the calling core.
///
/// # Panics
///
/// Panics if the matrices do not fit each other or `target`.
pub(crate) fn matmul_on_one_core(
    target: &mut [f32],
    row_stride: usize,
    add: bool,
    a: Matrix,
    b: Matrix,
) {
    run(&[Product::new(target, row_stride, add, a, b)], false);
}

/// Computes `sum += a b` for a contiguous `sum` of f32.
pub(crate) fn add_matmul<T: Element>(sum: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    with_matrices::<T, _>(a, b, |a, b| {
        slice::write_f32(sum, |sum| {
            matmul(sum, b.columns, true, a, b);
            Ok(())
        })
    })
}

/// Returns `a b`, rounded.
pub(crate) fn product<T: Element>(a: &Tensor, b: &Tensor) -> Result<Vec<T>> {
    with_matrices::<T, _>(a, b, |a, b| {
        let mut product = vec![0.0; a.rows * b.columns];
        matmul(&mut product, b.columns, false, a, b);
        Ok(T::rounded(product))
    })
}

/// Calls `multiply` with the matrices of two tensors.
fn with_matrices<T: Element, R>(
    a: &Tensor,
    b: &Tensor,
    multiply: impl FnOnce(Matrix, Matrix) -> Result<R>,
) -> Result<R> {
    let (a_storage, a_layout) = a.storage_and_layout();
    let (b_storage, b_layout) = b.storage_and_layout();
    let (mut a_buffer, mut b_buffer) = (Vec::new(), Vec::new());
    let values = slice::on_cpu(&a_storage)?.as_slice::<T>()?;
    let a = Matrix::from_layout(values, a_layout, &mut a_buffer)?;
    let values = slice::on_cpu(&b_storage)?.as_slice::<T>()?;
    let b = Matrix::from_layout(values, b_layout, &mut b_buffer)?;
    multiply(a, b)
}

/// One product, with its target.
pub(super) struct Product<'a, B> {
    target: *mut f32,
    row_stride: usize,
    add: bool,
    a: Matrix<'a>,
    b: B,
}

// SAFETY: the target is borrowed mutably for `'a`, and each task writes its own entries.
#[allow(unsafe_code)]
unsafe impl<B: Sync> Sync for Product<'_, B> {}

impl<'a, B: Columns> Product<'a, B> {
    /// See [`matmul`].
    ///
    /// # Panics
    ///
    /// Panics if the matrices do not fit each other or `target`.
    pub(super) fn new(
        target: &'a mut [f32],
        row_stride: usize,
        add: bool,
        a: Matrix<'a>,
        b: B,
    ) -> Self {
        let columns = b.len();
        assert!(
            a.in_bounds() && b.fits(&a),
            "the factors do not fit each other"
        );
        let last = a
            .rows
            .checked_sub(1)
            .map(|last| last * row_stride + columns);
        assert!(row_stride >= columns && last.unwrap_or(0) <= target.len());
        Self {
            target: target.as_mut_ptr(),
            row_stride,
            add,
            a,
            b,
        }
    }

    /// Returns whether the factors are multiplied in tiles of AMX.
    #[cfg(target_arch = "x86_64")]
    fn in_tiles(&self) -> bool {
        matches!(self.a.numbers, Numbers::Halves(_)) && multiplies_in_tiles()
    }

    /// Returns the width of the widest panel.
    fn widest(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.in_tiles() {
            return amx::BLOCK;
        }
        WIDEST
    }

    /// Splits the product into at least `wanted` tasks, if its size permits.
    fn tasks(&self, wanted: usize) -> Vec<Task<'_, 'a, B>> {
        let panels: Vec<_> = panels(self.b.len(), self.widest()).collect();
        let parts = self.a.rows.div_ceil(ROWS);
        let groups = wanted.div_ceil(parts.max(1)).clamp(1, panels.len().max(1));
        let bound = |index: usize, of: usize, len: usize| index * len / of;
        let mut tasks = Vec::with_capacity(parts * groups);
        for group in 0..groups {
            let group = bound(group, groups, panels.len())..bound(group + 1, groups, panels.len());
            tasks.extend((0..parts).map(|part| Task {
                product: self,
                rows: bound(part, parts, self.a.rows)..bound(part + 1, parts, self.a.rows),
                panels: panels[group.clone()].to_vec(),
            }));
        }
        tasks
    }
}

/// Computes all products.
pub(super) fn run<B: Columns>(products: &[Product<B>], share: bool) {
    let work = |product: &Product<B>| product.a.rows * product.a.columns * product.b.len();
    let all: usize = products.iter().map(work).sum();
    if !share || all < WORTH_SHARING {
        for task in products.iter().flat_map(|product| product.tasks(1)) {
            task.run();
        }
        return;
    }
    let wanted = TASKS_PER_CORE * rayon::current_num_threads();
    let tasks: Vec<_> = products
        .iter()
        .flat_map(|product| product.tasks((wanted * work(product)).div_ceil(all)))
        .collect();
    tasks.par_iter().with_max_len(1).for_each(Task::run);
}

/// Some rows times some panels.
struct Task<'p, 'a, B> {
    product: &'p Product<'a, B>,
    rows: Range<usize>,
    panels: Vec<Range<usize>>,
}

impl<B: Columns> Task<'_, '_, B> {
    fn run(&self) {
        Scratch::with(|scratch| self.run_with(scratch));
    }

    fn run_with(&self, scratch: &mut Scratch) {
        match self.product.a.numbers {
            #[cfg(target_arch = "x86_64")]
            Numbers::Halves(_) if self.product.in_tiles() => self.run_in_tiles(scratch),
            Numbers::Singles(numbers) => f32::dispatch(Run {
                task: self,
                numbers,
                scratch,
            }),
            Numbers::Halves(numbers) => bf16::dispatch(Run {
                task: self,
                numbers,
                scratch,
            }),
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: Columns> Task<'_, '_, B> {
    /// [`Self::run`] for bf16 in tiles of AMX.
    fn run_in_tiles(&self, scratch: &mut Scratch) {
        let Self {
            product,
            rows,
            panels,
        } = self;
        let (Some(first), Some(last)) = (panels.first(), panels.last()) else {
            return;
        };
        let target = |row_stride, column_stride| TileTarget {
            first: product.target,
            row_stride,
            column_stride,
            add: product.add,
        };
        // For few rows, the time is that of reading `b`. The transpose of the product reads its
        // columns as they lie in memory.
        if rows.len() <= amx::BLOCK
            && let Some(left) = product.b.as_rows()
            // Otherwise its rows have to be copied.
            && left.columns.is_multiple_of(bf16::NUMBERS * amx::STEP)
        {
            return bf16::dispatch(RunTiles {
                left: &left,
                rows: first.start..last.end,
                right: &product.a.t(),
                panels: std::slice::from_ref(rows),
                target: target(1, product.row_stride),
                depth: left.columns,
                scratch,
            });
        }
        // Parts of about the same length, at multiples of each quantized block.
        let parts = product.a.columns.div_ceil(TILE_DEPTH).max(1);
        bf16::dispatch(RunTiles {
            left: &product.a,
            rows: rows.clone(),
            right: &product.b,
            panels,
            target: target(product.row_stride, 1),
            depth: product.a.columns.div_ceil(parts).next_multiple_of(SHORT),
            scratch,
        });
    }
}

/// Buffers of a task.
#[derive(Default)]
pub(super) struct Scratch {
    /// Words of rows of `a` in tiles or blocks, unless their entries are adjacent.
    pub(super) a: Buffer,
    /// A panel of `b`.
    pub(super) panel: Buffer,
    /// Numbers of `b` in f32, for its own use.
    pub(super) wide: Vec<f32>,
}

impl Scratch {
    /// Calls `f` with the buffers of this thread. A small product takes less time than the
    /// allocation of new ones.
    fn with(f: impl FnOnce(&mut Self)) {
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
pub(super) struct Buffer(Vec<f32>);

impl Buffer {
    /// Bytes of a cache line.
    const LINE: usize = 64;

    /// Returns the first `len` numbers. Their values are not defined.
    pub(super) fn first(&mut self, len: usize) -> &mut [f32] {
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
    pub(super) fn get(&self, range: Range<usize>) -> &[f32] {
        &self.0[self.start()..][range]
    }

    #[inline(always)]
    fn start(&self) -> usize {
        self.0.as_ptr().align_offset(Self::LINE)
    }
}

struct Run<'r, 'p, 'a, W, B> {
    task: &'r Task<'p, 'a, B>,
    /// The numbers of `a`.
    numbers: &'a [W],
    scratch: &'r mut Scratch,
}

impl<W: Word, B: Columns> WithSimd for Run<'_, '_, '_, W, B> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            task,
            numbers,
            scratch,
        } = self;
        let Scratch {
            a: tiles,
            panel,
            wide,
        } = scratch;
        let &Task {
            product,
            ref rows,
            ref panels,
        } = task;
        let a = &product.a;
        // The last word of an odd number of bf16 is in a tile.
        let packed = a.column_stride != 1 || !a.columns.is_multiple_of(W::NUMBERS);
        // For few rows, the time is that of packing. Parts of a panel stay in the L1 cache, and a
        // panel is read as it lies in memory.
        let few = rows.len() <= FEW && !packed;
        let depth = W::NUMBERS * if few { SHORT } else { DEPTH };
        let parts = a.columns.max(1).div_ceil(depth);
        for index in 0..parts * panels.len() {
            let (part, number) = match few {
                true => (index % parts, index / parts),
                false => (index / panels.len(), index % panels.len()),
            };
            let inner = part * depth..a.columns.min((part + 1) * depth);
            let words = inner.len().div_ceil(W::NUMBERS);
            if packed && number == 0 {
                let tiles = tiles.first(rows.len() * words);
                pack_rows::<S, W>(numbers, a, rows, &inner, tiles);
            }
            let columns = &panels[number];
            let width = columns.len().next_multiple_of(UNIT);
            let panel: &[f32] = match product.b.packed::<W>(columns, &inner) {
                Some(panel) => panel,
                None => {
                    let panel = panel.first(width * words);
                    product.b.pack::<W>(columns, &inner, panel, wide);
                    panel
                }
            };
            let mut first = rows.start;
            while first < rows.end {
                let height = height::<S>(rows.end - first);
                let tile = Tile {
                    panel,
                    depth: words,
                    columns: columns.len(),
                    target: product
                        .target
                        .wrapping_add(first * product.row_stride + columns.start),
                    row_stride: product.row_stride,
                    add: product.add || part > 0,
                };
                let rows = if packed {
                    // Borrowed for this tile only. With a slice for the whole loop, the compiler
                    // generates code of half the speed in f32.
                    let tiles = tiles.first(rows.len() * words);
                    let tiles = &tiles[(first - rows.start) * words..];
                    Rows::new(tiles, height, words, 1, height)
                } else {
                    let numbers = &numbers[first * a.row_stride + inner.start..];
                    Rows::new(numbers, height, words, a.row_stride, W::NUMBERS)
                };
                tile.dispatch::<S, W>(simd, height, width / UNIT, rows);
                first += height;
            }
        }
    }
}

/// Returns the rows of the next tile: the largest power of two with at most `left` rows.
#[inline(always)]
fn height<S: Simd>(left: usize) -> usize {
    let most = match S::REGISTER_COUNT < 32 {
        true => TILE / 2,
        false => TILE,
    };
    most.min(1 << left.ilog2())
}

/// Writes the words of rows of `a` in tiles, in which those of one inner index are adjacent.
#[inline(always)]
fn pack_rows<S: Simd, W: Word>(
    numbers: &[W],
    a: &Matrix,
    rows: &Range<usize>,
    inner: &Range<usize>,
    target: &mut [f32],
) {
    let words = inner.len().div_ceil(W::NUMBERS);
    let mut first = rows.start;
    while first < rows.end {
        let height = height::<S>(rows.end - first);
        let tile = &mut target[(first - rows.start) * words..][..height * words];
        a.t()
            .pack_words(numbers, &(first..first + height), inner, tile);
        first += height;
    }
}

/// Words of some rows of `a`.
#[derive(Clone, Copy)]
struct Rows<'t> {
    /// The first word. It may not be aligned.
    first: *const f32,
    /// Bytes from a row to the next.
    row_step: usize,
    /// Bytes from a word of a row to the next.
    step: usize,
    numbers: PhantomData<&'t [f32]>,
}

impl<'t> Rows<'t> {
    /// Returns `depth` words of `height` rows of `numbers`. The steps are in numbers.
    ///
    /// # Panics
    ///
    /// Panics if the numbers end before.
    #[inline(always)]
    fn new<W>(numbers: &'t [W], height: usize, depth: usize, row_step: usize, step: usize) -> Self {
        let size = size_of::<W>();
        let last = (height - 1) * row_step + depth.saturating_sub(1) * step;
        assert!(depth == 0 || last * size + size_of::<f32>() <= size_of_val(numbers));
        Self {
            first: numbers.as_ptr().cast(),
            row_step: row_step * size,
            step: step * size,
            numbers: PhantomData,
        }
    }
}

/// Some rows of `a` times a panel.
struct Tile<'t> {
    /// `[depth, units * UNIT]`
    panel: &'t [f32],
    depth: usize,
    /// The columns that the target has.
    columns: usize,
    /// The first entry of the target.
    target: *mut f32,
    row_stride: usize,
    add: bool,
}

impl Tile<'_> {
    /// Selects the function for `height` rows and `units` units of columns.
    #[inline(always)]
    fn dispatch<S: Simd, W: Word>(&self, simd: S, height: usize, units: usize, rows: Rows) {
        match (height, units) {
            (8, 3) => self.compute::<S, W, 8, 3>(simd, rows),
            (8, 2) => self.compute::<S, W, 8, 2>(simd, rows),
            (8, _) => self.compute::<S, W, 8, 1>(simd, rows),
            (4, 3) => self.compute::<S, W, 4, 3>(simd, rows),
            (4, 2) => self.compute::<S, W, 4, 2>(simd, rows),
            (4, _) => self.compute::<S, W, 4, 1>(simd, rows),
            (2, 3) => self.compute::<S, W, 2, 3>(simd, rows),
            (2, 2) => self.compute::<S, W, 2, 2>(simd, rows),
            (2, _) => self.compute::<S, W, 2, 1>(simd, rows),
            (_, 3) => self.compute::<S, W, 1, 3>(simd, rows),
            (_, 2) => self.compute::<S, W, 1, 2>(simd, rows),
            _ => self.compute::<S, W, 1, 1>(simd, rows),
        }
    }

    /// Computes R rows of U units of columns.
    #[inline(always)]
    fn compute<S: Simd, W: Word, const R: usize, const U: usize>(&self, simd: S, rows: Rows) {
        let depth = self.depth;
        let (panel, _) = S::as_simd_f32s(self.panel);
        // Vectors of a unit: a part of the columns has U vectors.
        let parts = UNIT / S::F32_LANES;
        assert!(panel.len() == depth * U * parts);
        let starts: [_; R] =
            std::array::from_fn(|row| rows.first.wrapping_byte_add(row * rows.row_step));
        for part in 0..parts {
            let first = part * U * S::F32_LANES;
            let columns = self.columns.saturating_sub(first).min(U * S::F32_LANES);
            // SAFETY: the constructor of the product checked the bounds of the target. No other
            // task has these entries, and nothing reads them during the product.
            #[allow(unsafe_code)]
            let mut targets: [&mut [f32]; R] = std::array::from_fn(|row| unsafe {
                let start = self.target.wrapping_add(row * self.row_stride + first);
                std::slice::from_raw_parts_mut(start, columns)
            });
            let mut sums = [[simd.splat_f32s(0.0); U]; R];
            if self.add {
                for (sums, target) in sums.iter_mut().zip(&targets) {
                    for (sum, target) in sums.iter_mut().zip(target.chunks(S::F32_LANES)) {
                        *sum = simd.partial_load_f32s(target);
                    }
                }
            }
            // Plain loops: the compiler must inline all of it, and does not inline every closure.
            let mut b = [simd.splat_f32s(0.0); U];
            for k in 0..depth {
                // SAFETY: the assertion above and that of the rows keep the indices in bounds, and
                // `dispatch` of the words called this.
                #[allow(unsafe_code)]
                unsafe {
                    for (unit, b) in b.iter_mut().enumerate() {
                        *b = *panel.get_unchecked((k * parts + part) * U + unit);
                    }
                    for row in 0..R {
                        let word = starts[row].byte_add(k * rows.step).read_unaligned();
                        let a = simd.splat_f32s(word);
                        for unit in 0..U {
                            sums[row][unit] = W::mul_add(simd, a, b[unit], sums[row][unit]);
                        }
                    }
                }
            }
            for (sums, target) in sums.into_iter().zip(&mut targets) {
                if columns == U * S::F32_LANES {
                    S::as_mut_simd_f32s(target).0.copy_from_slice(&sums);
                    continue;
                }
                for (sum, target) in sums.into_iter().zip(target.chunks_mut(S::F32_LANES)) {
                    simd.partial_store_f32s(target, sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_starts_at_a_cache_line_and_keeps_its_numbers() {
        let mut buffer = Buffer::default();
        for len in [1, 5, 48, 1000, 300_000, 7] {
            let numbers = buffer.first(len);
            assert_eq!(
                (numbers.len(), numbers.as_ptr().addr() % 64),
                (len, 0),
                "{len} numbers"
            );
            numbers.fill(len as f32);
            assert_eq!(buffer.first(len), vec![len as f32; len]);
        }
    }
}
