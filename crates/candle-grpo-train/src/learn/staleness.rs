//! The completions' age, and the sampling engine's deviation from the policy.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::Mask;

use super::collector::Collection;
use crate::sequence::Batch;

/// Each trained token's staleness: the number of updates between the weights that sampled it and
/// `version`.
fn token_staleness(batch: &Batch, version: u64) -> impl Iterator<Item = u64> {
    batch.sequences().iter().flat_map(move |sequence| {
        let versions = sequence.weight_versions().unwrap_or_default().iter();
        let trained = versions
            .zip(sequence.trained())
            .filter(|(_, trains)| *trains);
        trained.map(move |(drawn, _)| version.saturating_sub(*drawn))
    })
}

/// Maximum token staleness in `batch`.
pub(super) fn max_staleness(batch: &Batch, version: u64) -> u64 {
    token_staleness(batch, version).max().unwrap_or(0)
}

/// Metrics for the tokens to train on.
pub(super) fn staleness_metrics(
    collection: &Collection,
    version: u64,
) -> Result<BTreeMap<String, f64>> {
    let mut metrics = BTreeMap::new();
    if let Some(regenerated) = collection.regenerated_groups {
        metrics.insert("regenerated_groups".to_owned(), regenerated as f64);
    }
    let kept = collection.kept.iter();
    let kept = kept.map(|&group| collection.all.group_batch(group));
    let kept: Vec<Batch> = kept.collect::<Result<_>>()?;
    let tokens = || {
        kept.iter()
            .flat_map(|batch| token_staleness(batch, version))
    };
    if let Some(max) = tokens().max() {
        let mean = tokens().sum::<u64>() as f64 / tokens().count() as f64;
        metrics.insert("staleness_mean".to_owned(), mean);
        metrics.insert("staleness_max".to_owned(), max as f64);
    }
    Ok(metrics)
}

/// Groups to train on that contain a token with staleness above `most`.
pub(super) fn stale_groups(collection: &Collection, version: u64, most: u64) -> Result<Vec<usize>> {
    let mut stale = Vec::new();
    for &group in &collection.kept {
        if max_staleness(&collection.all.group_batch(group)?, version) > most {
            stale.push(group);
        }
    }
    Ok(stale)
}

/// Effective sample size for the importance weights `w = exp(old - rollout)`, as a fraction of the
/// tokens in the mask: `(sum w)^2 / (n sum w^2)` (Kish 1965). All arguments are `[B, T]`.
/// Synchronizes with the device.
pub(super) fn effective_sample_share(
    old_log_probs: &Tensor,
    rollout_log_probs: &Tensor,
    response_mask: &Tensor,
) -> Result<f64> {
    let mask = Mask::new(response_mask)?;
    let numbers = |x: &Tensor| -> Result<Vec<f64>> {
        let x = x.flatten_all()?.to_device(&Device::Cpu)?;
        Ok(x.to_dtype(DType::F64)?.to_vec1()?)
    };
    let old = numbers(&mask.select(&old_log_probs.detach())?)?;
    let rollout = numbers(&mask.select(&rollout_log_probs.detach())?)?;
    let selected = numbers(mask.selected())?;
    let ratios: Vec<f64> = old
        .iter()
        .zip(rollout)
        .zip(selected)
        .filter(|(_, selected)| *selected != 0.)
        .map(|((old, rollout), _)| old - rollout)
        .collect();
    // The fraction does not depend on a common factor in the weights.
    let largest = ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights = || ratios.iter().map(|ratio| (ratio - largest).exp());
    let squares: f64 = weights().map(|weight| weight * weight).sum();
    Ok(weights().sum::<f64>().powi(2) / (ratios.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_weights_use_all_tokens_and_one_large_weight_uses_one() {
        let share = |old: [f32; 4]| {
            let tensor = |x: [f32; 4]| Tensor::new(&[x], &Device::Cpu).unwrap();
            let mask = Tensor::new(&[[1u8, 1, 1, 0]], &Device::Cpu).unwrap();
            let rollout = tensor([-1., -2., -3., f32::NAN]);
            effective_sample_share(&tensor(old), &rollout, &mask).unwrap()
        };
        assert_eq!(share([-1.5, -2.5, -3.5, 0.]), 1.);
        assert!((share([-1., -2., -103., 0.]) - 2. / 3.).abs() < 1e-12);
        // Weights 1, 2 and 3: 36 / (3 * 14).
        let ln = [1f32, 2., 3.].map(f32::ln);
        let found = share([ln[0] - 1., ln[1] - 2., ln[2] - 3., 0.]);
        assert!((found - 6. / 7.).abs() < 1e-6, "{found}");
    }
}
