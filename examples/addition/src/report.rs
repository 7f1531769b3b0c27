//! Compares answers before and after training.

use anyhow::Result;
use candle_grpo_train::run::Evaluation;
use candle_grpo_train::{Actor, SamplingConfig, evaluate};

use crate::settings::Settings;
use crate::task::{Task, answer, is_right};

/// Step number for the evaluations' random numbers. Training steps count from 1.
pub(crate) const STREAM: u64 = 0;

/// Number of answers in the table.
const SHOWN: usize = 40;

/// A policy's answers to the held-out problems.
pub(crate) struct Measurement {
    sampled: Evaluation,
    greedy: Evaluation,
}

impl Measurement {
    pub(crate) fn take(actor: &Actor, settings: &Settings, task: &Task) -> Result<Self> {
        let answers = |greedy| answers(actor, settings, task, greedy);
        Ok(Self {
            sampled: answers(false)?,
            greedy: answers(true)?,
        })
    }

    /// Fraction of sampled answers that are correct.
    pub(crate) fn accuracy(&self) -> f64 {
        self.sampled.reward_mean()
    }
}

/// A policy's answers to the held-out problems, one each.
pub(crate) fn answers(
    actor: &Actor,
    settings: &Settings,
    task: &Task,
    greedy: bool,
) -> Result<Evaluation> {
    let sampler = actor.sampler(SamplingConfig {
        greedy,
        ..settings.train.sampling.clone()
    })?;
    let problems = &task.held_out;
    evaluate(&sampler, problems, 1, &is_right, &task.tokenizer, STREAM)
}

pub(crate) fn table(before: &Measurement, after: &Measurement) -> String {
    let n = before.sampled.samples.len();
    let percent = |x: &Evaluation| format!("{:.1} %", 100. * x.reward_mean());
    let rows = [
        (
            format!("{n} held-out problems"),
            "before".to_owned(),
            "after".to_owned(),
        ),
        (
            "right, sampled".to_owned(),
            percent(&before.sampled),
            percent(&after.sampled),
        ),
        (
            "right, greedy".to_owned(),
            percent(&before.greedy),
            percent(&after.greedy),
        ),
        (
            "mean reward, sampled".to_owned(),
            format!("{:.3}", before.sampled.reward_mean()),
            format!("{:.3}", after.sampled.reward_mean()),
        ),
        (
            "response length in tokens".to_owned(),
            format!("{:.2}", before.sampled.response_length_mean()),
            format!("{:.2}", after.sampled.response_length_mean()),
        ),
    ];
    rows.map(|(name, before, after)| format!("{name:28}{before:>10}{after:>10}"))
        .join("\n")
}

/// A Markdown table with sampled answers.
pub(crate) fn samples_side_by_side(
    task: &Task,
    before: &Measurement,
    after: &Measurement,
) -> String {
    let mut text = String::from(
        "# Sampled answers to held-out problems\n\n| problem | correct answer | before | | after | |\n|---|---|---|---|---|---|\n",
    );
    let pairs = before.sampled.samples.iter().zip(&after.sampled.samples);
    for (prompt, (before, after)) in task.held_out.iter().zip(pairs).take(SHOWN) {
        let mark = |reward| if reward == Some(1.) { "right" } else { "wrong" };
        text += &format!(
            "| `{}` | `{}` | `{}` | {} | `{}` | {} |\n",
            prompt.text,
            answer(prompt),
            before.completion,
            mark(before.reward),
            after.completion,
            mark(after.reward)
        );
    }
    text
}
