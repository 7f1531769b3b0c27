//! Tests of `paged_attention.cu` against the formula in f64.

use std::ptr;

use candle_core::Result;
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_test_support::{assert_close, noise};

/// Positions of a page, and spans of a part, as in the kernel.
const PAGE: usize = 16;
const PART: usize = 16;
const SCALE: f64 = 0.3;
const EPSILON: f64 = 1e-3;

/// Returns `len` numbers, followed by `behind` elements in memory.
fn buffer<T: Kernels>(len: usize, behind: usize, seed: u64) -> Buffer<T> {
    let mut numbers: Vec<T> = noise(len, seed).into_iter().map(T::from_f64).collect();
    numbers.resize(len + behind, T::from_f64(f64::NAN));
    Buffer::new(&numbers)
}

fn wide<T: Kernels>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// The kernel for heads of at most `D` elements and `H` heads at once, with a window and a cap.
macro_rules! attend_with_options {
    ($D:ident, $H:ident, $($argument:expr),*) => {
        match ($D, $H) {
            (..=64, 2) => T::scored_paged_attention_64_2($($argument),*),
            (..=64, 4) => T::scored_paged_attention_64_4($($argument),*),
            (..=64, _) => T::scored_paged_attention_64_8($($argument),*),
            (..=128, 2) => T::scored_paged_attention_128_2($($argument),*),
            (..=128, 4) => T::scored_paged_attention_128_4($($argument),*),
            (..=128, _) => T::scored_paged_attention_128_8($($argument),*),
            (_, 2) => T::scored_paged_attention_256_2($($argument),*),
            (_, 4) => T::scored_paged_attention_256_4($($argument),*),
            (_, _) => T::scored_paged_attention_256_8($($argument),*),
        }
    };
}

/// The kernel without them.
macro_rules! attend {
    ($D:ident, $H:ident, $($argument:expr),*) => {
        match ($D, $H) {
            (..=64, 2) => T::paged_attention_64_2($($argument),*),
            (..=64, 4) => T::paged_attention_64_4($($argument),*),
            (..=64, _) => T::paged_attention_64_8($($argument),*),
            (..=128, 2) => T::paged_attention_128_2($($argument),*),
            (..=128, 4) => T::paged_attention_128_4($($argument),*),
            (..=128, _) => T::paged_attention_128_8($($argument),*),
            (_, 2) => T::paged_attention_256_2($($argument),*),
            (_, 4) => T::paged_attention_256_4($($argument),*),
            (_, _) => T::paged_attention_256_8($($argument),*),
        }
    };
}

/// The kernel for units.
macro_rules! attend_shared {
    ($D:ident, $($argument:expr),*) => {
        match $D {
            ..=64 => T::shared_paged_attention_64($($argument),*),
            _ => T::shared_paged_attention_128($($argument),*),
        }
    };
}

/// The kernels' tables, and the number of pages.
#[derive(Default)]
struct Tables {
    pages: usize,
    spans: Vec<u32>,
    firsts: Vec<u32>,
    begins: Vec<u32>,
    ends: Vec<u32>,
    visible: Vec<u32>,
    /// Empty without units.
    shared: Vec<u32>,
    members: Vec<u32>,
    starts: Vec<u32>,
}

impl Tables {
    /// Adds a row whose spans have these pages and lengths.
    fn push(&mut self, spans: &[(usize, usize)]) {
        let mut visible = 0;
        self.begins.push(self.spans.len() as u32);
        for &(page, len) in spans {
            self.spans.push(page as u32);
            self.firsts.push(visible);
            visible += len as u32;
        }
        self.ends.push(self.spans.len() as u32);
        self.visible.push(visible);
    }

    /// Rows with these numbers of visible positions, each in a sequence of its own.
    fn separate(visible: &[usize]) -> Self {
        let mut tables = Self::default();
        // The first span of a sequence has 5 positions.
        let lengths = |visible: usize| {
            let rest = visible.saturating_sub(5);
            let whole = std::iter::repeat_n(PAGE, rest / PAGE);
            let ends = [visible.min(5)].into_iter().chain(whole);
            ends.chain((!rest.is_multiple_of(PAGE)).then_some(rest % PAGE))
        };
        tables.pages = visible.iter().map(|n| lengths(*n).count()).sum();
        // The pages are taken from the last one on.
        let mut page = tables.pages;
        for &n in visible {
            let spans = lengths(n).map(|len| {
                page -= 1;
                (page, len)
            });
            tables.push(&spans.collect::<Vec<_>>());
        }
        tables
    }

    /// Rows of several units in turn: each unit's number of rows, of spans that they share, of
    /// positions in the last of these, and of positions that its first row has alone. Each further
    /// row has one more.
    fn in_units(units: &[[usize; 4]]) -> Self {
        let mut tables = Self::default();
        let shared = units.iter().map(|&[_, spans, last, _]| {
            let first_page = tables.pages;
            tables.pages += spans;
            let page = |i| (first_page + i, if i + 1 == spans { last } else { PAGE });
            (0..spans).map(page).collect::<Vec<_>>()
        });
        let shared: Vec<_> = shared.collect();
        let mut rows = vec![vec![]; units.len()];
        for turn in 0..units.iter().map(|unit| unit[0]).max().unwrap_or(0) {
            for (unit, &[count, _, _, own]) in units.iter().enumerate() {
                if turn >= count {
                    continue;
                }
                let mut spans = shared[unit].clone();
                for first in (0..own + turn).step_by(PAGE) {
                    spans.push((tables.pages, PAGE.min(own + turn - first)));
                    tables.pages += 1;
                }
                rows[unit].push(tables.visible.len() as u32);
                tables.shared.push(shared[unit].len() as u32);
                tables.push(&spans);
            }
        }
        tables.starts.push(0);
        for rows in rows {
            tables.members.extend(rows);
            tables.starts.push(tables.members.len() as u32);
        }
        // A unit of the padding.
        tables.starts.push(tables.members.len() as u32);
        tables
    }

    /// The pages of each visible position of a row, and its place in the page.
    fn positions(&self, row: usize) -> Vec<(usize, usize)> {
        let (begin, end) = (self.begins[row] as usize, self.ends[row] as usize);
        let positions = (begin..end).flat_map(|span| {
            let stop = if span + 1 < end {
                self.firsts[span + 1]
            } else {
                self.visible[row]
            };
            let page = self.spans[span] as usize;
            (0..(stop - self.firsts[span]) as usize).map(move |at| (page, at))
        });
        positions.collect()
    }

    /// The largest number of parts that a row reads alone, and that a unit reads.
    fn parts(&self) -> [usize; 2] {
        let spans = (0..self.visible.len()).map(|row| {
            let shared = self.shared.get(row).copied().unwrap_or(0);
            [self.ends[row] - self.begins[row] - shared, shared]
        });
        let spans: Vec<_> = spans.collect();
        [0, 1].map(|i| {
            let most = spans.iter().map(|spans| spans[i] as usize).max();
            most.unwrap_or(0).div_ceil(PART)
        })
    }
}

/// `kv_heads`, query heads of each, and `head_dim`.
fn check_attention<T: Kernels>(
    tables: &Tables,
    [kv_heads, group, head_dim]: [usize; 3],
    behind: usize,
    options: Option<(usize, f64)>,
    tolerance: f64,
) {
    let (n, heads) = (tables.visible.len(), kv_heads * group);
    let query = buffer::<T>(n * heads * head_dim, behind, 1);
    let of_pages = tables.pages * kv_heads * PAGE * head_dim;
    let (mut keys, mut values) = (
        buffer::<T>(of_pages, behind, 2),
        buffer::<T>(of_pages, behind, 3),
    );
    // Positions that no row sees must not have an effect.
    let mut is_seen = vec![false; tables.pages * PAGE];
    for (page, at) in (0..n).flat_map(|row| tables.positions(row)) {
        is_seen[page * PAGE + at] = true;
    }
    for place in (0..of_pages).filter(|place| {
        let position = place / head_dim;
        !is_seen[position / PAGE / kv_heads * PAGE + position % PAGE]
    }) {
        keys[place] = T::from_f64(f64::NAN);
        values[place] = T::from_f64(f64::NAN);
    }
    let mut expected = vec![];
    for row in 0..n {
        let positions = tables.positions(row);
        assert_eq!(positions.len(), tables.visible[row] as usize);
        let window = options.map_or(usize::MAX, |(window, _)| window);
        let positions = &positions[positions.len().saturating_sub(window)..];
        for head in 0..heads {
            let query = wide(&query[(row * heads + head) * head_dim..][..head_dim]);
            let places = positions
                .iter()
                .map(|(page, at)| ((page * kv_heads + head / group) * PAGE + at) * head_dim);
            let of = |all: &[T], place: usize| wide(&all[place..][..head_dim]);
            let scores = places.clone().map(|place| {
                let key = of(&keys, place);
                let score = SCALE * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
                match options {
                    Some((_, cap)) if cap > 0.0 => cap * (score / cap).tanh(),
                    _ => score,
                }
            });
            let weights: Vec<f64> = scores.map(f64::exp).collect();
            let total: f64 = weights.iter().sum();
            let mut mixed = vec![0.0; head_dim];
            for (place, weight) in places.zip(&weights) {
                let value = of(&values, place);
                mixed
                    .iter_mut()
                    .zip(value)
                    .for_each(|(y, v)| *y += weight / total * v);
            }
            expected.extend(mixed);
        }
    }

    let count = tables.spans.len() as u32;
    let spans = Buffer::new(&[&*tables.spans, &*tables.firsts].concat());
    let rows = Buffer::new(&[&*tables.begins, &*tables.ends, &*tables.visible].concat());
    let [shared, members, starts] =
        [&tables.shared, &tables.members, &tables.starts].map(|table| Buffer::new(table));
    let has_units = !tables.shared.is_empty();
    let shared = if has_units {
        shared.as_ptr()
    } else {
        ptr::null()
    };
    let [own_parts, shared_parts] = tables.parts();
    let parts = own_parts + shared_parts;
    let at_once = match group {
        ..=2 => 2,
        3..=4 => 4,
        _ => 8,
    };
    let grid = Grid {
        grid: [
            n as u32,
            (kv_heads * group.div_ceil(at_once)) as u32,
            // A part that no row has.
            own_parts as u32 + u32::from(has_units),
        ],
        block: [128, 1, 1],
        shared_bytes: 0,
    };
    let units = tables.starts.windows(2);
    let queries = units.map(|ends| (ends[1] - ends[0]) as usize * group).max();
    let queries = queries.unwrap_or(0);
    let warps = if size_of::<T>() == 4 { 2 } else { 4 };
    let row_bytes = if head_dim <= 64 { 64 } else { 128 } * size_of::<T>() + 16;
    let of_units = Grid {
        grid: [
            tables.starts.len().saturating_sub(1) as u32,
            (kv_heads * queries.div_ceil(16 * warps)) as u32,
            shared_parts as u32 + 1,
        ],
        block: [32 * warps as u32, 1, 1],
        shared_bytes: (4 * warps * PAGE + queries.next_power_of_two().clamp(16, 16 * warps))
            * row_bytes,
    };
    let merge = Grid {
        grid: [(n * heads).div_ceil(8) as u32, 1, 1],
        block: [32, 8, 1],
        shared_bytes: 0,
    };
    let seven = T::from_f64(7.0);
    for order in ORDERS {
        let mut y = Buffer::filled(seven, n * heads * head_dim + behind);
        let of_parts = if parts > 1 {
            n * heads * parts * (head_dim + 2)
        } else {
            0
        };
        let mut partial = Buffer::filled(f32::NAN, of_parts);
        // SAFETY: the buffers have the sizes of the rows, heads, pages and parts.
        unsafe {
            if has_units {
                attend_shared!(
                    head_dim,
                    of_units,
                    order,
                    query.as_ptr(),
                    keys.as_ptr(),
                    values.as_ptr(),
                    rows.as_ptr(),
                    spans.as_ptr(),
                    shared,
                    members.as_ptr(),
                    starts.as_ptr(),
                    partial.as_mut_ptr(),
                    n as u32,
                    count,
                    kv_heads as u32,
                    group as u32,
                    parts as u32,
                    head_dim as i32,
                    SCALE as f32
                )
                .unwrap();
            }
            macro_rules! arguments {
                ($attend:ident $(, $option:expr)*) => {
                    $attend!(
                        head_dim,
                        at_once,
                        grid,
                        order,
                        query.as_ptr(),
                        keys.as_ptr(),
                        values.as_ptr(),
                        rows.as_ptr(),
                        spans.as_ptr(),
                        shared,
                        y.as_mut_ptr(),
                        partial.as_mut_ptr(),
                        n as u32,
                        count,
                        kv_heads as u32,
                        group as u32,
                        parts as u32,
                        head_dim as i32,
                        SCALE as f32
                        $(, $option)*
                    )
                };
            }
            match options {
                None => arguments!(attend),
                Some((window, cap)) => {
                    arguments!(attend_with_options, window as u32, cap as f32)
                }
            }
            .unwrap();
            if parts > 1 {
                T::paged_attention_merge(
                    merge,
                    order,
                    partial.as_ptr(),
                    rows.as_ptr(),
                    shared,
                    y.as_mut_ptr(),
                    n as u32,
                    heads as u32,
                    parts as u32,
                    head_dim as i32,
                )
                .unwrap();
            }
        }
        let (found, behind) = y.split_at(expected.len());
        assert_close(&wide(found), &expected, tolerance);
        assert!(behind.iter().all(|x| *x == seven));
    }
}

/// Writes `n` rows of query, key and value, with norms and rotations or without.
fn check_write<T: Kernels>(
    n: usize,
    [heads, kv_heads, head_dim]: [usize; 3],
    transforms: bool,
    tolerance: f64,
) {
    let (query, key, value) = (
        buffer::<T>(n * heads * head_dim, 0, 1),
        buffer::<T>(n * kv_heads * head_dim, 0, 2),
        buffer::<T>(n * kv_heads * head_dim, 0, 3),
    );
    let weights = [buffer::<T>(head_dim, 0, 4), buffer::<T>(head_dim, 0, 5)];
    let angles = noise(n * head_dim / 2, 6);
    let of_angles = |f: fn(f64) -> f64| -> Buffer<f32> {
        let values: Vec<f32> = angles.iter().map(|x| f(*x) as f32).collect();
        Buffer::new(&values)
    };
    let (cos, sin) = (of_angles(f64::cos), of_angles(f64::sin));
    let pages = n.div_ceil(PAGE) + 1;
    // From the last slot on.
    let slots: Vec<u32> = (0..n)
        .map(|row| ((pages * PAGE - 1) - row) as u32)
        .collect();
    let transformed = |x: &[T], weight: &[T], row: usize| -> Vec<f64> {
        let x = wide(x);
        if !transforms {
            return x;
        }
        let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
        let scale = 1.0 / (mean + EPSILON).sqrt();
        let normed: Vec<f64> = x
            .iter()
            .zip(wide(weight))
            .map(|(x, weight)| x * scale * weight)
            .collect();
        let half = head_dim / 2;
        let rotated = (0..head_dim).map(|i| {
            let (cos, sin) = (
                angles[row * half + i % half].cos(),
                angles[row * half + i % half].sin(),
            );
            if i < half {
                normed[i] * cos - normed[i + half] * sin
            } else {
                normed[i] * cos + normed[i - half] * sin
            }
        });
        rotated.collect()
    };
    let head_of = |x: &[T], per_row: usize, row: usize, head: usize| -> Vec<T> {
        x[(row * per_row + head) * head_dim..][..head_dim].to_vec()
    };
    let optional = |x: *const T| if transforms { x } else { ptr::null() };
    let angle = |x: &Buffer<f32>| if transforms { x.as_ptr() } else { ptr::null() };
    let grid = Grid {
        grid: [(n * (heads + 2 * kv_heads)).div_ceil(8) as u32, 1, 1],
        block: [32, 8, 1],
        shared_bytes: 0,
    };
    let slots = Buffer::new(&slots);
    let seven = T::from_f64(7.0);
    for order in ORDERS {
        let mut rotated = Buffer::filled(seven, n * heads * head_dim);
        let of_pages = pages * kv_heads * PAGE * head_dim;
        let [mut keys, mut values] = [(); 2].map(|()| Buffer::filled(seven, of_pages));
        // SAFETY: the buffers have the sizes of the rows, heads and pages.
        unsafe {
            T::paged_write(
                grid,
                order,
                query.as_ptr(),
                optional(weights[0].as_ptr()),
                key.as_ptr(),
                optional(weights[1].as_ptr()),
                value.as_ptr(),
                angle(&cos),
                angle(&sin),
                slots.as_ptr(),
                rotated.as_mut_ptr(),
                keys.as_mut_ptr(),
                values.as_mut_ptr(),
                n as u32,
                heads as u32,
                kv_heads as u32,
                head_dim as i32,
                head_dim as i32,
                if transforms { head_dim as i32 / 2 } else { 0 },
                EPSILON as f32,
                0.0,
            )
            .unwrap();
        }
        let mut written = 0;
        for row in 0..n {
            for head in 0..heads {
                let found = wide(&head_of(&rotated, heads, row, head));
                let expected = transformed(&head_of(&query, heads, row, head), &weights[0], row);
                assert_close(&found, &expected, tolerance);
            }
            for head in 0..kv_heads {
                let slot = slots[row] as usize;
                let place = ((slot / PAGE * kv_heads + head) * PAGE + slot % PAGE) * head_dim;
                let found = wide(&keys[place..][..head_dim]);
                let expected = transformed(&head_of(&key, kv_heads, row, head), &weights[1], row);
                assert_close(&found, &expected, tolerance);
                assert!(values[place..][..head_dim] == head_of(&value, kv_heads, row, head));
                written += head_dim;
            }
        }
        let untouched = |x: &[T]| x.iter().filter(|x| **x == seven).count();
        assert_eq!(untouched(&keys), of_pages - written);
        assert_eq!(untouched(&values), of_pages - written);
    }
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    // One part, and several.
    for visible in [&[1, 5, 6, 40][..], &[300, 17, 245]] {
        for (shape, behind) in [
            ([2, 1, 64], 0),
            ([1, 3, 20], 1),
            ([2, 5, 128], 0),
            ([1, 9, 72], 3),
            ([1, 2, 256], 0),
            ([1, 6, 136], 0),
        ] {
            for options in [
                None,
                Some((3, 0.0)),
                Some((20, 1.5)),
                Some((280, 0.0)),
                Some((1000, 0.5)),
            ] {
                let tables = Tables::separate(visible);
                check_attention::<T>(&tables, shape, behind, options, tolerance);
            }
        }
    }
    // Rows, spans that they share, positions in the last of these, and positions that the first row
    // has alone.
    for (units, shape) in [
        (&[[1, 1, 16, 1]][..], [1, 1, 64]),
        (&[[8, 16, 16, 250]], [2, 2, 128]),
        (&[[2, 3, 1, 0], [17, 5, 16, 14], [3, 1, 7, 300]], [1, 3, 80]),
        (&[[16, 4, 9, 0], [5, 33, 16, 0]], [1, 4, 64]),
        (&[[9, 2, 3, 20]], [3, 5, 96]),
        (&[[7, 17, 16, 1], [6, 8, 2, 1]], [2, 6, 40]),
        (&[[10, 6, 15, 2]], [1, 7, 128]),
        (&[[4, 7, 16, 40], [11, 1, 1, 1]], [1, 8, 72]),
        (&[[3, 9, 11, 5], [13, 2, 16, 0]], [1, 16, 64]),
        (&[[2, 200, 4, 30]], [1, 2, 8]),
        (&[[12, 4, 16, 3], [14, 4, 8, 3], [15, 4, 1, 3]], [1, 1, 128]),
    ] {
        check_attention::<T>(&Tables::in_units(units), shape, 0, None, tolerance);
    }
    for transforms in [false, true] {
        check_write::<T>(1, [1, 1, 8], transforms, tolerance);
        check_write::<T>(19, [6, 2, 40], transforms, tolerance);
        check_write::<T>(3, [4, 4, 256], transforms, tolerance);
    }
    Ok(())
}

each_dtype!(equals_the_formula: f32 1e-5, bf16 1.6e-2, f16 2e-3);
