//! Computations over a whole step: selections, rollout filters, the value loss.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutFilter};
use candle_grpo_loss::surrogate::{ClipCov, KlCov};
use candle_grpo_loss::{
    AdaptiveEntropy, Aggregation, PolicyBatch, PolicyLoss, RolloutCorrection, StepTotals, ValueLoss,
};
use candle_grpo_test_support::{assert_close, devices, noise_tensor, numbers};
use rstest::rstest;

/// Advantages 1 and -1, log-probs with mean -1.5: covariances -0.5, 0.5, 1.5 and 1.5, -0.5, 0.5.
fn covariances(device: &Device) -> Result<(Tensor, Tensor, Tensor)> {
    let log_probs = Tensor::new(
        &[[-2., -1., 0.], [-3., -1., -2.], [f64::NAN, -1., -1.]],
        device,
    )?;
    let advantages = Tensor::new(&[1f64, -1., 0.], device)?;
    let mask = Tensor::new(&[[1u8, 1, 1], [1, 1, 1], [0, 0, 0]], device)?;
    Ok((log_probs, advantages, mask))
}

fn select(loss: &PolicyLoss, seed: u64, device: &Device) -> Result<Vec<f64>> {
    let (log_probs, advantages, mask) = covariances(device)?;
    let batch = PolicyBatch::new(&log_probs, &advantages, &mask);
    numbers(&loss.select_tokens(&batch, seed)?.expect("a selection"))
}

#[test]
fn kl_cov_takes_the_highest_covariances() -> Result<()> {
    for device in devices() {
        let with_ratio = |ratio| PolicyLoss {
            surrogate: KlCov { ratio, coef: 1. }.into(),
            ..Default::default()
        };
        assert_eq!(
            select(&with_ratio(0.4), 0, device)?,
            [0., 0., 1., 1., 0., 0., 0., 0., 0.]
        );
        let one = select(&with_ratio(1e-6), 0, device)?;
        assert_eq!(one.iter().sum::<f64>(), 1., "at least one: {one:?}");
    }
    Ok(())
}

#[test]
fn clip_cov_draws_among_the_candidates() -> Result<()> {
    for device in devices() {
        let loss = PolicyLoss {
            surrogate: ClipCov {
                ratio: 0.17,
                lower: 0.2,
                upper: 5.,
                ..Default::default()
            }
            .into(),
            ..Default::default()
        };
        let mut drawn = [0; 9];
        for seed in 0..60 {
            let selected = select(&loss, seed, device)?;
            assert_eq!(
                selected,
                select(&loss, seed, device)?,
                "the same seed draws the same"
            );
            assert_eq!(selected.iter().sum::<f64>(), 1.);
            for (count, s) in drawn.iter_mut().zip(&selected) {
                *count += *s as usize;
            }
        }
        let candidates = [1, 2, 3, 5];
        for (i, &count) in drawn.iter().enumerate() {
            assert_eq!(count > 0, candidates.contains(&i), "{drawn:?}");
        }
        assert!(
            PolicyLoss::grpo()
                .select_tokens(
                    &PolicyBatch::new(
                        &covariances(device)?.0,
                        &covariances(device)?.1,
                        &covariances(device)?.2
                    ),
                    0
                )?
                .is_none()
        );
    }
    Ok(())
}

/// d is [0.5, -0.1 | 0.1, 0.1], and NaN where masked.
fn policies(device: &Device) -> Result<(Tensor, Tensor, Tensor)> {
    let old = Tensor::new(&[[-1., -1., f64::NAN], [-1., -1., 0.]], device)?;
    let rollout = Tensor::new(&[[-1.5, -0.9, 0.], [-1.1, -1.1, f64::NAN]], device)?;
    let mask = Tensor::new(&[[1u8, 1, 0], [1, 1, 0]], device)?;
    Ok((old, rollout, mask))
}

#[rstest]
#[case(FilterStatistic::LogRatio, FilterLevel::Token, -0.2, 0.2, [0., 1., 0., 1., 1., 0.])]
#[case(FilterStatistic::LogRatio, FilterLevel::SequenceMean, -0.15, 0.15, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::LogRatio, FilterLevel::SequenceMean, -0.2, 0.2, [1., 1., 0., 1., 1., 0.])]
#[case(FilterStatistic::LogRatio, FilterLevel::SequenceSum, -0.2, 0.3, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::LogRatio, FilterLevel::SequenceMax, -9., 0.2, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::LogRatio, FilterLevel::Segment, -0.15, 0.15, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::K1, FilterLevel::Token, -0.2, 0.05, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::K2, FilterLevel::Token, 0., 0.1, [0., 1., 0., 1., 1., 0.])]
#[case(FilterStatistic::K3, FilterLevel::SequenceMean, 0., 0.01, [0., 0., 0., 1., 1., 0.])]
#[case(FilterStatistic::ProbabilityDifference, FilterLevel::Token, -0.05, 0.2, [1., 1., 0., 1., 1., 0.])]
fn filters_keep_what_is_within_their_bounds(
    #[case] statistic: FilterStatistic,
    #[case] level: FilterLevel,
    #[case] min: f64,
    #[case] max: f64,
    #[case] expected: [f64; 6],
) -> Result<()> {
    for device in devices() {
        let (old, rollout, mask) = policies(device)?;
        let correction = RolloutCorrection {
            filters: vec![RolloutFilter {
                statistic,
                level,
                min: Some(min),
                max: Some(max),
            }],
            ..Default::default()
        };
        let corrected = correction.compute(&old, &rollout, &mask)?;
        assert_eq!(numbers(&corrected.kept)?, expected);
        let rejected = 1. - expected.iter().sum::<f64>() / 4.;
        assert_eq!(
            corrected
                .metrics
                .to_host()?
                .get("rollout_rejected_fraction"),
            Some(rejected)
        );
    }
    Ok(())
}

#[test]
fn normalized_weights_have_the_mean_one() -> Result<()> {
    for device in devices() {
        let (old, rollout, mask) = policies(device)?;
        let correction = RolloutCorrection {
            weight: Some(ImportanceWeight {
                normalize: true,
                ..ImportanceWeight::truncated(1.2)
            }),
            ..Default::default()
        };
        let corrected = correction.compute(&old, &rollout, &mask)?;
        let weights = numbers(&corrected.weights.expect("weights"))?;
        let raw = [1.2, (-0.1f64).exp(), 0., 0.1f64.exp(), 0.1f64.exp(), 0.];
        let mean = raw.iter().sum::<f64>() / 4.;
        assert_close(&weights, &raw.map(|w| w / mean), 1e-12);
        let metrics = corrected.metrics.to_host()?;
        assert_eq!(metrics.get("rollout_truncated_fraction"), Some(0.25));
        assert_close(&[metrics.get("rollout_kl").expect("a KL")], &[-0.15], 1e-12);
    }
    Ok(())
}

/// A sequence filter and a token bound in one correction: kept tokens are truncated all the same.
#[test]
fn filters_and_weights_apply_together() -> Result<()> {
    for device in devices() {
        let (old, rollout, mask) = policies(device)?;
        let correction = RolloutCorrection {
            weight: Some(ImportanceWeight::truncated(1.1)),
            filters: vec![RolloutFilter {
                statistic: FilterStatistic::LogRatio,
                level: FilterLevel::SequenceMean,
                min: Some(-0.15),
                max: Some(0.15),
            }],
            ..Default::default()
        };
        let corrected = correction.compute(&old, &rollout, &mask)?;
        assert_eq!(numbers(&corrected.kept)?, [0., 0., 0., 1., 1., 0.]);
        let weights = numbers(&corrected.weights.expect("weights"))?;
        assert_close(&weights, &[1.1, (-0.1f64).exp(), 0., 1.1, 1.1, 0.], 1e-12);
    }
    Ok(())
}

/// One prompt with long answers and one with short ones count the same.
#[test]
fn the_prompt_mean_gives_each_prompt_the_same_weight() -> Result<()> {
    for device in devices() {
        let per_token = Tensor::new(&[[1f64, 1., 1.], [3., f64::NAN, 0.], [8., 0., 0.]], device)?;
        let response_mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0], [1, 0, 0]], device)?;
        let prompt_tokens = Tensor::new(&[4f64, 4., 1.], device)?;
        let mask = candle_grpo_loss::Mask::new(&response_mask)?;
        let totals = StepTotals::count(&response_mask)?.with_prompts(2.);
        let loss = Aggregation::PromptMeanTokenMean.apply_with_prompts(
            &per_token,
            &mask,
            &totals,
            Some(&prompt_tokens),
        )?;
        assert_eq!(loss.to_scalar::<f64>()?, (6. / 4. + 8.) / 2.);
    }
    Ok(())
}

#[test]
fn a_value_clipped_towards_the_return_has_no_gradient() -> Result<()> {
    for device in devices() {
        // Against a return of 1 and an old value of 0, clip 0.5: within, beyond towards the return,
        // beyond away from it.
        let values = Var::new(&[[0.2f64, 0.8, -2., f64::NAN]], device)?;
        let (old, returns) = (values.zeros_like()?, values.ones_like()?);
        let mask = Tensor::new(&[[1u8, 1, 1, 0]], device)?;
        let loss = ValueLoss {
            clip: Some(0.5),
            aggregation: Aggregation::TokenSum,
            ..ValueLoss::default()
        };
        let totals = StepTotals::count(&mask)?;
        let (value, metrics) = loss.compute(&values, Some(&old), &returns, &mask, &totals)?;
        assert_close(&[value.to_scalar()?], &[(0.64 + 0.25 + 9.) / 2.], 1e-12);
        let gradient = value.backward()?;
        let gradient = numbers(gradient.get(&values).expect("a gradient"))?;
        assert_close(&gradient, &[-0.8, 0., -3., 0.], 1e-12);
        assert_close(
            &[metrics
                .to_host()?
                .get("value_clip_fraction")
                .expect("a fraction")],
            &[1. / 3.],
            1e-12,
        );
    }
    Ok(())
}

/// `old + (value - old)` is not the value to the last bit: within the clip every value keeps its
/// gradient all the same.
#[test]
fn values_within_the_clip_keep_their_gradients() -> Result<()> {
    for device in devices() {
        let vector = |seed, scale: f64| noise_tensor((1, 1000), seed, DType::F32, device)? * scale;
        let old = vector(1, 3.)?;
        let values = Var::from_tensor(&(&old + vector(2, 0.1)?)?)?;
        let returns = vector(3, 5.)?;
        let mask = returns.ones_like()?;
        let totals = StepTotals::count(&mask)?;
        let loss = ValueLoss {
            clip: Some(0.5),
            aggregation: Aggregation::TokenSum,
            ..ValueLoss::default()
        };
        let (value, metrics) = loss.compute(&values, Some(&old), &returns, &mask, &totals)?;
        assert_eq!(metrics.to_host()?.get("value_clip_fraction"), Some(0.));
        let gradient = value.backward()?;
        let expected = numbers(&(values.as_tensor() - returns)?)?;
        assert_close(
            &numbers(gradient.get(&values).expect("a gradient"))?,
            &expected,
            1e-6,
        );
    }
    Ok(())
}

#[test]
fn adaptive_entropy_acts_below_its_target() -> Result<()> {
    let mut controller = AdaptiveEntropy {
        target: 0.5,
        delta: 0.1,
        max: 0.15,
        ..Default::default()
    };
    assert_eq!(controller.entropy_coef(), 0.);
    controller.update(0.4)?;
    controller.update(0.3)?;
    assert_close(&[controller.entropy_coef()], &[0.15], 1e-12);
    controller.update(0.6)?;
    assert_eq!(
        controller.entropy_coef(),
        0.,
        "above the target there is no bonus"
    );
    assert_close(&[controller.coef], &[0.05], 1e-12);
    assert!(controller.update(f64::NAN).is_err());
    Ok(())
}
