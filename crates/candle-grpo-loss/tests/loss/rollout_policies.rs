//! Corrections over a whole step: second moments, presets, and interpolated policies.

use candle_core::{Device, Result, Tensor};
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, OutOfBounds, ProximalPolicy};
use candle_grpo_loss::{ImportanceLevel, RolloutCorrection, RolloutWeights};
use candle_grpo_test_support::{assert_close, devices, numbers};
use proptest::prelude::*;

/// Corrects rows with three tokens and log-ratios `d`.
fn correct(correction: &RolloutCorrection, d: &[f64], mask: &[u8]) -> Result<RolloutWeights> {
    let (device, shape) = (Device::Cpu, (d.len() / 3, 3));
    let rollout = vec![-2.; d.len()];
    let old: Vec<f64> = d.iter().map(|d| d - 2.).collect();
    let tensor = |x: &[f64]| Tensor::from_slice(x, shape, &device);
    let mask = Tensor::from_slice(mask, shape, &device)?;
    correction.compute(&tensor(&old)?, &tensor(&rollout)?, &mask)
}

proptest! {
    /// The kept tokens' mean square is below the threshold, and one more token would reach it.
    #[test]
    fn m2po_drops_the_fewest_tokens(
        d in prop::collection::vec(-2f64..2., 12), mask in prop::collection::vec(0u8..2, 12),
        threshold in 0.01f64..3.,
    ) {
        prop_assume!(mask.contains(&1));
        let mut dirty = d.clone();
        for (x, _) in dirty.iter_mut().zip(&mask).filter(|(_, m)| **m == 0) {
            *x = f64::NAN;
        }
        let correction = RolloutCorrection::m2po(threshold);
        let kept = numbers(&correct(&correction, &dirty, &mask).unwrap().kept).unwrap();
        let squares = |keep: f64| -> Vec<f64> {
            let places = (0..12).filter(|&i| mask[i] == 1 && kept[i] == keep);
            places.map(|i| d[i] * d[i]).collect()
        };
        let (stays, mut dropped) = (squares(1.), squares(0.));
        prop_assert!((0..12).all(|i| mask[i] == 1 || kept[i] == 0.));
        prop_assert!(!stays.is_empty());
        let (sum, n) = (stays.iter().sum::<f64>(), stays.len() as f64);
        prop_assert!(sum / n < threshold || n == 1.);
        dropped.sort_by(f64::total_cmp);
        if let Some(next) = dropped.first() {
            prop_assert!((sum + next) / (n + 1.) >= threshold - 1e-9);
            prop_assert!(stays.iter().all(|x| x <= next));
        }
    }

    /// An interpolated policy lies between its two policies, whatever a token's version.
    #[test]
    fn an_interpolated_policy_lies_between(
        current in -30f64..0., rollout in -30f64..0., version in -1i64..9, now in 0i64..9,
    ) {
        let device = Device::Cpu;
        let tensor = |x: f64| Tensor::new(&[[x]], &device).unwrap();
        let versions = Tensor::new(&[[version]], &device).unwrap();
        for policy in [ProximalPolicy::LogLinear, ProximalPolicy::Linear { floor: 0. }] {
            let old = policy.log_probs(&tensor(current), &tensor(rollout), &versions, now).unwrap();
            let old = numbers(&old).unwrap()[0];
            let (low, high) = (current.min(rollout), current.max(rollout));
            prop_assert!(old >= low - 1e-9 && old <= high + 1e-9, "{old}");
            if version < 0 || version >= now - 1 {
                prop_assert!((old - rollout).abs() < 1e-9);
            }
        }
    }
}

#[test]
fn the_presets_of_verl_have_their_levels() {
    let range = [0.5, 2.];
    let weight = |correction: &RolloutCorrection| correction.weight.expect("a weight");
    let token = RolloutCorrection::token_is(2.);
    assert_eq!(weight(&token).level, ImportanceLevel::Token);
    let sequence = RolloutCorrection::seq_is_rs(3., range);
    assert_eq!(weight(&sequence).level, ImportanceLevel::SequenceProduct);
    assert_eq!(weight(&sequence).max, Some(3.));
    assert_eq!(sequence.filters[0].level, FilterLevel::SequenceSum);
    assert_eq!(sequence.filters[0].max, Some(2f64.ln()));
    let geometric = RolloutCorrection::geo_rs(range);
    assert!(geometric.weight.is_none() && geometric.rejects());
    assert_eq!(geometric.filters[0].level, FilterLevel::SequenceMean);
    let k3 = RolloutCorrection::k3_rs_seq_tis(2., 0.01);
    assert_eq!(k3.filters[0].statistic, FilterStatistic::K3);
    let icepop = RolloutCorrection::token_icepop(range);
    assert_eq!(weight(&icepop).out_of_bounds, OutOfBounds::Mask);
    assert_eq!(weight(&icepop).min, Some(0.5));
}

/// Sequence weights are divided by the mean over sequences, without counting sequences that have no
/// token.
#[test]
fn normalized_weights_of_sequences_have_the_mean_one() -> Result<()> {
    let mut correction = RolloutCorrection::seq_is(10.);
    if let Some(weight) = &mut correction.weight {
        weight.normalize = true;
    }
    let d = [0.1, 0.2, 0.3, -0.5, 0., 0., 9., 9., 9.];
    let mask = [1, 1, 1, 1, 0, 0, 0, 0, 0];
    let corrected = correct(&correction, &d, &mask)?;
    let weights = numbers(corrected.weights.as_ref().expect("weights"))?;
    let (a, b) = (0.6f64.exp(), (-0.5f64).exp());
    let mean = (a + b) / 2.;
    assert_close(&weights[..2], &[a / mean, b / mean], 1e-12);
    let metrics = corrected.metrics.to_host()?;
    assert_close(
        &[metrics.get("rollout_weight_normalizer").expect("a metric")],
        &[mean],
        1e-12,
    );
    Ok(())
}

#[test]
fn the_mismatch_of_equal_policies_is_zero() -> Result<()> {
    for device in devices() {
        let log_probs = Tensor::new(&[[-1f32, -3.], [-2., f32::NAN]], device)?;
        let mask = Tensor::new(&[[1u8, 1], [1, 0]], device)?;
        let corrected = RolloutCorrection::default().compute(&log_probs, &log_probs, &mask)?;
        let metrics = corrected.metrics.to_host()?;
        let get = |name: &str| metrics.get(&format!("mismatch_{name}")).expect("a metric");
        for name in [
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "chi2_token",
            "chi2_sequence",
        ] {
            assert_eq!(get(name), 0., "{name}");
        }
        assert_eq!(get("ppl_ratio"), 1.);
        assert_close(&[get("training_ppl")], &[2f64.exp()], 1e-6);
    }
    Ok(())
}
