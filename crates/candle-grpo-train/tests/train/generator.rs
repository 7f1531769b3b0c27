//! Custom generators.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_nn::LoraConfig;
use candle_grpo_test_support::device;
use candle_grpo_train::learn::{OldLogProbs, rollout_log_probs};
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator, PolicyWeights};
use candle_grpo_train::{
    Completion, FinishReason, Generator, Progress, Sampler, TokenBatch, TrainConfig, Trainer,
    TrainerParts, evaluate,
};
use rstest::rstest;

use crate::common::{self, END, config, max_difference, prompts, sampling, tokenizer, trainer_of};

fn parts(config: TrainConfig) -> TrainerParts {
    let length = |sample: &candle_grpo_train::Sample| sample.completion_tokens.len() as f32;
    common::parts(length, config)
}

fn trainer(config: TrainConfig) -> Trainer {
    trainer_of(parts(config))
}

/// Samples from a copy of the weights that it received last, delivers in reverse order and records
/// the versions.
struct Remote {
    weights: Mutex<Option<(u64, LocalGenerator)>>,
    versions: Arc<Mutex<Vec<u64>>>,
}

impl Remote {
    fn new() -> (Arc<Self>, Arc<Mutex<Vec<u64>>>) {
        let versions = Arc::new(Mutex::new(Vec::new()));
        let remote = Self {
            weights: Mutex::new(None),
            versions: Arc::clone(&versions),
        };
        (Arc::new(remote), versions)
    }
}

impl Generator for Remote {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let weights = self.weights.lock().unwrap();
        let (version, local) = weights
            .as_ref()
            .expect("weights before the first completion");
        let mut completions = Vec::new();
        local.generate(batch, &mut |place, completion| {
            completions.push((place, completion));
            Ok(())
        })?;
        completions.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (place, mut completion) in completions {
            completion.weight_versions.fill(*version);
            deliver(place, completion)?;
        }
        Ok(())
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, _: &dyn Progress) -> Result<()> {
        self.versions.lock().unwrap().push(weights.version);
        let copy = weights.merged()?.frozen_copy()?.into_iter().collect();
        let copy = candle_grpo_nn::Parameters::from_tensors(weights.model, copy, device())?;
        let local = LocalGenerator::new(weights.model, &copy)?;
        *self.weights.lock().unwrap() = Some((weights.version, local));
        Ok(())
    }
}

#[rstest]
#[case::all_weights(None)]
#[case::adapters(Some(LoraConfig::all_linear(4, 8.)))]
fn a_generator_that_copies_the_weights_trains_like_the_policy_itself(
    #[case] adapters: Option<LoraConfig>,
) {
    let mut config = config();
    config.adapters = adapters;
    config.optimizer.learning_rate = 1e-2;
    let (remote, versions) = Remote::new();
    let mut local = trainer(config.clone());
    let mut remote = trainer_of(TrainerParts {
        generator: Some(remote),
        ..parts(config)
    });
    for _ in 0..3 {
        let (a, b) = (local.step().unwrap(), remote.step().unwrap());
        assert!(!a.skipped);
        assert_eq!(a.reward_mean, b.reward_mean);
    }
    let (a, b) = (
        local.policy_parameters().unwrap(),
        remote.policy_parameters().unwrap(),
    );
    for (name, variable) in a.iter() {
        assert!(
            max_difference(variable, b.get(name).unwrap()) < 1e-4,
            "{name}"
        );
    }
    assert_eq!(*versions.lock().unwrap(), [0, 1, 2]);
    // An evaluation draws from the current weights.
    remote.sampler(sampling()).unwrap();
    assert_eq!(*versions.lock().unwrap(), [0, 1, 2, 3]);
}

#[test]
fn tokens_carry_the_version_of_the_weights_that_drew_them() {
    let mut trainer = trainer(config());
    let prompts = prompts(&["abc"]);
    for version in 0..2 {
        let sampler = trainer.sampler(sampling()).unwrap();
        for rollout in sampler.sample(&[&prompts[0]], 3, 0).unwrap() {
            let completion = rollout.completion;
            assert_eq!(
                completion.weight_versions,
                vec![version; completion.tokens.len()]
            );
        }
        assert!(!trainer.step().unwrap().skipped);
    }
}

/// Repeats one completion for every seed.
struct Constant(Completion);

impl Generator for Constant {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let completions = batch.prompts.iter().map(|prompt| prompt.seeds.len()).sum();
        (0..completions).try_for_each(|place| deliver(place, self.0.clone()))
    }
}

/// Tokens 1 and 2 from the policy, then 3 from a tool, then the end.
fn with_tool() -> Completion {
    Completion {
        tokens: vec![1, 2, 3, END],
        drawn_log_probs: vec![-1., -2., f32::NAN, -3.],
        log_probs: None,
        written: Some(vec![true, true, false, true]),
        weight_versions: vec![0; 4],
        finish_reason: FinishReason::StopToken,
        experts: None,
    }
}

#[rstest]
// 1212 2121 1212 2121 and one with the end.
#[case::a_loop(&[1, 2, 1, 2, 1, 2, 1, END], None, 2. / 5.)]
#[case::no_loop(&[1, 2, 1, 2, 3, 1, 2, END], None, 0.)]
#[case::shorter_than_a_gram(&[1, 1, 1], None, 0.)]
// Without the tool's token, three times 1111.
#[case::a_loop_around_a_tool(&[1, 1, 1, 3, 1, 1, 1], Some(3), 2. / 3.)]
fn a_step_has_the_share_of_text_that_repeats(
    #[case] tokens: &[u32],
    #[case] tool: Option<usize>,
    #[case] share: f64,
) {
    let n = tokens.len();
    let written = |place| Some(place) != tool;
    let completion = Completion {
        tokens: tokens.to_vec(),
        drawn_log_probs: (0..n)
            .map(|place| if written(place) { -1. } else { f32::NAN })
            .collect(),
        log_probs: None,
        written: tool.map(|_| (0..n).map(written).collect()),
        weight_versions: vec![0; n],
        finish_reason: FinishReason::Length,
        experts: None,
    };
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(Constant(completion))),
        ..parts(config())
    });
    let metrics = trainer.step().unwrap();
    assert!(
        (metrics.repetition - share).abs() < 1e-12,
        "{}",
        metrics.repetition
    );
}

#[test]
fn recorded_experts_are_read_back_and_absent_in_older_recordings() {
    let recorded = Completion {
        drawn_log_probs: vec![-1., -2., -4., -3.],
        experts: Some(vec![0, 3, 1, 300]),
        ..with_tool()
    };
    let bytes = postcard::to_stdvec(&recorded).unwrap();
    assert_eq!(
        postcard::from_bytes::<Completion>(&bytes).unwrap(),
        recorded
    );
    let mut json = serde_json::to_value(&recorded).unwrap();
    let read = |json| serde_json::from_value::<Completion>(json).unwrap();
    assert_eq!(read(json.clone()), recorded);
    json.as_object_mut().unwrap().remove("experts").unwrap();
    let older = Completion {
        experts: None,
        ..recorded
    };
    assert_eq!(read(json), older);
    // The ranks exchange completions without experts, too.
    let bytes = postcard::to_stdvec(&older).unwrap();
    assert_eq!(postcard::from_bytes::<Completion>(&bytes).unwrap(), older);
}

#[test]
fn tokens_that_the_policy_did_not_write_are_context_only() {
    let sampler = Sampler::from_generator(Arc::new(Constant(with_tool())), 6, sampling()).unwrap();
    let prompts = prompts(&["abc"]);
    let rollouts = sampler.sample(&[&prompts[0]], 2, 0).unwrap();
    let batch = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let mask = batch.response_mask().to_vec2::<u32>().unwrap();
    assert_eq!(mask, [[1, 1, 0, 1]; 2]);
    // The model reads all tokens before the last one.
    let read = batch.sequences().iter().map(|x| x.read_tokens().len());
    assert_eq!(read.collect::<Vec<_>>(), [6; 2]);
    let log_probs = rollout_log_probs(&rollouts, device()).unwrap();
    assert_eq!(
        log_probs.to_vec2::<f32>().unwrap(),
        [[-1., -2., 0., -3.]; 2]
    );
    // One more than the tokens, and than `written`.
    let mut other = rollouts;
    other[1].completion.drawn_log_probs.push(-1.);
    let error = rollout_log_probs(&other, device()).unwrap_err().to_string();
    assert_eq!(
        error,
        "sequence 1: log_probs: 5 entries, must be 4, one per token"
    );
}

/// Ends completions at odd positions with a stop token, the others later, so that rewards differ.
struct Alternating;

impl Generator for Alternating {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let completions = batch.prompts.iter().map(|prompt| prompt.seeds.len()).sum();
        for place in 0..completions {
            let mut completion = with_tool();
            if place % 2 == 1 {
                completion.tokens.remove(1);
                completion.drawn_log_probs.remove(1);
                completion.weight_versions.remove(1);
                completion.written = Some(vec![true, false, true]);
            }
            deliver(place, completion)?;
        }
        Ok(())
    }
}

#[test]
fn old_log_probs_of_a_generator_without_those_of_the_policy_are_an_error() {
    let mut config = config();
    config.old_log_probs = OldLogProbs::Sampler;
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(Alternating)),
        ..parts(config)
    });
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert!(
        error.starts_with("step 1: old_log_probs: Sampler, must be Recompute"),
        "{error}"
    );
}

#[test]
fn completions_with_the_tokens_of_a_tool_train() {
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(Alternating)),
        ..parts(config())
    });
    let metrics = trainer.step().unwrap();
    assert!(metrics.grad_norm.unwrap() > 0.);
}

#[rstest]
#[case(|c: &mut Completion| c.tokens.clear(), "tokens: none, must be at least one")]
#[case(|c: &mut Completion| c.tokens[1] = 6, "tokens: 6 at 1, must be below the vocabulary size 6")]
#[case(|c: &mut Completion| c.drawn_log_probs.truncate(3), "drawn_log_probs: 3 entries, must be 4, one per token")]
#[case(|c: &mut Completion| c.log_probs = Some(vec![-1.]), "log_probs: 1 entries, must be 4, one per token")]
#[case(|c: &mut Completion| c.weight_versions.truncate(3), "weight_versions: 3 entries, must be 4, one per token")]
#[case(|c: &mut Completion| c.written = Some(vec![false; 4]), "written: false for all tokens, must be true for at least one")]
#[case(|c: &mut Completion| c.drawn_log_probs[0] = 0.5, "drawn_log_probs: 0.5 at 0, must be finite and at most 0")]
#[case(|c: &mut Completion| c.drawn_log_probs[3] = f32::NAN, "drawn_log_probs: NaN at 3, must be finite and at most 0")]
fn a_malformed_completion_is_refused_by_name(
    #[case] spoil: fn(&mut Completion),
    #[case] words: &str,
) {
    let mut completion = with_tool();
    spoil(&mut completion);
    let sampler = Sampler::from_generator(Arc::new(Constant(completion)), 6, sampling()).unwrap();
    let prompts = prompts(&["abc"]);
    let error = sampler.sample(&[&prompts[0]], 2, 0).unwrap_err();
    assert_eq!(
        format!("{error:#}"),
        format!("generator: completion 0 of prompt 0: {words}")
    );
}

/// Delivers the given places.
struct Places(Vec<usize>);

impl Generator for Places {
    fn generate(&self, _: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|&place| deliver(place, with_tool()))
    }
}

#[rstest]
#[case(vec![0], "generator: completion 1 of prompt 0 is missing")]
#[case(vec![1, 1], "generator: completion 1 of prompt 0 came twice")]
#[case(vec![0, 1, 2], "generator: delivered completion 2, must be below 2")]
fn lost_and_doubled_completions_are_errors(#[case] places: Vec<usize>, #[case] words: &str) {
    let sampler = Sampler::from_generator(Arc::new(Places(places)), 6, sampling()).unwrap();
    let prompts = prompts(&["abc"]);
    let error = sampler.sample(&[&prompts[0]], 2, 0).unwrap_err();
    assert_eq!(error.to_string(), words);
}

/// Fails to take over weights the first time.
struct Unreachable(Mutex<usize>);

impl Generator for Unreachable {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        Constant(with_tool()).generate(batch, deliver)
    }

    fn weights_changed(&self, _: &PolicyWeights<'_>, _: &dyn Progress) -> Result<()> {
        let mut calls = self.0.lock().unwrap();
        *calls += 1;
        anyhow::ensure!(*calls > 1, "engine: no answer");
        Ok(())
    }
}

#[test]
fn a_step_whose_generator_did_not_take_the_weights_can_be_repeated() {
    let mut trainer = trainer_of(TrainerParts {
        generator: Some(Arc::new(Unreachable(Mutex::new(0)))),
        ..parts(config())
    });
    let error = format!("{:#}", trainer.step().unwrap_err());
    assert_eq!(error, "step 1: engine: no answer");
    assert_eq!(trainer.steps(), 0);
    trainer.step().unwrap();
    assert_eq!(trainer.steps(), 1);
}

#[test]
fn an_evaluation_takes_any_generator() {
    let sampler = Sampler::from_generator(Arc::new(Constant(with_tool())), 6, sampling()).unwrap();
    let length = |sample: &candle_grpo_train::Sample| sample.completion_tokens.len() as f32;
    let prompts = prompts(&["abc", "d"]);
    let evaluation = evaluate(&sampler, &prompts, 2, &length, &tokenizer(), 0).unwrap();
    // Rewards get the tokens that the policy wrote.
    assert_eq!(evaluation.reward_mean(), 3.);
}
