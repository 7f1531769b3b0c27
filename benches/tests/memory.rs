//! Memory for operators on a vocabulary and for a run's models, beyond their arguments.

use std::alloc::System;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_bench::{Counting, peak, peak_bytes, restart_peak};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, log_prob, log_prob_gradient,
};
use candle_grpo_loss::{PolicyLoss, Recipe};
use candle_grpo_nn::optim::{MasterWeights, Sharding, StateForm};
use candle_grpo_nn::{
    ActivationCheckpointing, AdamWConfig, BaseWeights, Decoder, DecoderConfig, Export, Gradients,
    LanguageModel, Lora, LoraConfig, ModelType, PackedTokens, PagedCache, Parameters,
    SequenceRanks,
};
use candle_grpo_test_support::{LoneRank, is_long};
use candle_grpo_train::data::MixedOrder;
use candle_grpo_train::learn::{
    ActorConfig, DemonstrationConfig, DemonstrationPart, Draws, MemoryPlan, Reference, TeacherPart,
};
use candle_grpo_train::model::character_tokenizer;
use candle_grpo_train::sft::{SftConfig, SftParts, SftTrainer};
use candle_grpo_train::{
    Actor, ComputeDType, CriticConfig, Prompt, Sample, SamplingConfig, Sequence, TrainConfig,
    Trainer, TrainerParts,
};
use rstest::rstest;

#[global_allocator]
static ALLOCATOR: Counting<System> = Counting(System);

/// One test at a time, because the allocator counts for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

fn ones_like(tokens: &TokenLogProbs) -> Result<TokenLogProbs> {
    Ok(TokenLogProbs {
        log_probs: tokens.log_probs.ones_like()?,
        entropy: tokens.entropy.ones_like()?,
        log_sum_exp: tokens.log_sum_exp.ones_like()?,
    })
}

#[rstest]
fn log_prob_takes_its_gradient_or_nothing(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(false, true)] gradient_into_logits: bool,
) -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (rows, vocab) = (256, 20_000);
    let logits = Tensor::randn(0f32, 1., (rows, vocab), &Device::Cpu)?.to_dtype(dtype)?;
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    let options = LogProbOptions {
        gradient_into_logits,
        ..Default::default()
    };
    let (gradient, bytes) = peak_bytes(|| {
        let tokens = log_prob(&logits, &targets, 1.0, options)?;
        let derivatives = ones_like(&tokens)?;
        log_prob_gradient(&logits, &targets, 1.0, options, &tokens, &derivatives)
    });
    let logits_bytes = gradient?.elem_count() * dtype.size_in_bytes();
    let allowed = if gradient_into_logits {
        0
    } else {
        logits_bytes
    };
    assert!(
        bytes <= allowed + logits_bytes / 20,
        "{bytes} bytes beside logits of {logits_bytes}"
    );
    Ok(())
}

/// The bound, for any number of rows. Logits would take up to 312 MiB, a copy of the hidden states
/// 20.
#[rstest]
fn linear_log_prob_takes_its_gradients_and_a_few_mib(
    #[values(1, 1000, 20_000)] rows: usize,
    #[values(false, true)] is_masked: bool,
    #[values(false, true)] is_frozen: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (vocab, width) = (4096, 256);
    let random = |shape: (usize, usize)| {
        Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (hidden, weight) = (random((rows, width))?, random((vocab, width))?);
    let weight = if is_frozen {
        weight.as_detached_tensor()
    } else {
        weight.as_tensor().clone()
    };
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    let kept = (0..rows).map(|row| u8::from(row % 4 != 1));
    let mask = Tensor::from_iter(kept, &Device::Cpu)?;
    let options = LogProbOptions {
        mask: is_masked.then_some(&mask),
        ..Default::default()
    };
    let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, options)?;
    let (gradients, bytes) = peak_bytes(|| {
        let tokens = layer.forward()?;
        let derivatives = ones_like(&tokens)?;
        layer.backward(&tokens, &derivatives)
    });
    let gradients = gradients?;
    assert_eq!(gradients.weight.is_none(), is_frozen);
    let size = dtype.size_in_bytes();
    let weight_bytes = if is_frozen {
        0
    } else {
        vocab * width * DType::F32.size_in_bytes()
    };
    // The hidden state gradient is first summed in f32.
    let rounded = if dtype == DType::F32 { 0 } else { size };
    let hidden_bytes = rows * width * (DType::F32.size_in_bytes() + rounded);
    // A few numbers per row: tokens, derivatives, coefficients, indices of unmasked rows.
    let rows_bytes = rows * 256;
    // A logit tile, packing buffers for products, and for half precision a tile from each argument
    // in f32.
    let tile_bytes = if dtype == DType::F32 { 13 } else { 20 } * MIB;
    let allowed = weight_bytes + hidden_bytes + rows_bytes + tile_bytes;
    assert!(bytes <= allowed, "{bytes} bytes, allowed are {allowed}");
    Ok(())
}

#[test]
fn policy_reference_and_sampler_share_the_weights_under_adapters() -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = DecoderConfig {
        vocab_size: 1000,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 8,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        ..DecoderConfig::default()
    };
    let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
    let bytes_in_f32 = 4 * parameters.num_elements();
    let adapters = Lora::init(LoraConfig::all_linear(1, 1.), &model, 0, &Device::Cpu)?;
    let config = ActorConfig {
        policy_loss: PolicyLoss::default(),
        optimizer: AdamWConfig::default(),
        temperature: 1.,
        activation_checkpointing: ActivationCheckpointing::default(),
        activation_offloading: false,
        compute_dtype: ComputeDType::Bf16,
        router_aux_loss_coef: 0.,
        distillation_loss: None,
    };
    let (made, bytes) = peak_bytes(|| -> anyhow::Result<_> {
        let actor = Actor::with_adapters(model, parameters, adapters, config)?;
        let reference = actor.reference()?;
        let sampler = actor.sampler(SamplingConfig::default())?;
        Ok((actor, reference, sampler))
    });
    made?;
    // While a weight is converted, it is there twice.
    assert!(
        bytes < bytes_in_f32 / 10,
        "{bytes} bytes, the weights took {bytes_in_f32}"
    );
    Ok(())
}

/// A checkpoint with merged adapters converts and writes weights piece by piece.
#[rstest]
fn a_file_takes_a_few_mib_whatever_its_tensors(
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = DecoderConfig {
        vocab_size: 40_000,
        hidden_size: 256,
        intermediate_size: 256,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    };
    let base = Parameters::init(&model, 0, &Device::Cpu)?;
    let base = base.frozen_as(&model, BaseWeights::Dense, dtype)?;
    let adapters = Lora::init(LoraConfig::all_linear(4, 8.), &model, 0, &Device::Cpu)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let (saved, bytes) = peak_bytes(|| adapters.export(&base).save(&path));
    saved?;
    // The embedding takes 39 MiB in f32.
    assert!(bytes < 12 * MIB, "{bytes} bytes");

    let (all, bytes) =
        peak_bytes(|| candle_grpo_nn::all_finite(base.get("model.embed_tokens.weight").unwrap()));
    assert!(all?);
    assert!(bytes < 12 * MIB, "{bytes} bytes");
    Ok(())
}

/// A run whose plan is compared with its peak.
struct Measured {
    model: DecoderConfig,
    config: TrainConfig,
    prompt_tokens: usize,
    /// The number of tokens in each completion.
    response_tokens: usize,
    /// The number of tokens in each demonstration.
    demonstration_tokens: usize,
    has_teacher: bool,
    /// The number of prompts with one completion each that are drawn after each step.
    evaluated: usize,
}

impl Measured {
    fn new(model: DecoderConfig) -> Self {
        let config = TrainConfig {
            prompts_per_step: 4,
            num_generations: 4,
            sampling: SamplingConfig {
                max_new_tokens: 80,
                ..SamplingConfig::default()
            },
            micro_batch_size: 8,
            ..TrainConfig::default()
        };
        Self {
            model,
            config,
            prompt_tokens: 48,
            response_tokens: 80,
            demonstration_tokens: 0,
            has_teacher: false,
            evaluated: 0,
        }
    }

    fn plan(&self) -> anyhow::Result<MemoryPlan> {
        let demonstration = self.demonstration_tokens;
        let plan = MemoryPlan::new(&self.model, &self.config, self.prompt_tokens, demonstration)?;
        let plan = if self.has_teacher {
            plan.with_teacher(&self.model, &self.config, 1)
        } else {
            plan
        };
        let draws = Draws {
            prompts: self.evaluated,
            samples_per_prompt: 1,
            prompt_tokens: self.prompt_tokens,
            sampling: &self.config.sampling,
        };
        plan.with_evaluation(&self.model, &self.config, draws)
    }

    /// The peak in the second step, because in the first one the optimizer has no state.
    fn peak(mut self) -> anyhow::Result<usize> {
        let alphabet = "abcdefghijklmnopqrstuvwxyz";
        let tokenizer = character_tokenizer(alphabet)?;
        // The first two letters differ, or prompts would share their beginnings.
        let prompt = |at: usize| {
            let first = [at, at / 26].into_iter();
            let rest = first.filter_map(|at| alphabet.chars().nth(at % 26));
            let text = rest.chain(alphabet.chars().cycle().skip(at));
            let text: String = text.take(self.prompt_tokens).collect();
            Prompt::new(at as u64, &text, serde_json::Value::Null, &tokenizer)
        };
        let prompts = (0..self.config.prompts_per_step).map(prompt);
        let prompts = prompts.collect::<anyhow::Result<Vec<_>>>()?;
        let held_out = (0..self.evaluated).map(prompt);
        let held_out = held_out.collect::<anyhow::Result<Vec<_>>>()?;
        let reward = |sample: &Sample| (sample.completion_tokens[0] % 7) as f32;
        let (base, dtype) = self.config.stored_form();
        let parameters = Parameters::init(&self.model, 0, &Device::Cpu)?;
        let parameters = parameters.frozen_as(&self.model, base, dtype.into())?;
        let teacher = self.has_teacher.then(|| {
            let parameters = Parameters::init(&self.model, 1, &Device::Cpu)?;
            Reference::new(&self.model, &parameters, ComputeDType::F32)
        });
        let teacher = teacher.transpose()?;
        let demonstrations = self.config.demonstrations.map(|_| {
            let rows = examples(self.demonstration_tokens)?;
            let order = MixedOrder::single(rows.len(), 0)?;
            anyhow::Ok(DemonstrationPart::Rows(rows, order))
        });
        self.config.sampling.max_new_tokens = self.response_tokens;
        let sampling = self.config.sampling.clone();
        let mut trainer = Trainer::new(TrainerParts {
            teacher: teacher.map(TeacherPart::other),
            demonstrations: demonstrations.transpose()?,
            ..TrainerParts::new(
                self.model,
                parameters,
                tokenizer,
                prompts,
                reward,
                self.config,
            )
        })?;
        trainer.step()?;
        restart_peak();
        assert!(!trainer.step()?.skipped);
        if !held_out.is_empty() {
            let sampler = trainer.sampler(sampling)?;
            sampler.sample(&held_out.iter().collect::<Vec<_>>(), 1, 0)?;
        }
        let most = peak();
        drop(trainer);
        // What is left are the buffers of threads, which are not tensors.
        Ok(most - restart_peak())
    }
}

/// Rows with `tokens` tokens each, which share nothing.
fn examples(tokens: usize) -> anyhow::Result<Vec<Sequence>> {
    let row = |first: u32| Sequence::of_answer(&[first, 0, 1], &vec![first; tokens - 3]);
    (1..25).map(row).collect()
}

fn dense() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 4096,
        hidden_size: 256,
        intermediate_size: 768,
        num_hidden_layers: 10,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        max_position_embeddings: 256,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}

fn experts() -> DecoderConfig {
    DecoderConfig {
        model_type: ModelType::Qwen3Moe,
        num_experts: 8,
        num_experts_per_tok: 2,
        moe_intermediate_size: 256,
        ..dense()
    }
}

fn delta() -> DecoderConfig {
    DecoderConfig {
        model_type: ModelType::Qwen3_5,
        head_dim: Some(32),
        linear_key_head_dim: Some(32),
        linear_value_head_dim: Some(32),
        linear_num_key_heads: Some(4),
        linear_num_value_heads: Some(8),
        linear_conv_kernel_dim: Some(4),
        ..dense()
    }
}

#[rstest]
fn packed_weights_take_the_planned_bytes(
    #[values(dense(), experts(), delta())] model: DecoderConfig,
    #[values(BaseWeights::Dense, BaseWeights::Q8_0)] base: BaseWeights,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
    let parameters = parameters.frozen_as(&model, base, dtype)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let mut cache = PagedCache::new(&model, dtype, &Device::Cpu)?;
    // Enough tokens for most experts.
    let (sequence, tokens) = (cache.add(), (0..64).collect::<Vec<_>>());
    let mut step = |packs: bool| {
        if packs {
            cache.pack_weights();
        }
        decoder.next_logits(&[(sequence, &tokens)], &mut cache)?;
        Ok::<_, anyhow::Error>(restart_peak())
    };
    let copies = step(false)?.abs_diff(step(true)?);
    let planned = model.packed_bytes((base, None), dtype)?;
    assert!(
        copies.abs_diff(planned) <= planned / 10 + MIB / 4,
        "{copies} bytes, planned {planned}"
    );
    Ok(())
}

type Change = fn(&mut Measured);

/// Settings that have a part of their own in the plan.
const CHANGES: &[(&str, Change)] = &[
    ("passes of 8", |_| {}),
    ("one pass", |m| m.config.micro_batch_size = 16),
    ("one short pass", |m| {
        m.config.micro_batch_size = 16;
        m.prompt_tokens = 16;
        m.with_responses_of(20);
    }),
    ("short passes", |m| m.config.micro_batch_size = 1),
    ("mini-batches", |m| m.config.mini_batch_size = Some(8)),
    ("long prompts", |m| m.prompt_tokens = 170),
    ("large groups", |m| {
        (m.config.prompts_per_step, m.config.num_generations) = (2, 16);
    }),
    ("tokens", |m| m.with_micro_batches_of(600)),
    ("first pass longer", |m| m.with_micro_batches_of(1000)),
    // A single pass reaches the bound.
    ("shorter completions", |m| {
        m.with_micro_batches_of(1000);
        m.response_tokens = 50;
    }),
    ("checkpointing", |m| {
        m.config.activation_checkpointing = true.into();
    }),
    ("checkpointing in one pass", |m| {
        m.config.activation_checkpointing = true.into();
        m.config.micro_batch_size = 16;
    }),
    ("untied with checkpointing in one pass", |m| {
        m.model.tie_word_embeddings = false;
        m.config.activation_checkpointing = true.into();
        m.config.micro_batch_size = 16;
    }),
    ("checkpointing of some layers", |m| {
        m.config.activation_checkpointing = ActivationCheckpointing::Layers(4);
    }),
    ("checkpointing of most layers in one pass", |m| {
        m.config.activation_checkpointing = ActivationCheckpointing::Layers(7);
        m.config.micro_batch_size = 16;
    }),
    ("large vocabulary", |m| {
        m.model.vocab_size = 20_000;
        m.config.activation_checkpointing = true.into();
    }),
    ("bf16", |m| m.config.compute_dtype = ComputeDType::Bf16),
    ("master weights in bf16", |m| {
        m.config.compute_dtype = ComputeDType::Bf16;
        m.config.optimizer.master_weights = MasterWeights::Bf16;
    }),
    ("8 bits", |m| m.config.optimizer.state = StateForm::Blocks8),
    ("draws in bf16", |m| {
        m.config.rollout.dtype = Some(ComputeDType::Bf16)
    }),
    ("adapters", |m| m.with_adapters(8)),
    ("adapters in bf16", |m| {
        m.with_adapters(8);
        m.config.compute_dtype = ComputeDType::Bf16;
    }),
    ("quantized", |m| {
        m.with_adapters(8);
        m.config.base_weights = BaseWeights::Q8_0;
    }),
    ("quantized in bf16", |m| {
        m.with_adapters(8);
        m.config.base_weights = BaseWeights::Q8_0;
        m.config.compute_dtype = ComputeDType::Bf16;
    }),
    // Sampling takes more than training.
    ("packed", |m| {
        m.with_adapters(1);
        m.config.activation_checkpointing = true.into();
        m.config.micro_batch_size = 4;
    }),
    ("many prompts", |m| {
        m.with_adapters(1);
        m.config.activation_checkpointing = true.into();
        m.config.micro_batch_size = 1;
        (m.config.prompts_per_step, m.config.num_generations) = (16, 2);
        m.prompt_tokens = 230;
        m.with_responses_of(20);
    }),
    ("evaluation", |m| {
        m.evaluated = 200;
        m.with_responses_of(20);
    }),
    // Too few tokens to copy weights for them.
    ("short evaluation", |m| {
        m.evaluated = 256;
        m.prompt_tokens = 96;
        m.with_responses_of(8);
    }),
    ("reference", |m| m.config.recipe = Recipe::openrlhf()),
    ("critic", Measured::with_critic),
    ("critic with checkpointing", |m| {
        m.with_critic();
        m.config.activation_checkpointing = true.into();
    }),
    ("teacher", Measured::with_teacher),
    ("teacher in one pass", |m| {
        m.with_teacher();
        m.config.micro_batch_size = 16;
    }),
    ("demonstrations", |m| m.with_demonstrations(256)),
    ("demonstrations after one pass", |m| {
        m.with_demonstrations(2048);
        m.config.micro_batch_size = 16;
    }),
    ("demonstrations in one pass", |m| {
        m.with_demonstrations(1024);
        m.config.micro_batch_size = 1;
    }),
];

impl Measured {
    fn with_responses_of(&mut self, tokens: usize) {
        self.config.sampling.max_new_tokens = tokens;
        self.response_tokens = tokens;
    }

    fn with_micro_batches_of(&mut self, tokens: usize) {
        self.config.micro_batch_size = TrainConfig::default().micro_batch_size;
        self.config.micro_batch_tokens = Some(tokens.into());
    }

    fn with_adapters(&mut self, rank: usize) {
        self.config.adapters = Some(LoraConfig::all_linear(rank, 16.));
    }

    fn with_critic(&mut self) {
        self.config.critic = Some(CriticConfig::default());
        self.config.recipe.advantage = serde_json::from_str(r#"{"name": "gae"}"#).unwrap();
    }

    fn with_teacher(&mut self) {
        self.has_teacher = true;
        self.config.recipe = Recipe::gkd();
    }

    fn with_demonstrations(&mut self, micro_batch_tokens: usize) {
        self.demonstration_tokens = 128;
        self.config.demonstrations = Some(DemonstrationConfig {
            batch_size: 8,
            micro_batch_tokens,
            ..DemonstrationConfig::default()
        });
    }

    fn ratio(self) -> anyhow::Result<f64> {
        on_two_threads(|| {
            let plan = self.plan()?;
            let peak = self.peak()?;
            let ratio = plan.peak() as f64 / peak as f64;
            println!("{ratio:.3} of {} MiB: {plan:?}", peak / MIB);
            Ok(ratio)
        })
    }
}

/// Runs `work` on two threads. Each thread has buffers, and models as small as these would measure
/// those of a processor with many cores.
fn on_two_threads<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build()?;
    threads.install(work)
}

/// The plan is an upper bound within 10 %.
const BOUND: std::ops::RangeInclusive<f64> = 1.0..=1.1;

#[rstest]
fn the_plan_of_tensors_is_at_most_10_percent_above_the_peak(
    #[values(
        "passes of 8",
        "one pass",
        "first pass longer",
        "checkpointing in one pass",
        "checkpointing of some layers",
        "checkpointing of most layers in one pass",
        "short evaluation",
        "adapters in bf16",
        "quantized in bf16",
        "packed",
        "critic",
        "teacher in one pass",
        "demonstrations after one pass"
    )]
    name: &str,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, change) = CHANGES.iter().find(|(other, _)| *other == name).unwrap();
    let mut measured = Measured::new(dense());
    change(&mut measured);
    let ratio = measured.ratio()?;
    assert!(BOUND.contains(&ratio), "{ratio}");
    Ok(())
}

#[rstest]
#[case::experts(experts())]
#[case::delta(delta())]
fn the_plan_holds_for_other_blocks(#[case] model: DecoderConfig) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let ratio = Measured::new(model).ratio()?;
    assert!(BOUND.contains(&ratio), "{ratio}");
    Ok(())
}

/// Every setting with every model, in long tests.
#[rstest]
#[case::dense(dense())]
#[case::experts(experts())]
#[case::delta(delta())]
fn the_plan_holds_for_every_setting(#[case] model: DecoderConfig) -> anyhow::Result<()> {
    if !is_long() {
        return Ok(());
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut outside = Vec::new();
    for (name, change) in CHANGES {
        let mut measured = Measured::new(model.clone());
        change(&mut measured);
        println!("{name}");
        let ratio = measured.ratio()?;
        if !BOUND.contains(&ratio) {
            outside.push(format!("{name}: {ratio:.3}"));
        }
    }
    assert!(outside.is_empty(), "{outside:?}");
    Ok(())
}

#[rstest]
#[case::passes(|c: &mut SftConfig| c.micro_batch_tokens = 400)]
#[case::one_pass_in_bf16(|c: &mut SftConfig| {
    c.micro_batch_tokens = 1600;
    c.compute_dtype = ComputeDType::Bf16;
})]
#[case::checkpointing(|c: &mut SftConfig| {
    c.micro_batch_tokens = 1600;
    c.activation_checkpointing = true.into();
})]
#[case::checkpointing_of_some_layers(|c: &mut SftConfig| {
    c.micro_batch_tokens = 1600;
    c.activation_checkpointing = ActivationCheckpointing::Layers(5);
})]
fn the_plan_of_supervised_training_is_at_most_10_percent_above_the_peak(
    #[case] change: fn(&mut SftConfig),
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let tokens = 200;
    let mut config = SftConfig {
        batch_size: 8,
        max_steps: Some(2),
        ..SftConfig::default()
    };
    change(&mut config);
    let model = dense();
    let ratio = on_two_threads(|| {
        let plan = MemoryPlan::supervised(&model, &config, tokens, 1)?;
        let rows = examples(tokens)?;
        let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
        let mut trainer = SftTrainer::new(SftParts::new(model, parameters, rows, config))?;
        trainer.step()?;
        restart_peak();
        trainer.step()?;
        let most = peak();
        drop(trainer);
        let peak = most - restart_peak();
        let ratio = plan.peak() as f64 / peak as f64;
        println!("{ratio:.3} of {} MiB: {plan:?}", peak / MIB);
        Ok(ratio)
    })?;
    assert!(BOUND.contains(&ratio), "{ratio}");
    Ok(())
}

/// With one rank nothing is divided, so that no setting takes more memory than another, also
/// while a trainer is created.
#[test]
fn one_rank_takes_as_much_memory_with_every_sharding() -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = dense();
    let peak_with = |sharding| {
        let config = SftConfig {
            max_steps: Some(1),
            sharding,
            ..SftConfig::default()
        };
        on_two_threads(|| {
            let rows = examples(16)?;
            let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
            let count = parameters.num_elements();
            let before = restart_peak();
            let trainer = SftTrainer::new(SftParts::new(model.clone(), parameters, rows, config))?;
            let most = peak() - before;
            drop(trainer);
            Ok((most, count))
        })
    };
    let (whole, count) = peak_with(Sharding::None)?;
    // Two moments.
    let ratio = whole as f64 / (8 * count) as f64;
    assert!((1.0..1.1).contains(&ratio), "{ratio}");
    for sharding in [Sharding::Optimizer, Sharding::Resident, Sharding::Full] {
        let (found, _) = peak_with(sharding)?;
        let ratio = found as f64 / whole as f64;
        assert!((0.99..1.01).contains(&ratio), "{sharding:?}: {ratio}");
    }
    Ok(())
}

/// The bytes of one of four ranks that divide everything.
struct Shares {
    /// The peak in a step.
    peak: usize,
    /// The planned one.
    plan: usize,
    /// The peak while the trainer is created, beside the f32 weights.
    created: usize,
    /// The bytes of a share: 2 + 16 / W for each parameter, or 18 / W.
    share: usize,
    /// The number of parameters.
    count: usize,
}

impl Shares {
    const RANKS: usize = 4;

    /// Trains supervised in bf16.
    fn new(model: DecoderConfig, sharding: Sharding) -> anyhow::Result<Self> {
        let config = SftConfig {
            batch_size: 8,
            micro_batch_tokens: 16,
            max_steps: Some(2),
            compute_dtype: ComputeDType::Bf16,
            sharding,
            ..SftConfig::default()
        };
        on_two_threads(|| {
            let plan = MemoryPlan::supervised(&model, &config, 16, Self::RANKS)?;
            let rows = examples(16)?;
            let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
            let count = parameters.num_elements();
            let before = restart_peak();
            let mut trainer = SftTrainer::new(SftParts {
                collective: Arc::new(LoneRank {
                    rank: 1,
                    world_size: Self::RANKS,
                }),
                ..SftParts::new(model, parameters, rows, config)
            })?;
            let created = peak().saturating_sub(before);
            trainer.step()?;
            restart_peak();
            trainer.step()?;
            let most = peak();
            drop(trainer);
            Ok(Self {
                peak: most - restart_peak(),
                plan: plan.peak(),
                created,
                share: match sharding {
                    Sharding::Full => count * 18 / Self::RANKS,
                    _ => count * (2 + 16 / Self::RANKS),
                },
                count,
            })
        })
    }

    /// The ratio of `bytes` to those of a rank's share.
    fn ratio(&self, bytes: usize) -> f64 {
        bytes as f64 / self.share as f64
    }

    fn assert_planned(&self) {
        println!(
            "{:.3}, planned {:.3}, of {} MiB",
            self.ratio(self.peak),
            self.ratio(self.plan),
            self.share / MIB
        );
        assert!(
            (1.0..1.15).contains(&(self.plan as f64 / self.peak as f64)),
            "{} and {}",
            self.plan,
            self.peak
        );
    }
}

/// Beside its share, a rank has the gradients of a few blocks.
#[rstest]
#[case::resident(Sharding::Resident, 1.1)]
// The buffers are a larger part of a smaller share.
#[case::full(Sharding::Full, 1.2)]
fn a_rank_takes_its_share_of_f32_weights_gradients_and_state(
    #[case] sharding: Sharding,
    #[case] most: f64,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = DecoderConfig {
        vocab_size: 1024,
        hidden_size: 768,
        intermediate_size: 2304,
        num_hidden_layers: 32,
        num_attention_heads: 12,
        num_key_value_heads: 4,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    };
    let shares = Shares::new(model, sharding)?;
    // In place of f32 weights, a rank has rounded ones, its part and divided moments.
    let kept = match sharding {
        Sharding::Full => 0,
        _ => shares.count * (2 + (4 + 8) / Shares::RANKS - 4),
    };
    assert!(
        (kept..=kept * 3 / 2 + shares.count / 4).contains(&shares.created),
        "{} of {kept}",
        shares.created
    );
    let ratio = shares.ratio(shares.peak);
    assert!((1.0..most).contains(&ratio), "{ratio}");
    shares.assert_planned();
    Ok(())
}

/// In place of the f32 weights, a rank that reads them has rounded ones and its part, and one
/// whole weight at a time. If ranks divide all weights, it has parts alone.
#[rstest]
fn a_rank_reads_its_share_of_f32_weights(
    #[values(DType::F32, DType::BF16)] stored: DType,
    #[values(Sharding::Resident, Sharding::Full)] sharding: Sharding,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = DecoderConfig {
        vocab_size: 1024,
        num_hidden_layers: 24,
        ..dense()
    };
    let folder = tempfile::tempdir()?;
    let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
    let count = parameters.num_elements();
    let file = folder.path().join("model.safetensors");
    Export::new(&parameters).in_dtype(stored).save(&file)?;
    drop(parameters);
    let rank = LoneRank {
        rank: 1,
        world_size: Shares::RANKS,
    };
    let division = AdamWConfig::default().division(DType::BF16, (&(Arc::new(rank) as _), sharding));
    let division = division.context("several ranks")?;
    let before = restart_peak();
    let read = Parameters::load_folder_divided(&model, folder.path(), &division, &Device::Cpu)?;
    let most = peak() - before;
    let kept = restart_peak() - before;
    drop(read);
    let share = match sharding {
        Sharding::Full => count * 6 / Shares::RANKS,
        _ => count * (2 + 4 / Shares::RANKS),
    };
    let shapes = model.parameter_shapes();
    let largest = shapes.values().map(|shape| shape.elem_count()).max();
    let bound = share + 8 * largest.unwrap_or(0);
    println!("{kept} of {share}, at most {most} of {bound}");
    // Each tensor and its parts also have names, shapes and places.
    let others = shapes.len() * 2048;
    assert!((share..=share + share / 100 + others).contains(&kept));
    assert!(most <= bound + bound / 100 + others);
    Ok(())
}

/// Blocks of 3 MiB, of which several are summed together.
#[test]
fn the_plan_of_a_rank_holds_for_small_blocks() -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for sharding in [Sharding::Resident, Sharding::Full] {
        let model = DecoderConfig {
            vocab_size: 1024,
            num_hidden_layers: 64,
            ..dense()
        };
        Shares::new(model, sharding)?.assert_planned();
    }
    Ok(())
}

/// A team divides the tensors of a pass. Beside its share, a rank has the keys and values of all
/// tokens in one block, and their gradients.
#[rstest]
fn a_rank_takes_its_share_of_the_activations(
    #[values(false, true)] checkpointing: bool,
    #[values(2, 4)] ranks: usize,
) -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let tokens = 2048;
    let model = DecoderConfig {
        vocab_size: 64,
        max_position_embeddings: tokens,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..dense()
    };
    let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?
        .with_activation_checkpointing(checkpointing)?;
    let sequence = [(0..tokens as u32).map(|token| token % 64).collect()];
    let whole = PackedTokens::new(&sequence, &Device::Cpu)?;
    let rank = LoneRank {
        rank: 1,
        world_size: ranks,
    };
    let own = whole.clone().divided(&SequenceRanks::new(Arc::new(rank)));
    on_two_threads(|| {
        let activations = |tokens: &PackedTokens| -> anyhow::Result<usize> {
            let (kept, bytes) = peak_bytes(|| {
                let (hidden, recorded) = decoder.record(tokens)?;
                let mut gradients = Gradients::new();
                recorded.backward(&hidden.zeros_like()?, &parameters, &mut gradients)?;
                candle_core::Result::Ok(gradients)
            });
            kept?;
            Ok(bytes - 4 * parameters.num_elements())
        };
        let (whole, own) = (activations(&whole)?, activations(&own)?);
        let keys = 2 * model.num_key_value_heads * model.head_dim();
        let exchanged = 4 * tokens * keys * 3;
        let share = whole / ranks + exchanged;
        println!("{} of {} MiB", own / MIB, whole / MIB);
        assert!(own <= share + share / 10, "{own} of {share}");
        Ok(())
    })
}
