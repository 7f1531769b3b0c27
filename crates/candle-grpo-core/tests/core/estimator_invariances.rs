//! Invariances and equivariances that every published estimator has.

use candle_core::{Device, Result, Tensor};
use candle_grpo_core::advantage::{OptimalTokenBaseline, TokenBaseline};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, GroupAdvantage, Scale, TokenAdvantage,
    experimental,
};
use candle_grpo_test_support::{devices, numbers};
use proptest::prelude::*;

use crate::close;

const TOKENS: usize = 5;

/// A batch on the host: groups with at least two sequences, and sequences with at least one token.
#[derive(Debug, Clone)]
struct Data {
    ids: Vec<u32>,
    rewards: Vec<f64>,
    baselines: Vec<f64>,
    mask: Vec<[bool; TOKENS]>,
    values: Vec<[f64; TOKENS]>,
    probs: Vec<[f64; TOKENS]>,
}

fn data() -> impl Strategy<Value = Data> {
    prop::collection::vec(2usize..5, 1..4).prop_flat_map(|sizes| {
        let ids: Vec<u32> = sizes
            .iter()
            .enumerate()
            .flat_map(|(group, &size)| std::iter::repeat_n(group as u32, size))
            .collect();
        let n = ids.len();
        let sixteenths = || (-64i32..64).prop_map(|r| f64::from(r) / 16.);
        let mask = prop::array::uniform5(any::<bool>()).prop_map(|mut row| {
            row[0] |= row == [false; TOKENS];
            row
        });
        (
            Just(ids).prop_shuffle(),
            prop::collection::vec(sixteenths(), n),
            prop::collection::vec(sixteenths(), n),
            prop::collection::vec(mask, n),
            prop::collection::vec(prop::array::uniform5(-1f64..1.), n),
            prop::collection::vec(prop::array::uniform5(0.01f64..0.99), n),
        )
            .prop_map(|(ids, rewards, baselines, mask, values, probs)| Data {
                ids,
                rewards,
                baselines,
                mask,
                values,
                probs,
            })
    })
}

impl Data {
    /// Computes the advantages `[B, T]`; positions outside the mask hold `outside`.
    fn estimate(
        &self,
        pipeline: &AdvantagePipeline,
        outside: f64,
        device: &Device,
    ) -> Result<Vec<f64>> {
        let rows = |of: &dyn Fn(usize, usize) -> f64| {
            let entry = |i: usize, t: usize| if self.mask[i][t] { of(i, t) } else { outside };
            let row = |i: usize| (0..TOKENS).map(|t| entry(i, t)).collect();
            Tensor::new(
                (0..self.ids.len()).map(row).collect::<Vec<Vec<f64>>>(),
                device,
            )
        };
        let values = rows(&|i, t| self.values[i][t])?;
        let log_probs = rows(&|i, t| self.probs[i][t].ln())?;
        // Never below the square of the token's own probability.
        let squares = rows(&|i, t| self.probs[i][t].powi(2) + 0.01)?;
        let mask: Vec<Vec<u8>> = self
            .mask
            .iter()
            .map(|row| row.map(u8::from).to_vec())
            .collect();
        let mask = Tensor::new(mask, device)?;
        let rewards = Tensor::new(self.rewards.as_slice(), device)?;
        let baselines = Tensor::new(self.baselines.as_slice(), device)?;
        let batch = AdvantageBatch::new(&rewards, &self.ids)
            .response_mask(&mask)
            .reward_baselines(&baselines)
            .values(&values)
            .old_log_probs(&log_probs)
            .sum_of_squared_probs(&squares);
        numbers(&pipeline.estimate(&batch)?.on_tokens(&batch.mask()?)?)
    }

    fn permuted(&self, order: &[usize]) -> Self {
        fn pick<T: Clone>(order: &[usize], x: &[T]) -> Vec<T> {
            order.iter().map(|&i| x[i].clone()).collect()
        }
        Self {
            ids: pick(order, &self.ids),
            rewards: pick(order, &self.rewards),
            baselines: pick(order, &self.baselines),
            mask: pick(order, &self.mask),
            values: pick(order, &self.values),
            probs: pick(order, &self.probs),
        }
    }

    /// Applies `factor` and `shift` to the rewards and to everything measured against them.
    fn changed(&self, factor: f64, shift: f64) -> Self {
        let change = |x: &[f64]| x.iter().map(|x| x * factor + shift).collect();
        Self {
            rewards: change(&self.rewards),
            baselines: change(&self.baselines),
            ..self.clone()
        }
    }
}

fn without_epsilon(pipeline: AdvantagePipeline) -> AdvantagePipeline {
    pipeline
        .map_sequence(|sequence: &mut GroupAdvantage| sequence.epsilon = 0.)
        .map_tokens(|tokens: &mut TokenAdvantage| tokens.whitening.epsilon = 1e-30)
}

fn one_of(pipelines: Vec<AdvantagePipeline>) -> impl Strategy<Value = AdvantagePipeline> {
    prop::sample::select(pipelines)
}

/// Estimators that are linear in the reward scale.
fn linear() -> Vec<AdvantagePipeline> {
    let no_tail = |tokens: &mut TokenAdvantage| {
        tokens.baseline = match tokens.baseline {
            TokenBaseline::OptimalToken(baseline) => {
                TokenBaseline::OptimalToken(OptimalTokenBaseline {
                    handle_zero_tail: false,
                    epsilon: 1e-30,
                    ..baseline
                })
            }
            other => other,
        };
    };
    vec![
        AdvantagePipeline::dr_grpo(),
        AdvantagePipeline::rloo(),
        experimental::opo(),
        AdvantagePipeline::gpg(),
        experimental::flash_reinforce(),
        AdvantagePipeline::remax(),
        AdvantagePipeline::pass_at_k().map_sequence(|s| s.scale = Scale::None),
        AdvantagePipeline::optimal_token_baseline().map_tokens(no_tail),
        AdvantagePipeline::multi_turn_optimal_token_baseline().map_tokens(no_tail),
    ]
}

/// Estimators that do not depend on the reward scale.
fn scale_free() -> Vec<AdvantagePipeline> {
    vec![
        AdvantagePipeline::grpo(),
        experimental::lite_ppo(),
        AdvantagePipeline::rloo().map_sequence(|s| s.scale = Scale::Group),
        AdvantagePipeline::rloo().map_sequence(|s| s.scale = Scale::Batch),
        AdvantagePipeline::pass_at_k(),
        AdvantagePipeline::reinforce_plus_plus(),
        AdvantagePipeline::reinforce_plus_plus_baseline(),
        AdvantagePipeline::reinforce(),
        AdvantagePipeline::reinforce_baseline(),
    ]
    .into_iter()
    .map(without_epsilon)
    .collect()
}

fn all() -> Vec<AdvantagePipeline> {
    let mut all = linear();
    all.extend(scale_free());
    all.extend([
        AdvantagePipeline::gae(0.9, 0.8),
        AdvantagePipeline::gdpo(),
        experimental::max_rl(),
        AdvantagePipeline::reinforce_plus_plus().map_tokens(|tokens| tokens.gamma = 0.7),
        AdvantagePipeline::optimal_token_baseline(),
        AdvantagePipeline::multi_turn_optimal_token_baseline(),
    ]);
    all
}

proptest! {
    #[test]
    fn values_outside_the_mask_have_no_effect(
        data in data(), pipeline in one_of(all()), outside in prop::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30]),
    ) {
        for device in devices() {
            let clean = data.estimate(&pipeline, 0., device).unwrap();
            prop_assert!(clean.iter().all(|a| a.is_finite()), "{clean:?}");
            prop_assert_eq!(clean, data.estimate(&pipeline, outside, device).unwrap());
        }
    }

    #[test]
    fn a_permutation_of_the_batch_permutes_the_advantages(
        data in data(), pipeline in one_of(all()), seed in any::<u64>(),
    ) {
        for device in devices() {
            let mut order: Vec<usize> = (0..data.ids.len()).collect();
            order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1));
            let plain = data.estimate(&pipeline, 0., device).unwrap();
            let expected: Vec<f64> =
                order.iter().flat_map(|&i| plain[i * TOKENS..(i + 1) * TOKENS].to_vec()).collect();
            let permuted = data.permuted(&order).estimate(&pipeline, 0., device).unwrap();
            prop_assert!(close(&expected, &permuted), "{expected:?} {permuted:?}");
        }
    }

    #[test]
    fn a_constant_added_to_all_rewards_changes_nothing(
        data in data(), pipeline in one_of([linear(), scale_free()].concat()), shift in -100i32..100,
    ) {
        for device in devices() {
            let plain = data.estimate(&pipeline, 0., device).unwrap();
            let shifted = data.changed(1., f64::from(shift)).estimate(&pipeline, 0., device).unwrap();
            prop_assert!(close(&plain, &shifted), "{plain:?} {shifted:?}");
        }
    }

    #[test]
    fn a_factor_on_the_rewards_is_one_on_the_advantages(data in data(), pipeline in one_of(linear())) {
        for device in devices() {
            let expected: Vec<f64> = data.estimate(&pipeline, 0., device).unwrap().iter().map(|a| a * 4.).collect();
            let scaled = data.changed(4., 0.).estimate(&pipeline, 0., device).unwrap();
            prop_assert!(close(&expected, &scaled), "{expected:?} {scaled:?}");
        }
    }

    #[test]
    fn a_factor_on_the_rewards_is_lost_where_advantages_are_scaled(
        data in data(), pipeline in one_of(scale_free()),
    ) {
        for device in devices() {
            let plain = data.estimate(&pipeline, 0., device).unwrap();
            let scaled = data.changed(4., 0.).estimate(&pipeline, 0., device).unwrap();
            prop_assert!(close(&plain, &scaled), "{plain:?} {scaled:?}");
        }
    }
}
