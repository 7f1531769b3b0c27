//! Gradients against finite differences, in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::experimental::Vespo;
use candle_grpo_loss::surrogate::GeometricMean;
use candle_grpo_loss::{
    Aggregation, Clip, ImportanceLevel, KlLoss, PolicyBatch, PolicyLoss, StepTotals, Surrogate,
};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

use crate::fixture::{
    B, Fixture, T, detached_surrogates, differentiable_losses, differentiable_surrogates,
};

#[test]
fn every_gradient_is_the_finite_difference_of_the_loss() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let step = 1e-6;
        for loss in differentiable_losses() {
            let value = |log_probs: &[f64], entropy: &[f64]| -> Result<f64> {
                let moved = Fixture {
                    log_probs: log_probs.to_vec(),
                    entropy: entropy.to_vec(),
                    ..Fixture::new(&Device::Cpu)
                };
                Ok(moved.compute(&loss)?.loss)
            };
            let got = fixture.compute(&loss)?;
            // The CPU's loss, so the differences may come from there.
            let expected = value(&fixture.log_probs, &fixture.entropy)?;
            assert_close(&[got.loss], &[expected], 1e-12);
            for i in 0..B * T {
                let difference = |x: &[f64], f: &dyn Fn(&[f64]) -> Result<f64>| -> Result<f64> {
                    let mut moved = x.to_vec();
                    moved[i] += step;
                    let above = f(&moved)?;
                    moved[i] -= 2. * step;
                    Ok((above - f(&moved)?) / (2. * step))
                };
                let by_log_prob = difference(&fixture.log_probs, &|x| value(x, &fixture.entropy))?;
                assert!(
                    (got.log_probs[i] - by_log_prob).abs() < 1e-7,
                    "log_probs[{i}]: {} against {by_log_prob} for {loss:?}",
                    got.log_probs[i]
                );
                let by_entropy = difference(&fixture.entropy, &|x| value(&fixture.log_probs, x))?;
                assert!(
                    (got.entropy[i] - by_entropy).abs() < 1e-7,
                    "entropy[{i}]: {} against {by_entropy} for {loss:?}",
                    got.entropy[i]
                );
            }
        }
    }
    Ok(())
}

/// Sequence-ratio values with each token's own gradient: with one advantage per sequence and the
/// mean over its tokens, the gradient equals the sequence ratio's own.
#[test]
fn gspo_token_has_the_value_and_gradient_of_gspo() -> Result<()> {
    for device in devices() {
        let fixture = Fixture {
            importance_weights: vec![1.; B * T],
            ..Fixture::new(device)
        };
        let sequence = PolicyLoss::gspo();
        let token = PolicyLoss {
            importance_level: ImportanceLevel::SequenceToken,
            ..sequence.clone()
        };
        let (sequence, token) = (fixture.compute(&sequence)?, fixture.compute(&token)?);
        assert_close(&[token.loss], &[sequence.loss], 1e-12);
        assert_close(&token.log_probs, &sequence.log_probs, 1e-12);
    }
    Ok(())
}

#[test]
fn the_unbiased_kl_gradients_are_those_of_k2() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let with = |kl: Kl| PolicyLoss {
            kl: Some(KlLoss::new(1., kl)),
            ..PolicyLoss::dapo()
        };
        let k2 = fixture.compute(&with(Kl::new(KlEstimator::K2)))?;
        for estimator in [KlEstimator::K1, KlEstimator::K3, KlEstimator::Abs] {
            let kl = Kl {
                gradient: KlGradient::StraightThrough,
                ..Kl::new(estimator)
            };
            let direct = fixture.compute(&with(Kl::new(estimator)))?;
            let through = fixture.compute(&with(kl))?;
            assert_close(&[through.loss], &[direct.loss], 1e-12);
            assert_close(&through.log_probs, &k2.log_probs, 1e-12);
        }
        let with = |kl: KlLoss| PolicyLoss {
            kl: Some(kl),
            ..PolicyLoss::dapo()
        };
        let k3 = fixture.compute(&with(KlLoss::k3(1.)))?;
        let unbiased = fixture.compute(&with(KlLoss::unbiased(1.)))?;
        assert_close(&[unbiased.loss], &[k3.loss], 1e-12);
        assert_close(&unbiased.log_probs, &k2.log_probs, 1e-12);
    }
    Ok(())
}

/// Without old log-probs the ratio is 1, and every surrogate has the policy gradient.
#[test]
fn a_ratio_of_one_gives_the_policy_gradient() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let on_policy = Fixture {
            old_log_probs: fixture.log_probs.clone(),
            ..Fixture::new(device)
        };
        let plain = PolicyLoss {
            surrogate: Surrogate::PolicyGradient,
            ..Default::default()
        };
        let expected = on_policy.compute(&plain)?;
        let surrogates = differentiable_surrogates()
            .into_iter()
            .chain(detached_surrogates());
        for surrogate in surrogates {
            let other_at_one = match surrogate {
                // A bound below 1 clips a ratio of 1.
                Surrogate::Clip(clip) => clip.delta.is_some_and(|d| d < 1.),
                // These give some tokens their own loss.
                Surrogate::ClipCov(_) => true,
                Surrogate::Topr(topr) => topr.positive_weight != 1.,
                // The advantage does not enter.
                Surrogate::Likelihood(_) => true,
                // A sequence's weights enter its mean.
                Surrogate::Vespo(_) | Surrogate::GeometricMean(_) => true,
                _ => false,
            };
            if other_at_one {
                continue;
            }
            let got = on_policy.compute(&PolicyLoss {
                surrogate,
                ..Default::default()
            })?;
            assert_close(&got.log_probs, &expected.log_probs, 1e-12);
            assert_eq!(got.output.metrics.to_host()?.get("ratio_mean"), Some(1.));
        }
    }
    Ok(())
}

/// On a bound, the clipped and the unclipped loss are equal. The gradient comes from one of them,
/// and is not half of each.
#[rstest]
#[case(Clip::symmetric(0.))]
#[case(Clip { delta: Some(1.), ..Clip::symmetric(0.2) })]
#[case(Clip { delta: Some(1.), ..Clip::symmetric(0.) })]
fn a_ratio_on_a_bound_keeps_its_whole_gradient(#[case] clip: Clip) -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let on_policy = Fixture {
            old_log_probs: fixture.log_probs.clone(),
            ..Fixture::new(device)
        };
        let gradient_of = |surrogate: Surrogate| {
            on_policy.compute(&PolicyLoss {
                surrogate,
                ..Default::default()
            })
        };
        let expected = gradient_of(Surrogate::PolicyGradient)?.log_probs;
        let got = gradient_of(clip.into())?;
        assert_close(&got.log_probs, &expected, 1e-12);
        assert_eq!(got.output.metrics.to_host()?.get("clip_fraction"), Some(0.));
    }
    Ok(())
}

/// Surrogates with their own level, at ratio 1 and with weights 1.
#[test]
fn sequence_surrogates_give_the_policy_gradient_too() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let on_policy = Fixture {
            old_log_probs: fixture.log_probs.clone(),
            importance_weights: vec![1.; B * T],
            ..Fixture::new(device)
        };
        let plain = PolicyLoss {
            surrogate: Surrogate::PolicyGradient,
            ..Default::default()
        };
        let expected = on_policy.compute(&plain)?;
        for surrogate in [Vespo::default().into(), GeometricMean::default().into()] {
            let got = on_policy.compute(&PolicyLoss {
                surrogate,
                allow_length_weighting: true,
                ..Default::default()
            })?;
            assert_close(&got.log_probs, &expected.log_probs, 1e-12);
        }
    }
    Ok(())
}

/// A ratio that is far off is clipped, and its overflow must not return through the gradient.
#[test]
fn a_ratio_that_overflows_gives_a_finite_gradient() -> Result<()> {
    for device in devices() {
        let log_probs = Var::from_tensor(&Tensor::zeros((1, 100), DType::F32, device)?)?;
        let mask = log_probs.ones_like()?;
        let totals = StepTotals::count(&mask)?;
        for (level, drift, log_ratio_clamp) in [
            (ImportanceLevel::SequenceProduct, -1f32, Some(20.)),
            (ImportanceLevel::SequenceProduct, -1., None),
            (ImportanceLevel::Token, -100., None),
            (ImportanceLevel::Token, -100., Some(20.)),
        ] {
            let old = Tensor::full(drift, (1, 100), device)?;
            let loss = PolicyLoss {
                importance_level: level,
                log_ratio_clamp,
                allow_length_weighting: true,
                ..PolicyLoss::verl()
            };
            for advantage in [1f32, -1.] {
                let advantages = Tensor::new(&[advantage], device)?;
                let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
                let output = loss.compute(&batch, &totals)?;
                let expected = if advantage > 0. { -1.2 } else { 3. };
                assert_close(
                    &[f64::from(output.loss.to_scalar::<f32>()?)],
                    &[expected],
                    1e-6,
                );
                let gradient = output.loss.backward()?;
                let gradient = numbers(gradient.get(&log_probs).expect("a gradient"))?;
                assert!(
                    gradient.iter().all(|g| *g == 0.),
                    "{level:?} {advantage}: {gradient:?}"
                );
            }
        }
    }
    Ok(())
}

/// A rejected token leaves the geometric mean; the others in its sequence stay.
#[test]
fn a_weight_of_zero_does_not_silence_a_sequence() -> Result<()> {
    for device in devices() {
        let mut fixture = Fixture::new(device);
        fixture.importance_weights = vec![1.; B * T];
        fixture.importance_weights[0] = 0.;
        let gradient = fixture.compute(&PolicyLoss::gmpo())?.log_probs;
        assert!(gradient[1..T].iter().all(|g| *g != 0.), "{gradient:?}");
    }
    Ok(())
}

#[test]
fn half_precision_is_computed_in_f32() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        // Values that bf16 and f16 hold exactly, so that only the arithmetic can differ.
        let rounded = |x: &[f64]| x.iter().map(|v| (v * 8.).round() / 8.).collect::<Vec<_>>();
        let fixture = Fixture {
            log_probs: rounded(&fixture.log_probs),
            old_log_probs: rounded(&fixture.old_log_probs),
            ref_log_probs: rounded(&fixture.ref_log_probs),
            entropy: rounded(&fixture.entropy),
            advantages: rounded(&fixture.advantages),
            scores: fixture.scores.clone(),
            selected: fixture.selected.clone(),
            importance_weights: rounded(&fixture.importance_weights),
            teacher_log_probs: rounded(&fixture.teacher_log_probs),
            token_weights: fixture.token_weights.clone(),
            sample_weights: rounded(&fixture.sample_weights),
            mask: fixture.mask,
            device: device.clone(),
        };
        let totals = fixture.totals()?;
        for loss in differentiable_losses() {
            let exact = fixture.compute(&loss)?;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let got = fixture.compute_rows(&loss, 0..B, &totals, dtype)?;
                assert_eq!(got.output.loss.dtype(), DType::F32);
                assert_close(&[got.loss], &[exact.loss], 1e-5);
            }
        }
    }
    Ok(())
}

#[test]
fn half_log_probs_give_an_f32_loss_and_a_gradient_of_their_dtype() -> Result<()> {
    for device in devices() {
        let log_probs = Tensor::new(&[[-1f32, -0.5, -2.], [-0.25, -1.5, -3.]], device)?;
        let old = (&log_probs + 0.125)?;
        let advantages = Tensor::new(&[1f32, -0.5], device)?;
        let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], device)?;
        let loss = PolicyLoss::default();
        let run = |dtype: DType| -> Result<(Tensor, Tensor)> {
            let log_probs = Var::from_tensor(&log_probs.to_dtype(dtype)?)?;
            let old = old.to_dtype(dtype)?;
            let batch = PolicyBatch::new(&log_probs, &advantages, &mask).old_log_probs(&old);
            let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
            let gradients = output.loss.backward()?;
            let gradient = gradients.get(&log_probs).expect("a gradient").clone();
            Ok((output.loss, gradient))
        };
        let (expected, expected_gradient) = run(DType::F64)?;
        for dtype in [DType::BF16, DType::F16] {
            let (loss, gradient) = run(dtype)?;
            assert_eq!((loss.dtype(), gradient.dtype()), (DType::F32, dtype));
            assert_close(&numbers(&loss)?, &numbers(&expected)?, 1e-6);
            assert_close(&numbers(&gradient)?, &numbers(&expected_gradient)?, 1e-3);
        }
    }
    Ok(())
}

#[test]
fn the_gradient_of_a_scaled_loss_is_scaled() -> Result<()> {
    for device in devices() {
        let log_probs = Var::new(&[[-1f32, -0.5]], device)?;
        let advantages = Tensor::new(&[1f32], device)?;
        let mask = Tensor::new(&[[1u8, 1]], device)?;
        let loss = PolicyLoss {
            aggregation: Aggregation::TokenSum,
            ..Default::default()
        };
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask);
        let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
        let gradients = (output.loss * 0.25)?.backward()?;
        let gradient = gradients.get(&log_probs).expect("a gradient");
        assert_eq!(numbers(gradient)?, [-0.25, -0.25]);
    }
    Ok(())
}
