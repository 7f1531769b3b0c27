//! Tests of `attention.cu` against the composed twin in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, on_hopper};
use candle_grpo_kernels::{Scores, Sequences, attention, composed};
use candle_grpo_test_support::noise;
use half::{bf16, f16};

include!("../../../../kernels/attention.rs");

const SCALE: f64 = 0.3;

/// Left padding of the second sequence: more than the keys of a tile.
const LEFT: usize = 67;

/// Sequences of `new` positions after `past` others, with random padding or left padding, or packed
/// sequences.
#[derive(Debug, Clone, Copy)]
enum Layout<'a> {
    Gaps {
        batch: usize,
        new: usize,
        past: usize,
    },
    Left {
        batch: usize,
        new: usize,
        past: usize,
    },
    Packed(&'a [usize]),
}

#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    layout: Layout<'a>,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// Scale of the scores.
    spread: f64,
    /// Elements after the inputs in memory, which change the alignment of the inputs.
    behind: usize,
    /// Further elements after the results, except the gradient of the keys.
    behind_results: usize,
    /// With one of them, the kernels with options.
    window: Option<usize>,
    cap: Option<f64>,
    /// If set, the first unmasked value and the last unmasked gradient are NaN. NaN must not reach
    /// padding.
    nan: bool,
}

impl Case<'_> {
    /// Returns the first query, new positions, first key and all positions of each sequence.
    fn sequences(&self) -> Vec<[u32; 4]> {
        match self.layout {
            Layout::Gaps { batch, new, past } | Layout::Left { batch, new, past } => (0..batch)
                .map(|i| [i * new, new, i * (new + past), new + past].map(|x| x as u32))
                .collect(),
            Layout::Packed(lengths) => {
                let mut first = 0;
                let lengths = lengths.iter().map(|&length| {
                    first += length;
                    [first - length, length, first - length, length].map(|x| x as u32)
                });
                lengths.collect()
            }
        }
    }

    /// Returns one entry for each key.
    fn mask(&self) -> Vec<u8> {
        match self.layout {
            Layout::Gaps { batch, new, past } => {
                let noise = noise(batch * (new + past), 9);
                noise.iter().map(|x| u8::from(*x > -0.4) * 7).collect()
            }
            Layout::Left { batch, new, past } => (0..batch)
                .flat_map(|i| (0..new + past).map(move |at| u8::from(at >= LEFT * i)))
                .collect(),
            Layout::Packed(lengths) => vec![1; lengths.iter().sum()],
        }
    }
}

/// Returns the result and the gradients of query, key and value.
fn expected<T: Kernels>(case: &Case, inputs: [&[T]; 4], mask: &[u8]) -> Result<Vec<Expected>> {
    let device = &Device::Cpu;
    let [query_width, key_width] =
        [case.group, 1].map(|group| group * case.kv_heads * case.head_dim);
    let table = |x: &[T], width: usize| Tensor::from_slice(x, (x.len() / width, width), device);
    let [query, key, value, gradient] = inputs;
    let inputs = [
        table(query, query_width)?,
        table(key, key_width)?,
        table(value, key_width)?,
    ];
    let scores = Scores {
        scale: SCALE,
        window: case.window,
        cap: case.cap,
    };
    let padded;
    let sequences = match case.layout {
        Layout::Packed(lengths) => Sequences::Packed(lengths),
        _ => {
            let batch = case.sequences().len();
            padded = Tensor::from_slice(mask, (batch, mask.len() / batch), device)?;
            Sequences::Padded(&padded)
        }
    };
    Expected::from_twin(
        &inputs,
        &table(gradient, query_width)?,
        |x| composed::attention(&x[0], &x[1], &x[2], sequences, case.head_dim, scores),
        |x| attention(&x[0], &x[1], &x[2], sequences, case.head_dim, scores),
    )
}

/// Checks the kernels of all GPUs that have their own.
fn check<T: Kernels>(case: Case, tolerance: f64) -> Result<()> {
    check_kernels::<T>(case, tolerance, false)?;
    if size_of::<T>() == 2 {
        on_hopper(|| check_kernels::<T>(case, tolerance, true))?;
    }
    Ok(())
}

fn check_kernels<T: Kernels>(case: Case, tolerance: f64, has_warpgroups: bool) -> Result<()> {
    let Case {
        kv_heads,
        group,
        head_dim,
        ..
    } = case;
    let (sequences, mask) = (case.sequences(), case.mask());
    let heads = kv_heads * group;
    let queries: usize = sequences.iter().map(|s| s[1] as usize).sum();
    // The index of a new position among the keys.
    let own = |query: usize| {
        let of = sequences
            .iter()
            .find(|s| query < (s[0] + s[1]) as usize)
            .expect("a sequence");
        query - of[0] as usize + of[2] as usize + (of[3] - of[1]) as usize
    };
    let of = |len: usize, seed, size: f64| -> Vec<T> {
        noise(len, seed)
            .iter()
            .map(|x| T::from_f64(size * x))
            .collect()
    };
    let query = of(queries * heads * head_dim, 1, case.spread);
    let key = of(mask.len() * kv_heads * head_dim, 2, case.spread);
    let value = of(mask.len() * kv_heads * head_dim, 3, 2.0);
    let gradient = of(queries * heads * head_dim, 4, 2.0);
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
    let expected = expected(&case, [&query, &key, &value, &gradient], &mask)?;

    let (mut value, mut gradient) = (value, gradient);
    if case.nan {
        let first = mask
            .iter()
            .position(|x| *x != 0)
            .expect("a key that counts");
        value[first * kv_heads * head_dim] = T::from_f64(f64::NAN);
        let last = (0..queries).rfind(|query| mask[own(*query)] != 0);
        let last = last.expect("a query that counts");
        gradient[last * heads * head_dim] = T::from_f64(f64::NAN);
    }

    // NaN at padding must not have an effect.
    let spoilt = |mut x: Vec<T>, width: usize, at: &dyn Fn(usize) -> usize| {
        for (position, row) in x.chunks_mut(width).enumerate() {
            if mask[at(position)] == 0 {
                row.fill(T::from_f64(f64::NAN));
            }
        }
        x.resize(x.len() + case.behind, T::from_f64(f64::NAN));
        Buffer::new(&x)
    };
    let query = spoilt(query, heads * head_dim, &own);
    let gradient = spoilt(gradient, heads * head_dim, &own);
    let key = spoilt(key, kv_heads * head_dim, &|at| at);
    let value = spoilt(value, kv_heads * head_dim, &|at| at);
    let table = Buffer::new(&sequences.concat());
    let mask_in_memory = Buffer::new(&mask);
    // Packed sequences have no padding and no mask.
    let mask_or_null = match case.layout {
        Layout::Packed(_) => std::ptr::null(),
        _ => mask_in_memory.as_ptr(),
    };

    let tiles = attention_tiles(head_dim, size_of::<T>(), has_warpgroups).expect("a width");
    let most_queries = sequences.iter().map(|s| s[1] as usize * group).max();
    let most_keys = sequences.iter().map(|s| s[3] as usize).max();
    let tiles_of = |rows: Option<usize>, of_tile| rows.unwrap_or(0).div_ceil(of_tile).max(1) as u32;
    let forward_tiles = tiles_of(most_queries, tiles.forward_rows);
    let query_tiles = tiles_of(most_queries, tiles.rows);
    let key_tiles = tiles_of(most_keys, tiles.rows);
    let grid = |tiles_in_row: u32, parts: usize, threads: usize, shared_bytes| Grid {
        grid: [
            tiles_in_row * (parts * kv_heads * sequences.len()) as u32,
            1,
            1,
        ],
        block: [threads as u32, 1, 1],
        shared_bytes,
    };
    for order in ORDERS {
        let seven = T::from_f64(7.0);
        let result = |inputs: usize| Buffer::filled(seven, inputs + case.behind_results);
        let (mut y, mut of_query) = (result(query.len()), result(query.len()));
        let mut of_key = Buffer::filled(seven, key.len());
        let mut of_value = result(key.len());
        let mut log_sums = Buffer::filled(f32::NAN, queries * heads);
        let mut dots = Buffer::filled(f32::NAN, queries * heads);
        macro_rules! run {
            ($forward:ident, $of_query:ident, $of_key:ident $(, $option:expr)*) => {
                // SAFETY: the buffers have the sizes of the sequences and heads.
                unsafe {
                    T::$forward(
                        grid(forward_tiles, 1, tiles.forward_threads, tiles.forward_bytes),
                        order,
                        query.as_ptr(),
                        key.as_ptr(),
                        value.as_ptr(),
                        mask_or_null,
                        table.as_ptr(),
                        y.as_mut_ptr(),
                        log_sums.as_mut_ptr(),
                        forward_tiles,
                        kv_heads as u32,
                        group as u32,
                        head_dim as i32,
                        SCALE as f32,
                        $($option,)*
                    )
                    .unwrap_or_else(|error| panic!("{case:?}, forward: {error}"));
                    T::$of_query(
                        grid(query_tiles, 1, tiles.threads, tiles.query_bytes),
                        order,
                        query.as_ptr(),
                        key.as_ptr(),
                        value.as_ptr(),
                        mask_or_null,
                        table.as_ptr(),
                        y.as_ptr(),
                        gradient.as_ptr(),
                        log_sums.as_ptr(),
                        dots.as_mut_ptr(),
                        of_query.as_mut_ptr(),
                        query_tiles,
                        kv_heads as u32,
                        group as u32,
                        head_dim as i32,
                        SCALE as f32,
                        $($option,)*
                    )
                    .unwrap_or_else(|error| panic!("{case:?}, of query: {error}"));
                    T::$of_key(
                        grid(key_tiles, tiles.parts, tiles.threads, tiles.key_bytes),
                        order,
                        query.as_ptr(),
                        key.as_ptr(),
                        value.as_ptr(),
                        mask_or_null,
                        table.as_ptr(),
                        gradient.as_ptr(),
                        log_sums.as_ptr(),
                        dots.as_ptr(),
                        of_key.as_mut_ptr(),
                        of_value.as_mut_ptr(),
                        key_tiles,
                        kv_heads as u32,
                        group as u32,
                        head_dim as i32,
                        SCALE as f32,
                        $($option,)*
                    )
                    .unwrap_or_else(|error| panic!("{case:?}, of key: {error}"));
                }
            };
        }
        let window = case.window.map_or(i32::MAX, |window| window as i32);
        let cap = case.cap.unwrap_or(0.0) as f32;
        match (tiles.width, case.window.is_some() || case.cap.is_some()) {
            (64, false) => run!(
                attention_forward_64,
                attention_of_query_64,
                attention_of_key_64
            ),
            (128, false) => run!(
                attention_forward_128,
                attention_of_query_128,
                attention_of_key_128
            ),
            (_, false) => run!(
                attention_forward_256,
                attention_of_query_256,
                attention_of_key_256
            ),
            (64, true) => run!(
                scored_attention_forward_64,
                scored_attention_of_query_64,
                scored_attention_of_key_64,
                window,
                cap
            ),
            (128, true) => run!(
                scored_attention_forward_128,
                scored_attention_of_query_128,
                scored_attention_of_key_128,
                window,
                cap
            ),
            (_, true) => run!(
                scored_attention_forward_256,
                scored_attention_of_query_256,
                scored_attention_of_key_256,
                window,
                cap
            ),
        }
        type Place<'a> = &'a dyn Fn(usize) -> usize;
        let of_queries: (usize, Place) = (heads * head_dim, &own);
        let of_keys: (usize, Place) = (kv_heads * head_dim, &|at| at);
        for (name, found, expected, (width, at)) in [
            ("y", &y, &expected[0], of_queries),
            ("of query", &of_query, &expected[1], of_queries),
            ("of key", &of_key, &expected[2], of_keys),
            ("of value", &of_value, &expected[3], of_keys),
        ] {
            let (found, behind) = found.split_at(expected.exact.len());
            let mut found = wide(found);
            if case.nan {
                for (i, (x, expected)) in found.iter_mut().zip(&expected.exact).enumerate() {
                    if mask[at(i / width)] != 0 {
                        *x = *expected;
                    }
                }
            }
            let close = std::panic::catch_unwind(|| expected.assert_close(&found, tolerance));
            assert!(close.is_ok(), "{name}, {case:?}, order {order}");
            assert!(behind.iter().all(|x| *x == seven), "{name}, {case:?}");
        }
    }
    Ok(())
}

const PLAIN: Case = Case {
    layout: Layout::Gaps {
        batch: 2,
        new: 37,
        past: 0,
    },
    kv_heads: 1,
    group: 1,
    head_dim: 64,
    spread: 1.0,
    behind: 0,
    behind_results: 0,
    window: None,
    cap: None,
    nan: false,
};

/// Checks the fragments of each head dimension.
fn check_head_dims<T: Kernels>(head_dims: &[usize], tolerance: f64) -> Result<()> {
    for &head_dim in head_dims {
        let behind = match head_dim {
            // Rows that are not aligned to 16 bytes, in unaligned memory.
            5 => 2,
            // Unaligned memory.
            80 => 1,
            _ => 0,
        };
        let case = Case {
            head_dim,
            behind,
            ..PLAIN
        };
        check::<T>(case, tolerance)?;
    }
    let results_elsewhere = Case {
        behind_results: 1,
        ..PLAIN
    };
    check::<T>(results_elsewhere, tolerance)?;
    check::<T>(Case { nan: true, ..PLAIN }, tolerance)
}

/// Checks whole tiles of keys before all queries of a tile and the reverse, and windows and caps of
/// each width. They are the same code for bf16 and f16.
fn check_whole_tiles<T: Kernels>(tolerance: f64) -> Result<()> {
    for head_dim in [128, 256] {
        let case = Case {
            layout: Layout::Packed(&[200]),
            kv_heads: 1,
            group: 2,
            head_dim,
            ..PLAIN
        };
        check::<T>(case, tolerance)?;
        let case = Case {
            window: Some(90),
            cap: Some(1.5),
            ..case
        };
        check::<T>(case, tolerance)?;
    }
    for head_dim in [80, 144] {
        let case = Case {
            head_dim,
            window: Some(20),
            cap: Some(2.0),
            ..PLAIN
        };
        check::<T>(case, tolerance)?;
    }
    Ok(())
}

/// Checks the bounds of rows and windows. They are the same code for bf16 and f16.
fn check_layouts<T: Kernels>(tolerance: f64) -> Result<()> {
    for (layout, kv_heads, group) in [
        (
            Layout::Gaps {
                batch: 1,
                new: 1,
                past: 0,
            },
            1,
            1,
        ),
        (
            Layout::Gaps {
                batch: 2,
                new: 1,
                past: 70,
            },
            1,
            3,
        ),
        (
            Layout::Gaps {
                batch: 1,
                new: 30,
                past: 50,
            },
            2,
            3,
        ),
        (
            Layout::Left {
                batch: 2,
                new: 75,
                past: 3,
            },
            1,
            1,
        ),
        // The last key is the first of its tile.
        (Layout::Packed(&[65]), 1, 1),
        (Layout::Packed(&[1, 67, 3, 20]), 1, 2),
    ] {
        let case = Case {
            layout,
            kv_heads,
            group,
            head_dim: 24,
            ..PLAIN
        };
        check::<T>(case, tolerance)?;
        // Windows within a tile, over several tiles and longer than any row.
        for (window, cap) in [(5, None), (40, Some(1.5)), (1000, Some(0.7)), (1, None)] {
            let case = Case {
                window: Some(window),
                cap,
                ..case
            };
            check::<T>(case, tolerance)?;
        }
    }
    Ok(())
}

#[test]
fn f32_is_the_twin_and_the_cpu_path() -> Result<()> {
    check_head_dims::<f32>(&[5, 64, 80, 256], 1e-5)?;
    check_whole_tiles::<f32>(1e-5)?;
    check_layouts::<f32>(1e-5)
}

#[test]
fn bf16_is_the_twin_and_the_cpu_path() -> Result<()> {
    check_head_dims::<bf16>(&[1, 16, 64, 72, 80, 96, 128, 144, 256], 3e-2)?;
    check_whole_tiles::<bf16>(3e-2)?;
    check_layouts::<bf16>(3e-2)
}

#[test]
fn f16_is_the_twin_and_the_cpu_path() -> Result<()> {
    check_head_dims::<f16>(&[16, 128, 256], 4e-3)
}

/// Scores of some millions: their exponentials overflow, and their last bit is worth 0.5.
#[test]
fn large_scores_do_not_overflow() -> Result<()> {
    let case = Case {
        spread: 1000.0,
        ..PLAIN
    };
    check::<f32>(case, 1e-2)
}
