//! A run's environments or agents.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_train::Pretrained;
use candle_grpo_train::environment::{
    AgentConfig, EnvironmentConfig, EnvironmentKind, EnvironmentLimits,
};
use candle_grpo_train::rollout::Trajectories;

/// Starts a model's environments, or the server for its agents. `stop_token_ids` must match the
/// sampler's.
///
/// # Errors
///
/// Fails if an option is invalid, a program cannot be started, or agents need the feature `agents`.
pub fn trajectories(
    config: &EnvironmentConfig,
    model: &Pretrained,
    stop_token_ids: &[u32],
) -> Result<Arc<dyn Trajectories>> {
    let trajectories = match &config.kind {
        EnvironmentKind::Agent(agent) => agents(agent, &config.limits, model, stop_token_ids),
        _ => (config.build(model, stop_token_ids)).map(|found| Arc::new(found) as _),
    };
    trajectories.context("environment")
}

#[cfg(feature = "agents")]
fn agents(
    config: &AgentConfig,
    limits: &EnvironmentLimits,
    model: &Pretrained,
    stop_token_ids: &[u32],
) -> Result<Arc<dyn Trajectories>> {
    let (config, limits) = (config.clone(), limits.clone());
    let (tokenizer, template) = (&model.tokenizer, model.chat_template.as_ref());
    let agents =
        candle_grpo_agents::Agents::new(config, limits, tokenizer, template, stop_token_ids)?;
    Ok(Arc::new(agents))
}

#[cfg(not(feature = "agents"))]
fn agents(
    _: &AgentConfig,
    _: &EnvironmentLimits,
    _: &Pretrained,
    _: &[u32],
) -> Result<Arc<dyn Trajectories>> {
    anyhow::bail!("kind: agent, must be another: this program was built without the feature agents")
}
