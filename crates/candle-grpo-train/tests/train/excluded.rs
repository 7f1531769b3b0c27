//! Completions without a score.

use anyhow::Result;
use candle_grpo_core::advantage::{AdvantageName, BaselinePopulation};
use candle_grpo_core::selection::{GroupFilter, SampleFilter, ScoreResampling};
use candle_grpo_core::{AdvantagePipeline, GroupAdvantage, experimental};
use candle_grpo_loss::{KlLoss, Recipe};
use candle_grpo_train::rewards::{
    EnsembleReward, RewardFaults, Score, ScoreFailure, WeightedRewards,
};
use candle_grpo_train::{
    CriticConfig, FinishReason, RewardFunction, Sample, StepMetrics, TrainConfig, Trainer,
};
use rstest::rstest;

use crate::common::{self, digest, max_difference, trainer, without_seconds};

/// Truncated completions have no score.
struct WithoutTruncated;

impl RewardFunction for WithoutTruncated {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let score = |sample: &Sample| match sample.finish_reason {
            FinishReason::Length => Score::NONE.after(ScoreFailure::Timeout),
            _ => digest(sample).into(),
        };
        Ok(samples.iter().map(score).collect())
    }
}

fn config(recipe: Recipe) -> TrainConfig {
    let mut config = common::config();
    config.recipe = recipe;
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    config.optimizer.learning_rate = 1e-2;
    // About half of the completions are truncated.
    config.sampling.max_new_tokens = 4;
    config
}

fn with_advantage(advantage: impl Into<AdvantagePipeline>) -> TrainConfig {
    let mut config = config(Recipe::grpo());
    config.recipe.advantage = advantage.into();
    config
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<StepMetrics> {
    let step = |_| without_seconds(trainer.step().unwrap());
    (0..count).map(step).collect()
}

fn assert_equal(a: &Trainer, b: &Trainer) {
    let (a, b) = (
        a.policy_parameters().unwrap(),
        b.policy_parameters().unwrap(),
    );
    for (name, x) in a.iter() {
        assert_eq!(max_difference(x, b.get(name).unwrap()), 0., "{name}");
    }
}

/// Completions without a score train as if a filter masked them in the loss, with statistics over
/// the others only.
#[rstest]
#[case::grpo(with_advantage(AdvantagePipeline::grpo()))]
#[case::leave_one_out(with_advantage(AdvantagePipeline::rloo()))]
#[case::batch(with_advantage(experimental::lite_ppo()))]
#[case::two_stages(with_advantage(AdvantagePipeline::reinforce_plus_plus_baseline()))]
#[case::tokens(with_advantage(AdvantagePipeline::reinforce_plus_plus()))]
#[case::critic({
    let mut config = with_advantage(AdvantagePipeline::gae(1., 0.95));
    config.critic = Some(CriticConfig::default());
    config
})]
fn excluded_completions_enter_neither_statistics_nor_loss(#[case] config: TrainConfig) {
    let mut excluded = trainer(WithoutTruncated, config.clone());
    let mut masked = config;
    masked.sample_filters = vec![SampleFilter::NotTruncated {}];
    let unmasked = |group: &mut GroupAdvantage| group.population = BaselinePopulation::Unmasked;
    let pipeline = masked.recipe.advantage.pipeline().map_sequence(unmasked);
    masked.recipe.advantage = pipeline;
    let mut masked = trainer(digest, masked);
    let (mut count, mut trained) = (0, 0);
    for (a, b) in steps(&mut excluded, 3).iter().zip(steps(&mut masked, 3)) {
        assert_eq!(a.policy, b.policy);
        assert_eq!(a.policy.is_empty(), a.skipped);
        trained += usize::from(!a.skipped);
        count += a.reward_faults["reward"].excluded;
    }
    assert!((6..30).contains(&count), "{count} of 36");
    assert!(trained >= 2);
    assert_equal(&excluded, &masked);
}

/// Groups without scores are replaced, and a step that has only such groups is skipped.
#[test]
fn a_step_without_scores_is_skipped() {
    struct Nothing;
    impl RewardFunction for Nothing {
        fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
            Ok(vec![Score::NONE; samples.len()])
        }
    }
    for group_filter in [None, Some(GroupFilter::default())] {
        let mut config = config(Recipe::grpo());
        config.recipe.group_filter = group_filter;
        config.max_sampling_batches = 2;
        let mut trainer = trainer(Nothing, config);
        let metrics = trainer.step().unwrap();
        assert!(metrics.skipped);
        let rounds = 1 + usize::from(group_filter.is_some());
        let faults = RewardFaults {
            excluded: 12 * rounds,
            ..RewardFaults::default()
        };
        assert_eq!(metrics.reward_faults["reward"], faults);
        assert_eq!((metrics.reward_mean, metrics.reward_std), (0., 0.));
        assert_eq!(metrics.constant_groups, 1.);
        assert_eq!(metrics.group_reward_quantiles, [0.; 5]);
    }
}

#[test]
fn resampling_draws_completions_with_scores_only() {
    let mut config = config(Recipe::grpo());
    config.resampling = Some(ScoreResampling::Power(1.));
    let mut trainer = trainer(WithoutTruncated, config);
    for metrics in steps(&mut trainer, 3) {
        assert!(!metrics.skipped && metrics.reward_faults["reward"].excluded > 0);
    }
}

/// A greedy completion without a score leaves nothing to compare with.
#[test]
fn groups_whose_greedy_completion_has_no_score_do_not_train() {
    let mut config = config(Recipe::grpo());
    config.recipe.advantage = AdvantageName::Remax.into();
    let mut trainer = trainer(WithoutTruncated, config);
    let metrics = steps(&mut trainer, 3);
    assert!(metrics.iter().any(|metrics| !metrics.skipped));
}

/// A missing term is left out of the sum, as in TRL.
#[test]
fn a_missing_term_is_left_out_of_the_sum() {
    let sum = || {
        WeightedRewards::new()
            .with("digest", 2., WithoutTruncated)
            .with("length", 0.5, |sample: &Sample| {
                sample.completion_tokens.len() as f32
            })
    };
    let by_hand = |sample: &Sample| {
        let half = 0.5 * sample.completion_tokens.len() as f32;
        match sample.finish_reason {
            FinishReason::Length => half,
            _ => 2. * digest(sample) + half,
        }
    };
    for advantage in [
        AdvantagePipeline::grpo(),
        AdvantagePipeline::reinforce_plus_plus(),
    ] {
        let mut a = trainer(sum(), with_advantage(advantage.clone()));
        let mut b = trainer(by_hand, with_advantage(advantage));
        for (a, b) in steps(&mut a, 2).into_iter().zip(steps(&mut b, 2)) {
            let faults = a.reward_faults["digest"];
            assert!(faults.excluded > 0 && faults.timeouts == faults.excluded);
            assert!(!a.reward_faults.contains_key("length"));
            assert_eq!((a.reward_mean, a.reward_std), (b.reward_mean, b.reward_std));
            for (name, x) in &a.policy {
                assert!((x - b.policy[name]).abs() < 1e-5, "{name}");
            }
        }
    }
}

#[test]
fn an_ensemble_leaves_out_a_judge_without_a_score() {
    let judges = EnsembleReward::new(Default::default())
        .with(WithoutTruncated)
        .with(|_: &Sample| 3.);
    let row = serde_json::Value::Null;
    let sample = |finish_reason| Sample {
        prompt: "",
        messages: &[],
        completion: "ab",
        prompt_tokens: &[],
        completion_tokens: &[1, 2],
        finish_reason,
        columns: &row,
        group: 0,
    };
    let samples = [
        sample(FinishReason::Length),
        sample(FinishReason::StopToken),
    ];
    let scores = judges.score(&samples).unwrap();
    let late = Score::from(3.).after(ScoreFailure::Timeout);
    assert_eq!(scores[0], late);
    assert_eq!(scores[1], (digest(&samples[1]) + 3.) / 2.);
    let alone = EnsembleReward::new(Default::default()).with(WithoutTruncated);
    assert_eq!(alone.score(&samples).unwrap()[0].value(), None);
}
