//! `grpo sft`.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_grpo::config::SftRunConfig;
use candle_grpo::run::{RunSession, SftSession, Start};
use candle_grpo::train::learn::Ranks;
use candle_grpo::train::sft::SftMetrics;

use super::console::Console;
use super::exit::Exit;
use super::load;
use super::train::{advance, files, on_ranks};

/// Trains on the answers in the data that `file` configures.
pub(super) fn sft(file: &Path, start: Start, quiet: bool) -> Result<(), Exit> {
    let config = load::sft_config(&load::document(file)?)?;
    on_ranks(quiet, |console, ranks| {
        run(file, config, start, console, ranks)
    })
}

fn run(
    file: &Path,
    mut config: SftRunConfig,
    start: Start,
    console: &Console,
    ranks: &Ranks,
) -> Result<(), Exit> {
    load::set_threads(&config)?;
    files(&mut config, start, console, ranks)?;
    // Everything else is checked before the weights are read.
    let (dataset, _) = load::sft_inputs(&config)?;
    let pretrained = load::policy(&config, ranks)?;
    let progress = Arc::new(console.clone());
    let collective = Arc::clone(ranks.collective());
    let mut session =
        SftSession::on_ranks(config, pretrained, dataset, start, progress, collective)
            .map_err(|error| Exit::Run(format!("{error:#}")))?;
    let begun = Instant::now();
    advance(&mut session, "sft", file, console, summary)?;
    console.say(&format!(
        "{} steps; {:.0} seconds; {}",
        session.steps(),
        begun.elapsed().as_secs_f64(),
        session.path().display()
    ));
    Ok(())
}

/// Returns a step's line.
fn summary(metrics: &SftMetrics, steps: usize) -> String {
    format!(
        "step {}/{steps}  loss {:.4}  accuracy {:.3}  gradient {:.3}  tokens {}  {:.0} tokens/s  {:.1} s",
        metrics.step,
        metrics.loss,
        metrics.token_accuracy,
        metrics.grad_norm,
        metrics.trained_tokens,
        metrics.tokens_per_second,
        metrics.seconds.train,
    )
}
