//! The cross entropy on what environments write (ECHO).

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use candle_grpo_loss::PolicyLoss;
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_test_support::{device, stay_on_cpu};
use candle_grpo_train::rollout::{Engine, WeightSync};
use candle_grpo_train::sequence::Batch;
use candle_grpo_train::{
    Actor, Rollout, SamplingConfig, Sequence, TokenBatch, TrainConfig, Trainer, TrainerParts,
    TrainingBatch, WeightedRewards,
};
use rstest::rstest;

use super::{echo, environments};
use crate::common::{
    actor_config, assert_ranks_agree, config, max_difference, model, parameters, parts, prompts,
    sampler, sampling, share_of_a, trainer, trainer_of,
};

const COEF: f64 = 0.05;

fn long() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 20,
        ..sampling()
    }
}

fn rollouts() -> Vec<Rollout> {
    let prompts = prompts(&["abc", "d"]);
    let prompts: Vec<_> = prompts.iter().collect();
    sampler(long())
        .with_environments(environments(echo(3)))
        .sample(&prompts, 3, 0)
        .unwrap()
}

/// The rollouts as rows in which the tokens of the environment train, and no others.
fn observations(rollouts: &[Rollout]) -> Vec<Sequence> {
    let row = |rollout: &Rollout| {
        let completion = &rollout.completion;
        let written = completion.written.as_ref().unwrap();
        let weights = written.iter().map(|&written| f32::from(!written));
        let weights = [
            vec![0.; rollout.prompt_tokens.len()],
            weights.collect::<Vec<f32>>(),
        ];
        let tokens = [&rollout.prompt_tokens[..], &completion.tokens].concat();
        Sequence::new(tokens, weights.concat()).unwrap()
    };
    rollouts.iter().map(row).collect()
}

fn batch(rollouts: &[Rollout]) -> TrainingBatch {
    let rows = rollouts.iter();
    let rows = rows.map(|rollout| rollout.completion.sequence(&rollout.prompt_tokens));
    let rows = rows.map(|row| row.unwrap().with_observations());
    let tokens = TokenBatch::of_batch(&Batch::new(rows.collect()).unwrap(), device()).unwrap();
    let advantages = Tensor::new(&[1f32, -0.5, 0.25, 2., -1., 0.5], &Device::Cpu).unwrap();
    TrainingBatch::new(tokens, &advantages.to_device(device()).unwrap())
}

fn actor(observation_coef: f64) -> Actor {
    let config = actor_config(PolicyLoss {
        observation_coef,
        ..PolicyLoss::dapo()
    });
    Actor::new(model(), parameters(), config).unwrap()
}

fn gradients(actor: &Actor) -> BTreeMap<String, Tensor> {
    let gradients = actor.gradients().iter();
    let gradients = gradients.map(|(name, x)| (name.to_owned(), x.copy().unwrap()));
    gradients.collect()
}

#[rstest]
#[case::together(6)]
#[case::one_by_one(1)]
fn the_gradient_of_observations_is_that_of_their_likelihood(#[case] micro_batch: usize) {
    let rollouts = rollouts();
    let batch = batch(&rollouts);
    let totals = batch.tokens().totals();
    let rows = observations(&rollouts);
    let count: f64 = rows.iter().map(Sequence::total_weight).sum();
    assert!(count > 6.);
    assert_eq!(totals.observations, Some(count));

    let mut whole = actor(COEF);
    let (mut sum, mut tokens) = (0., 0.);
    for piece in batch.split(micro_batch).unwrap() {
        let metrics = whole.forward_backward(&piece, &totals).unwrap();
        let own = piece.tokens().totals().observations.unwrap();
        sum += metrics.get("observation_loss").unwrap() * own;
        tokens += own;
    }
    let mut apart = actor(0.);
    apart.forward_backward(&batch, &totals).unwrap();
    let policy_alone = gradients(&apart);
    let sums = apart
        .forward_backward_examples(&rows, Likelihood::default(), COEF / count, 1.)
        .unwrap();
    assert!((sum / tokens - sums.mean_loss()).abs() < 1e-5);
    let (found, expected) = (gradients(&whole), gradients(&apart));
    assert_eq!(found.len(), expected.len());
    for (name, gradient) in &found {
        let difference = max_difference(gradient, &expected[name]);
        assert!(difference < 1e-5, "{name}: {difference}");
    }
    let moves = |(name, x): (&String, &Tensor)| max_difference(x, &policy_alone[name]) > 1e-4;
    assert!(found.iter().any(moves));
}

#[test]
fn prompts_padding_and_dropped_completions_have_no_observations() {
    let sequence = Sequence::of_answer(&[1, 2], &[3, 4, 5, 6]).unwrap();
    let written = [true, false, true, false];
    let sequence = sequence.with_written(&written).unwrap();
    // Without the term, the last token is not read.
    assert_eq!(sequence.read_tokens(), [1, 2, 3, 4]);
    let observed = sequence.with_observations();
    assert_eq!(observed.read_tokens(), [1, 2, 3, 4, 5]);
    assert_eq!(observed.observed(), Some(&[false, true, false, true][..]));
    let first = Sequence::of_answer(&[], &[3, 4]).unwrap();
    assert_eq!(
        first.with_observations().observed(),
        Some(&[false, false][..])
    );
    // A trajectory without a turn of the policy.
    let silent = Sequence::of_answer(&[1, 2], &[2]).unwrap();
    let silent = silent.with_written(&[false]).unwrap().with_observations();
    assert_eq!(silent.observed(), Some(&[false][..]));
    let short = Sequence::of_answer(&[1], &[2]).unwrap().with_observations();
    let rows = vec![observed.clone(), short, observed.masked()];
    let tokens = TokenBatch::of_batch(&Batch::new(rows).unwrap(), &Device::Cpu).unwrap();
    let mask = tokens.observation_mask().unwrap();
    assert_eq!(
        mask.to_vec2::<u32>().unwrap(),
        [[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    );
    assert_eq!(tokens.totals().observations, Some(2.));
}

fn training(observation_coef: f64) -> TrainConfig {
    let mut config = config();
    config.sampling = long();
    config.recipe.policy_loss.observation_coef = observation_coef;
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.epsilon = 1e-3;
    config
}

fn in_environments(config: TrainConfig) -> TrainerParts {
    TrainerParts {
        environments: Some(environments(echo(3))),
        ..parts(WeightedRewards::new(), config)
    }
}

#[test]
fn the_policy_learns_to_predict_its_environment() {
    let mut trainer = trainer_of(in_environments(training(0.)));
    let metrics = trainer.step().unwrap().policy;
    assert!(!metrics.contains_key("observation_loss"));

    let mut trainer = trainer_of(in_environments(training(1.)));
    let losses = (0..20).map(|_| trainer.step().unwrap().policy["observation_loss"]);
    let losses: Vec<f64> = losses.collect();
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn without_an_environment_the_term_changes_nothing() {
    let run = |observation_coef: f64| {
        let mut trainer: Trainer = trainer(share_of_a, training(observation_coef));
        let metrics = trainer.step().unwrap().policy;
        assert!(!metrics.contains_key("observation_loss"));
        let weights = trainer.policy_parameters().unwrap();
        let weights = weights.iter().map(|(_, x)| x.flatten_all().unwrap());
        let weights: Vec<Vec<f32>> = weights.map(|x| x.to_vec1().unwrap()).collect();
        (metrics, weights)
    };
    assert!(run(COEF) == run(0.));
}

#[test]
fn observations_on_several_ranks_are_those_of_one() {
    stay_on_cpu();
    assert_ranks_agree(&[2, 3], || in_environments(training(COEF)), 3);
}

#[test]
fn tokens_of_a_server_without_log_probs_are_not_taken_for_observations() {
    let mut config = training(COEF);
    config.rollout.engine = Engine::Openai;
    config.rollout.base_url = vec!["http://localhost:8000".to_owned()];
    config.rollout.weight_sync = WeightSync::None;
    let words = "recipe.policy_loss.observation_coef: 0.05, must be 0 with rollout.engine openai, whose tokens without a log-prob would be observations";
    assert_eq!(config.validate().unwrap_err().to_string(), words);
    config.recipe.policy_loss.observation_coef = 0.;
    config.validate().unwrap();
}
