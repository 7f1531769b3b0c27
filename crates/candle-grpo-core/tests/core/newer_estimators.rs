//! Cost penalties, roles, teacher weights, curricula and schedules.

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::advantage::{RoleBaselines, TeacherWeight};
use candle_grpo_core::rewards::{
    CosineLength, CostPenalty, Costs, NormLevel, RewardNorm, StdCenter,
};
use candle_grpo_core::schedule::{CoefSchedule, Decay};
use candle_grpo_core::selection::{AdvantageRange, DifficultyPools, TaskScores};
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Groups, RewardShaping, TokenAdvantage};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use proptest::prelude::*;

#[test]
fn the_cost_of_a_sample_is_relative_to_its_group() -> Result<()> {
    for device in devices() {
        let tensor = |x: &[f64]| Tensor::new(x, device);
        let (output, turns) = (tensor(&[4., 8., 100., 50.])?, tensor(&[1., 3., 2., 2.])?);
        let costs = Costs {
            output_tokens: Some(&output),
            turns: Some(&turns),
            input_tokens: None,
        };
        let penalty = CostPenalty {
            output_tokens: 0.5,
            turns: 0.3,
            input_tokens: 0.,
        };
        let rewards = tensor(&[1., 0., 2., 2.])?;
        let got = numbers(&penalty.apply(&rewards, 2, &costs)?)?;
        let expected = [
            1. - 0.5 * (0.5 * 0.5 + 0.3 / 3.),
            -0.5 * (0.5 + 0.3),
            2. - 2. * (0.5 + 0.3),
            2. - 2. * (0.25 + 0.3),
        ];
        assert_close(&got, &expected, 1e-12);
        // A missing score stays missing, and a group that fails has no penalty.
        let rewards = tensor(&[f64::NAN, 1., 0., 0.])?;
        let got = numbers(&penalty.apply(&rewards, 2, &costs)?)?;
        assert!(got[0].is_nan());
        assert_close(&got[1..], &[1. - 0.8, 0., 0.], 1e-12);
        let absent = Costs::default();
        assert_eq!(
            message(penalty.apply(&rewards, 2, &absent)),
            "output_tokens: absent, must be given for its penalty"
        );
    }
    Ok(())
}

proptest! {
    /// A role's moving average does not depend on other roles' samples.
    #[test]
    fn roles_do_not_mix(
        samples in prop::collection::vec((-5f64..5., 0usize..3), 1..30), decay in 0f64..=1.,
    ) {
        let rewards: Vec<f64> = samples.iter().map(|(x, _)| *x).collect();
        let roles: Vec<String> = samples.iter().map(|(_, role)| role.to_string()).collect();
        let mut all = RoleBaselines::new(decay).unwrap();
        let advantages = all.advantages(&rewards, &roles).unwrap();
        for role in ["0", "1", "2"] {
            let own: Vec<f64> =
                samples.iter().filter(|(_, r)| r.to_string() == role).map(|(x, _)| *x).collect();
            let mut alone = RoleBaselines::new(decay).unwrap();
            let expected = alone.advantages(&own, &vec![role; own.len()]).unwrap();
            let got: Vec<f64> =
                (0..roles.len()).filter(|&i| roles[i] == role).map(|i| advantages[i]).collect();
            prop_assert_eq!(got, expected);
            prop_assert_eq!(all.baselines().get(role), alone.baselines().get(role));
        }
    }

    /// A teacher weight moves credit and never changes an advantage's sign.
    #[test]
    fn a_teacher_keeps_the_sign_of_an_advantage(
        advantage in -3f64..3., teacher in prop::collection::vec(-40f64..0., 4),
        share in 0f64..=1., clip in 0.01f64..1.,
    ) {
        let device = Device::Cpu;
        let mask = Tensor::new(&[[1u8, 1, 1, 0]], &device).unwrap();
        let teacher = Tensor::from_vec(teacher, (1, 4), &device).unwrap();
        let old = Tensor::new(&[[-1f64, -2., -3., f64::NAN]], &device).unwrap();
        let rewards = Tensor::new(&[advantage], &device).unwrap();
        let batch = AdvantageBatch::new(&rewards, 1)
            .response_mask(&mask)
            .old_log_probs(&old)
            .teacher_log_probs(&teacher);
        let tokens = TokenAdvantage {
            teacher_weight: Some(TeacherWeight {
                share: CoefSchedule::constant(share),
                clip,
                negative_only: false,
            }),
            ..TokenAdvantage::default()
        };
        let got = numbers(&tokens.estimate(&batch).unwrap().advantages).unwrap();
        for x in &got[..3] {
            prop_assert!(x * advantage >= 0.);
            prop_assert!((x - advantage).abs() <= clip * advantage.abs() + 1e-12);
        }
        prop_assert_eq!(got[3], 0.);
    }
}

#[test]
fn a_teacher_weight_follows_its_schedule() -> Result<()> {
    let device = Device::Cpu;
    let mask = Tensor::new(&[[1u8]], &device)?;
    let tensor = |x: f64| Tensor::new(&[[x]], &device);
    let weight = TeacherWeight {
        share: CoefSchedule {
            warmup_steps: 4,
            decay_steps: Some(4),
            ..CoefSchedule::constant(0.8)
        },
        clip: 0.5,
        negative_only: true,
    };
    let compute = |reward: f64, step: usize| -> Result<f64> {
        let batch = AdvantageBatch::new(&Tensor::new(&[reward], &device)?, 1)
            .response_mask(&mask)
            .old_log_probs(&tensor(-1.)?)
            .teacher_log_probs(&tensor(-9.)?)
            .step(step);
        let tokens = TokenAdvantage {
            teacher_weight: Some(weight),
            ..TokenAdvantage::default()
        };
        Ok(numbers(&tokens.estimate(&batch)?.advantages)?[0])
    };
    // The teacher finds the token worse: a negative advantage counts 1.5 times.
    for (step, share) in [(0, 0.), (2, 0.4), (4, 0.8), (6, 0.4), (99, 0.)] {
        assert_close(&[compute(-1., step)?], &[-(1. + 0.5 * share)], 1e-12);
        assert_eq!(compute(1., step)?, 1.);
    }
    Ok(())
}

#[test]
fn an_advantage_without_a_teacher_keeps_its_weight() -> Result<()> {
    let device = Device::Cpu;
    let ones = Tensor::new(&[[1u8], [1]], &device)?;
    let batch = AdvantageBatch::new(&Tensor::new(&[-1f64, -1.], &device)?, 1)
        .response_mask(&ones)
        .old_log_probs(&Tensor::new(&[[-1f64], [-1.]], &device)?)
        .teacher_log_probs(&Tensor::new(&[[-9f64], [f64::NAN]], &device)?)
        .teacher_mask(&Tensor::new(&[[1u8], [0]], &device)?);
    let tokens = TokenAdvantage {
        teacher_weight: Some(TeacherWeight {
            clip: 0.5,
            ..TeacherWeight::default()
        }),
        ..TokenAdvantage::default()
    };
    let found = numbers(&tokens.estimate(&batch)?.advantages)?;
    assert_close(&found, &[-1.5, -1.], 1e-12);
    Ok(())
}

#[test]
fn a_cosine_decay_ends_at_its_end() {
    let schedule = CoefSchedule {
        warmup_steps: 0,
        decay_steps: Some(2),
        end: 0.2,
        decay: Decay::Cosine,
        ..CoefSchedule::constant(1.)
    };
    let values: Vec<f64> = (0..4).map(|step| schedule.at(step)).collect();
    assert_close(&values, &[1., 0.6, 0.2, 0.2], 1e-12);
    let wrong = CoefSchedule {
        end: -1.,
        ..schedule
    };
    assert!(wrong.validate().is_err());
}

#[test]
fn a_task_moves_between_pools_with_its_latest_group() -> Result<()> {
    let pools = DifficultyPools {
        thresholds: vec![0.25, 0.75],
        weights: vec![0.1, 2.],
        unseen_weight: 0.7,
    };
    let mut scores = TaskScores::default();
    scores.record(1, &[0., 0.5])?;
    assert_eq!(scores.weights(3, &pools)?, [0.7, 0.1, 0.7]);
    // A score above every threshold is in the last pool.
    scores.record(1, &[1., 1.])?;
    scores.record(2, &[0.25])?;
    assert_eq!(scores.weights(3, &pools)?, [0.7, 2., 0.1]);
    assert_eq!(scores.occupancy(3, &pools), [1, 1]);
    assert!(scores.record(0, &[f64::NAN]).is_err());
    let wrong = DifficultyPools {
        thresholds: vec![0.5, 0.5],
        ..pools
    };
    assert!(message(scores.weights(1, &wrong)).starts_with("thresholds: [0.5, 0.5], must be"));
    Ok(())
}

#[test]
fn a_gate_admits_groups_with_an_advantage_outside() -> Result<()> {
    for device in devices() {
        let x = Tensor::new(&[[0f32, 0.], [0.1, -0.1], [0., 0.3]], device)?;
        let admits = |min, max| numbers(&AdvantageRange { min, max }.admits(&x)?);
        assert_eq!(admits(0., 0.)?, [0., 1., 1.]);
        assert_eq!(admits(-0.2, 0.2)?, [0., 0., 1.]);
    }
    Ok(())
}

#[test]
fn roles_are_compared_within_their_episode_or_over_all() -> Result<()> {
    let groups = Groups::of_roles(&[0, 1, 1, 0, 1], &[5, 5, 5, 6, 6], &[1])?;
    assert_eq!(groups, Groups::Ids(vec![0, 1, 1, 0, 2]));
    assert!(message(Groups::of_roles(&[0], &[], &[])).starts_with("episodes: 0 for 1 roles"));
    Ok(())
}

#[test]
fn a_deviation_about_the_subtracted_mean_needs_no_second_reward() -> Result<()> {
    for device in devices() {
        let rewards = Tensor::new(&[1f64, 3., 5.], device)?;
        let normalize = |norm: RewardNorm, group: usize| {
            let shaping = RewardShaping {
                norm: RewardNorm {
                    epsilon: 1e-12,
                    ..norm
                },
                ..RewardShaping::default()
            };
            numbers(&shaping.apply(&rewards, group, None)?.rewards)
        };
        let about = RewardNorm {
            std_center: StdCenter::SubtractedMean,
            ..RewardNorm::default()
        };
        let batch = RewardNorm {
            mean: NormLevel::Batch,
            leave_one_out: true,
            ..about
        };
        assert_close(&normalize(batch, 3)?, &[-3., 0., 3.], 1e-9);
        let alone = RewardNorm {
            mean: NormLevel::Batch,
            std: NormLevel::Group,
            ..about
        };
        assert_close(&normalize(alone, 1)?, &[-2., 0., 2.], 1e-9);
        let biased = RewardNorm { ddof: 0, ..alone };
        assert_close(&normalize(biased, 1)?, &[-1., 0., 1.], 1e-9);
        let centered = RewardNorm {
            std: NormLevel::Batch,
            ..about
        };
        let root = (35f64 / 2.).sqrt();
        assert_close(
            &normalize(centered, 3)?,
            &[1. / root, 3. / root, 5. / root],
            1e-9,
        );
    }
    Ok(())
}

#[test]
fn a_periodic_cosine_rewards_the_longest_answers_again() -> Result<()> {
    let bounded = CosineLength {
        max_length: 10,
        ..CosineLength::default()
    };
    let periodic = CosineLength {
        periodic: true,
        ..bounded
    };
    assert_eq!(bounded.compute(20, true)?, bounded.compute(10, true)?);
    assert_close(
        &[periodic.compute(20, true)?],
        &[periodic.compute(0, true)?],
        1e-12,
    );
    Ok(())
}
