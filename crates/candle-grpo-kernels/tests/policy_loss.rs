//! What `policy_loss` promises by itself; `candle-grpo-loss` compares it with the composed product.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    KlEstimate, KlRatio, KlSlope, KlTerm, PolicyLossOptions, PolicyLossTensors, PolicySum,
    RatioLevel, RowDivisor, TokenSurrogate, policy_loss, policy_loss_is_fused,
};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use proptest::prelude::*;

mod common;
use common::{check_views, dtypes, layouts, noisy};

const OPTIONS: PolicyLossOptions = PolicyLossOptions {
    level: RatioLevel::Token,
    log_ratio_clamp: f32::INFINITY,
    surrogate: TokenSurrogate::Clip {
        ratio_min: 0.8,
        ratio_max: 1.2,
        dual_clip: f32::INFINITY,
        delta: f32::INFINITY,
    },
    kl: None,
    row_divisor: RowDivisor::One,
    denominator: 2.0,
};

const K3: KlTerm = KlTerm {
    coef: 0.1,
    estimate: KlEstimate::K3,
    slope: KlSlope::Direct,
    log_ratio_clamp: 20.0,
    value_clamp: f32::INFINITY,
    ratio: KlRatio::One,
};

fn of<'a>(
    log_probs: &'a Tensor,
    advantages: &'a Tensor,
    mask: &'a Tensor,
) -> PolicyLossTensors<'a> {
    PolicyLossTensors {
        log_probs,
        old_log_probs: None,
        ref_log_probs: None,
        advantages,
        weights: None,
        entropy: None,
        mask,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_layout_is_taken(
        batch in 0usize..4,
        tokens in 0usize..6,
        advantages_of_tokens in any::<bool>(),
        dtype in dtypes(),
        layouts in prop::collection::vec(layouts(), 7),
        seed in any::<u64>(),
    ) {
        let noise = |index: u64| noisy(&[batch, tokens], seed ^ index, dtype);
        let per_row = noisy(&[batch], seed ^ 9, dtype)?;
        for device in devices() {
            let lay = |index: usize, x: &Tensor| layouts[index].of(x)?.to_device(device);
            let (old, reference) = (lay(1, &noise(1)?)?, lay(2, &noise(2)?)?);
            let (weights, entropy) = (lay(3, &noise(3)?)?, lay(4, &noise(4)?)?);
            let advantages = lay(5, &if advantages_of_tokens { noise(5)? } else { per_row.clone() })?;
            let mask = lay(6, &noise(6)?.gt(-0.5)?)?;
            let copies = [&old, &reference, &weights, &entropy, &advantages, &mask].map(Tensor::force_contiguous);
            let copies = copies.into_iter().collect::<Result<Vec<_>>>()?;
            let outputs = |log_probs: &Tensor, [old, reference, weights, entropy, advantages, mask]: [&Tensor; 6]| {
                let tensors = PolicyLossTensors {
                    log_probs,
                    old_log_probs: Some(old),
                    ref_log_probs: Some(reference),
                    advantages,
                    weights: Some(weights),
                    entropy: Some(entropy),
                    mask,
                };
                policy_loss(&tensors, &PolicyLossOptions { kl: Some(K3), ..OPTIONS })
            };
            check_views(device, &[(&noise(0)?, layouts[0])], |views| {
                let output = outputs(views[0], [&old, &reference, &weights, &entropy, &advantages, &mask])?;
                let of_copies = outputs(views[0], std::array::from_fn(|index| &copies[index]))?;
                assert_eq!(numbers(&output.loss)?, numbers(&of_copies.loss)?);
                assert_eq!(numbers(&output.policy)?, numbers(&of_copies.policy)?);
                let entropy = output.sum(PolicySum::Entropy)?;
                assert_eq!(numbers(&entropy)?, numbers(&of_copies.sum(PolicySum::Entropy)?)?);
                Ok((vec![output.loss.clone(), output.policy, entropy], output.loss))
            })?;
        }
    }
}

/// The ratio overflows, and so does what the token scores.
#[test]
fn a_weight_of_zero_drops_an_infinite_loss() -> Result<()> {
    for device in devices() {
        let log_probs = Var::new(&[[-1f32, -1.]], device)?;
        let old = Tensor::new(&[[-1f32, -200.]], device)?;
        let (advantages, mask) = (
            Tensor::new(&[-1f32], device)?,
            Tensor::ones((1, 2), DType::U8, device)?,
        );
        let weights = Tensor::new(&[[1f32, 0.]], device)?;
        let weighted = PolicyLossTensors {
            old_log_probs: Some(&old),
            weights: Some(&weights),
            ..of(&log_probs, &advantages, &mask)
        };
        let output = policy_loss(&weighted, &OPTIONS)?;
        assert_eq!(numbers(&output.surrogate)?, [1., f64::INFINITY]);
        assert_eq!(numbers(&output.policy)?, [1., 0.]);
        let gradients = output.loss.backward()?;
        let gradient = numbers(gradients.get(&log_probs).expect("a gradient"))?;
        assert_eq!(gradient, [0.5, 0.]);
    }
    Ok(())
}

/// Of tokens of one sequence that have the reference `references`, without a surrogate: estimates and their gradient.
fn kl_alone(
    term: KlTerm,
    log_probs: &[f32],
    references: &[f32],
    device: &Device,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let row = |x: &[f32]| Tensor::new(x, device)?.unsqueeze(0);
    let log_probs = Var::from_tensor(&row(log_probs)?)?;
    let references = row(references)?;
    let zero = Tensor::zeros(1, DType::F32, device)?;
    let mask = Tensor::ones(log_probs.dims(), DType::U8, device)?;
    let tensors = PolicyLossTensors {
        ref_log_probs: Some(&references),
        weights: Some(&zero),
        ..of(&log_probs, &zero, &mask)
    };
    let options = PolicyLossOptions {
        kl: Some(KlTerm { coef: 1., ..term }),
        denominator: 1.,
        ..OPTIONS
    };
    let output = policy_loss(&tensors, &options)?;
    let gradients = output.loss.backward()?;
    let gradient = gradients.get(&log_probs).expect("a gradient");
    let estimates = output.kl.expect("an estimate for the term");
    Ok((numbers(&estimates)?, numbers(gradient)?))
}

/// Within the clamp, on it, and beyond it on both sides.
#[test]
fn beyond_the_clamp_an_estimate_is_constant() -> Result<()> {
    // d: 0.5, 1, 1.5, -0.5, -1, -1.5.
    let log_probs = [-1f32, -1., -1., -2., -2., -2.];
    let references = [-1.5f32, -2., -2.5, -1.5, -1., -0.5];
    let clamped = [0.5f64, 1., 1., -0.5, -1., -1.];
    let inside = [1f64, 1., 0., 1., 1., 0.];
    type Function = fn(f64) -> f64;
    let estimates: [(KlEstimate, Function, Function); 4] = [
        (KlEstimate::K1, |d| d, |_| 1.),
        (KlEstimate::K2, |d| d * d / 2., |d| d),
        (KlEstimate::K3, |d| (-d).exp() + d - 1., |d| 1. - (-d).exp()),
        (KlEstimate::Abs, f64::abs, f64::signum),
    ];
    for device in devices() {
        for (estimate, value, slope) in estimates {
            let term = KlTerm {
                estimate,
                log_ratio_clamp: 1.,
                ..K3
            };
            let (values, slopes) = kl_alone(term, &log_probs, &references, device)?;
            assert_close(&values, &clamped.map(value), 1e-6);
            let expected: Vec<f64> = clamped
                .iter()
                .zip(inside)
                .map(|(&d, inside)| inside * slope(d))
                .collect();
            assert_close(&slopes, &expected, 1e-6);
        }
        // The clamp is one of the estimate: a slope of its own goes on.
        let term = KlTerm {
            slope: KlSlope::StraightThrough,
            log_ratio_clamp: 1.,
            ..K3
        };
        let (_, slopes) = kl_alone(term, &log_probs, &references, device)?;
        assert_close(&slopes, &[0.5, 1., 1.5, -0.5, -1., -1.5], 1e-6);
    }
    Ok(())
}

/// A token that the reference, or the policy, holds to be impossible.
#[test]
fn an_infinite_log_ratio_has_no_slope() -> Result<()> {
    let (log_probs, references) = (
        [-1f32, f32::NEG_INFINITY, -1.],
        [f32::NEG_INFINITY, -1., -3.],
    );
    let slopes = [
        (KlSlope::Direct, 1. - (-2f64).exp()),
        (KlSlope::StraightThrough, 2.),
        (KlSlope::ImportanceWeighted { max: 0.5 }, 1.),
    ];
    for device in devices() {
        for (slope, of_the_finite) in slopes {
            let term = KlTerm { slope, ..K3 };
            let (values, slopes) = kl_alone(term, &log_probs, &references, device)?;
            assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
            assert_close(&slopes, &[0., 0., of_the_finite], 1e-6);
        }
    }
    Ok(())
}

/// Where both terms of the clip are equal the token counts as not clipped, and has the whole gradient of the ratio.
#[test]
fn a_tie_is_not_clipped() -> Result<()> {
    let clip = |ratio_min, ratio_max, dual_clip| TokenSurrogate::Clip {
        ratio_min,
        ratio_max,
        dual_clip,
        delta: f32::INFINITY,
    };
    // Log-ratio and advantage of a token, bounds, and the gradient.
    let infinite = f32::INFINITY;
    let ties = [
        // Nothing is gained outside of the bounds.
        (1., 0., clip(0.8, 1.2, infinite), 0.),
        (-1., 0., clip(0.8, 1.2, infinite), 0.),
        // On the upper and on the lower bound.
        (0., 1., clip(0.8, 1., infinite), -1.),
        (0., -1., clip(1., 1.2, infinite), 1.),
        // On the bound of the dual clip.
        (0., -2., clip(0.8, 1.2, 1.), 2.),
    ];
    let flags = [
        PolicySum::Clipped,
        PolicySum::ClippedLow,
        PolicySum::ClippedHigh,
        PolicySum::DualClipped,
    ];
    for device in devices() {
        for (log_ratio, advantage, surrogate, expected) in ties {
            let log_probs = Var::new(&[[-2f32 + log_ratio]], device)?;
            let old = Tensor::new(&[[-2f32]], device)?;
            let advantages = Tensor::new(&[advantage as f32], device)?;
            let mask = Tensor::ones((1, 1), DType::U8, device)?;
            let tensors = PolicyLossTensors {
                old_log_probs: Some(&old),
                ..of(&log_probs, &advantages, &mask)
            };
            let options = PolicyLossOptions {
                surrogate,
                denominator: 1.,
                ..OPTIONS
            };
            let output = policy_loss(&tensors, &options)?;
            assert_eq!(numbers(&output.clipped)?, [0.], "{surrogate:?}");
            for flag in flags {
                assert_eq!(numbers(&output.sum(flag)?)?, [0.], "{flag:?} {surrogate:?}");
            }
            let gradients = output.loss.backward()?;
            let gradient = gradients.get(&log_probs).expect("a gradient");
            assert_eq!(numbers(gradient)?, [expected], "{surrogate:?}");
        }
    }
    Ok(())
}

/// More tokens than one core works on at a time.
#[test]
fn long_batches_add_up() -> Result<()> {
    let (batch, tokens) = (37, 1001);
    for device in devices() {
        let noise = |seed| noisy(&[batch, tokens], seed, DType::F32)?.to_device(device);
        let (log_probs, old) = (noise(1)?, noise(2)?);
        let advantages = noisy(&[batch], 3, DType::F32)?.to_device(device)?;
        let mask = noise(4)?.gt(-0.9)?;
        let run = |row: usize, rows: usize| -> Result<Vec<f64>> {
            let part = |x: &Tensor| x.narrow(0, row, rows);
            let (log_probs, old, advantages, mask) = (
                part(&log_probs)?,
                part(&old)?,
                part(&advantages)?,
                part(&mask)?,
            );
            let tensors = PolicyLossTensors {
                old_log_probs: Some(&old),
                ..of(&log_probs, &advantages, &mask)
            };
            let output = policy_loss(&tensors, &OPTIONS)?;
            let count = output.sum(PolicySum::Count)?.to_scalar::<f64>()?;
            let ratio = output.sum(PolicySum::Ratio)?.to_scalar::<f64>()?;
            let clipped = output.sum(PolicySum::Clipped)?.to_scalar::<f64>()?;
            Ok(vec![numbers(&output.loss)?[0], count, ratio, clipped])
        };
        let mut sum = vec![0.0; 4];
        for row in 0..batch {
            for (sum, x) in sum.iter_mut().zip(run(row, 1)?) {
                *sum += x;
            }
        }
        assert_close(&run(0, batch)?, &sum, 1e-6);
    }
    Ok(())
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let two = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let three = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    let good = of(&x, &two, &x);
    let refused = |tensors: PolicyLossTensors, options: PolicyLossOptions, expected: &str| {
        let message = message(policy_loss(&tensors, &options));
        assert!(message.contains(expected), "{message}");
    };
    refused(
        PolicyLossTensors {
            advantages: &three,
            ..good
        },
        OPTIONS,
        "advantages: shape [3]",
    );
    refused(
        PolicyLossTensors {
            weights: Some(&three),
            ..good
        },
        OPTIONS,
        "weights: shape [3]",
    );
    refused(
        PolicyLossTensors {
            old_log_probs: Some(&two),
            ..good
        },
        OPTIONS,
        "old_log_probs: shape [2]",
    );
    refused(
        PolicyLossTensors { mask: &two, ..good },
        OPTIONS,
        "mask: shape [2]",
    );
    refused(of(&two, &two, &two), OPTIONS, "log_probs: shape [2]");
    let ids = x.to_dtype(DType::U32)?;
    refused(of(&ids, &two, &x), OPTIONS, "log_probs: U32");
    let exact = x.to_dtype(DType::F64)?;
    assert!(policy_loss_is_fused(&x) && !policy_loss_is_fused(&exact));
    refused(of(&exact, &two, &x), OPTIONS, "log_probs: F64");
    refused(
        good,
        PolicyLossOptions {
            kl: Some(K3),
            ..OPTIONS
        },
        "ref_log_probs: absent",
    );
    refused(
        good,
        PolicyLossOptions {
            denominator: 0.0,
            ..OPTIONS
        },
        "denominator: 0",
    );
    refused(
        good,
        PolicyLossOptions {
            log_ratio_clamp: -1.0,
            ..OPTIONS
        },
        "log_ratio_clamp: -1",
    );
    let row_divisor = RowDivisor::Given(&three);
    refused(
        good,
        PolicyLossOptions {
            row_divisor,
            ..OPTIONS
        },
        "row_divisor: shape [3]",
    );
    Ok(())
}
