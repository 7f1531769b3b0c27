//! Matrix products in f32, or in bf16 with f32 sums.
//!
//! Each entry is one chain of multiply-adds along the inner dimension, in order. Its bits therefore
//! depend only on one row in `a` and one column in `b`, not on other rows and columns or the number
//! of cores. In f32, they do not depend on the vector width either.
//!
//! bf16 is multiplied in tiles or in pairs on processors with such instructions ([`amx`],
//! [`pairs`]), and in f32 on others.
//!
//! [`amx`]: super::amx
//! [`pairs`]: super::word::multiplies_pairs
//!
//! A task multiplies some rows by some columns. It packs up to [`WIDEST`] columns into a panel. A
//! panel consists of units with [`UNIT`] columns each, in which entries with the same inner index
//! are adjacent. A tile of sums stays in registers.

use std::ops::Range;

use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::buffer::{Buffer, Scratch};
#[cfg(target_arch = "x86_64")]
use super::instructions::{CpuInstructions, has};
use super::matrix::Matrix;
use super::panel::{Columns, Panel, panels};
#[cfg(target_arch = "x86_64")]
use super::row_product::RowProduct;
#[cfg(target_arch = "x86_64")]
use super::tiles::{RunTiles, TileTarget};
use super::transpose::{UNIT, WIDEST, interleave};
#[cfg(target_arch = "x86_64")]
use super::word::multiplies_in_tiles;
use super::word::{Numbers, Word};

/// Maximum rows per task. Packed, they fit in the L2 cache together with a panel.
const ROWS: usize = 256;

/// Words to pack at a time if a vector holds a unit. A chain continues from the sum in memory.
const DEPTH: usize = 1024;

/// Maximum words to pack at a time with shorter vectors. A unit and a tile of rows then stay in a
/// 32 KiB L1 cache.
const NARROW_DEPTH: usize = 320;

/// Up to this many rows, packing dominates a task's time.
const FEW: usize = 4;

/// Words to pack at a time for few rows: a multiple of every quantized block size.
const SHORT: usize = 256;

/// Maximum values to pack at a time for AMX tiles. A panel then fills the L1 cache.
#[cfg(target_arch = "x86_64")]
const TILE_DEPTH: usize = 3 * SHORT;

/// Tasks per core, so that all cores finish at about the same time.
const TASKS_PER_CORE: usize = 4;

/// Minimum number of multiplications to use more than one core.
const WORTH_SHARING: usize = 1 << 16;

/// Computes `target = a b`, or `target += a b` if `add` is set, on all cores.
///
/// Rows in `target` start `row_stride` apart.
///
/// # Panics
///
/// Panics if the matrices do not fit each other or `target`.
pub(crate) fn matmul(target: &mut [f32], row_stride: usize, add: bool, a: Matrix, b: Matrix) {
    run(&[Product::new(target, row_stride, add, a, b)], true);
}

/// Like [`matmul`], on the calling core only.
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

/// One product, with its target.
pub(crate) struct Product<'a, B> {
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
    pub(crate) fn new(
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

    /// Returns whether the factors are multiplied in AMX tiles.
    #[cfg(target_arch = "x86_64")]
    fn in_tiles(&self) -> bool {
        matches!(self.a.numbers, Numbers::Halves(_)) && multiplies_in_tiles()
    }

    /// Returns the maximum panel width.
    fn widest(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.in_tiles() {
            return amx::BLOCK;
        }
        WIDEST
    }

    /// Splits the product into at least `wanted` tasks, if it is large enough.
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
pub(crate) fn run<B: Columns>(products: &[Product<B>], share: bool) {
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
            Numbers::Singles(numbers) => self.multiply(numbers, scratch),
            Numbers::Halves(numbers) => self.multiply(numbers, scratch),
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: Columns> Task<'_, '_, B> {
    /// Runs the task for bf16 in AMX tiles.
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
        // With few rows, the time is dominated by reading `b`. The transposed product reads its
        // columns in memory order.
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
        // Splits into parts with similar lengths, at multiples of every quantized block size.
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

impl<B: Columns> Task<'_, '_, B> {
    /// Runs the task with vectors for `W`. `numbers` are the values in `a`.
    fn multiply<W: Word>(&self, numbers: &[W], scratch: &mut Scratch) {
        let Scratch {
            a: tiles,
            panel,
            wide,
        } = scratch;
        let &Self {
            product,
            ref rows,
            ref panels,
        } = self;
        let a = &product.a;
        #[cfg(target_arch = "x86_64")]
        if let Some(product) = self.of_few_rows() {
            return product.run();
        }
        let lanes = W::dispatch(Lanes);
        // The last word in an odd number of bf16 values has to be in a tile.
        let scattered = a.column_stride != 1 || !a.columns.is_multiple_of(W::NUMBERS);
        // With few rows, packing dominates. Parts of a panel stay in the L1 cache, and a panel is
        // read in memory order.
        let few = rows.len() <= FEW && !scattered;
        let in_tiles = scattered || (lanes < UNIT && !few);
        let shape = Shape::new(lanes, rows.len());
        let most = match lanes < UNIT {
            _ if few => SHORT,
            true => NARROW_DEPTH,
            false => DEPTH,
        };
        // Splits into parts with similar lengths.
        let parts = a.columns.div_ceil(W::NUMBERS * most).max(1);
        let unit = product.b.block().next_multiple_of(W::NUMBERS);
        let depth = a.columns.div_ceil(parts).max(1).next_multiple_of(unit);
        let parts = a.columns.div_ceil(depth).max(1);
        for index in 0..parts * panels.len() {
            let (part, number) = if few {
                (index % parts, index / parts)
            } else {
                (index / panels.len(), index % panels.len())
            };
            let inner = part * depth..a.columns.min((part + 1) * depth);
            let words = inner.len().div_ceil(W::NUMBERS);
            if in_tiles && number == 0 {
                pack_rows(numbers, a, rows, &inner, shape.rows, tiles);
            }
            let columns = &panels[number];
            let panel = match product.b.packed::<W>(columns, &inner) {
                Some(panel) => panel,
                None => Panel::pack::<W>(&product.b, columns, &inner, panel, wide),
            };
            W::dispatch(PanelProduct {
                a: if in_tiles {
                    Rows::InTiles(tiles.get(0..rows.len() * words))
                } else {
                    let first = rows.start * a.row_stride + inner.start;
                    Rows::InPlace(&numbers[first.min(numbers.len())..], a.row_stride)
                },
                rows: rows.len(),
                shape,
                all: Tile {
                    panel,
                    depth: words,
                    columns: columns.len(),
                    target: product
                        .target
                        .wrapping_add(rows.start * product.row_stride + columns.start),
                    row_stride: product.row_stride,
                    add: product.add || part > 0,
                },
            });
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: Columns> Task<'_, '_, B> {
    /// Returns the task for one or two rows, if it needs no panel.
    fn of_few_rows(&self) -> Option<RowProduct<'_>> {
        let Self {
            product,
            rows,
            panels,
        } = self;
        let Numbers::Singles(numbers) = product.a.numbers else {
            return None;
        };
        let columns = panels.first()?.start..panels.last()?.end;
        if rows.len() > RowProduct::MOST
            || product.a.column_stride != 1
            || product.b.is_packed()
            || !has(CpuInstructions::Avx2)
        {
            return None;
        }
        let first = rows.start * product.row_stride + columns.start;
        Some(RowProduct {
            rows: &numbers[rows.start * product.a.row_stride..],
            count: rows.len(),
            stride: product.a.row_stride,
            columns: product.b.as_rows()?,
            range: columns,
            target: product.target.wrapping_add(first),
            target_stride: product.row_stride,
            add: product.add,
        })
    }
}

/// Returns the number of vector lanes.
struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

/// The largest tile: its rows and its units of columns. The registers hold the sums, one panel row
/// and one value from the other factor.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    units: usize,
}

impl Shape {
    /// Returns the shape for `rows` rows and vectors with `lanes` values.
    fn new(lanes: usize, rows: usize) -> Self {
        let (rows, units) = match lanes {
            // 32 registers, 24 sums.
            UNIT => (8, WIDEST / UNIT),
            // 16 registers, up to 12 sums. A single row needs several units to hide the latency of
            // additions.
            8 if rows <= 2 => (2, WIDEST / UNIT),
            4.. => (6, 1),
            _ => (2, 1),
        };
        Self { rows, units }
    }
}

/// Returns the next tile's height: `most`, or the largest power of two up to `left`.
#[inline(always)]
fn height(left: usize, most: usize) -> usize {
    if left >= most {
        most
    } else {
        1 << left.ilog2()
    }
}

/// Writes words from rows of `a` into tiles with up to `most` rows, so that words with the same
/// inner index are adjacent.
fn pack_rows<W: Word>(
    numbers: &[W],
    a: &Matrix,
    rows: &Range<usize>,
    inner: &Range<usize>,
    most: usize,
    tiles: &mut Buffer,
) {
    let words = inner.len().div_ceil(W::NUMBERS);
    // Vectors overwrite rows for the next inner indices.
    let tiles = tiles.first(rows.len() * words + UNIT);
    let mut first = rows.start;
    while first < rows.end {
        let height = height(rows.end - first, most);
        let tile = &mut tiles[(first - rows.start) * words..];
        let rows = first..first + height;
        let packed = match a.column_stride {
            1 => interleave(numbers, a, &rows, inner, tile),
            _ => false,
        };
        if !packed {
            a.t()
                .pack_words(numbers, &rows, inner, &mut tile[..height * words]);
        }
        first += height;
    }
}

/// Words from rows of `a`.
#[derive(Clone, Copy)]
enum Rows<'t, W> {
    /// Values in place, with this row stride.
    InPlace(&'t [W], usize),
    /// [Packed](pack_rows).
    InTiles(&'t [f32]),
}

/// Some rows of `a` times a panel.
struct PanelProduct<'t, W> {
    a: Rows<'t, W>,
    rows: usize,
    shape: Shape,
    /// All units in the panel.
    all: Tile<'t>,
}

impl<W: Word> WithSimd for PanelProduct<'_, W> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let all = self.all;
        let wide = self.shape.units * UNIT;
        for column in (0..all.columns).step_by(wide) {
            let columns = wide.min(all.columns - column);
            let mut row = 0;
            while row < self.rows {
                let height = height(self.rows - row, self.shape.rows);
                let tile = Tile {
                    panel: all.panel.from(column / UNIT),
                    columns,
                    target: all.target.wrapping_add(row * all.row_stride + column),
                    ..all
                };
                let rows = match self.a {
                    Rows::InPlace(numbers, stride) => {
                        Rows::InPlace(&numbers[(row * stride).min(numbers.len())..], stride)
                    }
                    Rows::InTiles(words) => Rows::InTiles(&words[row * all.depth..]),
                };
                tile.dispatch::<S, W>(simd, height, columns.div_ceil(UNIT), rows);
                row += height;
            }
        }
    }
}

/// Some rows of `a` times some units in a panel.
#[derive(Clone, Copy)]
struct Tile<'t> {
    panel: Panel<'t>,
    depth: usize,
    /// Number of columns in the target.
    columns: usize,
    /// First entry in the target.
    target: *mut f32,
    row_stride: usize,
    add: bool,
}

impl Tile<'_> {
    /// Selects the function for `height` rows and `units` units of columns.
    #[inline(always)]
    fn dispatch<S: Simd, W: Word>(&self, simd: S, height: usize, units: usize, rows: Rows<W>) {
        match S::F32_LANES {
            UNIT => match (height, units) {
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
            },
            8 => match (height, units) {
                (6, _) => self.compute::<S, W, 6, 2>(simd, rows),
                (4, _) => self.compute::<S, W, 4, 2>(simd, rows),
                (2, 3) => self.compute::<S, W, 2, 6>(simd, rows),
                (2, 2) => self.compute::<S, W, 2, 4>(simd, rows),
                (2, _) => self.compute::<S, W, 2, 2>(simd, rows),
                (_, 3) => self.compute::<S, W, 1, 6>(simd, rows),
                (_, 2) => self.compute::<S, W, 1, 4>(simd, rows),
                _ => self.compute::<S, W, 1, 2>(simd, rows),
            },
            4 => match height {
                6 => self.compute::<S, W, 6, 4>(simd, rows),
                4 => self.compute::<S, W, 4, 4>(simd, rows),
                2 => self.compute::<S, W, 2, 4>(simd, rows),
                _ => self.compute::<S, W, 1, 4>(simd, rows),
            },
            _ => match height {
                2 => self.compute::<S, W, 2, 4>(simd, rows),
                _ => self.compute::<S, W, 1, 4>(simd, rows),
            },
        }
    }

    /// Computes R rows, with V vectors from each in registers at a time.
    #[inline(always)]
    fn compute<S: Simd, W: Word, const R: usize, const V: usize>(&self, simd: S, rows: Rows<W>) {
        let depth = self.depth;
        // Vectors per unit.
        let of_unit = UNIT / S::F32_LANES;
        let parts = self.columns.div_ceil(V * S::F32_LANES);
        let units = (parts * V).div_ceil(of_unit);
        assert!(self.panel.holds(units, depth));
        match rows {
            Rows::InPlace(numbers, stride) => {
                let last = (R - 1) * stride + depth * W::NUMBERS;
                assert!(depth == 0 || last <= numbers.len());
            }
            Rows::InTiles(words) => assert!(R * depth <= words.len()),
        }
        for part in 0..parts {
            let first = part * V * S::F32_LANES;
            let columns = (self.columns - first).min(V * S::F32_LANES);
            // First word in each vector.
            let panel: [*const S::f32s; V] = std::array::from_fn(|v| {
                let vector = part * V + v;
                let lane = vector % of_unit * S::F32_LANES;
                self.panel.unit(vector / of_unit).wrapping_add(lane).cast()
            });
            // SAFETY: the product's constructor checked the target bounds. No other task has these
            // entries, and nothing reads them during the product.
            #[allow(unsafe_code)]
            let target_row = |row| unsafe {
                let start = self.target.wrapping_add(row * self.row_stride + first);
                std::slice::from_raw_parts_mut(start, columns)
            };
            // A copy of a tile whose vectors are not all whole.
            let mut copy = None;
            let target = if columns == V * S::F32_LANES {
                (self.target.wrapping_add(first), self.row_stride)
            } else {
                let copy = copy.insert([[simd.splat_f32s(0.0); V]; R]);
                if self.add {
                    for (row, sums) in copy.iter_mut().enumerate() {
                        let target = target_row(row).chunks(S::F32_LANES);
                        for (sum, target) in sums.iter_mut().zip(target) {
                            *sum = simd.partial_load_f32s(target);
                        }
                    }
                }
                (copy.as_mut_ptr().cast(), V * S::F32_LANES)
            };
            // SAFETY: the assertions above keep the words in bounds, and the target has whole
            // vectors. This is called from the words' `dispatch`.
            #[allow(unsafe_code)]
            unsafe {
                match rows {
                    Rows::InPlace(numbers, stride) => {
                        let rows = (numbers.as_ptr().cast(), stride * size_of::<W>());
                        products::<S, W, R, V, false>(simd, depth, rows, panel, target, self.add);
                    }
                    Rows::InTiles(words) => {
                        let rows = (words.as_ptr(), 0);
                        products::<S, W, R, V, true>(simd, depth, rows, panel, target, self.add);
                    }
                }
            }
            for (row, sums) in copy.iter().flatten().enumerate() {
                let target = target_row(row).chunks_mut(S::F32_LANES);
                for (sum, target) in sums.iter().zip(target) {
                    simd.partial_store_f32s(target, *sum);
                }
            }
        }
    }
}

/// Computes the products of R rows and V column vectors, `depth` words each, and adds them to the
/// target if `add` is set.
///
/// Words in a row are adjacent and rows are `stride` bytes apart, or the rows are in a tile if
/// TILED is set. Rows in the target are `target_stride` values apart.
///
/// This is a separate function with its own sums, because the compiler keeps them in registers only
/// if nothing else has their address. It uses plain loops, because the compiler must inline
/// everything and does not inline every closure.
///
/// # Safety
///
/// The rows must have `depth` words, and `panel` must point to the first of `depth` vectors, a unit
/// apart. The target must have R rows of V vectors, which nothing else accesses. This must be
/// called from the words' `dispatch`.
#[inline(always)]
#[allow(unsafe_code)]
unsafe fn products<S: Simd, W: Word, const R: usize, const V: usize, const TILED: bool>(
    simd: S,
    depth: usize,
    (first, stride): (*const f32, usize),
    panel: [*const S::f32s; V],
    (target, target_stride): (*mut f32, usize),
    add: bool,
) {
    let mut sums = [[simd.splat_f32s(0.0); V]; R];
    if add {
        for row in 0..R {
            let target: *const S::f32s = target.wrapping_add(row * target_stride).cast();
            for v in 0..V {
                // SAFETY: the caller guarantees the target.
                sums[row][v] = unsafe { target.add(v).read_unaligned() };
            }
        }
    }
    let mut b = [simd.splat_f32s(0.0); V];
    for k in 0..depth {
        // SAFETY: the caller guarantees these words.
        unsafe {
            for v in 0..V {
                b[v] = panel[v]
                    .byte_add(k * UNIT * size_of::<f32>())
                    .read_unaligned();
            }
            for row in 0..R {
                let word = if TILED {
                    first.add(k * R + row)
                } else {
                    first.byte_add(row * stride).add(k)
                };
                let a = simd.splat_f32s(word.read_unaligned());
                for v in 0..V {
                    sums[row][v] = W::mul_add(simd, a, b[v], sums[row][v]);
                }
            }
        }
    }
    for row in 0..R {
        let target: *mut S::f32s = target.wrapping_add(row * target_stride).cast();
        for v in 0..V {
            // SAFETY: the caller guarantees the target.
            unsafe { target.add(v).write_unaligned(sums[row][v]) };
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
