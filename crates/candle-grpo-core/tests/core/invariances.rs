//! Properties that advantage functions have for groups with any size, in any order.

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_test_support::{devices, numbers};
use proptest::prelude::*;

fn function() -> impl Strategy<Value = GroupAdvantage> {
    prop_oneof![Just(GroupAdvantage::grpo()), Just(GroupAdvantage::rloo())]
}

fn scale() -> impl Strategy<Value = Scale> {
    prop_oneof![Just(Scale::Group), Just(Scale::Batch), Just(Scale::None)]
}

/// Rewards in sixteenths, and ids for groups with at least two samples each.
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
