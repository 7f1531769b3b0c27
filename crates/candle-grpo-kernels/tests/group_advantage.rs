//! `group_advantage` against its composed twin, and what it promises about equal rewards, masks and errors.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{
    AdvantageScale, GroupAdvantageOptions, GroupBaseline, LoneSample, SampleGroups, composed,
    group_advantage,
};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

mod common;
use common::{dtypes, layouts};

proptest! {
    #[test]
    fn fused_equals_composed(
        samples in prop::collection::vec((-3i64..4, 0u8..4, -2.0f64..2.0), 0..40),
        offset in prop_oneof![Just(0.0), Just(1000.0)],
        size in prop::option::of(1usize..9),
        baseline in prop_oneof![Just(GroupBaseline::Mean), Just(GroupBaseline::LeaveOneOut)],
        scale in prop_oneof![Just(AdvantageScale::Group), Just(AdvantageScale::Batch), Just(AdvantageScale::None)],
        lone_sample in prop_oneof![Just(LoneSample::Zero), Just(LoneSample::Raw), Just(LoneSample::BatchMean)],
        epsilon in prop_oneof![Just(0.0), Just(1e-4)],
        ddof in 0usize..2,
        masked in any::<bool>(),
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        layouts in [layouts(), layouts()],
    ) {
        let batch = size.map_or(samples.len(), |size| samples.len() / size * size);
        let samples = &samples[..batch];
        for device in devices() {
            // Rounded to quarters, so that groups of equal rewards come up.
            let rewards: Vec<f64> = samples.iter().map(|&(_, _, x)| (x * 4.0).round() / 4.0 + offset).collect();
            let rewards = layouts[0].of(&Tensor::from_vec(rewards, batch, device)?.to_dtype(dtype)?)?;
            let mask: Vec<u8> = samples.iter().map(|&(_, kept, _)| kept.min(1)).collect();
            let mask = layouts[1].of(&Tensor::from_vec(mask, batch, device)?)?;
            let ids: Vec<i64> = samples.iter().map(|&(id, _, _)| id).collect();
            let groups = size.map_or(SampleGroups::Ids(&ids), SampleGroups::OfSize);
            let mask = masked.then_some(&mask);
            let options = GroupAdvantageOptions { baseline, scale, epsilon, ddof, lone_sample, mask };
            let fused = group_advantage(&rewards, groups, options)?;
            let composed = composed::group_advantage(&rewards, groups, options)?;
            prop_assert_eq!(fused.dims(), [batch]);
            prop_assert_eq!(fused.dtype(), composed.dtype());
            prop_assert_eq!(fused.dtype() == DType::F64, dtype == DType::F64);
            let tolerance = if dtype == DType::F64 { 1e-12 } else { 2e-7 };
            assert_close(&numbers(&fused)?, &numbers(&composed)?, tolerance);
        }
    }
}

/// 0.1 is not a binary fraction: a mean that is rounded leaves a residue, which a small epsilon blows up.
#[rstest]
fn equal_rewards_give_exact_zeros(
    #[values(1, 2, 3, 7, 10, 49, 1000)] size: usize,
    #[values(AdvantageScale::Group, AdvantageScale::Batch, AdvantageScale::None)]
    scale: AdvantageScale,
    #[values(GroupBaseline::Mean, GroupBaseline::LeaveOneOut)] baseline: GroupBaseline,
) -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(vec![0.1f32; size], device)?;
        let options = GroupAdvantageOptions {
            epsilon: 0.0,
            scale,
            baseline,
            ..Default::default()
        };
        let advantages = group_advantage(&rewards, SampleGroups::OfSize(size), options)?;
        assert!(numbers(&advantages)?.iter().all(|&a| a == 0.0));
    }
    Ok(())
}

#[rstest]
#[case::fused(group_advantage)]
#[case::composed(composed::group_advantage)]
fn a_sample_without_a_reward_may_hold_anything(
    #[case] twin: fn(&Tensor, SampleGroups, GroupAdvantageOptions) -> Result<Tensor>,
) -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&[f32::NAN, 1., 2., f32::INFINITY, 5.], device)?;
        let mask = Tensor::new(&[0f32, 1., 1., 0., 1.], device)?;
        let options = GroupAdvantageOptions {
            scale: AdvantageScale::None,
            lone_sample: LoneSample::Raw,
            mask: Some(&mask),
            ..Default::default()
        };
        let advantages = twin(&rewards, SampleGroups::Ids(&[1, 1, 1, 2, 2]), options)?;
        assert_eq!(numbers(&advantages)?, [0., -0.5, 0.5, 0., 5.]);
    }
    Ok(())
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let rewards = Tensor::zeros(6, DType::F32, &Device::Cpu)?;
    let default = GroupAdvantageOptions::default();
    let call =
        |rewards: &Tensor, groups, options| message(group_advantage(rewards, groups, options));
    let of_three = SampleGroups::OfSize(3);
    assert!(call(&rewards, SampleGroups::OfSize(0), default).contains("groups: of size 0"));
    assert!(call(&rewards, SampleGroups::OfSize(4), default).contains("groups: of size 4"));
    assert!(call(&rewards, SampleGroups::Ids(&[1, 2]), default).contains("groups: 2 ids for 6"));
    assert!(call(&rewards.reshape((2, 3))?, of_three, default).contains("rewards: shape [2, 3]"));
    assert!(call(&rewards.to_dtype(DType::U8)?, of_three, default).contains("rewards: U8"));
    let options = GroupAdvantageOptions { ddof: 2, ..default };
    assert!(call(&rewards, of_three, options).contains("ddof: 2"));
    let options = GroupAdvantageOptions {
        epsilon: -1.0,
        ..default
    };
    assert!(call(&rewards, of_three, options).contains("epsilon: -1"));
    let mask = Tensor::zeros(5, DType::F32, &Device::Cpu)?;
    let options = GroupAdvantageOptions {
        mask: Some(&mask),
        ..default
    };
    assert!(call(&rewards, of_three, options).contains("mask: shape [5]"));
    Ok(())
}

/// A group with a NaN has NaN for an advantage, whatever the others are.
#[rstest]
#[case(&[1.0, f64::NAN])]
#[case(&[0.0, 1.0, f64::NAN])]
fn nan_is_not_equal_to_anything(#[case] rewards: &[f64]) -> Result<()> {
    for device in devices() {
        for dtype in [DType::F64, DType::F32] {
            let rewards = Tensor::new(rewards, device)?.to_dtype(dtype)?;
            let groups = SampleGroups::OfSize(rewards.elem_count());
            let advantages = group_advantage(&rewards, groups, GroupAdvantageOptions::default())?;
            assert!(numbers(&advantages)?.iter().all(|a| a.is_nan()));
        }
    }
    Ok(())
}
