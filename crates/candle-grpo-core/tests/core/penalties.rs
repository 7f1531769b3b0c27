//! KL controllers, penalties, ensembles, resampling, filters and dynamic sampling.

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::kl::KlController;
use candle_grpo_core::rewards::{NonFinite, OverlongPenalty, RepetitionPenalty, ScoreEnsemble};
use candle_grpo_core::selection::{
    DynamicSampling, FilterBatch, GroupFilter, SampleFilter, SamplingDecision, ScoreResampling,
    top_entropy_tokens,
};
use candle_grpo_core::{GroupAdvantage, Mask, RewardShaping};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use rstest::rstest;

use crate::tensor;

#[rstest]
#[case(0.05, 0.97952)]
#[case(0.1, 1.)]
#[case(0.11, 1.01024)]
#[case(0.5, 1.02048)]
#[case(-3., 0.97952)] // k1 can be negative
fn the_adaptive_controller_changes_by_at_most_a_fifth(
    #[case] kl: f64,
    #[case] expected: f64,
) -> Result<()> {
    let mut controller = KlController::adaptive(1., 0.1, 10_000.)?;
    controller.update(kl, 1024)?;
    assert_close(&[controller.coef()], &[expected], 1e-12);
    let text = serde_json::to_string(&controller).map_err(candle_core::Error::wrap)?;
    let restored: KlController = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
    assert_eq!(restored, controller);

    let mut fixed = KlController::fixed(0.3)?;
    fixed.update(kl, 1024)?;
    assert_eq!(fixed.coef(), 0.3);
    Ok(())
}

#[test]
fn controllers_refuse_nan() -> Result<()> {
    assert!(message(KlController::fixed(-1.)).starts_with("coef: -1, must be"));
    assert!(message(KlController::adaptive(1., 0., 1.)).starts_with("target: 0, must be"));
    assert!(message(KlController::adaptive(1., 1., f64::NAN)).starts_with("horizon: NaN, must be"));
    assert!(message(KlController::fixed(1.)?.update(f64::NAN, 1)).starts_with("kl: NaN"));
    let unknown = r#"{"kind": "fixed", "coef": 1, "target": 2}"#;
    assert!(serde_json::from_str::<KlController>(unknown).is_err());
    Ok(())
}

#[test]
fn the_overlong_penalty_grows_linearly_and_saturates() -> Result<()> {
    for device in devices() {
        let lengths = tensor(&[0., 12., 14., 16., 20.], device);
        let penalty = OverlongPenalty {
            max_length: 16,
            buffer: 4,
            factor: 0.5,
            unbounded: false,
        };
        let got = numbers(&penalty.compute(&lengths)?)?;
        assert_close(&got, &[0., 0., -0.25, -0.5, -0.5], 0.);
        let unbounded = OverlongPenalty {
            unbounded: true,
            ..penalty
        };
        let got = numbers(&unbounded.compute(&lengths)?)?;
        assert_close(&got, &[0., 0., -0.25, -0.5, -1.], 0.);
        for (buffer, factor, expected) in [
            (0, 1., "buffer: 0"),
            (17, 1., "buffer: 17"),
            (4, -1., "factor: -1"),
            (4, f64::NAN, "factor: NaN"),
        ] {
            let penalty = OverlongPenalty {
                buffer,
                factor,
                ..penalty
            };
            assert!(message(penalty.compute(&lengths)).starts_with(expected));
        }
    }
    Ok(())
}

#[test]
fn repetitions_are_counted_in_ngrams() -> Result<()> {
    let penalty = RepetitionPenalty::default();
    assert_eq!(penalty.compute(&[1, 1])?, 0., "too short for one n-gram");
    assert_close(&[penalty.compute(&[7; 10])?], &[1. / 8. - 1.], 1e-12);
    assert_eq!(penalty.compute(&[1, 2, 3, 4, 5])?, 0.);
    let zero = RepetitionPenalty {
        ngram: 0,
        ..penalty
    };
    assert!(message(zero.compute(&[1])).starts_with("ngram: 0"));
    let negative = RepetitionPenalty {
        penalty: -1.,
        ..penalty
    };
    assert!(message(negative.compute(&[1])).starts_with("penalty: -1"));
    Ok(())
}

#[rstest]
#[case(ScoreEnsemble::Mean, [2., 3.])]
#[case(ScoreEnsemble::Min, [1., 3.])]
#[case(ScoreEnsemble::Max, [3., 3.])]
#[case(ScoreEnsemble::Weighted(vec![3., 1.]), [1.5, 3.])]
fn ensembles_leave_out_missing_scores(
    #[case] ensemble: ScoreEnsemble,
    #[case] expected: [f64; 2],
) -> Result<()> {
    for device in devices() {
        let nan = f32::NAN;
        let scores = Tensor::new(&[[1f32, 3.], [nan, 3.], [nan, nan]], device)?;
        let got = numbers(&ensemble.combine(&scores, NonFinite::Exclude)?)?;
        assert_close(&got[..2], &expected, 1e-6);
        assert!(got[2].is_nan());
        assert!(
            message(ensemble.combine(&scores, NonFinite::Error))
                .starts_with("scores: sample 1 has NaN")
        );
    }
    Ok(())
}

/// Expected values come from Python's `statistics.median` and, in a tie the smallest, from
/// `statistics.multimode`.
#[rstest]
#[case(ScoreEnsemble::Median, [2., 3., 0., 2.5, 7., f64::NAN])]
#[case(ScoreEnsemble::Majority, [2., 5., 0., 1., 7., f64::NAN])]
fn the_median_and_the_majority_are_over_the_scores_that_are_there(
    #[case] ensemble: ScoreEnsemble,
    #[case] expected: [f64; 6],
) -> Result<()> {
    let nan = f32::NAN;
    let rows = [
        [9f32, 2., 2., 1., nan],
        [5., 1., 5., 2., 3.],
        [-0., 0., 0., -0., 1.],
        [4., 3., 2., 1., nan],
        [nan, 7., nan, nan, nan],
        [nan; 5],
    ];
    for device in devices() {
        let scores = Tensor::new(&rows, device)?;
        let got = numbers(&ensemble.combine(&scores, NonFinite::Exclude)?)?;
        for (got, expected) in got.iter().zip(expected) {
            assert!(
                *got == expected || got.is_nan() && expected.is_nan(),
                "{got} must be {expected}"
            );
        }
    }
    Ok(())
}

#[test]
fn ensembles_refuse_other_shapes_and_weights() -> Result<()> {
    for device in devices() {
        let scores = Tensor::new(&[[1f32, 3.]], device)?;
        let with = |weights: &[f64]| {
            message(ScoreEnsemble::Weighted(weights.to_vec()).combine(&scores, NonFinite::Error))
        };
        assert!(with(&[1.]).starts_with("weights: 1 for 2 judges"));
        assert!(with(&[0., 0.]).starts_with("weights: [0.0, 0.0], must be"));
        assert!(with(&[-1., 2.]).starts_with("weights: [-1.0, 2.0], must be"));
        let flat = ScoreEnsemble::Mean.combine(tensor(&[1.], device), NonFinite::Error);
        assert_eq!(message(flat), "scores: shape [1], must be [B, K]");
    }
    Ok(())
}

#[test]
fn samples_are_drawn_in_proportion_to_their_weight() -> Result<()> {
    let uniforms: Vec<f64> = (0..1000).map(|i| (f64::from(i) + 0.5) / 1000.).collect();
    let count = |how: ScoreResampling, scores: &[f64]| -> Result<Vec<usize>> {
        let drawn = how.draw(scores, &uniforms)?;
        Ok((0..scores.len())
            .map(|i| drawn.iter().filter(|&&d| d == i).count())
            .collect())
    };
    assert_eq!(
        count(ScoreResampling::Power(2.), &[1., -2., 0., 3. * 5f64.sqrt()])?,
        [20, 80, 0, 900]
    );
    assert_eq!(
        count(ScoreResampling::MaxMin, &[0., 1., 2., 1.])?,
        [500, 0, 500, 0]
    );
    assert_eq!(
        count(ScoreResampling::MaxRandom, &[0., 1., 1., 0.])?,
        [100, 400, 400, 100]
    );
    assert_eq!(
        count(ScoreResampling::default(), &[0.; 4])?,
        [250; 4],
        "without any weight, evenly"
    );
    let drawn = ScoreResampling::MaxMin.draw(&[1., 0.], &[1. - f64::EPSILON])?;
    assert_eq!(drawn, [1]);
    let message_of = |how: ScoreResampling, s: &[f64], u: &[f64]| message(how.draw(s, u));
    let power = ScoreResampling::default();
    assert!(message_of(power, &[], &[0.]).starts_with("scores: empty"));
    assert!(message_of(power, &[f64::NAN], &[0.]).starts_with("scores: sample 0 is NaN"));
    assert!(message_of(power, &[1.], &[1.]).starts_with("uniforms: [0] is 1"));
    assert!(message_of(ScoreResampling::Power(-1.), &[1.], &[0.]).starts_with("power: -1"));
    Ok(())
}

fn filter(filter: SampleFilter, scores: &[f32], device: &Device) -> Result<Vec<u8>> {
    // Lengths 1, 2, 3, 1, ...
    let rows: Vec<Vec<u8>> = (0..scores.len())
        .map(|i| (0..3).map(|t| u8::from(t <= i % 3)).collect())
        .collect();
    let mask = Mask::new(&Tensor::new(rows, device)?)?;
    let truncated: Vec<u8> = (0..scores.len()).map(|i| u8::from(i % 3 == 2)).collect();
    let truncated = Tensor::new(truncated, device)?;
    let scores = tensor(scores, device);
    let batch = FilterBatch {
        scores: &scores,
        groups: 3.into(),
        response_mask: &mask,
        truncated: Some(&truncated),
    };
    filter.keep(&batch)?.to_vec1()
}

#[rstest]
#[case(SampleFilter::Spread {}, [1, 1, 1, 0, 0, 0])]
#[case(SampleFilter::Difficulty { low: 0., high: 1. }, [1, 1, 1, 0, 0, 0])]
#[case(SampleFilter::Difficulty { low: 0.5, high: 2. }, [0, 0, 0, 1, 1, 1])]
#[case(SampleFilter::ShorterThan { length: 3 }, [1, 1, 0, 1, 1, 0])]
#[case(SampleFilter::NotTruncated {}, [1, 1, 0, 1, 1, 0])]
#[case(SampleFilter::ShortErrors { length: 3 }, [1, 1, 0, 1, 1, 1])]
fn each_filter_keeps_its_samples(
    #[case] which: SampleFilter,
    #[case] expected: [u8; 6],
) -> Result<()> {
    for device in devices() {
        assert_eq!(filter(which, &[0., 1., 0., 1., 1., 1.], device)?, expected);
        let text = serde_json::to_string(&which).map_err(candle_core::Error::wrap)?;
        let again: SampleFilter = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
        assert_eq!(again, which);
    }
    Ok(())
}

#[test]
fn filters_have_strict_bounds_and_ignore_missing_scores() -> Result<()> {
    for device in devices() {
        let nan = f32::NAN;
        let strict = SampleFilter::Difficulty { low: 0., high: 0.5 };
        assert_eq!(filter(strict, &[0.5, nan, 0.5], device)?, [0, 0, 0]);
        assert_eq!(
            filter(SampleFilter::Spread {}, &[1., nan, 1.], device)?,
            [0, 0, 0]
        );
        let errors = SampleFilter::ShortErrors { length: 9 };
        assert_eq!(filter(errors, &[0.5, 0., 1.], device)?, [0, 1, 1]);

        let mask = Mask::new(&Tensor::new(&[[1u8], [1]], device)?)?;
        let scores = tensor(&[0., 1.], device);
        let batch = FilterBatch {
            scores: &scores,
            groups: 2.into(),
            response_mask: &mask,
            truncated: None,
        };
        assert!(
            message(SampleFilter::NotTruncated {}.keep(&batch)).starts_with("truncated: absent")
        );
        let crossed = SampleFilter::Difficulty { low: 1., high: 1. };
        assert!(message(crossed.keep(&batch)).starts_with("low: 1, must be below high, 1"));
        let short = tensor(&[0.], device);
        let batch = FilterBatch {
            scores: &short,
            ..batch
        };
        assert!(
            message(SampleFilter::Spread {}.keep(&batch))
                .starts_with("scores: shape [1], must be [2]")
        );
        let none = tensor(&[], device);
        let batch = FilterBatch {
            scores: &none,
            ..batch
        };
        assert!(
            message(SampleFilter::Spread {}.keep(&batch))
                .starts_with("scores: shape [0], must be [2]")
        );
        assert!(message(mask.keep_samples(&short)).starts_with("keep: shape [1], must be [2]"));
    }
    Ok(())
}

#[test]
fn dynamic_sampling_continues_until_a_step_is_full() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[0., 1., 1., 1., 0., 0., 0.5, 1.], device);
        let groups = GroupAdvantage::grpo()
            .group_statistics(&rewards, 2)?
            .summaries()?;
        let sampling = DynamicSampling {
            groups: 2,
            max_batches: Some(2),
            ..DynamicSampling::default()
        };
        assert_eq!(sampling.keep(&groups), [0, 3]);
        assert_eq!(sampling.decide(2, 1)?, SamplingDecision::Train);
        assert_eq!(
            sampling.decide(1, 1)?,
            SamplingDecision::Sample { missing: 1 }
        );
        assert_eq!(
            sampling.decide(1, 2)?,
            SamplingDecision::GiveUp { missing: 1 }
        );
        let by_mean = DynamicSampling {
            filter: GroupFilter {
                spread: false,
                mean_above: Some(0.),
                mean_below: Some(1.),
                std_above: Some(0.5),
            },
            ..sampling
        };
        assert_eq!(by_mean.keep(&groups), [0]);
        let none = DynamicSampling {
            groups: 0,
            ..sampling
        };
        assert!(message(none.decide(0, 0)).starts_with("groups: 0"));
        for (filter, expected) in [
            (
                GroupFilter {
                    std_above: Some(f64::NAN),
                    ..GroupFilter::default()
                },
                "filter.std_above: NaN, must be a number",
            ),
            (
                GroupFilter {
                    mean_above: Some(1.),
                    mean_below: Some(1.),
                    ..GroupFilter::default()
                },
                "filter.mean_above: 1, must be below mean_below, 1",
            ),
        ] {
            let sampling = DynamicSampling { filter, ..sampling };
            assert!(message(sampling.decide(1, 1)).starts_with(expected));
        }
    }
    Ok(())
}

#[test]
fn the_top_entropy_quantile_equals_torch() -> Result<()> {
    for device in devices() {
        let nan = f32::NAN;
        let mask = Mask::new(&Tensor::new(&[[1u8, 1, 1], [1, 0, 1]], device)?)?;
        let entropy = Tensor::new(&[[0.1f32, 0.5, 0.2], [0.4, nan, 0.3]], device)?;
        for (fraction, expected) in [
            (0.2, [0, 1, 0, 0, 0, 0]), // the quantile is 0.42
            (0.5, [0, 1, 0, 1, 0, 1]), // that of 0.5 is 0.3, which is one of them
            (1., [1, 1, 1, 1, 0, 1]),
        ] {
            let top = top_entropy_tokens(&entropy, &mask, fraction)?;
            let got = top.selected().flatten_all()?.to_vec1::<u8>()?;
            assert_eq!(got, expected, "{fraction}");
        }
        let fraction = top_entropy_tokens(&entropy, &mask, 0.);
        assert!(message(fraction).starts_with("fraction: 0, must be above 0"));
        let empty = Mask::new(&mask.selected().zeros_like()?)?;
        let top = top_entropy_tokens(&entropy, &empty, 0.5)?;
        assert_eq!(
            top.selected().flatten_all()?.max(0)?.to_scalar::<u8>()?,
            0,
            "nothing to choose from"
        );
    }
    Ok(())
}

#[test]
fn rewards_can_be_clipped_to_a_range() -> Result<()> {
    for device in devices() {
        let shaping = RewardShaping {
            clip_range: Some([-1., 2.]),
            ..RewardShaping::default()
        };
        let shaped = shaping.apply(tensor(&[-3., 0., 5., 2.], device), 2, None)?;
        assert_eq!(shaped.rewards.to_vec1::<f32>()?, [-1., 0., 2., 2.]);
        let metrics = shaped.metrics.to_host()?;
        assert_eq!(metrics.get("reward_clip_fraction"), Some(0.5));
        let both = RewardShaping {
            clip: Some(1.),
            ..shaping.clone()
        };
        assert!(
            message(both.apply(tensor(&[0., 1.], device), 2, None))
                .starts_with("clip and clip_range: both given")
        );
        let crossed = RewardShaping {
            clip_range: Some([1., 1.]),
            ..shaping
        };
        assert!(
            message(crossed.apply(tensor(&[0., 1.], device), 2, None))
                .starts_with("clip_range: [1, 1]")
        );
    }
    Ok(())
}

#[test]
fn the_adaptive_coefficient_never_becomes_negative() -> Result<()> {
    let mut controller = KlController::adaptive(0.2, 0.1, 100.)?;
    controller.update(0., 1024)?;
    assert_eq!(controller.coef(), 0.);
    controller.update(0., 1024)
}
