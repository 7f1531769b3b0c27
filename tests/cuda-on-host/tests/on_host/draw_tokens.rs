//! Tests of `draw_tokens.cu` against the CPU path, which has tests against the formula.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{Draw, DrawOptions, draw_tokens};
use candle_grpo_test_support::noise;

/// The rows of the draws; the last one has NaN.
const ROWS: usize = 4;
/// The draws of each row.
const DRAWS: usize = 5;

fn check<T: Kernels>(
    vocab: usize,
    behind: usize,
    options: &DrawOptions,
    tolerance: f32,
) -> Result<()> {
    let mut logits: Vec<T> = noise(ROWS * vocab, vocab as u64)
        .iter()
        .map(|x| T::from_f64(3.0 * x))
        .collect();
    // Equals, a token that is never drawn, and a row without a distribution.
    logits[vocab - 1] = logits[0];
    logits[vocab / 2] = T::from_f64(f64::NEG_INFINITY);
    logits[ROWS * vocab - 1] = T::from_f64(f64::NAN);
    let draws: Vec<Draw> = (0..ROWS * DRAWS)
        .map(|i| Draw {
            row: i % ROWS,
            uniform: (i / ROWS) as f64 / DRAWS as f64 + 1e-3,
        })
        .collect();
    let table = Tensor::from_slice(&logits, (ROWS, vocab), &Device::Cpu)?;
    let expected = draw_tokens(&table, &draws, options)?;

    logits.resize(ROWS * vocab + behind, T::from_f64(f64::NAN));
    let logits = Buffer::new(&logits);
    let n = draws.len();
    let bits = |draw: &Draw| draw.uniform.to_bits();
    let mut words: Vec<u32> = draws.iter().map(|draw| draw.row as u32).collect();
    words.extend(draws.iter().map(|draw| bits(draw) as u32));
    words.extend(draws.iter().map(|draw| (bits(draw) >> 32) as u32));
    let words = Buffer::new(&words);
    let threads = 32 * vocab.div_ceil(32 * 8).min(32) as u32;
    let inverse_temperature = (1.0 / options.temperature) as f32;
    let (parts, chunks) = (vocab.div_ceil(4096), vocab.div_ceil(512));
    for order in ORDERS {
        let mut largest = Buffer::filled(7f32, n * parts);
        let mut sums = Buffer::filled(7f64, n * chunks);
        let mut drawn = Buffer::filled(7u32, 3 * n);
        // SAFETY: each draw has `parts` parts and `chunks` chunks. The table and the results have
        // three numbers for each draw, and the rows are below ROWS.
        unsafe {
            T::draw_parts(
                Grid::new((n * parts) as u32, 256),
                order,
                logits.as_ptr(),
                words.as_ptr(),
                largest.as_mut_ptr(),
                sums.as_mut_ptr(),
                vocab as u32,
                parts as u32,
                inverse_temperature,
            )
            .unwrap();
            T::draw_tokens(
                Grid::new(n as u32, threads),
                order,
                logits.as_ptr(),
                words.as_ptr(),
                largest.as_ptr(),
                sums.as_ptr(),
                drawn.as_mut_ptr(),
                n as u32,
                vocab as u32,
                inverse_temperature,
                options.top_k as u32,
                options.top_p,
                options.min_p,
                u32::from(options.greedy),
            )
            .unwrap();
        }
        for (i, expected) in expected.iter().enumerate() {
            let Some(expected) = expected else {
                assert_eq!((drawn[i], i % ROWS), (u32::MAX, ROWS - 1));
                continue;
            };
            assert_eq!(drawn[i], expected.token, "{i}: {:?}, {options:?}", draws[i]);
            let found = [n, 2 * n].map(|first| f32::from_bits(drawn[first + i]));
            for (found, expected) in found
                .iter()
                .zip([expected.log_prob, expected.drawn_log_prob])
            {
                assert!((found - expected).abs() < tolerance, "{found} {expected}");
            }
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f32) -> Result<()> {
    let all = DrawOptions::default();
    for (vocab, behind) in [(2, 0), (37, 1), (600, 3)] {
        for options in [
            all,
            DrawOptions {
                temperature: 0.6,
                top_k: 2,
                ..all
            },
            DrawOptions { top_p: 0.7, ..all },
            DrawOptions { min_p: 0.2, ..all },
            DrawOptions {
                temperature: 1.5,
                top_k: 20,
                top_p: 0.9,
                min_p: 0.05,
                ..all
            },
            DrawOptions {
                greedy: true,
                ..all
            },
        ] {
            check::<T>(vocab, behind, &options, tolerance)?;
        }
    }
    // Several parts, with and without packs.
    let greedy = DrawOptions {
        greedy: true,
        ..all
    };
    for (vocab, options) in [(70_001, &all), (70_001, &greedy), (8192, &all)] {
        check::<T>(vocab, 0, options, tolerance)?;
    }
    // Threads that merge two chunks.
    check::<T>(600_000, 0, &all, tolerance)
}

each_dtype!(equals_the_cpu_path: f32 1e-5, bf16 1e-5, f16 1e-5);
