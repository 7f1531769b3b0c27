//! Steps that several ranks share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_collective::Collective;
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::rewards::{NormLevel, RewardNorm};
use candle_grpo_core::{AdvantagePipeline, RewardShaping};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::surrogate::{ClipCov, KlCov, Surrogate};
use candle_grpo_loss::{Aggregation, KlLoss, PolicyLoss, Recipe, RolloutCorrection, experimental};
use candle_grpo_nn::{DecoderConfig, LoraConfig, Parameters};
use candle_grpo_test_support::{cases, device, on_ranks, stay_on_cpu};
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator, PolicyWeights};
use candle_grpo_train::{
    ComputeDType, CriticConfig, Generator, Interrupted, Progress, Sample, SamplingConfig,
    StepMetrics, TrainConfig, Trainer, TrainerParts, evaluate,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::common::{
    self, assert_records_close, digest, model, model_with_experts, parameters, parameters_of,
    parts, pretrained, prompts, sampling, share_of_a, tokenizer, trainer, trainer_of,
};

/// Five prompts with four completions each, in two mini-batches.
fn config(recipe: Recipe) -> TrainConfig {
    let mut config = TrainConfig {
        recipe,
        prompts_per_step: 5,
        mini_batch_size: Some(12),
        epochs: 2,
        ..common::config()
    };
    // A larger epsilon than usual. Otherwise, if a weight's gradient is near 0, its update depends
    // on how that gradient is rounded.
    config.optimizer.epsilon = 1e-3;
    config.optimizer.learning_rate = 1e-2;
    config
}

/// The steps' metrics, and the bits of all weights.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    metrics: Vec<StepMetrics>,
    weights: Vec<(String, Vec<f32>)>,
}

fn values(parameters: &Parameters) -> Vec<(String, Vec<f32>)> {
    let flat = |(name, x): (&str, &candle_core::Var)| {
        (name.to_owned(), x.flatten_all().unwrap().to_vec1().unwrap())
    };
    parameters.iter().map(flat).collect()
}

fn run(trainer: &mut Trainer, steps: usize) -> Run {
    let metrics = common::run(trainer, steps);
    let mut weights = values(&trainer.policy_parameters().unwrap());
    if let Some(critic) = trainer.critic() {
        weights.extend(values(critic.parameters()));
    }
    Run { metrics, weights }
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * (1. + b.abs())
}

fn assert_run_close(found: &Run, expected: &Run) {
    assert_records_close(&found.metrics, &expected.metrics);
    for ((name, found), (_, expected)) in found.weights.iter().zip(&expected.weights) {
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                close(f64::from(*found), f64::from(*expected), 2e-5),
                "{name}: {found}, must be {expected}"
            );
        }
    }
}

/// Checks that runs with 2, 3 and 4 ranks equal a run with one rank up to rounding, and are
/// bit-identical on all ranks.
fn assert_equal_on_ranks(build: impl Fn() -> TrainerParts + Sync, steps: usize) {
    let alone = run(&mut trainer_of(build()), steps);
    assert!(alone.metrics.iter().any(|metrics| !metrics.skipped));
    for world_size in [2, 3, 4] {
        let runs = on_ranks(world_size, |collective| {
            run(
                &mut trainer_of(TrainerParts {
                    collective,
                    ..build()
                }),
                steps,
            )
        });
        for other in &runs[1..] {
            assert!(*other == runs[0], "{world_size} ranks differ");
        }
        assert_run_close(&runs[0], &alone);
    }
}

fn surrogate(surrogate: impl Into<Surrogate>) -> Recipe {
    Recipe {
        policy_loss: PolicyLoss {
            surrogate: surrogate.into(),
            ..PolicyLoss::default()
        },
        ..Recipe::default()
    }
}

fn advantage(name: &str) -> Recipe {
    let advantage: AdvantagePipeline = serde_json::from_str(name).unwrap();
    Recipe {
        advantage,
        ..Recipe::default()
    }
}

#[rstest]
#[case::grpo(Recipe::grpo())]
#[case::gspo(Recipe::gspo())]
#[case::dapo_with_dynamic_sampling(Recipe::dapo(8, 4))]
#[case::batch_scaled_advantages(experimental::recipe::lite_ppo())]
#[case::whitening(Recipe::reinforce_plus_plus_baseline())]
#[case::kl_in_the_reward(Recipe::reinforce_plus_plus(0.01))]
#[case::clip_cov(surrogate(ClipCov::default()))]
#[case::greedy_baselines(advantage(r#"{"name": "remax"}"#))]
#[case::optimal_token_baseline(advantage(r#"{"name": "optimal_token_baseline"}"#))]
fn five_steps_are_those_of_one_rank(#[case] recipe: Recipe) {
    stay_on_cpu();
    assert_equal_on_ranks(|| parts(digest, config(recipe.clone())), 5);
}

/// In one mini-batch: a token's penalty is the absolute value of its log ratio. Where log-probs
/// before the first update differ by rounding, the sign of its gradient depends on the rounding.
#[test]
fn tokens_of_highest_covariance_are_those_of_all_ranks() {
    stay_on_cpu();
    let mut config = config(surrogate(KlCov {
        ratio: 0.1,
        ..KlCov::default()
    }));
    config.mini_batch_size = None;
    // Without equal completions, whose order depends on rounding as well.
    config.sampling.temperature = 3.;
    config.sampling.stop_token_ids = Vec::new();
    config.sampling.max_new_tokens = 16;
    assert_equal_on_ranks(|| parts(digest, config.clone()), 5);
}

/// The rollouts' experts are exchanged, too.
#[test]
fn replayed_experts_are_those_of_one_rank() {
    stay_on_cpu();
    let config = TrainConfig {
        router_replay: true,
        // Expert balance is computed per micro-batch.
        micro_batch_size: 1,
        ..config(Recipe::grpo())
    };
    let model = model_with_experts();
    let build = || {
        TrainerParts::new(
            model.clone(),
            parameters_of(&model, device()),
            tokenizer(),
            prompts(&["a", "b", "ab", "ba", "aab"]),
            digest,
            config.clone(),
        )
    };
    assert_equal_on_ranks(build, 3);
}

/// Before the first update, entropies have the same bits on any number of ranks.
#[test]
fn tokens_of_highest_entropy_are_those_of_all_ranks() {
    stay_on_cpu();
    let config = TrainConfig {
        top_entropy: Some(0.3),
        mini_batch_size: None,
        epochs: 1,
        ..config(Recipe::grpo())
    };
    assert_equal_on_ranks(|| parts(digest, config.clone()), 1);
}

/// With adapters and a critic, in bf16, and with parameters whose number of elements is not
/// divisible by the number of ranks.
#[rstest]
fn a_sharded_optimizer_is_that_of_one_rank(
    #[values(false, true)] with_adapters: bool,
    #[values(ComputeDType::F32, ComputeDType::Bf16)] compute_dtype: ComputeDType,
) {
    stay_on_cpu();
    let mut config = with_critic();
    config.sharded_optimizer = true;
    config.adapters = with_adapters.then(|| LoraConfig::all_linear(3, 6.));
    config.compute_dtype = compute_dtype;
    // Half precision rounds sums differently in other micro-batches.
    config.micro_batch_size = 1;
    assert_equal_on_ranks(|| parts(digest, config.clone()), 3);
}

#[test]
fn checkpoints_resume_on_another_number_of_ranks() {
    stay_on_cpu();
    let mut config = config(Recipe::grpo());
    config.sharded_optimizer = true;
    let build = |collective| {
        trainer_of(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        })
    };
    let folder = tempfile::tempdir().unwrap();
    // Saves after two steps, and returns the steps after that.
    let uninterrupted = |world_size: usize, save: bool| {
        on_ranks(world_size, |collective| {
            let first = collective.rank() == 0;
            let mut trainer = build(collective);
            run(&mut trainer, 2);
            match (save, first) {
                (true, true) => trainer
                    .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
                    .unwrap(),
                (true, false) => trainer.take_part_in_checkpoint().unwrap(),
                (false, _) => {}
            }
            run(&mut trainer, 2)
        })
    };
    let expected = uninterrupted(3, true);
    for world_size in [1, 2, 3] {
        let resumed = on_ranks(world_size, |collective| {
            let mut trainer = build(collective);
            trainer.load_state(folder.path()).unwrap();
            run(&mut trainer, 2)
        });
        assert_run_close(&resumed[0], &expected[0]);
        if world_size == 3 {
            assert!(resumed == expected, "the resumed run has other bits");
        }
    }
}

#[test]
fn a_rank_with_other_weights_is_an_error_of_all() {
    stay_on_cpu();
    let errors = on_ranks(3, |collective| {
        let rank = collective.rank();
        let trainer = trainer_of(TrainerParts {
            collective,
            ..parts(digest, config(Recipe::grpo()))
        });
        trainer.ensure_equal_ranks().unwrap();
        if rank == 1 {
            let (_, weight) = trainer.actor().parameters().iter().next().unwrap();
            weight.set(&(weight.as_tensor() * 1.0001).unwrap()).unwrap();
        }
        trainer.ensure_equal_ranks().unwrap_err().to_string()
    });
    for error in errors {
        let start = "weights: those of rank 1 (step 0, sha256 ";
        assert!(error.starts_with(start), "{error}");
        let rest = "differ from those of rank 0 (step 0, sha256 ";
        assert!(error.contains(rest), "{error}");
    }
}

#[test]
fn tokens_per_prompt_and_running_moments_are_those_of_all_ranks() {
    stay_on_cpu();
    let mut recipe = Recipe::grpo();
    recipe.policy_loss.aggregation = Aggregation::PromptMeanTokenMean;
    recipe.policy_loss.kl = Some(KlLoss::k3(0.05));
    recipe.reward_shaping = RewardShaping {
        norm: RewardNorm {
            mean: NormLevel::Running,
            std: NormLevel::Running,
            ..RewardNorm::default()
        },
        ..RewardShaping::default()
    };
    assert_equal_on_ranks(|| parts(digest, config(recipe.clone())), 4);
}

fn with_critic() -> TrainConfig {
    TrainConfig {
        critic: Some(CriticConfig {
            optimizer: candle_grpo_nn::AdamWConfig {
                epsilon: 1e-3,
                ..candle_grpo_nn::AdamWConfig::default()
            },
            warmup_steps: 1,
            ..CriticConfig::default()
        }),
        ..config(Recipe {
            advantage: AdvantageName::Gae.into(),
            ..Recipe::default()
        })
    }
}

#[test]
fn a_critic_is_that_of_one_rank() {
    stay_on_cpu();
    assert_equal_on_ranks(|| parts(digest, with_critic()), 4);
}

#[test]
fn adapters_are_those_of_one_rank() {
    stay_on_cpu();
    let config = TrainConfig {
        adapters: Some(LoraConfig::all_linear(2, 4.)),
        ..config(Recipe::grpo())
    };
    assert_equal_on_ranks(|| parts(digest, config.clone()), 4);
}

#[test]
fn a_rank_without_a_sequence_takes_part() {
    stay_on_cpu();
    let config = TrainConfig {
        prompts_per_step: 1,
        num_generations: 2,
        mini_batch_size: Some(1),
        ..config(Recipe::grpo())
    };
    assert_equal_on_ranks(|| parts(digest, config.clone()), 4);
}

#[test]
fn completions_drawn_ahead_are_those_of_one_rank() {
    stay_on_cpu();
    let mut config = config(Recipe::grpo());
    config.rollout.max_staleness = 1;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    assert_equal_on_ranks(
        || TrainerParts {
            last_step: 4,
            ..parts(digest, config.clone())
        },
        4,
    );
}

#[test]
fn drawing_ahead_with_a_filter_is_an_error_on_several_ranks() {
    stay_on_cpu();
    let mut config = config(Recipe::dapo(8, 4));
    config.rollout.max_staleness = 1;
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    assert!(trainer(digest, config.clone()).step().is_ok());
    for error in on_ranks(2, |collective| {
        let mut trainer = trainer_of(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        });
        format!("{:#}", trainer.step().unwrap_err())
    }) {
        assert!(
            error.contains("rollout.max_staleness: 1, must be 0"),
            "{error}"
        );
    }
}

#[test]
fn a_loss_of_whole_groups_is_refused_on_several_ranks_before_a_step() {
    stay_on_cpu();
    let mut config = config(Recipe::grpo());
    config.recipe.policy_loss = experimental::policy_loss::real();
    config.micro_batch_size = 4;
    config.mini_batch_size = None;
    for error in on_ranks(2, |collective| {
        let made = Trainer::new(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        });
        format!("{:#}", made.err().unwrap())
    }) {
        let expected = "recipe.policy_loss.surrogate: compares the sequences of a group";
        assert!(error.starts_with(expected), "{error}");
    }
}

/// The update, the critic and the metrics, in the order of the completions.
#[rstest]
fn micro_batches_of_tokens_change_only_the_rounding(#[values(1, 30, 10_000)] tokens: usize) {
    stay_on_cpu();
    let mut config = config(Recipe {
        advantage: advantage(r#"{"name": "gae"}"#).advantage,
        ..Recipe::grpo()
    });
    config.critic = Some(CriticConfig::default());
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.1));
    let expected = run(&mut trainer(digest, config.clone()), 3);
    config.micro_batch_size = TrainConfig::default().micro_batch_size;
    config.micro_batch_tokens = Some(tokens.into());
    assert_run_close(&run(&mut trainer(digest, config), 3), &expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(4, 60)))]
    #[test]
    fn any_split_is_that_of_one_rank(
        prompts_per_step in 1usize..6,
        num_generations in 2usize..5,
        mini_batch_size in 1usize..20,
        micro_batch_size in 1usize..8,
        micro_batch_tokens in proptest::option::of(1usize..60),
        world_size in 2usize..6,
    ) {
    stay_on_cpu();
        let config = TrainConfig {
            prompts_per_step,
            num_generations,
            mini_batch_size: Some(mini_batch_size),
            micro_batch_size: match micro_batch_tokens {
                Some(_) => TrainConfig::default().micro_batch_size,
                None => micro_batch_size,
            },
            micro_batch_tokens: micro_batch_tokens.map(Into::into),
            epochs: 1,
            ..config(Recipe::grpo())
        };
        let alone = run(&mut trainer(digest, config.clone()), 2);
        let runs = on_ranks(world_size, |collective| {
            run(&mut trainer_of(TrainerParts { collective, ..parts(digest, config.clone()) }), 2)
        });
        for found in &runs {
            assert_run_close(found, &alone);
        }
    }
}

#[test]
fn the_completions_do_not_depend_on_the_number_of_ranks() {
    stay_on_cpu();
    let drawn = |collective: Option<Arc<dyn Collective>>| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let own = Arc::clone(&seen);
        let reward = move |sample: &Sample| {
            let tokens = sample.completion_tokens.to_vec();
            own.lock().unwrap().push((sample.prompt.to_owned(), tokens));
            digest(sample)
        };
        // Every prompt occurs more than once in a step.
        let config = TrainConfig {
            prompts_per_step: 12,
            ..config(Recipe::grpo())
        };
        let mut parts = parts(reward, config);
        if let Some(collective) = collective {
            parts.collective = collective;
        }
        let mut trainer = trainer_of(parts);
        trainer.step().unwrap();
        std::mem::take(&mut *seen.lock().unwrap())
    };
    let alone = drawn(None);
    for world_size in [2, 3] {
        let shares = on_ranks(world_size, |collective| drawn(Some(collective)));
        assert!(shares.iter().all(|share| !share.is_empty()));
        assert_eq!(shares.concat(), alone);
    }
}

/// The gradients for several blocks fill more than one bucket, so that sums begin before the
/// backward pass has ended.
#[test]
fn gradients_that_are_summed_during_the_backward_pass_are_those_of_one_rank() {
    stay_on_cpu();
    let large = DecoderConfig {
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        head_dim: None,
        ..model()
    };
    let build = || {
        let mut config = config(Recipe::grpo());
        config.prompts_per_step = 2;
        config.optimizer.learning_rate = 1e-3;
        let parameters = Parameters::init(&large, 5, device()).unwrap();
        let prompts = prompts(&["abc", "d"]);
        TrainerParts::new(
            large.clone(),
            parameters,
            tokenizer(),
            prompts,
            digest,
            config,
        )
    };
    let alone = run(&mut trainer_of(build()), 2);
    let runs = on_ranks(2, |collective| {
        run(
            &mut trainer_of(TrainerParts {
                collective,
                ..build()
            }),
            2,
        )
    });
    assert!(runs[0] == runs[1], "the ranks differ");
    assert_run_close(&runs[0], &alone);
}

#[test]
fn an_evaluation_is_that_of_one_rank() {
    stay_on_cpu();
    let held_out = prompts(&["a", "bb", "cde"]);
    let evaluated = |trainer: Trainer| {
        let sampler = trainer.sampler(sampling()).unwrap();
        evaluate(
            &sampler,
            &held_out,
            2,
            trainer.reward(),
            trainer.tokenizer(),
            0,
        )
        .unwrap()
    };
    let build = || parts(share_of_a, config(Recipe::grpo()));
    let alone = evaluated(trainer_of(build()));
    for world_size in [2, 5] {
        for found in on_ranks(world_size, |collective| {
            evaluated(trainer_of(TrainerParts {
                collective,
                ..build()
            }))
        }) {
            assert_eq!(found, alone);
        }
    }
}

/// Cancels when it is set.
struct Stop(AtomicBool);

impl Progress for Stop {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_rank_that_cancels_ends_the_step_of_all() {
    stay_on_cpu();
    let ended = on_ranks(3, |collective| {
        let rank = collective.rank();
        let stop = Arc::new(Stop(AtomicBool::new(false)));
        let mut trainer = trainer_of(TrainerParts {
            progress: Arc::clone(&stop) as Arc<dyn Progress>,
            collective,
            ..parts(digest, config(Recipe::grpo()))
        });
        trainer.step().unwrap();
        stop.0.store(rank == 1, Ordering::SeqCst);
        let error = trainer.step().unwrap_err();
        stop.0.store(false, Ordering::SeqCst);
        // The state is as before the step on all ranks.
        let next = trainer.step().unwrap();
        (error.is::<Interrupted>(), next.step)
    });
    assert_eq!(ended, [(true, 2); 3]);
}

/// Counts its calls.
struct Shared {
    inner: LocalGenerator,
    draws: Mutex<Vec<usize>>,
    weights: Mutex<Vec<u64>>,
}

impl Generator for Shared {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.draws.lock().unwrap().push(batch.prompts.len());
        self.inner.generate(batch, deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        self.weights.lock().unwrap().push(weights.version);
        self.inner.weights_changed(weights, progress)
    }

    fn serves_all_ranks(&self) -> bool {
        true
    }
}

#[test]
fn an_engine_of_all_ranks_is_driven_by_the_first() {
    stay_on_cpu();
    let calls = on_ranks(2, |collective| {
        let shared = Arc::new(Shared {
            inner: LocalGenerator::new(&model(), &parameters()).unwrap(),
            draws: Mutex::default(),
            weights: Mutex::default(),
        });
        let mut trainer = trainer_of(TrainerParts {
            generator: Some(Arc::clone(&shared) as Arc<dyn Generator>),
            collective,
            ..parts(digest, config(Recipe::grpo()))
        });
        let found = run(&mut trainer, 2);
        let sampler = trainer.sampler(SamplingConfig { ..sampling() }).unwrap();
        let held_out = prompts(&["a", "bb", "cde"]);
        evaluate(
            &sampler,
            &held_out,
            1,
            trainer.reward(),
            trainer.tokenizer(),
            0,
        )
        .unwrap();
        let calls = (
            shared.draws.lock().unwrap().clone(),
            shared.weights.lock().unwrap().clone(),
        );
        (calls, found)
    });
    assert_eq!(calls[0].0, (vec![5, 5, 3], vec![0, 1, 2]));
    assert_eq!(calls[1].0, (vec![], vec![]));
    assert!(calls[0].1 == calls[1].1);
}
