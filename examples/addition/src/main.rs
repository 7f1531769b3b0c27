//! A tiny policy learns to add two-digit numbers, in minutes on a CPU.
//!
//! It warms up on examples until about a third of its answers are correct. Then GRPO trains it; the
//! only reward is whether the answer is correct. The run folder has settings, metrics,
//! answers and a checkpoint.

mod base;
mod progress;
mod report;
mod settings;
mod task;
mod warm_up;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_grpo_core::selection::DifficultyPools;
use candle_grpo_nn::DecoderConfig;
use candle_grpo_train::{RunDir, Trainer, TrainerParts};
use clap::Parser;
use clap::builder::RangedU64ValueParser;

use crate::report::{Measurement, answers, samples_side_by_side, table};
use crate::settings::{Settings, Size};
use crate::task::{Task, VOCABULARY, is_right};

/// A fast allocator, because the program allocates and frees many tensors.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a tiny language model to add two-digit numbers with GRPO, on the CPU.
#[derive(Parser)]
struct Args {
    /// Folder of the run; if it exists, the first free of OUT-2, OUT-3, ...
    #[arg(long, default_value = "runs/addition")]
    out: PathBuf,
    /// Replace an existing run.
    #[arg(long)]
    force: bool,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Training steps; the default depends on --short.
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    steps: Option<usize>,
    /// A short run, which must improve but need not reach a high accuracy.
    #[arg(long)]
    short: bool,
    /// Draw problems by how well the policy solves them, in place of a random order.
    #[arg(long)]
    curriculum: bool,
    /// Steps between evaluations on the held-out problems. Absent: before and after only.
    #[arg(long, value_name = "STEPS", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    evaluate_every: Option<usize>,
    /// Stop after the warm-up and write the policy and its problems to this folder.
    #[arg(long, conflicts_with_all = ["out", "force", "steps", "short", "curriculum", "evaluate_every"])]
    base: Option<PathBuf>,
    /// Hidden size of the policy: a multiple of 8.
    #[arg(long, requires = "base", default_value_t = Size::default().hidden_size)]
    hidden_size: usize,
    /// Number of layers of the policy.
    #[arg(long, requires = "base", default_value_t = Size::default().num_hidden_layers)]
    layers: usize,
    /// The `config.json` of another policy, such as those in `examples/addition/models`.
    #[arg(long, conflicts_with_all = ["hidden_size", "layers"])]
    model: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    // Matrices this small multiply faster on one core than on two.
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    one_thread.install(|| run(&args))
}

fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let size = Size {
        hidden_size: args.hidden_size,
        num_hidden_layers: args.layers,
    };
    let mut settings = Settings::new(args.seed, args.steps, args.short, size);
    if let Some(file) = &args.model {
        settings.model = model(file).with_context(|| file.display().to_string())?;
    }
    settings.curriculum = args.curriculum.then(DifficultyPools::default);
    settings.evaluate_every = args.evaluate_every;
    // Before the warm-up, which takes a while.
    settings.train.validate()?;
    if let Some(folder) = &args.base {
        return base::make(folder, &settings);
    }
    let (mut run, replaced) = if args.force {
        RunDir::replace(&args.out, &settings)?
    } else {
        (RunDir::create_numbered(&args.out, &settings)?, None)
    };
    let task = Task::new(settings.seed)?;

    let parameters = warm_up::warm_up(&settings, &task)?;
    let pretrained = base::pretrained(&settings, &task, parameters);
    let parts = TrainerParts::new(
        pretrained.model.clone(),
        pretrained.parameters.clone(),
        task.tokenizer.clone(),
        task.training.clone(),
        is_right,
        settings.train.clone(),
    );
    let mut trainer = Trainer::new(TrainerParts {
        curriculum: settings.curriculum.clone(),
        ..parts
    })?;

    let before = Measurement::take(trainer.actor(), &settings, &task)?;
    train(&mut trainer, &mut run, &settings, &task)?;
    let after = Measurement::take(trainer.actor(), &settings, &task)?;

    run.write("samples.md", samples_side_by_side(&task, &before, &after))?;
    run.write_checkpoint(&trainer, &pretrained)?;
    if let Some(replaced) = replaced {
        replaced.remove()?;
    }
    println!("\n{}", table(&before, &after));
    println!(
        "\n{} training steps, {} skipped; {:.0} seconds in all; see {}",
        trainer.steps(),
        trainer.skipped_steps(),
        start.elapsed().as_secs_f64(),
        run.path().display()
    );

    let (before, after) = (before.accuracy(), after.accuracy());
    ensure!(
        after >= settings.goal.accuracy(before),
        "held-out accuracy went from {before:.3} to {after:.3}, {}",
        settings.goal
    );
    Ok(())
}

/// Reads the `config.json` of a policy for this task.
fn model(file: &Path) -> Result<DecoderConfig> {
    let model = DecoderConfig::from_hugging_face(&std::fs::read(file)?)?;
    ensure!(
        model.vocab_size == VOCABULARY,
        "vocab_size: {}, must be {VOCABULARY}",
        model.vocab_size
    );
    Ok(model)
}

/// Runs the training steps; each appends a line of metrics to the run folder.
fn train(trainer: &mut Trainer, run: &mut RunDir, settings: &Settings, task: &Task) -> Result<()> {
    let bar = progress::Bar::with_steps("GRPO", settings.steps);
    for step in 0..=settings.steps {
        if let Some(every) = settings.evaluate_every
            && (step.is_multiple_of(every) || step == settings.steps)
        {
            let evaluation = answers(trainer.actor(), settings, task, false)?;
            run.append_evaluation(step, &evaluation, &evaluation.metrics(&[], 1.)?)?;
        }
        if step == settings.steps {
            break;
        }
        let metrics = trainer.step()?;
        run.append_metrics(&metrics)?;
        bar.step(&format!("reward {:.2}", metrics.reward_mean));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_at_least_one_step() {
        let parse = |steps| Args::try_parse_from(["addition", "--steps", steps]);
        assert_eq!(parse("1").ok().unwrap().steps, Some(1));
        let error = parse("0").err().unwrap().to_string();
        assert!(error.contains("0 is not in 1.."), "{error}");
    }

    #[test]
    fn the_settings_are_valid() {
        for short in [false, true] {
            Settings::new(0, None, short, Size::default())
                .train
                .validate()
                .unwrap();
        }
    }

    #[test]
    fn the_models_beside_the_program_fit_the_task() -> Result<()> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
        let mut count = 0;
        for file in std::fs::read_dir(folder)? {
            model(&file?.path())?;
            count += 1;
        }
        assert!(count > 0);
        Ok(())
    }

    #[test]
    fn a_model_of_another_vocabulary_is_refused() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/families/mistral/config.json");
        let error = model(&file).unwrap_err().to_string();
        assert_eq!(error, format!("vocab_size: 262, must be {VOCABULARY}"));
    }
}
