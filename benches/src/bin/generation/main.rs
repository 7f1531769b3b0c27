//! Generation, as a whole or by parts.
//!
//! Without `--parts` it reads lines `PROMPTS<tab>GENERATIONS<tab>PROMPT_TOKENS<tab>NEW_TOKENS`,
//! generates and prints the seconds. With `--adapters` it prints those with adapters apart, those
//! with merged ones, and those without any, one after the other. With `--parts` it prints a step's
//! time at several batch sizes, and the machine's limits, as JSON.

mod limits;
mod parts;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device};
use candle_grpo_bench::{decoder_in, read_model};
use candle_grpo_kernels::default_device;
use candle_grpo_nn::{BaseWeights, DecoderConfig, Lora, LoraConfig, Parameters};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{LocalGenerator, PolicyWeights};
use candle_grpo_train::{ComputeDType, Generator, Prompt, Sampler, SamplingConfig};
use clap::Parser;
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Times generation by a model with random weights
#[derive(Debug, Parser)]
struct Args {
    /// The model's config.json; without it, the dimensions of SmolLM2-135M
    #[arg(long)]
    model: Option<PathBuf>,
    /// Dtype for weights and activations: f32 or bf16
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Print the time of a SmolLM2-135M step by parts, on the CPU
    #[arg(long, conflicts_with = "model")]
    parts: bool,
    /// Also generate with adapters of this rank over all linear maps, and with merged ones
    #[arg(long, conflicts_with = "parts")]
    adapters: Option<usize>,
    /// Launch each operator separately on a GPU, without CUDA graphs
    #[arg(long)]
    no_graphs: bool,
}

/// Returns the seconds for `num_generations` completions for each of `prompts` prompts.
///
/// No completion ends early.
fn generate(
    model: &DecoderConfig,
    generator: &Arc<LocalGenerator>,
    [prompts, num_generations, prompt_tokens, new_tokens]: [usize; 4],
) -> Result<f64> {
    let config = SamplingConfig {
        max_new_tokens: new_tokens,
        ..SamplingConfig::default()
    };
    let sampler = Sampler::from_generator(Arc::clone(generator) as _, model.vocab_size, config)?;
    let prompts: Vec<Prompt> = (0..prompts)
        .map(|index| Prompt {
            index: index as u64,
            text: String::new(),
            messages: Vec::new(),
            tools: None,
            variables: serde_json::Map::new(),
            tokens: (0..prompt_tokens)
                .map(|i| ((index * 7919 + i * 104_729) % model.vocab_size) as u32)
                .collect(),
            columns: serde_json::Value::Null,
        })
        .collect();
    let start = Instant::now();
    let rollouts = sampler.sample(&prompts.iter().collect::<Vec<_>>(), num_generations, 0)?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(
        rollouts
            .iter()
            .all(|r| r.completion.tokens.len() == new_tokens),
        "a completion ended early"
    );
    Ok(seconds)
}

/// Returns generators with new adapters apart, and with merged ones, over weights in `dtype`.
fn generators_with_adapters(
    model: &DecoderConfig,
    parameters: &Parameters,
    rank: usize,
    dtype: DType,
) -> Result<Vec<LocalGenerator>> {
    let config = LoraConfig::all_linear(rank, 2. * rank as f64);
    let adapters = Lora::init(config, model, 1, parameters.device())?;
    let frozen = parameters
        .clone()
        .frozen_as(model, BaseWeights::Dense, dtype)?;
    let weights = PolicyWeights {
        version: 0,
        model,
        parameters: &frozen,
        adapters: Some(&adapters),
    };
    let dtype = match dtype {
        DType::F32 => ComputeDType::F32,
        DType::BF16 => ComputeDType::Bf16,
        other => bail!("dtype: {other:?}, must be f32 or bf16 with adapters"),
    };
    let apart = LocalGenerator::in_dtype(&weights, dtype)?;
    let merged = LocalGenerator::merged(&weights, dtype)?;
    let start = Instant::now();
    merged.weights_changed(&weights, &NoProgress)?;
    eprintln!("merged in {:.3} s", start.elapsed().as_secs_f64());
    Ok(vec![apart, merged])
}

fn main() -> Result<()> {
    let args = Args::parse();
    let model = read_model(args.model.as_deref())?;
    let device = if args.parts {
        Device::Cpu
    } else {
        default_device()?
    };
    let parameters = Parameters::init(&model, 1, &device)?;
    let decoder = decoder_in(&model, &parameters, args.dtype)?;
    if args.parts {
        let report = parts::measure(&model, &parameters, &decoder, args.dtype)?;
        println!("{}", serde_json::to_string_pretty(&report)?);
        return Ok(());
    }
    let mut generators = match args.adapters {
        None => Vec::new(),
        Some(rank) => generators_with_adapters(&model, &parameters, rank, args.dtype)?,
    };
    generators.push(LocalGenerator::from_decoder(decoder));
    let generators = generators.into_iter();
    let generators: Vec<_> = generators
        .map(|own| Arc::new(own.with_recorded_steps(!args.no_graphs)))
        .collect();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let numbers = line
            .split('\t')
            .map(str::parse)
            .collect::<Result<Vec<usize>, _>>()
            .with_context(|| format!("{line:?} is not four numbers"))?;
        let numbers = <[usize; 4]>::try_from(numbers.as_slice())
            .with_context(|| format!("{line:?} is not four numbers"))?;
        let seconds = generators
            .iter()
            .map(|generator| Ok(generate(&model, generator, numbers)?.to_string()))
            .collect::<Result<Vec<_>>>()?;
        println!("{}", seconds.join("\t"));
        std::io::stdout().flush()?;
    }
    Ok(())
}
