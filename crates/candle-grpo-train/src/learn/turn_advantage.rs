//! Advantages of the turns of trajectories.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::Invalid;
use candle_grpo_core::dtype::statistics_dtype;
use candle_grpo_core::trajectories::{Gigpo, Steps};
use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Advantages, GroupAdvantage};
use serde::{Deserialize, Serialize};

use super::rollout_groups::RolloutGroups;
use crate::environment::Episode;
use crate::sequence::Column;
use candle_grpo_base::within;

/// An estimator whose samples are turns, in place of the advantage of the recipe. All tokens of a
/// turn have its advantage.
///
/// The reward of a turn is that of its environment. The last turn also has the other rewards of the
/// trajectory, so the rewards of its turns add up to its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum TurnAdvantage {
    /// Group-in-group policy optimization (GiGPO, <https://arxiv.org/abs/2505.10978>): the score of the
    /// trajectory among those of its prompt, plus the return of the turn among those of the same
    /// state. States are those of the environment.
    Gigpo(Gigpo),
    /// The return of the turn among those of all turns of its prompt (ROLL's `step_reinforce`).
    StepReturns(StepReturns),
}

/// The options of [`TurnAdvantage::StepReturns`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StepReturns {
    /// Discount from one turn to the next.
    pub gamma: f64,
    /// The comparison of returns within a group, as in [`Gigpo::normalization`].
    pub normalization: GroupAdvantage,
}

impl Default for StepReturns {
    fn default() -> Self {
        let Gigpo {
            gamma,
            normalization,
            ..
        } = Gigpo::default();
        Self {
            gamma,
            normalization,
        }
    }
}

impl TurnAdvantage {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// If one is not valid.
    pub fn validate(&self) -> Result<()> {
        let name = match self {
            Self::Gigpo(_) => "gigpo",
            Self::StepReturns(_) => "step_returns",
        };
        let valid = self.estimator().validate();
        valid.map_err(|error| within(name, error.into()))
    }

    fn estimator(&self) -> Gigpo {
        match self {
            Self::Gigpo(gigpo) => gigpo.clone(),
            Self::StepReturns(returns) => Gigpo {
                gamma: returns.gamma,
                normalization: returns.normalization.clone(),
                episode_weight: 0.,
                ..Gigpo::default()
            },
        }
    }

    /// The advantages `[B, T]`, f32, of trajectories of at most `width` tokens; 0 for tokens
    /// outside of turns.
    pub(super) fn compute(
        &self,
        scored: &RolloutGroups,
        width: usize,
        device: &Device,
    ) -> Result<Advantages> {
        let (mut rewards, mut groups, mut trajectories, mut states, mut places) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let all = scored.rollouts.iter().zip(scored.is_scored()).enumerate();
        for (i, (rollout, is_scored)) in all {
            let episode = rollout.episode.as_ref().context(
                "turn_advantage: given, but a completion has no turns; there must be an environment",
            )?;
            if !rollout.branches.is_empty() {
                let (sample, prompt) = (rollout.sample_index, rollout.prompt_index);
                let must =
                    format!("be absent, as trajectory {sample} of prompt {prompt} has branches");
                return Err(Invalid::new("turn_advantage", "given", must).into());
            }
            if !is_scored {
                continue;
            }
            for turn in &episode.turns {
                groups.push(i / scored.num_generations);
                trajectories.push(i);
                states.push(match self {
                    Self::Gigpo(_) => turn.state,
                    Self::StepReturns(_) => 0,
                });
                places.push((i, turn.tokens.clone()));
            }
            rewards.extend(turn_rewards(episode, f64::from(scored.scores[i])));
        }
        let shape = (scored.rollouts.len(), width);
        if rewards.is_empty() {
            let advantages = Tensor::zeros(shape, DType::F32, device)?;
            return Ok(Advantages::new(advantages));
        }
        let steps = Steps::new(trajectories, states);
        let rewards = Tensor::new(rewards, device)?.to_dtype(statistics_dtype(device))?;
        let batch = AdvantageBatch::new(&rewards, groups).steps(&steps);
        let found = self.estimator().estimate(&batch)?;
        let of_turn = found.advantages.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let rows = scored.rollouts.iter();
        let mut rows: Vec<_> = rows
            .map(|x| vec![0f32; x.completion.tokens.len()])
            .collect();
        for ((row, tokens), advantage) in places.into_iter().zip(of_turn) {
            rows[row][tokens].fill(advantage);
        }
        Ok(Advantages {
            advantages: Column::per_token(rows).padded(width, device)?,
            ..found
        })
    }
}

/// The reward of each turn. They add up to `score`.
fn turn_rewards(episode: &Episode, score: f64) -> Vec<f64> {
    let mut rewards: Vec<f64> = episode
        .turns
        .iter()
        .map(|turn| {
            if episode.gives_rewards {
                turn.reward
            } else {
                0.
            }
        })
        .collect();
    let others = score - rewards.iter().sum::<f64>();
    if let Some(last) = rewards.last_mut() {
        *last += others;
    }
    rewards
}
