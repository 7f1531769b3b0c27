//! Supervised warm-up, so that reinforcement learning starts with some correct answers.

use anyhow::{Result, ensure};
use candle_core::Device;
use candle_grpo_nn::Parameters;
use candle_grpo_train::sft::{SftParts, SftTrainer};
use candle_grpo_train::{Sampler, SamplingConfig, evaluate};

use crate::progress::Bar;
use crate::report::STREAM;
use crate::settings::Settings;
use crate::task::{Task, is_right};

/// Number of steps between accuracy measurements.
const INTERVAL: usize = 5;

/// Trains a policy to the held-out accuracy in the settings.
pub(crate) fn warm_up(settings: &Settings, task: &Task) -> Result<Parameters> {
    let parameters = initial_parameters(settings)?;
    // The greedy accuracy, which is the higher one, must stay below the limit.
    let sampling = SamplingConfig {
        greedy: true,
        ..settings.train.sampling.clone()
    };
    let sampler = Sampler::new(&settings.model, &parameters, sampling)?;
    let mut trainer = SftTrainer::new(SftParts::new(
        settings.model.clone(),
        parameters.clone(),
        task.examples()?,
        settings.warm_up.clone(),
    ))?;
    let bar = Bar::open_ended("warm-up");
    let mut accuracy = 0.;
    while trainer.steps() < trainer.last_step() && accuracy < *settings.warm_up_accuracy.start() {
        let loss = trainer.step()?.loss;
        if trainer.steps().is_multiple_of(INTERVAL) {
            let answers = evaluate(
                &sampler,
                &task.held_out,
                1,
                &is_right,
                &task.tokenizer,
                STREAM,
            )?;
            accuracy = answers.reward_mean();
        }
        bar.step(&format!("loss {loss:.2}, right {:.0} %", 100. * accuracy));
    }
    let steps = trainer.steps();
    ensure!(
        settings.warm_up_accuracy.contains(&accuracy),
        "after {steps} steps of warm-up the accuracy is {accuracy:.3}, must be in {:?}",
        settings.warm_up_accuracy
    );
    drop(bar);
    println!(
        "\nwarmed up in {steps} steps on examples: {:.1} % correct greedily",
        100. * accuracy
    );
    Ok(parameters)
}

/// Initializes parameters like [`Parameters::init`], with scaled matrices.
fn initial_parameters(settings: &Settings) -> Result<Parameters> {
    let device = Device::Cpu;
    let factor = settings.initial_std / 0.02;
    let scaled = Parameters::init(&settings.model, settings.seed, &device)?
        .frozen_copy()?
        .into_iter()
        .map(|(name, x)| {
            let is_norm = x.rank() == 1;
            Ok((name, if is_norm { x } else { (x * factor)? }))
        })
        .collect::<Result<_>>()?;
    Ok(Parameters::from_tensors(&settings.model, scaled, &device)?)
}
