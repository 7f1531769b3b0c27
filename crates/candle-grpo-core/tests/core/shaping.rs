use candle_core::{Result, Tensor, Var};
use candle_grpo_core::advantage::{KlPenalty, Whitening};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::rewards::{NormLevel, RewardNorm, RunningMoments};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, Kl, KlEstimator, Mask, RewardShaping, TokenAdvantage,
};
use candle_grpo_test_support::{assert_close, devices, gradient, message, numbers};
use rstest::rstest;

use crate::tensor;

const EXAMPLE: [f64; 8] = [0., 1., 0., 1., 1., 0., 0., 0.];

/// ROLL's published values, and a combination that fails in ROLL: a group std without the group
/// mean.
#[rstest]
#[case(NormLevel::Group, NormLevel::Group, [-0.866024, 0.866024, 1.499997, -0.499999])]
#[case(NormLevel::Group, NormLevel::Batch, [-0.96609, 0.96609, 1.44914, -0.48305])]
#[case(NormLevel::Batch, NormLevel::Batch, [-0.724567, 1.207612, 1.207612, -0.724567])]
#[case(NormLevel::None, NormLevel::Group, [0., 1.732048, 1.999996, 0.])]
#[case(NormLevel::Batch, NormLevel::Group, [-0.649518, 1.082530, 1.249998, -0.749999])]
fn mean_and_std_are_chosen_independently(
    #[case] mean: NormLevel,
    #[case] std: NormLevel,
    #[case] values: [f64; 4],
) -> Result<()> {
    for device in devices() {
        let [first, second, success, failure] = values;
        let shaping = RewardShaping {
            norm: RewardNorm {
                mean,
                std,
                ..Default::default()
            },
            ..Default::default()
        };
        let shaped = shaping
            .apply(Tensor::new(&EXAMPLE, device)?, 4, None)?
            .rewards;
        let expected = [
            first, second, first, second, success, failure, failure, failure,
        ];
        assert_close(&numbers(&shaped)?, &expected, 1e-5);
    }
    Ok(())
}

#[test]
fn shift_and_scale_come_before_the_clip() -> Result<()> {
    for device in devices() {
        let shaping = RewardShaping {
            shift: 1.,
            scale: 3.,
            clip: Some(4.),
            ..Default::default()
        };
        let shaped = shaping.apply(tensor(&[0., 1., -3., 0.25], device), 2, None)?;
        assert_eq!(shaped.rewards.to_vec1::<f32>()?, [3., 4., -4., 3.75]);
        assert_eq!(
            shaped.metrics.to_host()?.get("reward_clip_fraction"),
            Some(0.5)
        );
    }
    Ok(())
}

#[test]
fn running_moments_cover_all_rewards_so_far() -> Result<()> {
    for device in devices() {
        let shaping = RewardShaping {
            norm: RewardNorm {
                mean: NormLevel::Running,
                std: NormLevel::Running,
                epsilon: 1e-12,
                ..Default::default()
            },
            ..Default::default()
        };
        let mut running = RunningMoments::new(device)?;
        shaping.apply(
            tensor(&[1e4, 1e4 + 1., 1e4 + 5.], device),
            3,
            Some(&mut running),
        )?;
        let restored = RunningMoments::from_state(running.state()?, device)?;
        let mut running = restored;
        let second = shaping
            .apply(tensor(&[1e4 + 2., 1e4 + 7.], device), 2, Some(&mut running))?
            .rewards;
        // {0, 1, 5, 2, 7} has mean 3 and variance 34 / 4.
        let std = (34f64 / 4.).sqrt();
        assert_close(&numbers(&second)?, &[-1. / std, 4. / std], 1e-6);
        assert_eq!(running.state()?.count, 5.);
    }
    Ok(())
}

/// Masked positions hold NaN, which must not reach any result.
#[test]
fn the_token_stage_applies_its_steps_in_order() -> Result<()> {
    for device in devices() {
        let nan = f32::NAN;
        let mask = Tensor::new(&[[1u8, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], device)?;
        let old = Tensor::new(
            &[[-1f32, -2., nan, nan], [-1., -1., -1., nan], [nan; 4]],
            device,
        )?;
        let reference = Tensor::new(
            &[[-2f32, -1., nan, nan], [-1., -1., -4., nan], [nan; 4]],
            device,
        )?;
        let shaping = TokenAdvantage {
            kl_penalty: Some(KlPenalty {
                coef: 0.5,
                kl: Kl::new(KlEstimator::K1),
            }),
            token_reward_clip: Some(1.),
            gamma: 0.5,
            advantage_clip: Some(0.7),
            ..Default::default()
        };
        let rewards = tensor(&[1., 3., 9.], device);
        let batch = AdvantageBatch::new(&rewards, 1)
            .response_mask(&mask)
            .old_log_probs(&old)
            .ref_log_probs(&reference);
        let tokens = shaping.estimate(&batch)?;
        // k1 is [1, -1 | 0, 0, 3]: token rewards [-0.5, 1.5 | 0, 0, 1.5], clipped to [-0.5, 1 | 0,
        // 0, 1].
        let returns = [0., 1., 0., 0., 0.25, 0.5, 1., 0., 0., 0., 0., 0.];
        assert_close(&numbers(&tokens.returns.unwrap())?, &returns, 1e-7);
        let advantages = [0., 0.7, 0., 0., 0.25, 0.5, 0.7, 0., 0., 0., 0., 0.];
        assert_close(&numbers(&tokens.advantages)?, &advantages, 1e-7);
        let metrics = tokens.metrics.to_host()?;
        assert_close(
            &[
                "reward_kl",
                "reward_kl_per_sequence",
                "token_reward_clip_fraction",
                "advantage_clip_fraction",
            ]
            .map(|m| metrics.get(m).unwrap()),
            &[0.6, 0.5, 0.4, 0.4],
            1e-7,
        );
    }
    Ok(())
}

#[test]
fn whitened_advantages_have_mean_zero_and_variance_one_over_the_mask() -> Result<()> {
    for device in devices() {
        let mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], device)?;
        let shaping = TokenAdvantage {
            whiten_advantages: true,
            ..Default::default()
        };
        let rewards = tensor(&[2., -1.], device);
        let batch = AdvantageBatch::new(&rewards, 1).response_mask(&mask);
        let advantages = shaping.estimate(&batch)?.advantages;
        // {2, 2, 2, -1}: mean 1.25, variance 2.25.
        assert_close(&numbers(&advantages)?, &[0.5, 0.5, 0.5, -1.5, 0., 0.], 1e-6);
    }
    Ok(())
}

#[test]
fn whitening_of_fewer_than_two_tokens_changes_nothing() -> Result<()> {
    for device in devices() {
        let mask = Mask::new(&Tensor::new(&[[0u8, 1, 0]], device)?)?;
        let values = Tensor::new(&[[5f32, 3., 7.]], device)?;
        let whitened = Whitening::default().apply(&values, &mask)?;
        assert_eq!(whitened.to_vec2::<f32>()?, values.to_vec2::<f32>()?);
    }
    Ok(())
}

#[rstest]
#[case(KlEstimator::K1, [0.5, -1.])]
#[case(KlEstimator::K2, [0.125, 0.5])]
#[case(KlEstimator::K3, [0.106531, 0.718282])]
#[case(KlEstimator::Abs, [0.5, 1.])]
fn kl_estimators_have_their_published_values(
    #[case] estimator: KlEstimator,
    #[case] expected: [f64; 2],
) -> Result<()> {
    for device in devices() {
        let kl = Kl::new(estimator).per_token(
            &tensor(&[-1., -2.], device),
            &tensor(&[-1.5, -1.], device),
            None,
        )?;
        assert_close(&numbers(&kl)?, &expected, 1e-6);
    }
    Ok(())
}

/// `sum_v p (log p - log q)`, with derivative `p (log p - log q + 1)` by each `log p`. An entry
/// with probability 0 adds nothing.
#[test]
fn the_full_kl_is_the_divergence_of_the_distributions() -> Result<()> {
    let (p, q) = ([0.25f64, 0.75, 0.], [0.5f64, 0.125, 0.375]);
    let terms = [0.25 * 0.5f64.ln(), 0.75 * 6f64.ln()];
    for device in devices() {
        let log_p = Var::new(&[p.map(f64::ln)], device)?;
        let kl = Kl::full(&log_p, &Tensor::new(&[q.map(f64::ln)], device)?)?;
        assert_close(&numbers(&kl)?, &[terms[0] + terms[1]], 1e-12);
        let expected = [terms[0] + 0.25, terms[1] + 0.75, 0.];
        assert_close(&gradient(&kl.backward()?, &log_p)?, &expected, 1e-12);
        assert!(message(Kl::full(&log_p, &Tensor::new(&[0.5f64], device)?)).contains("shape [1]"));
    }
    Ok(())
}

/// Dividing by the standard deviation of equal rewards would divide by epsilon alone.
#[rstest]
#[case(NormLevel::None, [1., 1., 1., 1.])]
#[case(NormLevel::Batch, [0.25, 0.25, 0.25, 0.25])]
#[case(NormLevel::Running, [0.25, 0.25, 0.25, 0.25])]
#[case(NormLevel::Group, [0.; 4])]
fn a_flat_group_is_not_divided(#[case] mean: NormLevel, #[case] expected: [f64; 4]) -> Result<()> {
    for device in devices() {
        let norm = RewardNorm {
            mean,
            std: NormLevel::Group,
            ..Default::default()
        };
        let shaping = RewardShaping {
            norm,
            ..Default::default()
        };
        let mut running = RunningMoments::new(device)?;
        let rewards = [1., 1., 1., 1., 0., 1., 0., 1.];
        let shaped = numbers(
            &shaping
                .apply(tensor(&rewards, device), 4, Some(&mut running))?
                .rewards,
        )?;
        assert_close(&shaped[..4], &expected, 1e-6);
        assert!((shaped[5] - shaped[4] - 1.732048).abs() < 1e-5);
    }
    Ok(())
}

/// A token with probability 0, or nearly 0, under the reference has a finite gradient, and the same
/// value as with the estimator's own gradient.
#[rstest]
#[case(KlGradient::StraightThrough)]
#[case(KlGradient::ImportanceWeighted { max: 10. })]
fn an_impossible_token_has_a_finite_divergence(#[case] gradient: KlGradient) -> Result<()> {
    for device in devices() {
        let kl = Kl {
            gradient,
            ..Kl::default()
        };
        let log_probs = Var::from_tensor(&tensor(&[-1., -1., -3.], device))?;
        let reference = tensor(&[f32::NEG_INFINITY, f32::MIN, -1.], device);
        let old = log_probs.as_detached_tensor();
        let value = kl.per_token(&log_probs, &reference, Some(&old))?;
        // exp(-20) + 20 - 1, and exp(2) - 2 - 1.
        assert_close(&numbers(&value)?, &[19., 19., 4.389056], 1e-5);
        let gradients = value.sum_all()?.backward()?;
        let gradient = gradients.get(&log_probs).map(numbers).transpose()?;
        let gradient = gradient.unwrap_or_default();
        assert_eq!(gradient[0], 0.);
        assert!(gradient[1].is_finite());
        assert_close(&gradient[2..], &[-2.], 1e-6);
    }
    Ok(())
}
