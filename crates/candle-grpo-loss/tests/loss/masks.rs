//! What stands outside the mask changes nothing, whatever it is.

use candle_core::{DType, Result, Tensor};
use candle_grpo_loss::{Mask, MetricValues, PolicyLoss, StepTotals};
use candle_grpo_test_support::devices;
use proptest::prelude::*;

use crate::fixture::{B, Computed, Fixture, T, all_losses};

fn poison(values: &mut [f64], mask: &[u8], with: f64) {
    for (value, &m) in values.iter_mut().zip(mask) {
        if m == 0 {
            *value = with;
        }
    }
}

fn same(a: &Computed, b: &Computed) -> Result<bool> {
    let metrics = |c: &Computed| -> Result<MetricValues> { c.output.metrics.to_host() };
    Ok(a.loss == b.loss
        && a.log_probs == b.log_probs
        && a.entropy == b.entropy
        && metrics(a)? == metrics(b)?)
}

#[test]
fn nan_and_infinity_outside_the_mask_change_nothing() -> Result<()> {
    for device in devices() {
        let clean = Fixture::new(device);
        for with in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
            let mut dirty = Fixture::new(device);
            for values in [
                &mut dirty.log_probs,
                &mut dirty.old_log_probs,
                &mut dirty.ref_log_probs,
                &mut dirty.entropy,
                &mut dirty.importance_weights,
            ] {
                poison(values, &clean.mask, with);
            }
            // The row without any token.
            dirty.advantages[2] = with;
            dirty.sample_weights[2] = with;
            for loss in all_losses() {
                let (got, expected) = (dirty.compute(&loss)?, clean.compute(&loss)?);
                assert!(same(&got, &expected)?, "{with} shows in {loss:?}");
                let outside = got
                    .log_probs
                    .iter()
                    .zip(&clean.mask)
                    .filter(|(_, m)| **m == 0);
                assert!(outside.clone().count() > 0 && outside.into_iter().all(|(g, _)| *g == 0.));
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn finite_values_outside_the_mask_change_nothing(
        noise in prop::collection::vec(-50f64..50., B * T), pick in any::<prop::sample::Index>(),
    ) {
        for device in devices() {
            let losses = all_losses();
            let loss: &PolicyLoss = pick.get(&losses);
            let clean = Fixture::new(device);
            let mut dirty = Fixture::new(device);
            for (i, value) in noise.iter().enumerate().filter(|(i, _)| clean.mask[*i] == 0) {
                dirty.log_probs[i] = *value;
                dirty.old_log_probs[i] = -*value;
                dirty.ref_log_probs[i] = value * 2.;
                dirty.entropy[i] = value + 1.;
            }
            let (got, expected) = (dirty.compute(loss).unwrap(), clean.compute(loss).unwrap());
            prop_assert!(same(&got, &expected).unwrap());
        }
    }
}

#[test]
fn masks_of_any_dtype_are_the_same() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 1], [0, 1, 0]], device)?;
        let expected = Mask::new(&mask)?.selected().to_vec2::<u8>()?;
        for dtype in [
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            let mask = mask.to_dtype(dtype)?;
            assert_eq!(Mask::new(&mask)?.selected().to_vec2::<u8>()?, expected);
            assert_eq!(StepTotals::to_host(&mask)?.tokens, 3.);
        }
    }
    Ok(())
}

#[test]
fn the_last_token_of_each_sequence() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], device)?;
        assert_eq!(
            Mask::new(&mask)?.last()?.to_vec2::<u8>()?,
            [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
        );
    }
    Ok(())
}
