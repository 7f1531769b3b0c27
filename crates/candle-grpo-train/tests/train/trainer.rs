//! The training step as a whole.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::{
    actor_config, max_difference, model, parameters, prompts, sampler, sampling, share_of_a,
    tokenizer, try_trainer, without_seconds,
};
use anyhow::Result;
use candle_grpo_core::AdvantagePipeline;
use candle_grpo_core::advantage::SingletonGroup;
use candle_grpo_core::selection::GroupFilter;
use candle_grpo_loss::Recipe;
use candle_grpo_nn::optim::{GradientDType, MasterWeights};
use candle_grpo_nn::{AdamWConfig, ComputeDType};
use candle_grpo_train::learn::{LearningRateSchedule, OldLogProbs};
use candle_grpo_train::progress::{NoProgress, Phase};
use candle_grpo_train::rewards::Score;
use candle_grpo_train::{
    Actor, ActorConfig, Interrupted, Progress, RewardFunction, Sample, StepMetrics, TrainConfig,
    Trainer, TrainerParts, evaluate,
};
use rstest::rstest;
use std::collections::HashMap;

fn config() -> TrainConfig {
    TrainConfig {
        prompts_per_step: 3,
        num_generations: 4,
        sampling: sampling(),
        epochs: 2,
        mini_batch_size: Some(6),
        micro_batch_size: 4,
        optimizer: AdamWConfig {
            learning_rate: 1e-2,
            ..AdamWConfig::default()
        },
        ..TrainConfig::default()
    }
}

#[test]
fn the_same_seed_gives_a_bit_identical_run() {
    let run = || {
        let mut config = config();
        config.recipe.policy_loss.kl = Some(candle_grpo_loss::KlLoss::k3(0.04));
        let mut trainer = try_trainer(share_of_a, config).unwrap();
        let metrics: Vec<StepMetrics> = (0..5)
            .map(|_| without_seconds(trainer.step().unwrap()))
            .collect();
        let bits: HashMap<String, Vec<u32>> = trainer
            .actor()
            .parameters()
            .iter()
            .map(|(name, x)| {
                let values = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                (
                    name.to_owned(),
                    values.into_iter().map(f32::to_bits).collect(),
                )
            })
            .collect();
        (metrics, bits)
    };
    let (metrics, bits) = run();
    assert_eq!(run(), (metrics.clone(), bits));
    assert!(
        metrics
            .iter()
            .any(|m| !m.skipped && m.policy.contains_key("kl"))
    );
}

#[rstest]
#[case(OldLogProbs::Recompute, ComputeDType::F32)]
#[case(OldLogProbs::Sampler, ComputeDType::F32)]
// With weights and gradient sums in bf16 alone.
#[case(OldLogProbs::Recompute, ComputeDType::Bf16)]
fn the_mean_reward_rises(#[case] old_log_probs: OldLogProbs, #[case] compute_dtype: ComputeDType) {
    let mut config = TrainConfig {
        old_log_probs,
        compute_dtype,
        ..config()
    };
    if compute_dtype == ComputeDType::Bf16 {
        config.optimizer.master_weights = MasterWeights::Bf16;
        config.optimizer.gradient_dtype = GradientDType::Bf16;
    }
    let mut trainer = try_trainer(share_of_a, config).unwrap();
    let rewards: Vec<f64> = (0..40)
        .map(|_| trainer.step().unwrap().reward_mean)
        .collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (first, last) = (mean(&rewards[..5]), mean(&rewards[35..]));
    assert!(last > first + 0.3, "from {first} to {last}");
}

#[test]
fn a_step_with_nothing_to_learn_is_skipped_and_counted() {
    let mut trainer = try_trainer(|_: &Sample| 0.3, config()).unwrap();
    for step in 1..=2 {
        let metrics = trainer.step().unwrap();
        assert!(metrics.skipped);
        assert_eq!((metrics.step, metrics.constant_groups), (step, 1.));
        assert_eq!((metrics.grad_norm, metrics.reward_std), (None, 0.));
        assert_eq!(trainer.skipped_steps(), step);
    }
    let before = parameters();
    for (name, value) in trainer.actor().parameters().iter() {
        assert_eq!(
            max_difference(value, before.get(name).unwrap()),
            0.,
            "{name}"
        );
    }
}

#[test]
fn the_learning_rate_follows_its_schedule() {
    let config = TrainConfig {
        schedule: LearningRateSchedule {
            warmup_steps: 4,
            ..LearningRateSchedule::default()
        },
        ..config()
    };
    let mut trainer = try_trainer(share_of_a, config).unwrap();
    let rates: Vec<f64> = (0..6)
        .map(|_| trainer.step().unwrap().learning_rate.unwrap())
        .collect();
    assert_eq!(rates, [2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2]);
}

#[test]
fn a_reward_that_is_not_finite_names_step_and_sample() {
    let reward = |sample: &Sample| if sample.prompt == "d" { f32::NAN } else { 0. };
    let config = TrainConfig {
        prompts_per_step: 5,
        ..config()
    };
    let error = format!(
        "{:#}",
        try_trainer(reward, config).unwrap().step().unwrap_err()
    );
    assert!(error.starts_with("step 1: rewards: sample "), "{error}");
    assert!(
        error.contains("prompt \"d\"") && error.ends_with("has reward NaN, must be finite"),
        "{error}"
    );
}

struct OneTooMany;

impl RewardFunction for OneTooMany {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(vec![Score::from(0.); samples.len() + 1])
    }
}

#[test]
fn a_reward_function_of_the_wrong_length_is_an_error() {
    let error = try_trainer(OneTooMany, config())
        .unwrap()
        .step()
        .unwrap_err();
    assert_eq!(
        format!("{error:#}"),
        "step 1: rewards: 13 scores for 12 samples, there must be one for each"
    );
}

#[rstest]
#[case(TrainConfig { prompts_per_step: 0, ..config() }, "prompts_per_step: 0, must be at least 1")]
#[case(TrainConfig { num_generations: 0, ..config() }, "num_generations: 0, must be at least 1")]
#[case(TrainConfig { epochs: 0, ..config() }, "epochs: 0, must be at least 1")]
#[case(TrainConfig { mini_batch_size: Some(0), ..config() }, "mini_batch_size: 0, must be at least 1")]
#[case(TrainConfig { micro_batch_size: 0, ..config() }, "micro_batch_size: 0, must be at least 1")]
#[case(TrainConfig { micro_batch_tokens: Some(0.into()), ..config() }, "micro_batch_tokens: 0, must be at least 1")]
#[case(TrainConfig { micro_batch_tokens: Some(9.into()), micro_batch_size: 2, ..config() }, "micro_batch_size: 2, must be absent with micro_batch_tokens")]
#[case(TrainConfig { num_generations: 1, ..config() }, "num_generations: 1, must be at least 2 for a relative advantage")]
#[case(TrainConfig { max_grad_norm: f64::NAN, ..config() }, "max_grad_norm: NaN, must be positive and finite")]
fn invalid_settings_are_errors(#[case] config: TrainConfig, #[case] words: &str) {
    let error = try_trainer(share_of_a, config).err().unwrap().to_string();
    assert!(error.starts_with(words), "{error}");
}

#[test]
fn recipes_that_are_not_valid_are_refused_before_anything_is_drawn() {
    let mut config = config();
    config.recipe.policy_loss.loss_coef = -1.;
    let error = format!("{:#}", config.validate().unwrap_err());
    assert!(
        error.starts_with("recipe") && error.contains("loss_coef: -1"),
        "{error}"
    );
    let error = format!(
        "{:#}",
        try_trainer(share_of_a, config.clone()).err().unwrap()
    );
    assert!(
        error.starts_with("recipe") && error.contains("loss_coef: -1"),
        "{error}"
    );
    let config = ActorConfig {
        optimizer: config.optimizer,
        ..actor_config(config.recipe.policy_loss)
    };
    let error = Actor::new(model(), parameters(), config).err().unwrap();
    let error = format!("{error:#}");
    assert!(error.starts_with("policy_loss: loss_coef: -1"), "{error}");
}

/// Seven positions for five prompts: two prompts occur twice.
#[test]
fn a_prompt_that_occurs_twice_in_a_step_has_two_groups() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let reward = {
        let seen = seen.clone();
        move |sample: &Sample| {
            let completion = sample.completion_tokens.to_vec();
            seen.lock()
                .unwrap()
                .push((sample.prompt.to_owned(), completion));
            0.
        }
    };
    let config = TrainConfig {
        prompts_per_step: 7,
        num_generations: 8,
        ..config()
    };
    try_trainer(reward, config).unwrap().step().unwrap();
    let seen = seen.lock().unwrap();
    let groups: Vec<_> = seen.chunks(8).collect();
    let mut twice = 0;
    for (i, a) in groups.iter().enumerate() {
        for b in &groups[..i] {
            if a[0].0 == b[0].0 {
                assert_ne!(a, b);
                twice += 1;
            }
        }
    }
    assert_eq!(twice, 2);
}

#[test]
fn sampling_settings_are_checked_too() {
    let mut config = config();
    config.sampling.temperature = 0.;
    let error = try_trainer(share_of_a, config.clone())
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("sampling.temperature: 0.0, must be from 1e-6 to 1e6"),
        "{error}"
    );
    config.sampling.temperature = 1.;
    config.sampling.greedy = true;
    let error = try_trainer(share_of_a, config).err().unwrap().to_string();
    assert!(error.starts_with("sampling.greedy: true"), "{error}");
}

#[test]
fn an_evaluation_scores_one_completion_of_each_prompt() {
    let prompts = prompts(&["abc", "d"]);
    let sampler = sampler(sampling());
    let reward = |sample: &Sample| sample.columns["row"].as_i64().unwrap_or(-1) as f32;
    let evaluation = evaluate(&sampler, &prompts, 1, &reward, &tokenizer(), 0).unwrap();
    assert_eq!(evaluation.reward_mean(), 0.5);
    let rollouts = sampler.sample(&[&prompts[0], &prompts[1]], 1, 0).unwrap();
    for (sample, rollout) in evaluation.samples.iter().zip(&rollouts) {
        assert_eq!(sample.response_length, rollout.completion.tokens.len());
        let text = tokenizer()
            .decode(&rollout.completion.tokens, true)
            .unwrap();
        assert_eq!(sample.completion, text);
    }
    assert_eq!(evaluation.samples[1].prompt, "d");
    assert!(evaluate(&sampler, &[], 1, &reward, &tokenizer(), 0).is_err());
}

#[test]
fn a_step_that_failed_does_not_stop_the_next() {
    let calls = AtomicUsize::new(0);
    let reward = move |sample: &Sample| {
        if calls.fetch_add(1, Ordering::SeqCst) < 12 {
            f32::NAN
        } else {
            share_of_a(sample)
        }
    };
    let mut trainer = try_trainer(reward, config()).unwrap();
    assert!(trainer.step().is_err());
    assert!(!trainer.step().unwrap().skipped);
}

#[test]
fn no_prompts_is_an_error() {
    let made = Trainer::new(TrainerParts::new(
        model(),
        parameters(),
        tokenizer(),
        vec![],
        share_of_a,
        config(),
    ));
    let error = format!("{:#}", made.err().unwrap());
    assert!(error.starts_with("prompts"), "{error}");
}

#[test]
fn groups_of_one_are_fine_with_a_policy_for_them() {
    let config = TrainConfig {
        num_generations: 1,
        recipe: Recipe {
            advantage: AdvantagePipeline {
                single_sample: Some(SingletonGroup::Raw),
                ..AdvantagePipeline::default()
            },
            ..Recipe::grpo()
        },
        ..config()
    };
    let metrics = try_trainer(|_: &Sample| 1., config)
        .unwrap()
        .step()
        .unwrap();
    assert!(!metrics.skipped);
}

#[test]
fn settings_survive_serialization() {
    let text = serde_json::to_string(&config()).unwrap();
    let read: TrainConfig = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), text);
    let error = serde_json::from_str::<TrainConfig>(r#"{"num_generation": 4}"#).unwrap_err();
    assert!(error.to_string().contains("unknown field `num_generation`"));
}

/// A step's phases with their units, and a request to stop.
#[derive(Default)]
struct Phases {
    begun: Mutex<Vec<(Phase, usize)>>,
    advanced: Mutex<Vec<usize>>,
    stop: AtomicBool,
}

impl Progress for Phases {
    fn begin(&self, phase: Phase, units: usize) {
        self.begun.lock().unwrap().push((phase, units));
        self.advanced.lock().unwrap().push(0);
    }

    fn advance(&self, units: usize, _: usize) {
        *self.advanced.lock().unwrap().last_mut().unwrap() += units;
    }

    fn is_canceled(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

#[test]
fn a_step_reports_its_phases() {
    let phases = Arc::new(Phases::default());
    let mut trainer = try_trainer(share_of_a, config()).unwrap();
    trainer.set_progress(phases.clone());
    assert!(!trainer.step().unwrap().skipped);
    // Two epochs train on every completion.
    let expected = [(Phase::Sample, 12), (Phase::Score, 12), (Phase::Learn, 24)];
    assert_eq!(*phases.begun.lock().unwrap(), expected);
    assert_eq!(*phases.advanced.lock().unwrap(), [12, 12, 24]);
}

/// Requests a stop while it computes scores, and expects to receive the request itself.
struct Stopping {
    scale: f32,
    phases: Arc<Phases>,
    progress: Arc<dyn Progress>,
}

impl RewardFunction for Stopping {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        self.phases.stop.store(true, Ordering::SeqCst);
        assert!(self.progress.is_canceled());
        let score = |sample| Score::from(self.scale * share_of_a(sample));
        Ok(samples.iter().map(score).collect())
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }
}

#[rstest]
#[case::before_it_trains(1.0, None)]
#[case::before_it_is_skipped(0.0, Some(GroupFilter::default()))]
fn a_request_to_stop_during_the_scores_ends_the_step(
    #[case] scale: f32,
    #[case] group_filter: Option<GroupFilter>,
) {
    let phases = Arc::new(Phases::default());
    let reward = Stopping {
        scale,
        phases: phases.clone(),
        progress: Arc::new(NoProgress),
    };
    let mut config = config();
    config.recipe.group_filter = group_filter;
    config.max_sampling_batches = 1;
    let mut trainer = try_trainer(reward, config).unwrap();
    trainer.set_progress(phases.clone());
    let error = trainer.step().unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
    let begun = phases.begun.lock().unwrap();
    assert!(begun.iter().all(|(phase, _)| *phase != Phase::Learn));
    assert_eq!(trainer.steps(), 0);
}
