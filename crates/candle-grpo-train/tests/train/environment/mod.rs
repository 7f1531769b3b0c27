//! Multi-turn trajectories.

mod branches;
mod contents;
#[cfg(all(unix, feature = "code", feature = "mcp"))]
mod isolation;
mod loops;
mod masks;
#[cfg(all(unix, feature = "mcp"))]
mod mcp;
mod observations;
#[cfg(unix)]
mod openenv;
#[cfg(unix)]
mod programs;
#[cfg(all(unix, feature = "mcp"))]
mod real_mcp;
mod roles;
mod rollouts;
pub(crate) mod templates;
#[cfg(unix)]
mod tools;
mod turn_advantages;

use std::sync::Arc;

use anyhow::Result;
use candle_grpo_train::environment::{
    Append, Environment, EnvironmentFactory, EnvironmentLimits, Environments, EpisodeStart, Step,
    Turn,
};
use serde_json::json;

use crate::common::{END, tokenizer};

/// Responds to each turn with "de" and a reward that depends on the turn, until three turns are
/// over.
pub(crate) struct Echo {
    pub(crate) turns: usize,
}

impl Environment for Echo {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        let reward = turn
            .tokens
            .iter()
            .map(|&token| f64::from(token))
            .sum::<f64>();
        Ok(Step {
            append: Append::Text("de".to_owned()),
            reward: Some(reward.sin()),
            done: turn.number + 1 == self.turns,
            state: Some(json!(turn.number)),
            metrics: [("letters".to_owned(), turn.text.len() as f64)].into(),
            ..Step::default()
        })
    }
}

pub(crate) fn echo(turns: usize) -> impl EnvironmentFactory + 'static {
    move |_: &EpisodeStart<'_>| -> Result<Echo> { Ok(Echo { turns }) }
}

/// Environments for the tiny policy with turns of at most two tokens.
pub(crate) fn environments(factory: impl EnvironmentFactory + 'static) -> Arc<Environments> {
    let limits = EnvironmentLimits {
        max_turn_tokens: Some(2),
        ..EnvironmentLimits::default()
    };
    limited(factory, limits)
}

pub(crate) fn limited(
    factory: impl EnvironmentFactory + 'static,
    limits: EnvironmentLimits,
) -> Arc<Environments> {
    let environments = Environments::new(factory, limits, &tokenizer(), None, &[END]);
    Arc::new(environments.unwrap())
}
