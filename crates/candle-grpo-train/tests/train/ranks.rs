//! Steps that several ranks share.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use candle_grpo_collective::Collective;
use candle_grpo_core::advantage::AdvantageName;
use candle_grpo_core::rewards::{NormLevel, RewardNorm};
use candle_grpo_core::{AdvantagePipeline, RewardShaping};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::surrogate::{ClipCov, KlCov, Surrogate};
use candle_grpo_loss::{
    Aggregation, KlLoss, PolicyLoss, Recipe, RolloutCorrection, TeacherTerm, experimental,
};
use candle_grpo_nn::optim::{GradientDType, MasterWeights, Sharding, StateForm, StateMemory};
use candle_grpo_nn::{BaseWeights, DecoderConfig, LoraConfig, Parameters};
use candle_grpo_test_support::{cases, device, on_ranks, stay_on_cpu};
use candle_grpo_train::learn::{Reference, ReferenceRefresh, TeacherPart};
use candle_grpo_train::rollout::{Deliver, GenerationBatch, LocalGenerator, PolicyWeights};
use candle_grpo_train::{
    ComputeDType, CriticConfig, Generator, Interrupted, Pretrained, Progress, Prompt, Sample,
    SamplingConfig, StepMetrics, TokenBatch, TrainConfig, Trainer, TrainerParts, evaluate,
};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use crate::common::{
    self, assert_records_close, digest, model, parameters, parts, parts_with_experts, pretrained,
    prompts, sampling, share_of_a, tokenizer, trainer, trainer_of,
};

/// Five prompts with four completions each, in two mini-batches.
pub(crate) fn config(recipe: Recipe) -> TrainConfig {
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
pub(crate) struct Run {
    pub(crate) metrics: Vec<StepMetrics>,
    pub(crate) weights: Vec<(String, Vec<f32>)>,
}

/// The values of all weights. If ranks divide them, all ranks must call it together.
fn values(parameters: &Parameters) -> Vec<(String, Vec<f32>)> {
    let flat = |(name, x): (&str, &Var)| {
        let x = if parameters.is_full() {
            parameters.whole(name).unwrap()
        } else {
            x.as_detached_tensor()
        };
        let x = x.to_dtype(DType::F32).unwrap();
        (name.to_owned(), x.flatten_all().unwrap().to_vec1().unwrap())
    };
    parameters.iter().map(flat).collect()
}

pub(crate) fn run(trainer: &mut Trainer, steps: usize) -> Run {
    let metrics = common::run(trainer, steps);
    // Adapters are merged into whole weights.
    let _held = trainer.actor().hold_weights().unwrap();
    let mut weights = values(&trainer.policy_parameters().unwrap());
    if let Some(critic) = trainer.critic() {
        weights.extend(values(critic.parameters()));
    }
    Run { metrics, weights }
}

fn close(a: f64, b: f64, tolerance: f64) -> bool {
    (a - b).abs() <= tolerance * (1. + b.abs())
}

pub(crate) fn assert_run_close(found: &Run, expected: &Run) {
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
        assert_equal_to_one_rank(&build, steps, world_size, &alone);
    }
}

/// Checks that a run with `world_size` ranks equals `alone`, a run with one rank, up to rounding,
/// and is bit-identical on all ranks.
pub(crate) fn assert_equal_to_one_rank(
    build: impl Fn() -> TrainerParts + Sync,
    steps: usize,
    world_size: usize,
    alone: &Run,
) {
    let size = build().config.sequence_ranks;
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
        assert!(
            *other == runs[0],
            "{world_size} ranks in teams of {size} differ"
        );
    }
    assert_run_close(&runs[0], alone);
}

pub(crate) fn surrogate(surrogate: impl Into<Surrogate>) -> Recipe {
    Recipe {
        policy_loss: PolicyLoss {
            surrogate: surrogate.into(),
            ..PolicyLoss::default()
        },
        ..Recipe::default()
    }
}

pub(crate) fn advantage(name: &str) -> Recipe {
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

/// Each rank divides the weights of its rows by the mean of those of all rows.
#[test]
fn the_weights_of_rows_are_those_of_one_rank() {
    stay_on_cpu();
    let config = TrainConfig {
        sample_weight_column: Some("weight".to_owned()),
        ..config(Recipe::grpo())
    };
    let texts = ["abc", "d", "ee", "ca", "b"].into_iter();
    let rows = texts.zip([1., 0.2, 5., 3., 0.5]).enumerate();
    let prompts: Vec<Prompt> = rows
        .map(|(i, (text, weight))| {
            let columns = json!({ "weight": weight });
            Prompt::new(i as u64, text, columns, &tokenizer()).unwrap()
        })
        .collect();
    let build = || TrainerParts {
        prompts: prompts.clone(),
        ..parts(digest, config.clone())
    };
    assert_equal_on_ranks(build, 4);
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
#[rstest]
fn replayed_experts_are_those_of_one_rank(
    #[values(Sharding::None, Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
        router_replay: true,
        // Expert balance is computed per micro-batch.
        micro_batch_size: 1,
        ..config(Recipe::grpo())
    };
    assert_equal_on_ranks(|| parts_with_experts(digest, config.clone()), 3);
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
/// divisible by the number of ranks. Weights that ranks divide in bf16 are rounded in a trainer,
/// so another test compares checkpoints.
#[rstest]
#[case(Sharding::Optimizer, false, ComputeDType::F32)]
#[case(Sharding::Optimizer, true, ComputeDType::F32)]
#[case(Sharding::Optimizer, false, ComputeDType::Bf16)]
#[case(Sharding::Optimizer, true, ComputeDType::Bf16)]
#[case(Sharding::Resident, false, ComputeDType::F32)]
#[case(Sharding::Resident, true, ComputeDType::F32)]
#[case(Sharding::Resident, true, ComputeDType::Bf16)]
#[case(Sharding::Full, false, ComputeDType::F32)]
#[case(Sharding::Full, true, ComputeDType::F32)]
#[case(Sharding::Full, true, ComputeDType::Bf16)]
fn what_ranks_divide_is_that_of_one_rank(
    #[case] sharding: Sharding,
    #[case] with_adapters: bool,
    #[case] compute_dtype: ComputeDType,
) {
    stay_on_cpu();
    let mut config = with_critic();
    config.sharding = sharding;
    config.adapters = with_adapters.then(|| LoraConfig::all_linear(3, 6.));
    config.compute_dtype = compute_dtype;
    // Half precision rounds sums differently in other micro-batches.
    config.micro_batch_size = 1;
    assert_equal_on_ranks(|| parts(digest, config.clone()), 3);
}

/// Saves `trainer` in `folder`, on all ranks.
fn save(trainer: &Trainer, folder: &Path) {
    trainer.ensure_equal_ranks().unwrap();
    let model = Pretrained {
        model: trainer.actor().model().clone(),
        ..pretrained()
    };
    if trainer.ranks().is_first() {
        trainer
            .write_checkpoint(folder, &model, ComputeDType::F32)
            .unwrap();
    } else {
        trainer.take_part_in_checkpoint().unwrap();
    }
}

/// The metrics of three steps on `world_size` ranks, and the files of the checkpoint after them.
fn files_after(
    world_size: usize,
    config: &TrainConfig,
    parts: &(impl Fn(TrainConfig) -> TrainerParts + Sync),
) -> (Vec<StepMetrics>, Vec<(String, Vec<u8>)>) {
    let folder = tempfile::tempdir().unwrap();
    let mut metrics = on_ranks(world_size, |collective| {
        let mut trainer = trainer_of(TrainerParts {
            collective,
            ..parts(config.clone())
        });
        let metrics = common::run(&mut trainer, 3);
        save(&trainer, folder.path());
        metrics
    });
    assert!(
        metrics.iter().all(|other| *other == metrics[0]),
        "the ranks differ"
    );
    (metrics.swap_remove(0), files_of(folder.path()))
}

/// The names and bytes of the files of a checkpoint.
fn files_of(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap();
    let files = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.is_file());
    let read = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read(path).unwrap())
    };
    let mut files: Vec<_> = files.map(read).collect();
    files.sort();
    files
}

/// Checks that checkpoints of ranks that divide other things are byte for byte the same.
fn assert_same_files(
    shardings: &[Sharding],
    config: &TrainConfig,
    parts: impl Fn(TrainConfig) -> TrainerParts + Sync,
) {
    for world_size in 1..=5 {
        let mut found = shardings.iter().map(|&sharding| {
            let config = TrainConfig {
                sharding,
                ..config.clone()
            };
            files_after(world_size, &config, &parts)
        });
        let expected = found.next().unwrap();
        assert!(expected.1.len() > 2);
        for (found, sharding) in found.zip(&shardings[1..]) {
            assert_eq!(expected.0, found.0, "{world_size} ranks, {sharding:?}");
            assert_eq!(expected.1.len(), found.1.len());
            for ((name, expected), (_, found)) in expected.1.iter().zip(&found.1) {
                assert!(
                    found == expected,
                    "{name} of {world_size} ranks, {sharding:?}"
                );
            }
        }
    }
}

/// Checks that checkpoints of ranks that divide gradients, and of those that divide the weights
/// that they compute with, are byte for byte those of ranks that divide the state of the
/// optimizer.
fn assert_resident_is_optimizer(
    config: &TrainConfig,
    parts: impl Fn(TrainConfig) -> TrainerParts + Sync,
) {
    let all = [Sharding::Optimizer, Sharding::Resident, Sharding::Full];
    assert_same_files(&all, config, parts);
}

/// Each rank has one micro-batch in an update, so that both sum gradients in the same order.
fn in_one_micro_batch(config: TrainConfig) -> TrainConfig {
    TrainConfig {
        micro_batch_size: TrainConfig::default().micro_batch_size,
        ..config
    }
}

/// In half precision with adapters alone: the output layer has its weight in the dtype of the
/// weights that train.
#[rstest]
#[case::f32(ComputeDType::F32, false)]
#[case::adapters(ComputeDType::F32, true)]
#[case::adapters_in_bf16(ComputeDType::Bf16, true)]
#[case::adapters_in_f16(ComputeDType::F16, true)]
fn resident_shards_have_the_bits_of_a_divided_optimizer(
    #[case] compute_dtype: ComputeDType,
    #[case] with_adapters: bool,
    #[values(StateForm::F32, StateForm::Blocks8)] state: StateForm,
) {
    stay_on_cpu();
    let mut config = in_one_micro_batch(with_critic());
    config.compute_dtype = compute_dtype;
    config.adapters = with_adapters.then(|| LoraConfig::all_linear(3, 6.));
    config.optimizer.state = state;
    assert_resident_is_optimizer(&config, |config| parts(digest, config));
}

/// The gradients differ by the rounding of the output layer's weight.
#[rstest]
fn f32_weights_that_ranks_divide_move_as_whole_ones(
    #[values(ComputeDType::Bf16, ComputeDType::F16)] compute_dtype: ComputeDType,
    #[values(2, 3)] world_size: usize,
) {
    stay_on_cpu();
    let trained = |sharding| {
        let folder = tempfile::tempdir().unwrap();
        let config = TrainConfig {
            sharding,
            compute_dtype,
            ..in_one_micro_batch(config(Recipe::grpo()))
        };
        on_ranks(world_size, |collective| {
            let mut trainer = trainer_of(TrainerParts {
                collective,
                ..parts(digest, config.clone())
            });
            run(&mut trainer, 1);
            save(&trainer, folder.path());
        });
        values(&Parameters::load_folder(&model(), folder.path(), device()).unwrap())
    };
    let (whole, divided) = (trained(Sharding::None), trained(Sharding::Resident));
    let start = values(&parameters());
    let distance = |a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)]| {
        let pairs = a.iter().zip(b).flat_map(|((_, a), (_, b))| a.iter().zip(b));
        pairs.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>()
    };
    let (error, moved) = (distance(&divided, &whole), distance(&whole, &start));
    assert!(error < moved / 5., "{error} of {moved}");
    // The rest of a step is not lost in rounding: f32 has weights between those of half precision.
    let rounded = |values: &[f32]| -> candle_core::Result<Vec<f32>> {
        let rounded = Tensor::new(values, &Device::Cpu)?.to_dtype(compute_dtype.into())?;
        rounded.to_dtype(DType::F32)?.to_vec1::<f32>()
    };
    assert!(
        divided
            .iter()
            .any(|(_, values)| rounded(values).unwrap() != *values)
    );
}

/// Both compute with rounded weights. With a reference, whose weights are divided as well, and a
/// critic.
#[rstest]
fn weights_that_ranks_divide_have_the_bits_of_resident_ones(
    #[values(ComputeDType::Bf16, ComputeDType::F16)] compute_dtype: ComputeDType,
    #[values(StateForm::F32, StateForm::Blocks8)] state: StateForm,
) {
    stay_on_cpu();
    let mut config = in_one_micro_batch(with_critic());
    config.compute_dtype = compute_dtype;
    config.optimizer.state = state;
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.1));
    let both = [Sharding::Resident, Sharding::Full];
    assert_same_files(&both, &config, |config| parts(digest, config));
}

/// In several micro-batches, of which ranks have different numbers, and with recomputed blocks.
#[test]
fn weights_that_ranks_divide_are_gathered_in_every_pass() {
    stay_on_cpu();
    let config = TrainConfig {
        micro_batch_size: TrainConfig::default().micro_batch_size,
        micro_batch_tokens: Some(30.into()),
        activation_checkpointing: true.into(),
        top_entropy: Some(0.5),
        ..config(advantage(r#"{"name": "optimal_token_baseline"}"#))
    };
    let both = [Sharding::Resident, Sharding::Full];
    assert_same_files(&both, &config, |config| parts(digest, config));
}

/// A teacher in this process whose weights the ranks divide, with rows that all ranks share.
#[test]
fn a_teacher_that_ranks_divide_is_that_of_one_rank() {
    stay_on_cpu();
    let mut config = TrainConfig {
        sharding: Sharding::Full,
        ..config(Recipe::grpo())
    };
    config.recipe.policy_loss.distillation = Some(TeacherTerm::new(0.5));
    let steps = |collective: Option<Arc<dyn Collective>>| {
        let mut teacher = Parameters::init(&model(), 9, device()).unwrap();
        let division = collective.as_ref();
        if let Some(division) = division.and_then(|ranks| config.teacher_division(ranks)) {
            teacher = teacher.divided(&division).unwrap();
        }
        let teacher = Reference::shared(&model(), &teacher, ComputeDType::F32).unwrap();
        let mut parts = TrainerParts {
            teacher: Some(TeacherPart::other(teacher)),
            ..parts(digest, config.clone())
        };
        if let Some(collective) = collective {
            parts.collective = collective;
        }
        run(&mut trainer_of(parts), 3)
    };
    let alone = steps(None);
    for found in on_ranks(3, |collective| steps(Some(collective))) {
        assert_run_close(&found, &alone);
    }
}

#[rstest]
#[case::quantized(
    |config: &mut TrainConfig| {
        config.adapters = Some(LoraConfig::all_linear(2, 4.));
        config.base_weights = BaseWeights::Q8_0;
    },
    "base_weights: q8_0, must be dense with sharding: full, which divides numbers, not blocks of them"
)]
#[case::ahead(
    |config: &mut TrainConfig| config.rollout.max_staleness = 1,
    "rollout.max_staleness: 1, must be 0 with sharding: full, because a thread that samples ahead copies all weights"
)]
#[case::another_dtype(
    |config: &mut TrainConfig| config.rollout.dtype = Some(ComputeDType::Bf16),
    "rollout.dtype: bf16, must be absent with sharding: full, because a copy in another dtype is not divided"
)]
#[case::a_reference_that_follows(
    |config: &mut TrainConfig| config.reference_refresh = Some(ReferenceRefresh { every_steps: 1, alpha: 1. }),
    "sharding: full, must be none or optimizer with reference_refresh, which reads whole weights"
)]
fn settings_that_need_whole_weights_are_refused(
    #[case] change: fn(&mut TrainConfig),
    #[case] expected: &str,
) {
    let mut config = TrainConfig {
        sharding: Sharding::Full,
        ..config(Recipe::grpo())
    };
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.1));
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    config.validate().unwrap();
    change(&mut config);
    assert_eq!(config.validate().unwrap_err().to_string(), expected);
}

/// Fails in one of the calls that gather weights.
struct Failing {
    ranks: Arc<dyn Collective>,
    /// The number of calls before the one that fails.
    left: AtomicUsize,
}

impl Collective for Failing {
    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn world_size(&self) -> usize {
        self.ranks.world_size()
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        self.ranks.all_reduce_sum(tensors)
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        self.ranks.reduce_scatter_sum(tensors)
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        if tensors.iter().any(|tensor| tensor.dtype() == DType::BF16) {
            let left = self
                .left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    Some(left.saturating_sub(1))
                });
            if left == Ok(1) {
                candle_core::bail!("another rank has ended");
            }
        }
        self.ranks.all_gather(tensors)
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> candle_core::Result<()> {
        self.ranks.broadcast(tensors, root)
    }

    fn barrier(&self) -> candle_core::Result<()> {
        self.ranks.barrier()
    }
}

/// A failed operation is one of all ranks: while completions are drawn, in a pass without
/// gradients, forward or backward, or after the optimizer has changed a part. The next step finds
/// the weights as they were, or is refused.
#[rstest]
// All weights, and each of two blocks, embedding, norm and output layer in each pass.
#[case::full(Sharding::Full, 12)]
#[case::resident(Sharding::Resident, 1)]
fn a_gather_that_fails_ends_the_step(#[case] sharding: Sharding, #[case] least: usize) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
        compute_dtype: ComputeDType::Bf16,
        ..in_one_micro_batch(config(Recipe::grpo()))
    };
    let steps = |failing: Option<usize>| {
        on_ranks(2, |collective| {
            let ranks = Arc::new(Failing {
                ranks: collective,
                left: AtomicUsize::new(0),
            });
            let mut trainer = trainer_of(TrainerParts {
                collective: Arc::clone(&ranks) as Arc<dyn Collective>,
                ..parts(digest, config.clone())
            });
            let error = failing.map(|failing| {
                ranks.left.store(failing, Ordering::SeqCst);
                let error = trainer
                    .step()
                    .map(drop)
                    .map_err(|error| format!("{error:#}"));
                ranks.left.store(0, Ordering::SeqCst);
                error
            });
            let next = trainer.step().ok();
            (
                error,
                next.map(|_| values(&trainer.policy_parameters().unwrap())),
            )
        })
    };
    let expected = steps(None)[0].1.clone().unwrap();
    let mut failed = 0;
    for failing in 1..200 {
        let found = steps(Some(failing));
        let Some(Err(error)) = &found[0].0 else {
            break;
        };
        assert!(error.contains("another rank has ended"), "{error}");
        assert!(matches!(&found[1].0, Some(Err(_))));
        // A step that has changed weights cannot be repeated.
        for (_, next) in &found {
            assert!(next.as_ref().is_none_or(|next| *next == expected));
        }
        failed += 1;
    }
    assert!((least..199).contains(&failed), "{failed}");
}

#[rstest]
fn resident_shards_round_in_bf16_as_a_divided_optimizer(
    #[values(GradientDType::F32, GradientDType::Bf16)] gradient_dtype: GradientDType,
) {
    stay_on_cpu();
    let mut config = in_one_micro_batch(config(Recipe::grpo()));
    config.compute_dtype = ComputeDType::Bf16;
    config.optimizer.master_weights = MasterWeights::Bf16;
    config.optimizer.gradient_dtype = gradient_dtype;
    assert_resident_is_optimizer(&config, |config| parts(digest, config));
}

/// An output layer of its own, whose gradient is complete before all others, and matrices large
/// enough for a state in blocks.
#[rstest]
fn resident_shards_of_a_larger_model_have_the_bits_of_a_divided_optimizer(
    #[values(StateForm::F32, StateForm::Blocks8)] state: StateForm,
) {
    stay_on_cpu();
    let large = DecoderConfig {
        hidden_size: 72,
        intermediate_size: 132,
        num_attention_heads: 6,
        num_key_value_heads: 3,
        head_dim: None,
        tie_word_embeddings: false,
        ..model()
    };
    let mut config = in_one_micro_batch(config(Recipe::grpo()));
    config.optimizer.state = state;
    // The gradients of every step are clipped.
    config.max_grad_norm = 0.01;
    assert_resident_is_optimizer(&config, |config| {
        let parameters = Parameters::init(&large, 5, device()).unwrap();
        let prompts = prompts(&["abc", "d", "ea"]);
        let tokenizer = tokenizer();
        TrainerParts::new(
            large.clone(),
            parameters,
            tokenizer,
            prompts,
            digest,
            config,
        )
    });
}

/// Each rank has the state of its part, or of all weights.
#[rstest]
fn ranks_with_optimizers_in_host_memory_make_the_same_steps(
    #[values(Sharding::None, Sharding::Resident, Sharding::Full)] sharding: Sharding,
    #[values(ComputeDType::F32, ComputeDType::Bf16)] compute_dtype: ComputeDType,
) {
    stay_on_cpu();
    let steps = |memory| {
        let mut config = TrainConfig {
            sharding,
            compute_dtype,
            ..config(Recipe::grpo())
        };
        config.optimizer.memory = memory;
        let folder = tempfile::tempdir().unwrap();
        let found = on_ranks(2, |collective| {
            let mut trainer = trainer_of(TrainerParts {
                collective,
                ..parts(digest, config.clone())
            });
            let metrics = run(&mut trainer, 2).metrics;
            save(&trainer, folder.path());
            metrics
        });
        let files = ["model.safetensors", "optimizer.safetensors"];
        let files = files.map(|name| fs::read(folder.path().join(name)).unwrap());
        (found, files)
    };
    let (device, host) = (steps(StateMemory::Device), steps(StateMemory::Host));
    assert_eq!(host.0, device.0);
    assert!(host.1 == device.1, "the checkpoints differ");
}

#[rstest]
fn checkpoints_resume_on_another_number_of_ranks_that_divide_other_things(
    #[values(Sharding::Optimizer, Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let build = |collective, sharding| {
        let config = TrainConfig {
            sharding,
            ..config(Recipe::grpo())
        };
        trainer_of(TrainerParts {
            collective,
            ..parts(digest, config)
        })
    };
    let folder = tempfile::tempdir().unwrap();
    let expected = on_ranks(3, |collective| {
        let mut trainer = build(collective, sharding);
        run(&mut trainer, 2);
        save(&trainer, folder.path());
        run(&mut trainer, 2)
    });
    for (world_size, other) in [
        (1, Sharding::None),
        (2, Sharding::Optimizer),
        (4, Sharding::Resident),
        (5, Sharding::Full),
        (3, sharding),
    ] {
        let resumed = on_ranks(world_size, |collective| {
            let mut trainer = build(collective, other);
            trainer.load_state(folder.path()).unwrap();
            run(&mut trainer, 2)
        });
        assert_run_close(&resumed[0], &expected[0]);
        if world_size == 3 {
            assert!(resumed == expected, "the resumed run has other bits");
        }
    }
}

/// Loaded and written again at once.
#[rstest]
fn a_checkpoint_is_the_same_on_any_number_of_ranks(
    #[values(MasterWeights::F32, MasterWeights::Bf16)] master_weights: MasterWeights,
    #[values(Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let mut config = TrainConfig {
        compute_dtype: ComputeDType::Bf16,
        sharding,
        ..config(Recipe::grpo())
    };
    config.optimizer.master_weights = master_weights;
    let build = |collective| {
        trainer_of(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        })
    };
    let first = tempfile::tempdir().unwrap();
    on_ranks(3, |collective| {
        let mut trainer = build(collective);
        common::run(&mut trainer, 2);
        save(&trainer, first.path());
    });
    let expected = files_of(first.path());
    for world_size in 1..=5 {
        let again = tempfile::tempdir().unwrap();
        on_ranks(world_size, |collective| {
            let mut trainer = build(collective);
            trainer.load_state(first.path()).unwrap();
            save(&trainer, again.path());
        });
        let found = files_of(again.path());
        assert_eq!(found.len(), expected.len());
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            assert!(found == expected, "{name} of {world_size} ranks");
        }
    }
}

/// In bf16, where ranks divide the f32 weights: a run that resumes ends with the same bytes.
#[rstest]
fn f32_weights_that_ranks_divide_are_those_of_a_checkpoint(
    #[values(Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let config = TrainConfig {
        compute_dtype: ComputeDType::Bf16,
        sharding,
        ..in_one_micro_batch(with_critic())
    };
    let build = |collective| {
        trainer_of(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        })
    };
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [middle, end] = folders.each_ref().map(|folder| folder.path());
    on_ranks(3, |collective| {
        let mut trainer = build(collective);
        run(&mut trainer, 2);
        save(&trainer, middle);
    });
    on_ranks(3, |collective| {
        let mut trainer = build(collective);
        trainer.load_state(middle).unwrap();
        run(&mut trainer, 1);
        save(&trainer, end);
    });
    let (_, expected) = files_after(3, &config, &|config| parts(digest, config));
    for (name, expected) in expected {
        assert!(
            std::fs::read(end.join(&name)).unwrap() == expected,
            "{name}"
        );
    }
    // Other numbers of ranks, which divide other things, resume as well.
    for (world_size, sharding) in [(1, Sharding::None), (2, Sharding::Optimizer)] {
        let config = TrainConfig {
            sharding,
            ..config.clone()
        };
        on_ranks(world_size, |collective| {
            let mut trainer = trainer_of(TrainerParts {
                collective,
                ..parts(digest, config.clone())
            });
            trainer.load_state(middle).unwrap();
            run(&mut trainer, 1);
        });
    }
}

/// Its decoder has the f32 weights of the policy, which ranks have divided and rounded.
#[rstest]
fn a_critic_starts_from_the_f32_weights_that_ranks_divide(
    #[values(Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let config = TrainConfig {
        compute_dtype: ComputeDType::Bf16,
        sharding,
        ..with_critic()
    };
    let start = values(&parameters());
    let critics = on_ranks(3, |collective| {
        let trainer = trainer_of(TrainerParts {
            collective,
            ..parts(digest, config.clone())
        });
        assert!(trainer.actor().parameters().is_divided());
        values(trainer.critic().unwrap().parameters())
    });
    for critic in critics {
        for (name, found) in critic.iter().filter(|(name, _)| name.starts_with("model.")) {
            let (_, expected) = start.iter().find(|(other, _)| other == name).unwrap();
            assert!(found == expected, "{name}");
        }
        assert!(critic.len() > start.len());
    }
}

#[test]
fn a_reference_that_follows_the_policy_needs_its_f32_weights() {
    let mut config = TrainConfig {
        sharding: Sharding::Resident,
        ..config(Recipe::grpo())
    };
    config.recipe.policy_loss.kl = Some(KlLoss::k3(0.1));
    config.reference_refresh = Some(ReferenceRefresh {
        every_steps: 1,
        alpha: 1.,
    });
    config.validate().unwrap();
    config.compute_dtype = ComputeDType::Bf16;
    let error = config.validate().unwrap_err().to_string();
    let expected = "sharding: resident, must be none or optimizer with reference_refresh";
    assert!(error.starts_with(expected), "{error}");
    // There are no f32 weights.
    config.optimizer.master_weights = MasterWeights::Bf16;
    config.validate().unwrap();
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

pub(crate) fn with_critic() -> TrainConfig {
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

#[rstest]
fn a_rank_without_a_sequence_takes_part(
    #[values(Sharding::None, Sharding::Resident, Sharding::Full)] sharding: Sharding,
) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
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

#[rstest]
fn an_evaluation_is_that_of_one_rank(#[values(Sharding::None, Sharding::Full)] sharding: Sharding) {
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
    let build = || {
        let config = TrainConfig {
            sharding,
            ..config(Recipe::grpo())
        };
        parts(share_of_a, config)
    };
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

#[rstest]
fn an_engine_of_all_ranks_is_driven_by_the_first(
    #[values(Sharding::None, Sharding::Full)] sharding: Sharding,
) {
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
            ..parts(
                digest,
                TrainConfig {
                    sharding,
                    ..config(Recipe::grpo())
                },
            )
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

/// Reads the weights that it gets: to export them, and in a pass of a model. It has no others.
struct Reading {
    inner: LocalGenerator,
    read: Mutex<Vec<(Vec<f32>, Vec<f32>)>>,
}

impl Generator for Reading {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.inner.generate(batch, deliver)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, _: &dyn Progress) -> Result<()> {
        let export = weights.export().in_dtype(DType::BF16);
        let mut exported = Vec::new();
        for name in export.names() {
            let tensor = export.tensor(name)?.to_dtype(DType::F32)?;
            exported.extend(tensor.flatten_all()?.to_vec1::<f32>()?);
        }
        let reference = Reference::shared(weights.model, weights.parameters, ComputeDType::Bf16)?;
        let batch = TokenBatch::new(&[(&[1, 2], &[3, 4])], &Device::Cpu)?;
        let log_probs = reference.log_probs(&batch, 1.)?.flatten_all()?.to_vec1()?;
        self.read.lock().unwrap().push((exported, log_probs));
        Ok(())
    }

    fn serves_all_ranks(&self) -> bool {
        true
    }
}

/// Rank 0 passes the weights to an engine, and asks the others for their parts meanwhile.
#[test]
fn an_engine_reads_the_weights_that_ranks_divide() {
    stay_on_cpu();
    let read = |sharding| {
        let config = TrainConfig {
            sharding,
            compute_dtype: ComputeDType::Bf16,
            ..in_one_micro_batch(config(Recipe::grpo()))
        };
        let mut all = on_ranks(3, |collective| {
            let reading = Arc::new(Reading {
                inner: LocalGenerator::new(&model(), &parameters()).unwrap(),
                read: Mutex::default(),
            });
            let mut trainer = trainer_of(TrainerParts {
                generator: Some(Arc::clone(&reading) as Arc<dyn Generator>),
                collective,
                ..parts(digest, config.clone())
            });
            for _ in 0..2 {
                trainer.step().unwrap();
            }
            drop(trainer.sampler(sampling()).unwrap());
            std::mem::take(&mut *reading.read.lock().unwrap())
        });
        assert!(all[1].is_empty() && all[2].is_empty());
        all.swap_remove(0)
    };
    let (resident, full) = (read(Sharding::Resident), read(Sharding::Full));
    assert_eq!(full.len(), 3);
    assert!(full[0] != full[1] && full[1] != full[2]);
    assert!(full == resident);
}
