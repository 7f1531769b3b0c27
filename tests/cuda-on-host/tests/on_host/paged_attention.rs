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

/// Rows with these numbers of visible positions, each in a sequence of its own. `kv_heads`, query
/// heads of each, and `head_dim`.
fn check_attention<T: Kernels>(
    visible: &[usize],
    [kv_heads, group, head_dim]: [usize; 3],
    behind: usize,
    options: Option<(usize, f64)>,
    tolerance: f64,
) {
    let (n, heads) = (visible.len(), kv_heads * group);
    // The first span of a sequence has 5 positions. The pages are taken from the last one on.
    let lengths = visible
        .iter()
        .map(|visible| 1 + visible.saturating_sub(5).div_ceil(PAGE));
    let lengths: Vec<usize> = lengths.collect();
    let pages: usize = lengths.iter().sum();
    let (mut spans, mut firsts, mut begins, mut ends) = (vec![], vec![], vec![], vec![]);
    for length in &lengths {
        begins.push(spans.len() as u32);
        for span in 0..*length {
            spans.push((pages - 1 - spans.len()) as u32);
            firsts.push(if span == 0 {
                0
            } else {
                5 + (span as u32 - 1) * PAGE as u32
            });
        }
        ends.push(spans.len() as u32);
    }
    let query = buffer::<T>(n * heads * head_dim, behind, 1);
    let of_pages = pages * kv_heads * PAGE * head_dim;
    let (keys, values) = (
        buffer::<T>(of_pages, behind, 2),
        buffer::<T>(of_pages, behind, 3),
    );
    let mut expected = vec![];
    for row in 0..n {
        for head in 0..heads {
            let query = wide(&query[(row * heads + head) * head_dim..][..head_dim]);
            let places = (begins[row]..ends[row]).flat_map(|span| {
                let span = span as usize;
                let next = firsts
                    .get(span + 1)
                    .filter(|_| span + 1 < ends[row] as usize);
                let end = next.map_or(visible[row], |next| *next as usize);
                let positions = 0..end - firsts[span] as usize;
                let page = spans[span] as usize;
                positions.map(move |at| ((page * kv_heads + head / group) * PAGE + at) * head_dim)
            });
            let places: Vec<usize> = places.collect();
            assert_eq!(places.len(), visible[row]);
            let window = options.map_or(usize::MAX, |(window, _)| window);
            let places = &places[places.len().saturating_sub(window)..];
            let of = |all: &[T], place: usize| wide(&all[place..][..head_dim]);
            let scores = places.iter().map(|&place| {
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
            for (&place, weight) in places.iter().zip(&weights) {
                let value = of(&values, place);
                mixed
                    .iter_mut()
                    .zip(value)
                    .for_each(|(y, v)| *y += weight / total * v);
            }
            expected.extend(mixed);
        }
    }

    let count = spans.len() as u32;
    let table = Buffer::new(&[spans, firsts].concat());
    let visible: Vec<u32> = visible.iter().map(|&visible| visible as u32).collect();
    let rows = Buffer::new(&[begins, ends, visible].concat());
    let parts = lengths
        .iter()
        .max()
        .map_or(1, |longest| longest.div_ceil(PART));
    let at_once = match group {
        ..=2 => 2,
        3..=4 => 4,
        _ => 8,
    };
    let grid = Grid {
        grid: [
            n as u32,
            (kv_heads * group.div_ceil(at_once)) as u32,
            parts as u32,
        ],
        block: [128, 1, 1],
        shared_bytes: 0,
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
                        table.as_ptr(),
                        y.as_mut_ptr(),
                        partial.as_mut_ptr(),
                        n as u32,
                        count,
                        kv_heads as u32,
                        group as u32,
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
                    y.as_mut_ptr(),
                    (n * heads) as u64,
                    parts as i32,
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
                EPSILON as f32,
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
                check_attention::<T>(visible, shape, behind, options, tolerance);
            }
        }
    }
    for transforms in [false, true] {
        check_write::<T>(1, [1, 1, 8], transforms, tolerance);
        check_write::<T>(19, [6, 2, 40], transforms, tolerance);
        check_write::<T>(3, [4, 4, 256], transforms, tolerance);
    }
    Ok(())
}

each_dtype!(equals_the_formula: f32 1e-5, bf16 1.6e-2, f16 2e-3);
