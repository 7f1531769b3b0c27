//! Trajectory losses and gradients.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_grpo_loss::{PolicyLoss, StepTotals};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::rollout_log_probs;
use candle_grpo_train::{Actor, Rollout, SamplingConfig, TokenBatch, TrainingBatch};
use rstest::rstest;

use super::{echo, environments};
use crate::common::{
    actor_config, max_difference, model, parameters, prompts, sampler, sampling, with_mask,
};

fn rollouts() -> Vec<Rollout> {
    let config = SamplingConfig {
        max_new_tokens: 20,
        ..sampling()
    };
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    sampler(config)
        .with_environments(environments(echo(3)))
        .sample(&prompts, 3, 0)
        .unwrap()
}

fn pairs(rollouts: &[Rollout]) -> Vec<(&[u32], &[u32])> {
    let rollouts = rollouts.iter();
    rollouts
        .map(|r| (r.prompt_tokens.as_slice(), r.completion.tokens.as_slice()))
        .collect()
}

/// A batch with the same tokens as single policy responses.
fn single_turns(rollouts: &[Rollout]) -> TokenBatch {
    TokenBatch::new(&pairs(rollouts), device()).unwrap()
}

/// This batch with a handmade mask: each turn is followed by two environment tokens.
fn by_hand(rollouts: &[Rollout]) -> TokenBatch {
    let mut mask = Vec::new();
    for rollout in rollouts {
        let mut row = Vec::new();
        for turn in &rollout.episode.as_ref().unwrap().turns {
            row.extend(vec![1u32; turn.tokens.len()]);
            row.extend([0, 0]);
        }
        // Nothing follows the last turn.
        row.truncate(rollout.completion.tokens.len());
        mask.push(row);
    }
    with_mask(&pairs(rollouts), &mask)
}

fn gradients(batch: &TrainingBatch, micro_batch: usize) -> (f64, BTreeMap<String, Tensor>) {
    let parameters = parameters();
    let config = actor_config(PolicyLoss::dapo());
    let mut actor = Actor::new(model(), parameters.clone(), config).unwrap();
    let totals = StepTotals::count(batch.tokens().response_mask()).unwrap();
    let mut loss = 0.;
    for piece in batch.split(micro_batch).unwrap() {
        let metrics = actor.forward_backward(&piece, &totals).unwrap();
        loss += metrics.get("loss").unwrap_or(0.);
    }
    let found = parameters.iter().filter_map(|(name, _)| {
        let gradient = actor.gradients().get(name)?;
        Some((name.to_owned(), gradient.copy().unwrap()))
    });
    (loss, found.collect())
}

#[rstest]
#[case::together(6)]
#[case::one_by_one(1)]
fn loss_and_gradient_are_those_of_a_mask_by_hand(#[case] micro_batch: usize) {
    let rollouts = rollouts();
    let advantages = Tensor::new(&[1f32, -0.5, 0.25, 2., -1., 0.5], &Device::Cpu)
        .unwrap()
        .to_device(device())
        .unwrap();
    let old = (rollout_log_probs(&rollouts, device()).unwrap() * 1.1).unwrap();
    let batch = |tokens: TokenBatch| {
        TrainingBatch::new(tokens, &advantages).with_policy(|policy| policy.old_log_probs(&old))
    };
    let tokens = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let hand = by_hand(&rollouts);
    let rows = |x: &Tensor| x.to_vec2::<u32>().unwrap();
    assert_eq!(rows(tokens.response_mask()), rows(hand.response_mask()));
    let (loss, found) = gradients(&batch(tokens), micro_batch);
    let (expected_loss, expected) = gradients(&batch(hand), micro_batch);
    assert_eq!(loss, expected_loss);
    assert!(!found.is_empty());
    assert_eq!(found.len(), expected.len());
    for (name, gradient) in &found {
        assert_eq!(max_difference(gradient, &expected[name]), 0., "{name}");
    }
    // The environment's tokens would count.
    let all = single_turns(&rollouts);
    let (_, other) = gradients(&batch(all), micro_batch);
    let differs = found
        .iter()
        .any(|(name, g)| max_difference(g, &other[name]) > 1e-4);
    assert!(differs);
}
