//! Tests of `log_prob.cu` against the composed twin in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{LogProbOptions, composed, log_prob};
use candle_grpo_test_support::noise;

use crate::token_rows::{THREADS, stacked};

const TEMPERATURE: f64 = 0.7;

/// `n` rows of `vocab` logits at the end of their memory, so n and vocab determine their alignment
/// to 16 bytes. The gradient ends `shift` elements before the end of its memory, or replaces the
/// logits.
#[derive(Debug, Clone, Copy)]
struct Case {
    n: usize,
    vocab: usize,
    shift: usize,
    masked: bool,
    in_place: bool,
}

/// Checks a case. `tolerance` is for the gradient, which has the dtype of the logits.
fn check<T: Kernels>(case: Case, tolerance: f64) -> Result<()> {
    let Case { n, vocab, .. } = case;
    let mut logits: Vec<f64> = noise(n * vocab, 1).iter().map(|x| 6.0 * x).collect();
    // Some entries have probability 0, but no target.
    let targets: Vec<u32> = (0..n)
        .map(|row| ((row * 7919 + vocab * 5 / 8) % vocab) as u32)
        .collect();
    for (i, x) in logits.iter_mut().enumerate() {
        if i % 11 == 3 && targets[i / vocab] as usize != i % vocab {
            *x = f64::NEG_INFINITY;
        }
    }
    let mut mask: Vec<u8> = (0..n)
        .map(|row| u8::from(!case.masked || row % 2 == 0))
        .collect();
    mask[0] = 1;
    let packed_gradient: Vec<f32> = noise(3 * n, 2).iter().map(|x| *x as f32).collect();

    let rounded: Vec<T> = logits.iter().map(|x| T::from_f64(*x)).collect();
    let target_ids = Tensor::from_slice(&targets, n, &Device::Cpu)?;
    let kept = Tensor::from_slice(&mask, n, &Device::Cpu)?;
    let options = LogProbOptions {
        mask: Some(&kept),
        ..Default::default()
    };
    let expected = Expected::from_twin(
        &[Tensor::from_slice(&rounded, (n, vocab), &Device::Cpu)?],
        &Tensor::from_slice(&packed_gradient, (3, n), &Device::Cpu)?,
        |logits| {
            stacked(composed::log_prob(
                &logits[0],
                &target_ids,
                TEMPERATURE,
                options,
            )?)
        },
        |logits| stacked(log_prob(&logits[0], &target_ids, TEMPERATURE, options)?),
    )?;

    let mut memory = rounded;
    for (row, logits) in memory.chunks_mut(vocab).enumerate() {
        if mask[row] == 0 {
            logits.fill(T::from_f64(f64::NAN));
        }
    }
    let (targets, mask) = (Buffer::new(&targets), Buffer::new(&mask));
    let mask = if case.masked {
        mask.as_ptr()
    } else {
        std::ptr::null()
    };
    let grid = Grid::new(n as u32, THREADS);
    let (n64, vocab64, inverse) = (n as u64, vocab as u64, (1.0 / TEMPERATURE) as f32);

    for order in ORDERS {
        let mut packed = Buffer::filled(f32::NAN, 3 * n);
        let mut logits = Buffer::new(&memory);
        let packed_gradient = Buffer::new(&packed_gradient);
        // SAFETY: the buffers have the sizes of n and vocab.
        unsafe {
            T::log_prob_forward(
                grid,
                order,
                logits.as_ptr(),
                targets.as_ptr(),
                mask,
                packed.as_mut_ptr(),
                n64,
                vocab64,
                inverse,
            )
        }
        .unwrap_or_else(|error| panic!("{case:?}, order {order}: {error}"));
        let results: Vec<f64> = packed.iter().map(|x| f64::from(*x)).collect();
        expected[0].assert_close(&results, 3e-6);

        let mut apart = Buffer::filled(T::from_f64(7.0), n * vocab + case.shift);
        let (from, to) = if case.in_place {
            (logits.as_ptr(), logits.as_mut_ptr())
        } else {
            (logits.as_ptr(), apart.as_mut_ptr())
        };
        // SAFETY: as above.
        unsafe {
            T::log_prob_backward(
                grid,
                order,
                from,
                targets.as_ptr(),
                mask,
                packed.as_ptr(),
                packed_gradient.as_ptr(),
                to,
                n64,
                vocab64,
                inverse,
            )
        }
        .unwrap_or_else(|error| panic!("{case:?}, order {order}: {error}"));
        let written = if case.in_place { &logits } else { &apart };
        let written: Vec<f64> = written.iter().map(|x| x.to_f64()).collect();
        let (gradient, behind) = written.split_at(n * vocab);
        expected[1].assert_close(gradient, tolerance);
        assert!(behind.iter().all(|x| *x == 7.0), "{case:?}: {behind:?}");
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    let plain = Case {
        n: 1,
        vocab: 1,
        shift: 0,
        masked: false,
        in_place: false,
    };
    for vocab in [1, 2, 7, 8, 33, 1000, 4099, 9000] {
        for case in [
            plain,
            Case { n: 3, ..plain },
            Case {
                n: 3,
                masked: true,
                ..plain
            },
            Case {
                n: 2,
                shift: 1,
                ..plain
            },
            Case {
                n: 4,
                masked: true,
                in_place: true,
                ..plain
            },
        ] {
            check::<T>(Case { vocab, ..case }, tolerance)?;
        }
    }
    Ok(())
}

each_dtype!(equals_the_twin_and_the_cpu_path: f32 2e-6, bf16 4e-3, f16 6e-4);

/// The log-prob, the entropy and the log-sum-exp of one row.
fn one_row(logits: &[f32], target: u32, order: u32) -> [f32; 3] {
    let (logits, target) = (Buffer::new(logits), Buffer::new(&[target]));
    let mut packed = Buffer::filled(7f32, 3);
    // SAFETY: one row with all logits.
    unsafe {
        f32::log_prob_forward(
            Grid::new(1, THREADS),
            order,
            logits.as_ptr(),
            target.as_ptr(),
            std::ptr::null(),
            packed.as_mut_ptr(),
            1,
            logits.len() as u64,
            1.0,
        )
    }
    .unwrap();
    [packed[0], packed[1], packed[2]]
}

#[test]
fn a_row_that_is_no_distribution_gives_nan() {
    let (nan, none, all) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    for row in [
        [1.0, nan, 2.0],
        [nan, nan, none],
        [1.0, all, 2.0],
        [none; 3],
    ] {
        for padding in [0, 5000] {
            let mut logits = vec![none; padding];
            logits.extend(row);
            let [log_prob, ..] = one_row(&logits, padding as u32, 0);
            assert!(log_prob.is_nan(), "{row:?}: {log_prob}");
        }
    }
}

#[test]
fn a_target_out_of_range_is_not_read() {
    let [log_prob, _, log_sum_exp] = one_row(&[1.0, 2.0], u32::MAX, 0);
    assert!(log_prob.is_nan());
    assert!(log_sum_exp.is_finite());
}

/// The difference of the logits exceeds the largest f32.
#[test]
fn huge_logits_do_not_give_nan() {
    let mut logits = vec![-2e38f32; 1000];
    logits[700] = 2e38;
    for order in ORDERS {
        let [log_prob, entropy, log_sum_exp] = one_row(&logits, 700, order);
        assert_eq!((log_prob, entropy), (0.0, 0.0));
        assert!((log_sum_exp / 2e38 - 1.0).abs() < 1e-6, "{log_sum_exp}");
    }
}
