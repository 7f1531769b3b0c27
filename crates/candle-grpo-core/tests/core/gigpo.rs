//! Trajectory steps: returns, state groups, and GiGPO's two levels.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::advantage::{Baseline, BaselinePopulation, KlPenalty, SingletonGroup};
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::trajectories::{EpisodePopulation, Gigpo, Steps};
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Scale};
use candle_grpo_test_support::{assert_close, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::tensor;

/// Task 0: trajectory 10 visits the states a, b, a with rewards 0, 0, 1; trajectory 11 visits a, c
/// with rewards 1, 2; and trajectory 12 has one step in a without reward. Task 1: trajectory 13 is
/// in a too, but states in different tasks are distinct. The rows are shuffled.
const TASKS: [u32; 7] = [0, 0, 1, 0, 0, 0, 0];
const TRAJECTORIES: [u32; 7] = [10, 11, 13, 10, 12, 11, 10];
const NUMBERS: [i64; 7] = [2, 1, 0, 0, 0, 0, 1];
const STATES: [u32; 7] = [1, 3, 1, 1, 1, 1, 2];
const REWARDS: [f32; 7] = [1., 2., 9., 0., 0., 1., 0.];

fn steps() -> Steps {
    Steps::new(TRAJECTORIES.as_slice(), STATES.as_slice()).numbers(NUMBERS.to_vec())
}

fn mean(change: impl FnOnce(&mut Gigpo)) -> Gigpo {
    let mut gigpo = Gigpo {
        gamma: 0.5,
        ..Gigpo::default()
    };
    gigpo.normalization.scale = Scale::None;
    change(&mut gigpo);
    gigpo
}

fn estimate(gigpo: &Gigpo, device: &Device) -> Result<Vec<f64>> {
    let rewards = tensor(&REWARDS, device);
    let (tasks, steps) = (TASKS.as_slice(), steps());
    let batch = AdvantageBatch::new(&rewards, tasks).steps(&steps);
    numbers(&gigpo.estimate(&batch)?.advantages)
}

#[test]
fn returns_accumulate_over_the_steps_of_a_trajectory() -> Result<()> {
    for device in devices() {
        let returns = steps().discounted_returns(&tensor(&REWARDS, device), 0.5)?;
        assert_close(&numbers(&returns)?, &[1., 2., 9., 0.25, 0., 2., 0.5], 0.);
        // Every second number of a tensor.
        let rewards = tensor(&REWARDS, device);
        let doubled = Tensor::stack(&[&rewards, &rewards], 1)?;
        let strided = doubled.narrow(1, 1, 1)?.squeeze(1)?;
        let strided_returns = steps().discounted_returns(&strided, 0.5)?;
        assert_close(&numbers(&strided_returns)?, &numbers(&returns)?, 0.);
        let in_order = Steps::new(3, 1).discounted_returns(&tensor(&[1., 2., 4.], device), 1.)?;
        assert_close(&numbers(&in_order)?, &[7., 6., 4.], 0.);
    }
    Ok(())
}

/// In task 0, the episodes score 1, 3 and 0. The returns in its state a are 1, 0.25, 0 and 2, with
/// mean 0.8125.
#[rstest]
#[case::episodes(
    mean(|g| g.step_weight = 0.),
    [1. - 4. / 3., 3. - 4. / 3., 0., 1. - 4. / 3., -4. / 3., 3. - 4. / 3., 1. - 4. / 3.]
)]
// 1, 3, 1, 0, 3, 1 over the steps.
#[case::episodes_of_steps(
    mean(|g| { g.step_weight = 0.; g.episode_population = EpisodePopulation::Steps; }),
    [-0.5, 1.5, 0., -0.5, -1.5, 1.5, -0.5]
)]
#[case::steps(
    mean(|g| g.episode_weight = 0.),
    [0.1875, 0., 0., -0.5625, -0.8125, 1.1875, 0.]
)]
#[case::both(
    mean(|g| g.step_weight = 2.),
    [1. / 24., 5. / 3., 0., -35. / 24., -4. / 3. - 1.625, 5. / 3. + 2.375, -1. / 3.]
)]
#[case::identity(
    mean(|g| g.normalization.baseline = Baseline::None),
    [2., 5., 18., 1.25, 0., 5., 1.5]
)]
#[case::of_one_step_the_score_itself(
    mean(|g| { g.episode_weight = 0.; g.normalization.single_sample = SingletonGroup::Raw; }),
    [0.1875, 2., 9., -0.5625, -0.8125, 1.1875, 0.5]
)]
#[case::clipped(
    mean(|g| { g.episode_weight = 0.; g.normalization.clip = Some([-0.6, 1.]); }),
    [0.1875, 0., 0., -0.5625, -0.6, 1., 0.]
)]
fn both_levels_are_relative_to_their_group(
    #[case] gigpo: Gigpo,
    #[case] expected: [f64; 7],
) -> Result<()> {
    for device in devices() {
        assert_close(&estimate(&gigpo, device)?, &expected, 1e-6);
    }
    Ok(())
}

/// With deviations, by ROLL's formula: variances 7 / 3 and 2.421875 / 3.
#[test]
fn both_levels_divide_by_the_deviation_of_their_group() -> Result<()> {
    let episode = (7f64 / 3.).sqrt() + 1e-6;
    let step = (2.421875f64 / 3.).sqrt() + 1e-6;
    let expected = [
        -1. / 3. / episode + 0.1875 / step,
        5. / 3. / episode,
        0.,
        -1. / 3. / episode - 0.5625 / step,
        -4. / 3. / episode - 0.8125 / step,
        5. / 3. / episode + 1.1875 / step,
        -1. / 3. / episode,
    ];
    let gigpo = Gigpo {
        gamma: 0.5,
        ..Gigpo::default()
    };
    for device in devices() {
        assert_close(&estimate(&gigpo, device)?, &expected, 1e-6);
    }
    Ok(())
}

#[test]
fn episode_scores_can_be_given() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&REWARDS, device);
        let scores = tensor(&[4., 0., 7., 4., 2., 0., 4.], device);
        let scores = Tensor::stack(&[&scores, &rewards], 1)?;
        let scores = scores.narrow(1, 0, 1)?.squeeze(1)?;
        let (tasks, steps) = (TASKS.as_slice(), steps());
        let batch = AdvantageBatch::new(&rewards, tasks)
            .steps(&steps)
            .episode_rewards(&scores);
        let out = mean(|g| g.step_weight = 0.).estimate(&batch)?;
        assert_close(
            &numbers(&out.advantages)?,
            &[2., -2., 0., 2., 0., -2., 2.],
            0.,
        );
        let metrics = out.metrics.to_host()?;
        assert_close(
            &["state_group_size", "state_alone_fraction"].map(|m| metrics.get(m).unwrap()),
            &[7. / 4., 3. / 7.],
            1e-6,
        );
    }
    Ok(())
}

/// A missing score excludes the episode and the steps up to it; the others are compared.
#[test]
fn missing_scores_can_be_excluded() -> Result<()> {
    for device in devices() {
        let mut rewards = REWARDS;
        rewards[6] = f32::NAN; // the step of trajectory 10 in b
        let rewards = tensor(&rewards, device);
        let (tasks, steps) = (TASKS.as_slice(), steps());
        let batch = AdvantageBatch::new(&rewards, tasks).steps(&steps);
        let gigpo = mean(|g| g.normalization.non_finite = NonFinite::Exclude);
        let got = numbers(&gigpo.estimate(&batch)?.advantages)?;
        // Episodes 3 and 0, and returns 1, 0 and 2 in state a.
        assert_close(&got, &[0., 1.5, 0., 0., -2.5, 2.5, 0.], 1e-6);
        let error = message(Gigpo::default().estimate(&batch));
        assert!(error.starts_with("rewards: sample 6 is NaN"), "{error}");
    }
    Ok(())
}

#[rstest]
#[case(mean(|g| g.gamma = 1.5), "gamma: 1.5, must be from 0 to 1")]
#[case(mean(|g| g.step_weight = -1.), "step_weight: -1, must be")]
#[case(mean(|g| g.episode_weight = f64::NAN), "episode_weight: NaN, must be")]
#[case(
    mean(|g| g.normalization.kl_penalty = Some(KlPenalty::default())),
    "normalization.kl_penalty: given"
)]
#[case(
    mean(|g| g.normalization.baseline = Baseline::Given),
    "normalization: Given of All"
)]
#[case(
    mean(|g| g.normalization.population = BaselinePopulation::Unmasked),
    "normalization: GroupMean of Unmasked"
)]
#[case(mean(|g| g.normalization.ddof = 2), "normalization.ddof: 2")]
fn invalid_options_are_named(#[case] gigpo: Gigpo, #[case] expected: &str) {
    let got = message(gigpo.validate());
    assert!(got.starts_with(expected), "{got}");
    for device in devices() {
        assert_eq!(message(estimate(&gigpo, device)), got);
    }
}

#[test]
fn inconsistent_rows_are_refused() -> Result<()> {
    for device in devices() {
        let rewards = tensor(&[0., 1.], device);
        let scores = tensor(&[0.], device);
        let error = |steps: Steps, tasks: [u32; 2]| {
            let batch = AdvantageBatch::new(&rewards, tasks.as_slice()).steps(&steps);
            message(Gigpo::default().estimate(&batch))
        };
        let one = || Steps::new(2, 1);
        assert_eq!(
            error(one(), [0, 1]),
            "groups: a trajectory is in two groups, all its steps must be in one"
        );
        assert_eq!(
            error(one().numbers(vec![3, 3]), [0, 0]),
            "numbers: rows 0 and 1 are both step 3 of trajectory 0, there must be one row for a step"
        );
        assert!(
            error(one().numbers(vec![3]), [0, 0]).starts_with("numbers: 1 numbers of steps for 2")
        );
        assert!(
            error(Steps::new(3, 1), [0, 0]).starts_with("trajectories: blocks of 3 for 2 rows")
        );
        assert!(error(Steps::new(2, vec![1u32]), [0, 0]).starts_with("states: 1 ids for 2 rows"));
        let batch = AdvantageBatch::new(&rewards, 2);
        let without = message(Gigpo::default().estimate(&batch));
        assert!(without.starts_with("steps: absent"), "{without}");
        let steps = one();
        let batch = batch.steps(&steps).episode_rewards(&scores);
        let short = message(Gigpo::default().estimate(&batch));
        assert!(short.starts_with("episode_rewards: shape [1], must be [2]"));
        let table = Tensor::zeros((2, 1), candle_core::DType::F32, device)?;
        assert!(message(one().discounted_returns(&table, 1.)).starts_with("rewards: shape [2, 1]"));
    }
    Ok(())
}

#[test]
fn the_settings_survive_serde() -> serde_json::Result<()> {
    let gigpo = mean(|g| g.episode_population = EpisodePopulation::Steps);
    let read: Gigpo = serde_json::from_str(&serde_json::to_string(&gigpo)?)?;
    assert_eq!(read, gigpo);
    assert!(serde_json::from_str::<Gigpo>(r#"{"omega": 1}"#).is_err());
    Ok(())
}

/// A batch row: task, trajectory, step number, state, reward.
type Row = (u32, u32, i64, u32, f64);

/// Two to four tasks, shuffled. Each has two or three trajectories with up to four steps in three
/// states.
fn rows() -> impl Strategy<Value = Vec<Row>> {
    let step = (0u32..3, -16i32..16);
    let trajectory = prop::collection::vec(step, 1..5);
    let task = prop::collection::vec(trajectory, 2..4);
    prop::collection::vec(task, 2..4)
        .prop_map(|tasks| {
            let mut rows = Vec::new();
            for (task, trajectories) in tasks.iter().enumerate() {
                for (trajectory, steps) in trajectories.iter().enumerate() {
                    for (number, &(state, reward)) in steps.iter().enumerate() {
                        let id = (task * 10 + trajectory) as u32;
                        let reward = f64::from(reward) / 8.;
                        rows.push((task as u32, id, number as i64, state, reward));
                    }
                }
            }
            rows
        })
        .prop_shuffle()
}

fn estimate_rows(rows: &[Row], gigpo: &Gigpo, device: &Device) -> Result<Vec<f64>> {
    let column = |f: fn(&Row) -> u32| rows.iter().map(f).collect::<Vec<u32>>();
    let rewards: Vec<f64> = rows.iter().map(|r| r.4).collect();
    let rewards = Tensor::new(rewards, device)?;
    let steps =
        Steps::new(column(|r| r.1), column(|r| r.3)).numbers(rows.iter().map(|r| r.2).collect());
    let batch = AdvantageBatch::new(&rewards, column(|r| r.0)).steps(&steps);
    numbers(&gigpo.estimate(&batch)?.advantages)
}

/// GiGPO in plain loops: `(x - mean) / (std + 1e-6)` among entries with the same key, 0 for a
/// single entry.
fn by_loops(rows: &[Row], gamma: f64) -> Vec<f64> {
    let sum = |row: &Row, weight: &dyn Fn(i64) -> f64| -> f64 {
        let later = rows.iter().filter(|r| r.1 == row.1);
        later.map(|r| weight(r.2 - row.2) * r.4).sum()
    };
    let from = |by: i64| if by < 0 { 0. } else { gamma.powi(by as i32) };
    let normalized = |x: f64, among: &[f64]| {
        let n = among.len() as f64;
        let mean = among.iter().sum::<f64>() / n;
        let square = among.iter().map(|y| (y - mean).powi(2)).sum::<f64>();
        if n == 1. {
            0.
        } else {
            (x - mean) / ((square / (n - 1.)).sqrt() + 1e-6)
        }
    };
    rows.iter()
        .map(|row| {
            let episodes: HashMap<u32, f64> = rows
                .iter()
                .filter(|r| r.0 == row.0)
                .map(|r| (r.1, sum(r, &|_| 1.)))
                .collect();
            let episodes: Vec<f64> = episodes.into_values().collect();
            let here = rows.iter().filter(|r| (r.0, r.3) == (row.0, row.3));
            let returns: Vec<f64> = here.map(|r| sum(r, &from)).collect();
            normalized(sum(row, &|_| 1.), &episodes) + normalized(sum(row, &from), &returns)
        })
        .collect()
}

proptest! {
    #[test]
    fn advantages_equal_those_of_plain_loops(rows in rows()) {
        let gigpo = Gigpo { gamma: 0.5, ..Gigpo::default() };
        let expected = by_loops(&rows, gigpo.gamma);
        for device in devices() {
            let got = estimate_rows(&rows, &gigpo, device).unwrap();
            // Where all returns in a group are equal, the loops leave a residue.
            prop_assert!(got.iter().zip(&expected).all(|(g, e)| (g - e).abs() < 1e-6), "{got:?} {expected:?}");
        }
    }

    #[test]
    fn a_permutation_of_the_rows_permutes_the_advantages(rows in rows(), seed in any::<u64>()) {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1));
        let permuted: Vec<Row> = order.iter().map(|&i| rows[i]).collect();
        for device in devices() {
            let plain = estimate_rows(&rows, &Gigpo::default(), device).unwrap();
            let got = estimate_rows(&permuted, &Gigpo::default(), device).unwrap();
            prop_assert!(order.iter().zip(&got).all(|(&i, g)| (plain[i] - g).abs() < 1e-9));
        }
    }

    #[test]
    fn a_factor_on_the_rewards_is_one_on_advantages_that_are_not_scaled(rows in rows()) {
        let larger: Vec<Row> = rows.iter().map(|&(a, b, c, d, r)| (a, b, c, d, r * 4.)).collect();
        for device in devices() {
            let plain = estimate_rows(&rows, &mean(|_| ()), device).unwrap();
            let got = estimate_rows(&larger, &mean(|_| ()), device).unwrap();
            prop_assert!(plain.iter().zip(&got).all(|(p, g)| (4. * p - g).abs() < 1e-9));
        }
    }
}
