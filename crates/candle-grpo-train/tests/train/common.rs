//! A tiny policy and a few prompts.

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_grpo_loss::{PaddedTokens, PolicyLoss};
use candle_grpo_nn::{AdamWConfig, DecoderConfig, LayerType, ModelType, Parameters};
use candle_grpo_test_support::{TINY_DECODER, device, on_ranks};
use candle_grpo_train::learn::Models;
use candle_grpo_train::learn::step::{self, StepBatch};
use candle_grpo_train::model::{SpecialTokens, character_tokenizer};
use candle_grpo_train::run::StepRecord;
use candle_grpo_train::sequence::Batch;
use candle_grpo_train::{
    ActivationCheckpointing, ActorConfig, ComputeDType, Pretrained, Prompt, RewardFunction, Sample,
    Sampler, SamplingConfig, Sequence, StepMetrics, TokenBatch, TrainConfig, Trainer, TrainerParts,
};
use serde_json::json;
use tokenizers::Tokenizer;

pub(crate) const END: u32 = 0;

pub(crate) fn model() -> DecoderConfig {
    serde_json::from_str(TINY_DECODER).unwrap()
}

/// A model whose blocks are mixtures with two of four experts per token.
pub(crate) fn model_with_experts() -> DecoderConfig {
    DecoderConfig {
        model_type: ModelType::Qwen3Moe,
        num_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 8,
        head_dim: Some(model().head_dim()),
        ..model()
    }
}

/// A model with one attention block and one gated delta rule block.
pub(crate) fn model_with_states() -> DecoderConfig {
    DecoderConfig {
        model_type: ModelType::Qwen3_5,
        layer_types: vec![LayerType::LinearAttention, LayerType::FullAttention],
        linear_conv_kernel_dim: Some(4),
        linear_key_head_dim: Some(32),
        linear_value_head_dim: Some(32),
        linear_num_key_heads: Some(2),
        linear_num_value_heads: Some(4),
        ..model()
    }
}

/// Weights ten times larger than at the start of training, so that the distributions are far from
/// uniform.
pub(crate) fn parameters() -> Parameters {
    parameters_on(device())
}

pub(crate) fn parameters_on(device: &Device) -> Parameters {
    parameters_of(&model(), device)
}

pub(crate) fn parameters_of(model: &DecoderConfig, device: &Device) -> Parameters {
    drawn_parameters(model, 3, device)
}

pub(crate) fn drawn_parameters(model: &DecoderConfig, seed: u64, device: &Device) -> Parameters {
    let fresh = Parameters::init(model, seed, device).unwrap();
    let larger = fresh
        .frozen_copy()
        .unwrap()
        .into_iter()
        .map(|(name, x)| {
            let factor = if x.rank() == 2 { 10. } else { 1. };
            (name, (x * factor).unwrap())
        })
        .collect();
    Parameters::from_tensors(model, larger, device).unwrap()
}

pub(crate) fn pretrained() -> Pretrained {
    Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![END],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(model(), parameters(), tokenizer())
    }
}

pub(crate) fn tokenizer() -> Tokenizer {
    character_tokenizer("abcde").unwrap()
}

pub(crate) fn prompts(texts: &[&str]) -> Vec<Prompt> {
    let tokenizer = tokenizer();
    texts
        .iter()
        .enumerate()
        .map(|(i, text)| Prompt::new(i as u64, text, json!({ "row": i }), &tokenizer).unwrap())
        .collect()
}

pub(crate) fn sampling() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 8,
        stop_token_ids: vec![END],
        seed: 11,
        ..SamplingConfig::default()
    }
}

/// Configuration for a policy that trains in f32, at temperature 1.
pub(crate) fn actor_config(policy_loss: PolicyLoss) -> ActorConfig {
    ActorConfig {
        policy_loss,
        optimizer: AdamWConfig::default(),
        temperature: 1.,
        activation_checkpointing: ActivationCheckpointing::default(),
        activation_offloading: false,
        compute_dtype: ComputeDType::F32,
        router_aux_loss_coef: 0.,
        distillation_loss: None,
    }
}

/// Trainer parts for the tiny policy with five prompts.
pub(crate) fn parts(reward: impl RewardFunction + 'static, config: TrainConfig) -> TrainerParts {
    let prompts = prompts(&["abc", "d", "ee", "ca", "b"]);
    TrainerParts::new(model(), parameters(), tokenizer(), prompts, reward, config)
}

/// Trainer parts for the tiny policy with experts.
pub(crate) fn parts_with_experts(
    reward: impl RewardFunction + 'static,
    config: TrainConfig,
) -> TrainerParts {
    let model = model_with_experts();
    let parameters = parameters_of(&model, device());
    let prompts = prompts(&["a", "b", "ab", "ba", "aab"]);
    TrainerParts::new(model, parameters, tokenizer(), prompts, reward, config)
}

pub(crate) fn trainer_of(parts: TrainerParts) -> Trainer {
    Trainer::new(parts).unwrap()
}

pub(crate) fn try_trainer(
    reward: impl RewardFunction + 'static,
    config: TrainConfig,
) -> anyhow::Result<Trainer> {
    Trainer::new(parts(reward, config))
}

/// Three groups with four completions each, in micro-batches of five.
pub(crate) fn config() -> TrainConfig {
    TrainConfig {
        prompts_per_step: 3,
        num_generations: 4,
        sampling: sampling(),
        micro_batch_size: 5,
        ..TrainConfig::default()
    }
}

/// A step's completions to `prompts`, as a custom loop makes them.
pub(crate) fn step_batch(
    models: &Models,
    prompts: &[Prompt],
    config: &TrainConfig,
) -> anyhow::Result<StepBatch> {
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let sampling = &config.sampling;
    let sampler = models.sampler(sampling.clone())?;
    let mut groups = step::collect(&sampler, &prompts, config.num_generations, 1)?;
    step::score(&mut groups, &prompts, &digest, sampling, &tokenizer())?;
    StepBatch::new(groups, config, device())
}

pub(crate) fn trainer(reward: impl RewardFunction + 'static, config: TrainConfig) -> Trainer {
    try_trainer(reward, config).unwrap()
}

/// Returns `second` after it has loaded a checkpoint of `first`.
pub(crate) fn resumed(first: &Trainer, mut second: Trainer) -> Trainer {
    let folder = tempfile::tempdir().unwrap();
    first
        .write_checkpoint(folder.path(), &pretrained(), ComputeDType::F32)
        .unwrap();
    second.load_state(folder.path()).unwrap();
    second
}

/// Share that the character "a" has in a completion.
pub(crate) fn share_of_a(sample: &Sample) -> f32 {
    let a = sample.completion.matches('a').count();
    a as f32 / sample.completion_tokens.len() as f32
}

/// A reward that differs for almost any two completions.
pub(crate) fn digest(sample: &Sample) -> f32 {
    let weighted = |(i, &token): (usize, &u32)| (i as f32 + 1.) * token as f32;
    let tokens = sample.completion_tokens.iter().enumerate();
    tokens.map(weighted).sum::<f32>().sin()
}

/// File names in a folder, sorted.
pub(crate) fn file_names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

pub(crate) fn without_seconds(mut metrics: StepMetrics) -> StepMetrics {
    metrics.seconds = Default::default();
    metrics
}

pub(crate) fn sampler(config: SamplingConfig) -> Sampler {
    Sampler::new(&model(), &parameters(), config).unwrap()
}

pub(crate) fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    let [a, b] = [a, b].map(|x| x.to_dtype(DType::F32).unwrap());
    let difference = (a - b).unwrap().abs().unwrap();
    difference
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap()
        .to_scalar()
        .unwrap()
}

/// Metrics for the next steps.
pub(crate) fn run(trainer: &mut Trainer, steps: usize) -> Vec<StepMetrics> {
    let step = |_| without_seconds(trainer.step().unwrap());
    (0..steps).map(step).collect()
}

/// Checks that all ranks' steps are the same, and equal to those with one rank up to rounding.
pub(crate) fn assert_ranks_agree(
    world_sizes: &[usize],
    build: impl Fn() -> TrainerParts + Sync,
    steps: usize,
) {
    let expected = run(&mut trainer_of(build()), steps);
    for &world_size in world_sizes {
        let ranks = on_ranks(world_size, |collective| {
            let mut trainer = trainer_of(TrainerParts {
                collective,
                ..build()
            });
            let metrics = run(&mut trainer, steps);
            trainer.ensure_equal_ranks().unwrap();
            metrics
        });
        for metrics in &ranks {
            assert_eq!(metrics, &ranks[0]);
            assert_records_close(metrics, &expected);
        }
    }
}

/// The batch for (prompt, response) pairs, where a token trains if its entry in `mask` is 1.
pub(crate) fn with_mask(pairs: &[(&[u32], &[u32])], mask: &[Vec<u32>]) -> TokenBatch {
    let sequences = pairs.iter().zip(mask).map(|((prompt, response), mask)| {
        let written = mask[..response.len()].iter().map(|&trains| trains == 1);
        let sequence = Sequence::of_answer(prompt, response).unwrap();
        sequence.with_written(&written.collect::<Vec<_>>()).unwrap()
    });
    TokenBatch::of_batch(&Batch::new(sequences.collect()).unwrap(), device()).unwrap()
}

/// The sequences in `batch` with padding.
pub(crate) fn padded(batch: &TokenBatch) -> PaddedTokens {
    let sequences = batch.sequences().iter();
    let pairs: Vec<_> = sequences.map(|x| (x.prompt(), x.response())).collect();
    PaddedTokens::new(&pairs, device()).unwrap()
}

/// Checks that records have the same metrics up to rounding.
pub(crate) fn assert_records_close<R: StepRecord>(found: &[R], expected: &[R]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let step = found.step();
        let (scalars, others) = (found.scalars().unwrap(), expected.scalars().unwrap());
        assert_eq!(scalars.len(), others.len(), "{scalars:?} {others:?}");
        for ((name, value), (other_name, other)) in scalars.iter().zip(&others) {
            assert_eq!(name, other_name);
            let close = (value - other).abs() < 1e-4 * (1. + other.abs());
            assert!(close, "step {step}: {name}: {value}, must be {other}");
        }
    }
}
