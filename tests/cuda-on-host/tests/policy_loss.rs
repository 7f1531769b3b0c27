//! `policy_loss.cu` against the CPU path.
#![allow(unsafe_code, missing_docs)]

use candle_core::{Device, Result, Tensor, Var};
use candle_grpo_cuda_on_host::{Buffer, Grid, ORDERS, noise, policy_loss as kernel};
use candle_grpo_kernels::{
    KlEstimate, KlRatio, KlSlope, KlTerm, PolicyLossOptions, PolicyLossTensors, PolicySum,
    RatioLevel, RowDivisor, TokenSurrogate, policy_loss,
};
use candle_grpo_test_support::{assert_close, numbers};

include!("../../../kernels/policy_loss.rs");

const FIGURES: usize = 22;

/// In the order of their declaration.
const SUMS: [PolicySum; FIGURES - 1] = [
    PolicySum::Count,
    PolicySum::Ratio,
    PolicySum::RatioMax,
    PolicySum::RatioMin,
    PolicySum::TokenRatioMax,
    PolicySum::K1,
    PolicySum::Abs,
    PolicySum::K2,
    PolicySum::K3,
    PolicySum::K3Max,
    PolicySum::LogProb,
    PolicySum::OldLogProb,
    PolicySum::Kl,
    PolicySum::Entropy,
    PolicySum::Clipped,
    PolicySum::ClippedLow,
    PolicySum::ClippedHigh,
    PolicySum::DualClipped,
    PolicySum::Dropped,
    PolicySum::Positive,
    PolicySum::WeightBounded,
];

/// Which tensors there are, and how they look.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    tokens: usize,
    blocks: u32,
    old: bool,
    advantages_of_tokens: bool,
    /// None, one for each sequence, one for each token.
    weights: usize,
    entropy: bool,
    /// How far log-probs move.
    spread: f64,
}

const PLAIN: Case = Case {
    batch: 3,
    tokens: 37,
    blocks: 3,
    old: true,
    advantages_of_tokens: false,
    weights: 0,
    entropy: true,
    spread: 0.6,
};

/// None, one for each sequence, or one given for each sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Divisor {
    One,
    Length,
    Given,
}

/// A number in the place of an infinite one: figures of nothing are infinite.
fn finite(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x.clamp(-1e30, 1e30)).collect()
}

fn check(case: Case, options: PolicyLossOptions, divisor: Divisor) -> Result<()> {
    let Case { batch, tokens, .. } = case;
    let n = batch * tokens;
    let of = |len: usize, seed, scale: f64, shift: f64| -> Vec<f32> {
        noise(len, seed)
            .iter()
            .map(|x| (scale * x + shift) as f32)
            .collect()
    };
    let mask: Vec<u8> = noise(n, 1)
        .iter()
        .enumerate()
        // The second sequence has no token.
        .map(|(i, x)| {
            if i / tokens.max(1) == 1 {
                0
            } else {
                u8::from(*x > -0.6) * 3
            }
        })
        .collect();
    // What is dropped may hold anything.
    let masked = |mut x: Vec<f32>| {
        for (x, kept) in x.iter_mut().zip(&mask) {
            if *kept == 0 {
                *x = f32::NAN;
            }
        }
        x
    };
    let log_probs = masked(of(n, 2, 1.0, -1.2));
    let near = |seed| -> Vec<f32> {
        let moved = of(n, seed, case.spread, 0.0);
        log_probs.iter().zip(moved).map(|(x, d)| x + d).collect()
    };
    let (old, reference) = (near(3), near(4));
    let advantages = match case.advantages_of_tokens {
        true => masked(of(n, 5, 2.0, 0.0)),
        false => of(batch, 5, 2.0, 0.0),
    };
    let weights = match case.weights {
        1 => of(batch, 6, 0.5, 1.0),
        _ => {
            let mut weights = masked(of(n, 6, 0.5, 1.0));
            weights.iter_mut().step_by(5).for_each(|x| *x = 0.0);
            weights
        }
    };
    let entropy = masked(of(n, 7, 1.0, 1.0));
    let divisors = of(batch, 8, 2.0, 5.0);

    let device = &Device::Cpu;
    let table = |x: &[f32]| Tensor::from_slice(x, (batch, tokens), device);
    let spread = |x: &[f32], of_tokens: bool| match of_tokens {
        true => table(x),
        false => Tensor::from_slice(x, batch, device),
    };
    let log_probs_of = Var::from_tensor(&table(&log_probs)?)?;
    let (old_of, reference_of, entropy_of) = (table(&old)?, table(&reference)?, table(&entropy)?);
    let advantages_of = spread(&advantages, case.advantages_of_tokens)?;
    let weights_of = spread(&weights, case.weights != 1)?;
    let mask_of = Tensor::from_slice(&mask, (batch, tokens), device)?;
    let divisors_of = Tensor::from_slice(&divisors, batch, device)?;
    let tensors = PolicyLossTensors {
        log_probs: &log_probs_of,
        old_log_probs: case.old.then_some(&old_of),
        ref_log_probs: options.kl.map(|_| &reference_of),
        advantages: &advantages_of,
        weights: (case.weights > 0).then_some(&weights_of),
        entropy: case.entropy.then_some(&entropy_of),
        mask: &mask_of,
    };
    let options = PolicyLossOptions {
        row_divisor: match divisor {
            Divisor::One => RowDivisor::One,
            Divisor::Length => RowDivisor::Length,
            Divisor::Given => RowDivisor::Given(&divisors_of),
        },
        ..options
    };
    let expected = policy_loss(&tensors, &options)?;
    let gradient_expected = match expected.loss.backward()?.get(&log_probs_of) {
        Some(gradient) => numbers(gradient)?,
        None => vec![],
    };

    let (score, [score_a, score_b, score_c, score_d]) = score_numbers(options.surrogate);
    let (kl_slope, kl_slope_max) = options.kl.map_or((0, 0.0), |kl| slope_numbers(kl.slope));
    let [
        log_probs,
        old,
        reference,
        advantages,
        weights,
        entropy,
        divisors,
    ] = [
        log_probs, old, reference, advantages, weights, entropy, divisors,
    ]
    .map(|x| Buffer::of(&x));
    let kept = Buffer::of(&mask);
    let null = std::ptr::null();
    for order in ORDERS {
        let [
            mut gradient,
            mut surrogate,
            mut policy,
            mut kl,
            mut log_ratios,
        ] = [(); 5].map(|()| Buffer::filled(f32::NAN, n));
        let mut clipped = Buffer::filled(7u8, n);
        let mut parts = Buffer::filled(f64::NAN, case.blocks as usize * FIGURES);
        let mut finished = Buffer::filled(0u32, 1);
        let (mut loss, mut sums) = (
            Buffer::filled(f32::NAN, 1),
            Buffer::filled(f64::NAN, FIGURES - 1),
        );
        // SAFETY: the buffers have the sizes of batch, tokens and the number of blocks.
        unsafe {
            kernel(
                Grid::new(case.blocks, 256),
                order,
                log_probs.as_ptr(),
                if case.old { old.as_ptr() } else { null },
                if options.kl.is_some() {
                    reference.as_ptr()
                } else {
                    null
                },
                advantages.as_ptr(),
                if case.weights > 0 {
                    weights.as_ptr()
                } else {
                    null
                },
                if case.entropy { entropy.as_ptr() } else { null },
                if divisor == Divisor::Given {
                    divisors.as_ptr()
                } else {
                    null
                },
                kept.as_ptr(),
                gradient.as_mut_ptr(),
                surrogate.as_mut_ptr(),
                policy.as_mut_ptr(),
                if options.kl.is_some() {
                    kl.as_mut_ptr()
                } else {
                    std::ptr::null_mut()
                },
                log_ratios.as_mut_ptr(),
                clipped.as_mut_ptr(),
                parts.as_mut_ptr(),
                finished.as_mut_ptr(),
                loss.as_mut_ptr(),
                sums.as_mut_ptr(),
                batch as u64,
                tokens as u64,
                i32::from(advantages.len() == n),
                i32::from(weights.len() == n),
                options.level as i32,
                options.log_ratio_clamp,
                score,
                score_a,
                score_b,
                score_c,
                score_d,
                options.kl.map_or(0, |kl| kl.estimate as i32),
                kl_slope,
                options.kl.map_or(0, |kl| kl.ratio as i32),
                options.kl.map_or(0.0, |kl| kl.coef),
                kl_slope_max,
                options.kl.map_or(0.0, |kl| kl.log_ratio_clamp),
                options.kl.map_or(0.0, |kl| kl.value_clamp),
                i32::from(divisor == Divisor::Length),
                options.denominator,
            )
        }
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let what = format!("{case:?} {options:?}");
        let close = |name: &str, found: &[f64], expected: &[f64]| {
            let close =
                std::panic::catch_unwind(|| assert_close(&finite(found), &finite(expected), 3e-6));
            assert!(close.is_ok(), "{name} of {what}, order {order}");
        };
        close("loss", &wide(&loss), &numbers(&expected.loss)?);
        close("gradient", &wide(&gradient), &gradient_expected);
        close(
            "surrogate",
            &wide(&surrogate),
            &numbers(&expected.surrogate)?,
        );
        close("policy", &wide(&policy), &numbers(&expected.policy)?);
        close(
            "log_ratio",
            &wide(&log_ratios),
            &numbers(&expected.log_ratio)?,
        );
        if let Some(expected) = &expected.kl {
            close("kl", &wide(&kl), &numbers(expected)?);
        }
        let flags: Vec<f64> = clipped.iter().map(|x| f64::from(*x)).collect();
        close("clipped", &flags, &numbers(&expected.clipped)?);
        for (i, sum) in SUMS.into_iter().enumerate() {
            assert_eq!(sum as usize, i);
            close(
                &format!("{sum:?}"),
                &sums[i..=i],
                &numbers(&expected.sum(sum)?)?,
            );
        }
    }
    Ok(())
}

const CLIP: TokenSurrogate = TokenSurrogate::Clip {
    ratio_min: 0.8,
    ratio_max: 1.25,
    dual_clip: 1.4,
    delta: 1.5,
};

const K3: KlTerm = KlTerm {
    coef: 0.1,
    estimate: KlEstimate::K3,
    slope: KlSlope::Direct,
    log_ratio_clamp: 0.5,
    value_clamp: 0.1,
    ratio: KlRatio::One,
};

const OPTIONS: PolicyLossOptions = PolicyLossOptions {
    level: RatioLevel::Token,
    log_ratio_clamp: 0.4,
    surrogate: CLIP,
    kl: None,
    row_divisor: RowDivisor::One,
    denominator: 1.7,
};

const LEVELS: [RatioLevel; 4] = [
    RatioLevel::Token,
    RatioLevel::Sequence,
    RatioLevel::SequenceToken,
    RatioLevel::SequenceProduct,
];

#[test]
fn every_surrogate_at_every_level() -> Result<()> {
    let divergence = |binary_kl| TokenSurrogate::DivergenceMask {
        binary_kl,
        low: 0.02,
        high: 0.03,
        ratio_max: 1.2,
    };
    for level in LEVELS {
        for surrogate in [
            CLIP,
            TokenSurrogate::PolicyGradient,
            TokenSurrogate::DetachedWeight {
                ratio_min: 0.8,
                ratio_max: 1.2,
                drop_below: 0.75,
                drop_above: 1.3,
            },
            TokenSurrogate::Topr {
                positive_weight: 1.3,
                negative_weight: 0.7,
            },
            TokenSurrogate::SoftGate {
                tau_pos: 1.0,
                tau_neg: 2.0,
            },
            TokenSurrogate::SquaredLogRatio { coef: 0.3 },
            divergence(true),
            divergence(false),
        ] {
            let options = PolicyLossOptions {
                level,
                surrogate,
                ..OPTIONS
            };
            let case = Case {
                advantages_of_tokens: true,
                weights: 2,
                ..PLAIN
            };
            check(case, options, Divisor::Length)?;
        }
    }
    Ok(())
}

#[test]
fn every_kl_term() -> Result<()> {
    for estimate in [
        KlEstimate::K1,
        KlEstimate::K2,
        KlEstimate::K3,
        KlEstimate::Abs,
    ] {
        for slope in [
            KlSlope::Direct,
            KlSlope::StraightThrough,
            KlSlope::ImportanceWeighted { max: 1.1 },
        ] {
            for ratio in [KlRatio::One, KlRatio::Token, KlRatio::Level] {
                for level in [RatioLevel::Token, RatioLevel::Sequence] {
                    let options = PolicyLossOptions {
                        level,
                        kl: Some(KlTerm {
                            estimate,
                            slope,
                            ratio,
                            ..K3
                        }),
                        ..OPTIONS
                    };
                    check(PLAIN, options, Divisor::Given)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn batches_of_any_size() -> Result<()> {
    for (batch, tokens, blocks) in [
        (1, 1, 1),
        (5, 1, 2),
        (4, 700, 4),
        (30, 9, 26),
        (2, 0, 2),
        (0, 3, 1),
    ] {
        for level in [RatioLevel::Token, RatioLevel::SequenceProduct] {
            let options = PolicyLossOptions {
                level,
                kl: Some(K3),
                ..OPTIONS
            };
            let case = Case {
                batch,
                tokens,
                blocks,
                weights: 1,
                spread: 0.05,
                ..PLAIN
            };
            check(case, options, Divisor::Length)?;
        }
    }
    Ok(())
}

#[test]
fn what_is_missing_is_missing() -> Result<()> {
    let case = Case {
        old: false,
        entropy: false,
        ..PLAIN
    };
    let options = PolicyLossOptions {
        log_ratio_clamp: f32::INFINITY,
        kl: Some(KlTerm {
            log_ratio_clamp: f32::INFINITY,
            value_clamp: f32::INFINITY,
            ..K3
        }),
        ..OPTIONS
    };
    check(case, options, Divisor::One)
}
