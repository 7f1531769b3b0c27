//! `grpo train`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_grpo::config::{Configuration, RunConfig};
use candle_grpo::nn::DecoderConfig;
use candle_grpo::run::{
    Progress, RunMemory, RunPrompts, RunSession, Session, Start, recorded_inputs,
    recorded_micro_batch_tokens,
};
use candle_grpo::train::hub::HubContent;
use candle_grpo::train::learn::Ranks;
use candle_grpo::train::run::StepRecord;
use candle_grpo::train::{ChatTemplate, RunDir, StepMetrics};

use super::console::Console;
use super::exit::Exit;
use super::load;

/// Trains as `file` configures.
pub(super) fn train(
    file: &Path,
    start: Start,
    quiet: bool,
    allow_unsupported: bool,
) -> Result<(), Exit> {
    let config = load::any_config(file, allow_unsupported)?;
    on_ranks(quiet, |console, ranks| {
        run(file, config, start, console, ranks)
    })
}

/// Connects to the other ranks of a job, and ends the job if this one fails.
pub(super) fn on_ranks(
    quiet: bool,
    run: impl FnOnce(&Console, &Ranks) -> Result<(), Exit>,
) -> Result<(), Exit> {
    let ranks = load::ranks()?;
    let console = if ranks.is_first() {
        Console::new(quiet)
    } else {
        Console::of_other_rank()
    };
    console.stop_when_asked();
    let done = run(&console, &ranks);
    console.finish();
    match done {
        // All ranks are interrupted after the same step.
        Err(Exit::Interrupted(_)) if !ranks.is_first() => Err(Exit::Quiet),
        Err(exit) if !ranks.is_alone() && !matches!(exit, Exit::Interrupted(_)) => {
            let code = exit.report_of_rank(ranks.collective().rank());
            ranks.collective().abort(code.into())
        }
        done => done,
    }
}

fn run(
    file: &Path,
    mut config: RunConfig,
    start: Start,
    console: &Console,
    ranks: &Ranks,
) -> Result<(), Exit> {
    load::set_threads(&config)?;
    files(&mut config, start, console, ranks)?;
    // Everything else is checked before the weights are read.
    let load::Inputs { prompts, model, .. } = load::inputs(&config)?;
    if config.train.fits_micro_batches() {
        let tokens = micro_batch_tokens(&config, &model, &prompts, start, ranks)?;
        config.train.micro_batch_tokens = Some(tokens.into());
        console.say(&format!("micro_batch_tokens: auto is {tokens}"));
    }
    let pretrained = load::policy(&config, ranks)?;
    let reward = load::rewards(&config)?;
    let progress = Arc::new(console.clone());
    let collective = Arc::clone(ranks.collective());
    let mut session = Session::on_ranks(
        config, pretrained, prompts, reward, start, progress, collective,
    )
    .map_err(|error| Exit::Run(format!("{error:#}")))?;
    let begun = Instant::now();
    advance(&mut session, "train", file, console, summary)?;
    let trainer = session.trainer();
    console.say(&format!(
        "{} steps ({} without an update) in {:.0} seconds: {}",
        trainer.steps(),
        trainer.skipped_steps(),
        begun.elapsed().as_secs_f64(),
        session.path().display()
    ));
    Ok(())
}

/// Advances a `grpo COMMAND` run to its last step, and reports its progress. `summary` returns a
/// step's line, given the run's number of steps.
pub(super) fn advance<S: RunSession<Metrics: StepRecord>>(
    session: &mut S,
    command: &str,
    file: &Path,
    console: &Console,
    summary: fn(&S::Metrics, usize) -> String,
) -> Result<(), Exit> {
    let hint = |session: &S| hint(command, file, session.path(), session.replaced());
    let steps = session.last_step();
    console.begin_steps(session.steps(), steps);
    loop {
        let advanced = session.advance();
        match advanced.map_err(|error| Exit::from_run(error, hint(session)))? {
            Progress::Step(metrics) => {
                console.set_steps(metrics.step());
                console.say(&summary(&metrics, steps));
            }
            Progress::Evaluated { step, metrics } => console.say(&evaluated(step, &metrics)),
            Progress::Saved(_) => {}
            Progress::Interrupted => return Err(Exit::Interrupted(hint(session))),
            Progress::Finished => break,
        }
    }
    console.finish();
    Ok(())
}

/// Locates the hub files and sets the time that chat templates print. A resumed run keeps its first
/// commits and time. Rank 0 downloads files before the others, which find them in the machine's
/// shared cache.
pub(super) fn files(
    config: &mut impl Configuration,
    start: Start,
    console: &Console,
    ranks: &Ranks,
) -> Result<(), Exit> {
    locate(config, start, console, ranks).map_err(|exit| match exit {
        // The other ranks may wait for this one.
        Exit::Interrupted(message) if !ranks.is_alone() => Exit::Run(message),
        exit => exit,
    })
}

fn locate(
    config: &mut impl Configuration,
    start: Start,
    console: &Console,
    ranks: &Ranks,
) -> Result<(), Exit> {
    let failed = |error: anyhow::Error| Exit::Run(format!("{error:#}"));
    let begun = match (ranks.is_first(), start) {
        (false, _) => None,
        (true, Start::New | Start::Replace) => Some(None),
        (true, Start::Resume | Start::ResumeChanged) => {
            Some(recorded_inputs(config.run_dir()).map_err(failed)?)
        }
    };
    let mut shared = None;
    if let Some(begun) = &begun {
        let commits = begun.as_ref().map(|inputs| inputs.hub_commits().clone());
        load::files(
            config,
            HubContent::Model,
            &commits.unwrap_or_default(),
            console,
        )?;
        let clock = begun.as_ref().and_then(|inputs| inputs.clock());
        let clock = clock.map_or_else(ChatTemplate::local_time, str::to_owned);
        shared = Some((config.hub_commits().clone(), clock));
    }
    let (commits, clock) = ranks.from_first(shared).map_err(failed)?;
    config.model_mut().clock = Some(clock);
    if ranks.is_first() {
        Ok(())
    } else {
        load::files(config, HubContent::Model, &commits, console)
    }
}

/// Returns the number of tokens in a micro-batch that a resumed run started with, and otherwise the
/// smallest one that the ranks choose by their memory.
fn micro_batch_tokens(
    config: &RunConfig,
    model: &DecoderConfig,
    prompts: &RunPrompts,
    start: Start,
    ranks: &Ranks,
) -> Result<usize, Exit> {
    let failed = |error: anyhow::Error| Exit::Run(format!("{error:#}"));
    let recorded = match (ranks.is_first(), start) {
        (true, Start::Resume | Start::ResumeChanged) => {
            Some(recorded_micro_batch_tokens(&config.run_dir))
        }
        (true, Start::New | Start::Replace) => Some(None),
        (false, _) => None,
    };
    if let Some(tokens) = ranks.from_first(recorded).map_err(failed)? {
        return Ok(tokens);
    }
    let memory = RunMemory::new(config, model, prompts, None);
    let own = memory.and_then(|memory| memory.fitted_tokens());
    let own = own.map_err(|error| Exit::Config(format!("{error:#}")))?;
    let all = ranks.gather(own).map_err(failed)?;
    Ok(all.into_iter().min().unwrap_or(own))
}

/// Returns a step's line.
fn summary(metrics: &StepMetrics, steps: usize) -> String {
    let mut line = format!(
        "step {}/{steps}  reward {:.3} ± {:.3}",
        metrics.step, metrics.reward_mean, metrics.reward_std
    );
    if metrics.skipped {
        line += "  no update";
        if let Some(reason) = &metrics.skip_reason {
            line += &format!(": {reason}");
        }
    }
    for (name, shown) in [
        ("kl", "kl"),
        ("divergence", "divergence"),
        ("entropy", "entropy"),
        ("clip_fraction", "clipped"),
    ] {
        if let Some(value) = metrics.policy.get(name) {
            line += &format!("  {shown} {value:.4}");
        }
    }
    if let Some(norm) = metrics.grad_norm {
        line += &format!("  gradient {norm:.3}");
    }
    line + &format!(
        "  length {:.1}  {:.1} s",
        metrics.response_length,
        metrics.seconds.total()
    )
}

/// Returns an evaluation's line, after `step` steps.
fn evaluated(step: usize, metrics: &BTreeMap<String, f64>) -> String {
    let metrics = metrics.iter();
    let metrics = metrics.map(|(name, value)| format!("{name} {value:.3}"));
    let metrics: Vec<String> = metrics.collect();
    format!("held out, after {step} steps:  {}", metrics.join("  "))
}

/// Returns how to continue a `grpo COMMAND` run in `run_dir` that ended early, and where the
/// replaced run is.
fn hint(command: &str, file: &Path, run_dir: &Path, replaced: Option<&Path>) -> String {
    let latest = RunDir::checkpoints(run_dir).latest();
    let file = file.display();
    let mut hint = match latest.unwrap_or_default().checkpoint {
        Some(last) => format!(
            "The run is saved up to step {} in {}; to continue: grpo {command} {file} --resume",
            last.step,
            last.path.display(),
        ),
        None => {
            format!("There is no checkpoint yet; to start again: grpo {command} {file} --resume")
        }
    };
    if let Some(replaced) = replaced {
        hint += &format!("\nThe previous run is kept in {}.", replaced.display());
    }
    hint
}
