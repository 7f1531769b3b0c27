use candle_core::{DType, Result, Tensor};
use candle_grpo_core::advantage::{Baseline, SingletonGroup};
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_test_support::{assert_close, devices, numbers};
use rstest::rstest;

use crate::tensor;

const EXAMPLE: [f64; 8] = [0., 1., 0., 1., 1., 0., 0., 0.];

/// Each system's published values for the example (failures and success in group 1, then in group
/// 2).
#[rstest]
#[case::trl(1e-4, Scale::Group, [0.865875430, 1.499700060, -0.499900020])]
#[case::verl_and_roll(1e-6, Scale::Group, [0.866023904, 1.499997000, -0.499999000])]
#[case::twinkle(1e-8, Scale::Group, [0.866025389, 1.499999970, -0.499999990])]
#[case::openrlhf(1e-9, Scale::Group, [0.866025402, 1.499999997, -0.499999999])]
#[case::twinkle_batch(1e-8, Scale::Batch, [0.966091764, 1.449137647, -0.483045882])]
#[case::trl_batch(1e-4, Scale::Batch, [0.965905152, 1.448857729, -0.482952576])]
#[case::dr_grpo(1e-6, Scale::None, [0.5, 0.75, -0.25])]
fn grpo_gives_the_published_values(
    #[case] epsilon: f64,
    #[case] scale: Scale,
    #[case] values: [f64; 3],
) -> Result<()> {
    for device in devices() {
        let [first, success, failure] = values;
        let function = GroupAdvantage {
            epsilon,
            ..GroupAdvantage::grpo()
        };
        let rewards = Tensor::new(&EXAMPLE, device)?;
        let advantages = function.compute(&rewards, 4, scale)?;
        assert_eq!(advantages.dtype(), DType::F64, "f64 is kept");
        let expected = [
            -first, first, -first, first, success, failure, failure, failure,
        ];
        assert_close(&numbers(&advantages)?, &expected, 1e-9);
    }
    Ok(())
}

#[rstest]
#[case(Scale::None, [0.666666667, 1.0, -0.333333333])]
#[case(Scale::Group, [1.154700518, 1.999999960, -0.666666653])]
#[case(Scale::Batch, [1.288122353, 1.932183529, -0.644061176])]
fn rloo_gives_the_published_values(#[case] scale: Scale, #[case] values: [f64; 3]) -> Result<()> {
    for device in devices() {
        let [first, success, failure] = values;
        let function = GroupAdvantage {
            epsilon: 1e-8,
            ..GroupAdvantage::rloo()
        };
        let advantages = function.compute(Tensor::new(&EXAMPLE, device)?, 4, scale)?;
        let from_slice = function.compute(EXAMPLE, 4, scale)?;
        assert_eq!(from_slice.dtype(), DType::F32, "slices give f32");
        let expected = [
            -first, first, -first, first, success, failure, failure, failure,
        ];
        assert_close(&numbers(&from_slice)?, &expected, 1e-6);
        assert_close(&numbers(&advantages)?, &expected, 1e-9);
    }
    Ok(())
}

/// 0.1 is not a binary fraction: the rounded mean leaves a residue, which a small epsilon
/// amplifies.
#[rstest]
fn a_constant_group_gives_exact_zeros(
    #[values(2, 3, 7, 10, 49, 1000)] size: usize,
    #[values(0.1, 1. / 3., 1e4 + 0.1, -7.3e-9)] reward: f64,
    #[values(Scale::Group, Scale::Batch, Scale::None)] scale: Scale,
    #[values(DType::F64, DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(vec![reward; size], device)?.to_dtype(dtype)?;
        for function in [GroupAdvantage::grpo(), GroupAdvantage::rloo()] {
            let function = GroupAdvantage {
                epsilon: 0.,
                ..function
            };
            let advantages = numbers(&function.compute(&rewards, size, scale)?)?;
            assert!(advantages.iter().all(|&a| a == 0.), "{advantages:?}");
        }
    }
    Ok(())
}

#[rstest]
fn a_large_offset_costs_no_precision(
    #[values(Scale::Group, Scale::Batch, Scale::None)] scale: Scale,
) -> Result<()> {
    for device in devices() {
        // Multiples of 2^-10, which f32 still holds exactly beside 1e4.
        let rewards = [0.25, 0.5, 0.125, 1.0, 0.75, 0.0, 0.0, 0.0009765625];
        let shifted = rewards.map(|r| r + 1e4);
        for function in [GroupAdvantage::grpo(), GroupAdvantage::rloo()] {
            let plain = function.compute(tensor(&rewards, device), 4, scale)?;
            let offset = function.compute(tensor(&shifted, device), 4, scale)?;
            assert_eq!(plain.to_vec1::<f32>()?, offset.to_vec1::<f32>()?);
        }
    }
    Ok(())
}

#[test]
fn groups_of_any_size_in_any_order() -> Result<()> {
    for device in devices() {
        // The groups a = {2, 1, 0} and b = {5, 3}, interleaved.
        let rewards = tensor(&[2., 5., 1., 0., 3.], device);
        let from_slice =
            GroupAdvantage::grpo().compute(&rewards, [7u32, 1, 7, 7, 1].as_slice(), Scale::None)?;
        assert_eq!(from_slice.to_vec1::<f32>()?, [1., 1., 0., -1., -1.]);
        let from_vec =
            GroupAdvantage::grpo().compute(&rewards, vec![7i64, -1, 7, 7, -1], Scale::None)?;
        assert_eq!(from_vec.to_vec1::<f32>()?, from_slice.to_vec1::<f32>()?);
        let rloo =
            GroupAdvantage::rloo().compute(&rewards, vec![7usize, 1, 7, 7, 1], Scale::None)?;
        assert_eq!(rloo.to_vec1::<f32>()?, [1.5, 2., 0., -1.5, -2.]);
    }
    Ok(())
}

#[rstest]
#[case(Baseline::GroupMean, true)]
#[case(Baseline::LeaveOneOut, true)]
#[case(Baseline::LengthWeighted, true)]
#[case(Baseline::BestOfOthers, true)]
#[case(Baseline::BatchMean, false)]
#[case(Baseline::Given, false)]
#[case(Baseline::None, false)]
fn only_a_baseline_of_the_group_may_be_divided_by_its_deviation(
    #[case] baseline: Baseline,
    #[case] expected: bool,
) {
    let function = GroupAdvantage {
        baseline,
        ..GroupAdvantage::grpo()
    };
    assert_eq!(function.validate().is_ok(), expected);
}

/// Unequal groups [2 | 1, 0] with verl's and twinkle's conventions.
#[rstest]
#[case(SingletonGroup::Raw, Scale::None, [2., 0.5, -0.5])]
#[case(SingletonGroup::Zero, Scale::None, [0., 0.5, -0.5])]
#[case(SingletonGroup::BatchMean, Scale::None, [1., 0.5, -0.5])]
#[case(SingletonGroup::BatchMean, Scale::Batch, [1., 0.5, -0.5])]
fn a_single_sample_follows_its_policy(
    #[case] single_sample: SingletonGroup,
    #[case] scale: Scale,
    #[case] expected: [f64; 3],
) -> Result<()> {
    for device in devices() {
        let function = GroupAdvantage {
            single_sample,
            epsilon: 0.,
            ..GroupAdvantage::grpo()
        };
        let advantages = function.compute(
            tensor(&[2., 1., 0.], device),
            [0u32, 1, 1].as_slice(),
            scale,
        )?;
        assert_close(&numbers(&advantages)?, &expected, 1e-7);
    }
    Ok(())
}

#[test]
fn components_are_summed_with_their_weights() -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&[[1f32, 0.], [0., 4.], [1., 4.], [0., 0.]], device)?;
        let sums = GroupAdvantage::grpo().compute(&rewards, 4, Scale::None)?;
        assert_eq!(sums.to_vec1::<f32>()?, [-1.5, 1.5, 2.5, -2.5]);
        let weighted = GroupAdvantage {
            reward_weights: Some(vec![1., 0.5]),
            ..GroupAdvantage::grpo()
        };
        let weighted = weighted.compute(&rewards, 4, Scale::None)?;
        assert_eq!(weighted.to_vec1::<f32>()?, [-0.5, 0.5, 1.5, -1.5]);
    }
    Ok(())
}

#[test]
fn missing_scores_can_be_excluded() -> Result<()> {
    for device in devices() {
        let function = GroupAdvantage {
            non_finite: NonFinite::Exclude,
            ..GroupAdvantage::grpo()
        };
        let rewards = tensor(
            &[
                1.,
                f32::NAN,
                0.,
                f32::INFINITY,
                /* one score */ 3.,
                f32::NAN,
                f32::NAN,
                f32::NAN,
            ],
            device,
        );
        for scale in [Scale::Group, Scale::Batch, Scale::None] {
            let advantages = numbers(&function.compute(&rewards, 4, scale)?)?;
            assert!(advantages.iter().all(|a| a.is_finite()), "{advantages:?}");
            assert_eq!(advantages[1], 0.);
            assert_eq!(advantages[4..], [0.; 4]);
            assert_eq!(advantages[0], -advantages[2]);
            assert!(advantages[0] > 0.3);
        }
        let statistics = function.group_statistics(&rewards, 4)?;
        assert_eq!(statistics.count.to_vec1::<u32>()?, [2, 1]);
        assert_eq!(statistics.mean.to_vec1::<f32>()?, [0.5, 3.]);
        assert_eq!(statistics.zero_variance.to_vec1::<u8>()?, [0, 1]);
    }
    Ok(())
}

#[test]
fn a_missing_score_changes_its_own_group_only() -> Result<()> {
    for device in devices() {
        let function = GroupAdvantage {
            non_finite: NonFinite::Exclude,
            ..GroupAdvantage::grpo()
        };
        let advantages = |missing: f32| {
            let rewards = tensor(&[1., 0., 3., 1., missing, 1., 5., 5., 5.], device);
            numbers(&function.compute(&rewards, 3, Scale::Group)?)
        };
        let (complete, with_nan) = (advantages(2.)?, advantages(f32::NAN)?);
        assert_eq!(with_nan[..3], complete[..3]);
        assert_eq!(with_nan[6..], complete[6..]);
        assert_eq!(with_nan[3..6], [0.; 3]);
        assert_ne!(complete[3..6], [0.; 3]);
    }
    Ok(())
}

#[test]
fn integers_and_half_precision_give_f32() -> Result<()> {
    for device in devices() {
        let expected = [-0.5, 0.5, -0.5, 0.5];
        for dtype in [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16] {
            let rewards = tensor(&[0., 1., 0., 1.], device).to_dtype(dtype)?;
            let advantages = GroupAdvantage::grpo().compute(&rewards, 4, Scale::None)?;
            assert_eq!(advantages.dtype(), DType::F32);
            assert_close(&numbers(&advantages)?, &expected, 0.);
        }
    }
    Ok(())
}

#[test]
fn the_settings_survive_serde() -> Result<()> {
    let function = GroupAdvantage {
        single_sample: SingletonGroup::BatchMean,
        reward_weights: Some(vec![1., 2.]),
        ..GroupAdvantage::rloo()
    };
    let text = serde_json::to_string(&function).map_err(candle_core::Error::wrap)?;
    assert_eq!(
        serde_json::from_str::<GroupAdvantage>(&text).map_err(candle_core::Error::wrap)?,
        function
    );
    assert!(serde_json::from_str::<GroupAdvantage>(r#"{"epsilo": 1}"#).is_err());
    Ok(())
}
