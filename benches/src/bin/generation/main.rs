//! Generation, as a whole or by parts.
//!
//! Without `--parts` it reads lines `PROMPTS<tab>GENERATIONS<tab>PROMPT_TOKENS<tab>NEW_TOKENS`,
//! generates and prints the seconds. With `--parts` it prints, as JSON, the time of a step at
//! several batch sizes, and the limits of the machine.

mod limits;
mod parts;

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use candle_grpo_bench::{decoder_in, read_model};
use candle_grpo_kernels::default_device;
use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};
use candle_grpo_train::rollout::LocalGenerator;
use candle_grpo_train::{Prompt, Sampler, SamplingConfig};
use clap::Parser;
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Times generation by a model with random weights
#[derive(Debug, Parser)]
struct Args {
    /// The config.json of the model; without it, the dimensions of SmolLM2-135M
    #[arg(long)]
    model: Option<PathBuf>,
    /// The dtype of weights and activations: f32 or bf16
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Print the time of a step of SmolLM2-135M by parts, on the CPU
    #[arg(long, conflicts_with = "model")]
    parts: bool,
    /// Launch each operator of a step on a GPU, without CUDA graphs
    #[arg(long)]
    no_graphs: bool,
}

/// Returns the seconds for `num_generations` completions of each of `prompts` prompts.
///
/// No completion ends early.
fn generate(
    model: &DecoderConfig,
    decoder: &Decoder,
    records_steps: bool,
    [prompts, num_generations, prompt_tokens, new_tokens]: [usize; 4],
) -> Result<f64> {
    let config = SamplingConfig {
        max_new_tokens: new_tokens,
        ..SamplingConfig::default()
    };
    let generator = LocalGenerator::from_decoder(decoder.clone());
    let generator = Arc::new(generator.with_recorded_steps(records_steps));
    let sampler = Sampler::from_generator(generator, model.vocab_size, config)?;
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
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let numbers = line
            .split('\t')
            .map(str::parse)
            .collect::<Result<Vec<usize>, _>>()
            .with_context(|| format!("{line:?} is not four numbers"))?;
        let numbers = <[usize; 4]>::try_from(numbers.as_slice())
            .with_context(|| format!("{line:?} is not four numbers"))?;
        println!("{}", generate(&model, &decoder, !args.no_graphs, numbers)?);
        std::io::stdout().flush()?;
    }
    Ok(())
}
