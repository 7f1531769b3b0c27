//! Invariances and equivariances of the advantage functions.

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_test_support::{devices, numbers};
use proptest::prelude::*;

use crate::close;

fn function() -> impl Strategy<Value = GroupAdvantage> {
    prop_oneof![Just(GroupAdvantage::grpo()), Just(GroupAdvantage::rloo())]
}

fn scale() -> impl Strategy<Value = Scale> {
    prop_oneof![Just(Scale::Group), Just(Scale::Batch), Just(Scale::None)]
}

/// Rewards in sixteenths, with ids of groups of at least two samples each.
fn batch() -> impl Strategy<Value = (Vec<f64>, Vec<u32>)> {
    prop::collection::vec(2usize..6, 1..5).prop_flat_map(|sizes| {
        let ids: Vec<u32> = sizes
            .iter()
            .enumerate()
            .flat_map(|(group, &size)| std::iter::repeat_n(group as u32, size))
            .collect();
        let rewards =
            prop::collection::vec((-64i32..64).prop_map(|r| f64::from(r) / 16.), ids.len());
        (rewards, Just(ids).prop_shuffle())
    })
}

fn compute(
    function: &GroupAdvantage,
    rewards: &[f64],
    ids: &[u32],
    scale: Scale,
    device: &Device,
) -> Result<Vec<f64>> {
    let rewards = Tensor::new(rewards, device)?;
    numbers(&function.compute(&rewards, ids, scale)?)
}

proptest! {
    #[test]
    fn a_permutation_of_the_batch_permutes_the_advantages(
        (rewards, ids) in batch(), function in function(), scale in scale(), seed in any::<u64>(),
    ) {
        for device in devices() {
            let mut order: Vec<usize> = (0..ids.len()).collect();
            order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1));
            let pick = |x: &[f64]| order.iter().map(|&i| x[i]).collect::<Vec<f64>>();
            let permuted_ids: Vec<u32> = order.iter().map(|&i| ids[i]).collect();
            let plain = compute(&function, &rewards, &ids, scale, device).unwrap();
            let permuted = compute(&function, &pick(&rewards), &permuted_ids, scale, device).unwrap();
            prop_assert!(close(&pick(&plain), &permuted), "{plain:?} {permuted:?}");
        }
    }

    #[test]
    fn a_constant_added_to_all_rewards_changes_nothing(
        (rewards, ids) in batch(), function in function(), scale in scale(), shift in -1000i32..1000,
    ) {
        for device in devices() {
            let shifted: Vec<f64> = rewards.iter().map(|r| r + f64::from(shift)).collect();
            prop_assert_eq!(
                compute(&function, &rewards, &ids, scale, device).unwrap(),
                compute(&function, &shifted, &ids, scale, device).unwrap()
            );
        }
    }

    #[test]
    fn a_factor_passes_through_only_without_scaling(
        (rewards, ids) in batch(), function in function(), scale in scale(),
    ) {
        for device in devices() {
            let function = GroupAdvantage { epsilon: 0., ..function.clone() };
            let scaled: Vec<f64> = rewards.iter().map(|r| r * 4.).collect();
            let plain = compute(&function, &rewards, &ids, scale, device).unwrap();
            let factor = if scale == Scale::None { 4. } else { 1. };
            let expected: Vec<f64> = plain.iter().map(|a| a * factor).collect();
            prop_assert!(close(&compute(&function, &scaled, &ids, scale, device).unwrap(), &expected));
        }
    }

    #[test]
    fn the_advantages_of_a_group_sum_to_zero((rewards, ids) in batch(), function in function(), scale in scale()) {
        for device in devices() {
            let advantages = compute(&function, &rewards, &ids, scale, device).unwrap();
            for group in 0..=ids.iter().copied().max().unwrap() {
                let sum: f64 = advantages.iter().zip(&ids).filter(|(_, id)| **id == group).map(|(a, _)| a).sum();
                prop_assert!(sum.abs() < 1e-5, "group {group} sums to {sum}: {advantages:?}");
            }
        }
    }

    #[test]
    fn consecutive_blocks_are_the_same_as_their_ids(
        rewards in prop::collection::vec(-4f64..4., 12), function in function(), scale in scale(),
    ) {
        for device in devices() {
            let ids: Vec<u32> = (0..12).map(|i| i / 4).collect();
            let blocks = numbers(&function.compute(Tensor::new(rewards.as_slice(), device).unwrap(), 4, scale).unwrap()).unwrap();
            prop_assert_eq!(blocks, compute(&function, &rewards, &ids, scale, device).unwrap());
        }
    }
}
