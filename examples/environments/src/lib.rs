//! Shared parts of the environment examples: a tiny policy, and a run with a progress bar and the
//! usual files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_core::Device;
use candle_grpo_loss::{Clip, PolicyLoss, Recipe, Surrogate};
use candle_grpo_nn::{AdamWConfig, DecoderConfig, Parameters};
use candle_grpo_train::environment::Environments;
use candle_grpo_train::learn::{LearningRateSchedule, OldLogProbs};
use candle_grpo_train::run::{Evaluation, RolloutLogConfig};
use candle_grpo_train::{
    Actor, Prompt, RewardFunction, RunDir, Sampler, SamplingConfig, TrainConfig, Trainer, evaluate,
};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tokenizers::Tokenizer;

/// A fast allocator, because the programs allocate and free many tensors.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The token that ends an answer: a character tokenizer's first.
pub const END: u32 = 0;

/// Step number for the evaluations' random numbers. Training steps count from 1.
const STREAM: u64 = 0;

/// An example's arguments.
#[derive(Parser)]
pub struct Args {
    /// Run directory; if it exists, the first free one of OUT-2, OUT-3, ...
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Replace an existing run.
    #[arg(long)]
    pub force: bool,
    /// Seed for all random numbers.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// A short run with a lower goal.
    #[arg(long)]
    pub short: bool,
}

/// Runs an example on one thread, because matrices this small multiply faster on one core than on
/// two.
///
/// # Errors
///
/// If the thread cannot be started, or `run` fails.
pub fn on_one_thread(run: impl FnOnce(&Args) -> Result<()> + Send) -> Result<()> {
    let (args, start) = (Args::parse(), Instant::now());
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    one_thread.install(|| run(&args))?;
    println!("{:.0} seconds in all", start.elapsed().as_secs_f64());
    Ok(())
}

/// A tiny policy with random weights.
///
/// # Errors
///
/// If the weights cannot be allocated.
pub fn policy(
    vocab_size: usize,
    hidden_size: usize,
    seed: u64,
) -> Result<(DecoderConfig, Parameters)> {
    let model = DecoderConfig {
        vocab_size,
        hidden_size,
        intermediate_size: 2 * hidden_size,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        max_position_embeddings: 32,
        ..DecoderConfig::default()
    };
    // About 1 / sqrt(hidden_size) in place of 0.02, with which narrow models start slowly.
    let factor = 0.8 / (hidden_size as f64).sqrt() / 0.02;
    let scaled = Parameters::init(&model, seed, &Device::Cpu)?
        .frozen_copy()?
        .into_iter()
        .map(|(name, x)| {
            let is_norm = x.rank() == 1;
            Ok((name, if is_norm { x } else { (x * factor)? }))
        });
    let scaled = scaled.collect::<Result<_>>()?;
    let parameters = Parameters::from_tensors(&model, scaled, &Device::Cpu)?;
    Ok((model, parameters))
}

/// AdamW with a second moment for short runs.
pub fn adamw(learning_rate: f64) -> AdamWConfig {
    AdamWConfig {
        learning_rate,
        beta2: 0.99,
        weight_decay: 0.,
        ..AdamWConfig::default()
    }
}

/// Settings for a run: GRPO with `prompts` prompts per step and 8 trajectories each.
pub fn train_config(
    prompts: usize,
    steps: usize,
    learning_rate: f64,
    sampling: SamplingConfig,
) -> TrainConfig {
    TrainConfig {
        prompts_per_step: prompts,
        num_generations: 8,
        sampling,
        recipe: Recipe {
            policy_loss: PolicyLoss {
                surrogate: Surrogate::Clip(Clip::symmetric(0.2)),
                ..PolicyLoss::default()
            },
            ..Recipe::grpo()
        },
        old_log_probs: OldLogProbs::Sampler,
        mini_batch_size: Some(prompts * 4),
        micro_batch_size: 64,
        optimizer: adamw(learning_rate),
        schedule: LearningRateSchedule {
            warmup_steps: (steps / 10).min(10),
            decay_until: Some(steps),
            ..LearningRateSchedule::default()
        },
        ..TrainConfig::default()
    }
}

/// A bar with the number of steps and the remaining time. Without a terminal, [`step`] prints some
/// lines.
///
/// # Errors
///
/// Never: the template is constant.
pub fn bar(name: &'static str, steps: usize) -> Result<ProgressBar> {
    let bar = ProgressBar::new(steps as u64).with_prefix(name);
    let style = "{prefix:12}{bar:40} {pos}/{len}  {msg}  {eta} left";
    Ok(bar.with_style(ProgressStyle::with_template(style)?))
}

/// Advances a bar.
pub fn step(bar: &ProgressBar, message: String) {
    bar.inc(1);
    let (done, all) = (bar.position(), bar.length().unwrap_or(0));
    if bar.is_hidden() && done.is_multiple_of((all / 10).max(1)) {
        println!("{:12}step {done}/{all}  {message}", bar.prefix());
    }
    bar.set_message(message);
}

/// Trains for `steps` steps in the directory from `args`, or else `name` in `runs`, and writes
/// metrics and rollouts there.
///
/// # Errors
///
/// If a step fails or a file cannot be written.
pub fn train(args: &Args, name: &'static str, trainer: &mut Trainer, steps: usize) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| "runs".into()).join(name);
    let settings = json!({"seed": args.seed, "steps": steps, "train": trainer.config()});
    let (mut run, replaced) = if args.force {
        RunDir::replace(&out, &settings)?
    } else {
        (RunDir::create_numbered(&out, &settings)?, None)
    };
    let log = RolloutLogConfig::default();
    let bar = bar(name, steps)?;
    for _ in 0..steps {
        let metrics = trainer.step()?;
        if log.is_due(metrics.step) {
            run.append_rollouts(&trainer.rollouts(&log)?)?;
        }
        run.append_metrics(&metrics)?;
        step(&bar, format!("reward {:.2}", metrics.reward_mean));
    }
    bar.abandon();
    if let Some(replaced) = replaced {
        replaced.remove()?;
    }
    println!("\n{name}: see {}", run.path().display());
    Ok(())
}

/// Held-out prompts, and what is needed to score answers to them.
pub struct HeldOut<'a> {
    /// The prompts.
    pub prompts: &'a [Prompt],
    /// Number of completions per prompt.
    pub samples: usize,
    /// The rewards; those of the environment are added.
    pub reward: &'a dyn RewardFunction,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The distribution of completions, and their ends.
    pub sampling: SamplingConfig,
}

impl HeldOut<'_> {
    /// A policy's mean reward, with or without an environment.
    ///
    /// # Errors
    ///
    /// If an environment or the sampler fails.
    pub fn measure(&self, actor: &Actor, environments: Option<&Arc<Environments>>) -> Result<f64> {
        let sampler = actor.sampler(self.sampling.clone())?;
        let mean = self.measure_sampler(&sampler, environments)?.reward_mean();
        Ok(mean)
    }

    /// A sampler's completions and their rewards.
    ///
    /// # Errors
    ///
    /// Same as [`Self::measure`].
    pub fn measure_sampler(
        &self,
        sampler: &Sampler,
        environments: Option<&Arc<Environments>>,
    ) -> Result<Evaluation> {
        let mut sampler = sampler.clone().with_tokenizer(self.tokenizer);
        if let Some(environments) = environments {
            sampler = sampler.with_environments(environments.clone());
        }
        let (prompts, samples) = (self.prompts, self.samples);
        evaluate(
            &sampler,
            prompts,
            samples,
            self.reward,
            self.tokenizer,
            STREAM,
        )
    }
}
