//! A step's advantages.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::advantage::RoleBaselines;
use candle_grpo_core::rewards::{Costs, NonFinite, RunningMoments};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, Advantages, GroupAdvantage, MetricValues, RewardShaping,
    validate::check,
};

use super::joined_rows::JoinedRows;
use super::{StepBatch, single};
use crate::learn::TrainerState;
use crate::learn::critic::explained_variance;
use crate::learn::needs::keeps_components;
use crate::learn::role_groups::{Part, RoleGroups};
use crate::learn::rollout_groups::RolloutGroups;
use crate::{Rollout, TrainConfig};
use candle_grpo_core::inputs::Input;

/// Adds the advantages, and the returns that a critic learns.
///
/// They come from `estimator` if it is given, otherwise from the recipe,
/// [`TrainConfig::turn_advantage`] or [`TrainConfig::role_baselines`]. The estimator receives every
/// input that [`signals`](super::signals) has added. Running moments, baselines and controllers in
/// `state` advance.
///
/// If rows have [roles](Rollout::role), each role in a trajectory is a sample of its own, and the
/// groups are those of one role and one prompt. A role without a row in a trajectory is a sample
/// without a reward.
///
/// # Errors
///
/// Fails if the estimator fails, for example because an input that it needs is absent.
pub fn advantages(
    batch: &mut StepBatch,
    estimator: Option<&dyn AdvantageEstimator>,
    config: &TrainConfig,
    state: &mut TrainerState,
) -> Result<()> {
    let by_role = RoleGroups::new(&batch.groups);
    if let Some(roles) = &by_role {
        ensure_for_roles(batch, config)?;
        batch.push_role_rewards(roles)?;
    }
    let compared = by_role
        .as_ref()
        .map_or(&batch.groups, |roles| &roles.groups);
    let shaped = rewards(batch, compared, estimator.is_some(), config, state)?;
    let rewards = shaped.rewards;
    batch.metrics.merge(&shaped.metrics)?;
    let (tokens, groups) = (&batch.tokens, compared);
    let parts = by_role.as_ref().map(|roles| roles.parts.as_slice());
    let (rows, of_trajectories) = match parts {
        None => (batch.trajectories.clone(), None),
        Some(parts) => {
            let sequences = parts.iter().map(|part| part.sequences.clone());
            let rows = JoinedRows::new(sequences.collect(), tokens)?;
            let places = parts.iter().map(|part| part.trajectory as u32);
            let places = Tensor::new(places.collect::<Vec<_>>(), rewards.device())?;
            (rows, Some(places))
        }
    };
    let mask = rows.join(tokens.response_mask())?;
    let joined = batch.inputs.iter().map(|(&input, tensor)| {
        let joined = match (tensor.rank(), &of_trajectories) {
            (1, None) => tensor.clone(),
            (1, Some(places)) => tensor.contiguous()?.index_select(places, 0)?,
            _ => rows.join(tensor)?,
        };
        Ok((input, joined))
    });
    let joined: Vec<(Input, Tensor)> = joined.collect::<Result<_>>()?;
    let mut inputs = AdvantageBatch::new(&rewards, groups.num_generations)
        .response_mask(&mask)
        .step(state.steps);
    for (input, tensor) in &joined {
        inputs = inputs.with(*input, tensor);
    }
    let found = match (estimator, &config.turn_advantage, &mut state.role_baselines) {
        (Some(estimator), ..) => estimator.estimate(&inputs)?,
        (None, Some(advantage), _) => {
            check(
                parts.is_none(),
                "turn_advantage",
                "given",
                "be absent, as rows have roles",
            )?;
            let (_, width) = tokens.dims();
            advantage.compute(groups, width, rewards.device())?
        }
        (None, None, Some(baselines)) => {
            let found = minus_baselines(&rewards, parts, baselines)?;
            for (role, baseline) in baselines.baselines() {
                let name = match role.as_str() {
                    "" => "role_baseline".to_owned(),
                    role => format!("role_baseline/{role}"),
                };
                batch.metrics.insert(&name, single(*baseline));
            }
            Advantages::new(found)
        }
        (None, None, None) => {
            let pipeline = config.recipe.advantage.pipeline();
            // Only missing scores are not finite.
            let exclude = |group: &mut GroupAdvantage| group.non_finite = NonFinite::Exclude;
            let mut pipeline = pipeline.map_sequence(exclude);
            if let Some(controller) = &state.reward_kl {
                pipeline = pipeline.map_tokens(|tokens| {
                    if let Some(penalty) = &mut tokens.kl_penalty {
                        penalty.coef = controller.coef();
                    }
                });
            }
            pipeline.estimate(&inputs)?
        }
    };
    let metrics = found.metrics.to_host()?;
    if let (Some(controller), Some(kl)) =
        (&mut state.reward_kl, metrics.get("reward_kl_per_sequence"))
    {
        let coef = single(controller.coef());
        batch.metrics.insert("reward_kl_coef", coef);
        controller.update(kl, batch.groups.rollouts.len())?;
    }
    batch.metrics.merge(&metrics)?;
    // Rewards stay in the statistics dtype up to here.
    let result = |x: Tensor| rows.split(&x.to_dtype(DType::F32)?);
    let returns = found.returns.map(result).transpose()?;
    if let (Some(values), Some(returns)) = (batch.inputs.get(&Input::Values), &returns)
        && let Some(share) = explained_variance(values, returns, tokens.response_mask())?
    {
        let share = single(share);
        batch.metrics.insert("value_explained_variance", share);
    }
    batch.returns = returns;
    batch.advantages = Some(result(found.advantages)?);
    Ok(())
}

impl StepBatch {
    /// Returns each completion's mean advantage over its trained tokens; absent if it has none, and
    /// before [`advantages`]. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the advantages have another shape than the batch.
    pub fn mean_advantages(&self) -> Result<Vec<Option<f32>>> {
        match &self.advantages {
            Some(advantages) => self.trajectory_means(advantages),
            None => Ok(vec![None; self.groups.rollouts.len()]),
        }
    }

    /// Adds the mean score of each role.
    fn push_role_rewards(&mut self, roles: &RoleGroups) -> Result<()> {
        for (part, &score) in roles.parts.iter().zip(&roles.groups.scores) {
            if !score.is_nan() && !part.role.is_empty() {
                let mut one = MetricValues::default();
                one.insert(
                    &format!("role_reward/{}", part.role),
                    single(f64::from(score)),
                );
                self.metrics.merge(&one)?;
            }
        }
        Ok(())
    }

    /// Means over each trajectory's tokens from `[S]` or `[S, T]`, f32; absent without tokens.
    fn trajectory_means(&self, x: &Tensor) -> Result<Vec<Option<f32>>> {
        let (_, width) = self.tokens.dims();
        let x = match x.rank() {
            1 => x.unsqueeze(1)?,
            _ => x.clone(),
        };
        let x = x.broadcast_as(self.tokens.dims()).context("advantages")?;
        let all = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let means = self.trajectories.sequences().iter().map(|own| {
            let trained = own.iter().flat_map(|&at| {
                let row = &all[at * width..(at + 1) * width];
                row.iter().zip(self.tokens.sequences()[at].trained())
            });
            let trained = trained.filter(|(_, trains)| *trains);
            let trained: Vec<f64> = trained.map(|(&x, _)| f64::from(x)).collect();
            let count = trained.len() as f64;
            (!trained.is_empty()).then(|| (trained.iter().sum::<f64>() / count) as f32)
        });
        Ok(means.collect())
    }

    /// Returns the reason why the step has nothing to learn: all advantages are 0, or have no share
    /// in the loss, and no token has a teacher. `None` if it has. Synchronizes with the device.
    pub(in crate::learn) fn why_no_signal(
        &self,
        config: &TrainConfig,
    ) -> Result<Option<&'static str>> {
        let recipe = &config.recipe;
        let has_terms =
            recipe.policy_loss.distillation.is_some() || recipe.distillation_loss.is_some();
        let reward_alone =
            recipe.policy_loss.positive_nll.is_none() && !(has_terms && self.tokens.has_teacher());
        let teachers_alone = has_terms && recipe.policy_loss.loss_coef == 0.;
        Ok(match &self.advantages {
            Some(_) if reward_alone && teachers_alone => Some("no completion has a teacher"),
            Some(advantages) if reward_alone && is_zero(advantages)? => {
                Some("all advantages are 0")
            }
            _ => None,
        })
    }
}

/// Checks that no setting compares a role with what belongs to the whole trajectory.
fn ensure_for_roles(batch: &StepBatch, config: &TrainConfig) -> Result<()> {
    let recipe = &config.recipe;
    let turns = recipe.length_penalty.as_ref().map_or(0., |x| x.turns);
    for (field, is_given) in [
        ("recipe.advantage", batch.groups.greedy_scores.is_some()),
        (
            "recipe.policy_loss.positive_nll",
            recipe.policy_loss.positive_nll.is_some(),
        ),
        ("recipe.length_penalty.turns", turns != 0.),
    ] {
        let must = "be another one, as rows have roles: it reads scores or turns of trajectories";
        check(!is_given, field, "given", must)?;
    }
    Ok(())
}

/// The advantages `[B]` of samples with these rewards and roles: without a reward, 0. Without
/// parts, all have one role, whose name is empty. Synchronizes with the device.
fn minus_baselines(
    rewards: &Tensor,
    parts: Option<&[Part]>,
    baselines: &mut RoleBaselines,
) -> Result<Tensor> {
    let device = rewards.device();
    let all = rewards.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let known = all.iter().enumerate().filter(|(_, x)| !x.is_nan());
    let (places, known): (Vec<usize>, Vec<f64>) = known.map(|(at, x)| (at, *x)).unzip();
    let role = |at: &usize| parts.map_or("", |parts| parts[*at].role.as_str());
    let roles: Vec<&str> = places.iter().map(role).collect();
    let mut advantages = vec![0.; all.len()];
    for (at, advantage) in places.iter().zip(baselines.advantages(&known, &roles)?) {
        advantages[*at] = advantage;
    }
    Ok(Tensor::new(advantages, &Device::Cpu)?
        .to_dtype(rewards.dtype())?
        .to_device(device)?)
}

/// Rewards of the samples that advantages compare.
struct Rewards {
    /// `[B]` after shaping and penalties, or their components `[B, K]` if nothing sums them, in
    /// the statistics dtype.
    rewards: Tensor,
    metrics: MetricValues,
}

/// Returns the rewards of `scored`, which are the trajectories of `batch` or their parts.
fn rewards(
    batch: &StepBatch,
    scored: &RolloutGroups,
    has_estimator: bool,
    config: &TrainConfig,
    state: &mut TrainerState,
) -> Result<Rewards> {
    let recipe = &config.recipe;
    let device = batch.tokens.targets().device();
    let components = scored.component_tensor(device)?;
    // A pipeline with only a token stage cannot handle components where some are missing.
    let takes_components = has_estimator || recipe.advantage.pipeline().sequence.is_some();
    let takes_components = takes_components && config.role_baselines.is_none();
    if keeps_components(recipe) && takes_components {
        return Ok(Rewards {
            rewards: components,
            metrics: MetricValues::default(),
        });
    }
    let mut moments = state
        .running_moments
        .map(|state| RunningMoments::from_state(state, device))
        .transpose()?;
    let shaping = RewardShaping {
        non_finite: NonFinite::Exclude,
        ..recipe.reward_shaping.clone()
    };
    let shaped = shaping.apply(&components, scored.num_generations, moments.as_mut())?;
    state.running_moments = moments.map(|moments| moments.state()).transpose()?;
    let metrics = shaped.metrics.to_host()?;
    let mut rewards = shaped.rewards;
    let dtype = rewards.dtype();
    let numbers = |number: &dyn Fn(&Rollout) -> usize| -> Result<Tensor> {
        let numbers = scored.rollouts.iter().map(|rollout| number(rollout) as u32);
        Ok(Tensor::new(numbers.collect::<Vec<_>>(), device)?.to_dtype(dtype)?)
    };
    let lengths = numbers(&Rollout::num_written_tokens)?;
    if let Some(penalty) = &recipe.length_penalty {
        let turns = |rollout: &Rollout| rollout.episode.as_ref().map_or(1, |e| e.turns.len());
        let (input_tokens, turns) = (numbers(&Rollout::num_read_tokens)?, numbers(&turns)?);
        let costs = Costs {
            output_tokens: Some(&lengths),
            input_tokens: Some(&input_tokens),
            turns: Some(&turns),
        };
        rewards = penalty.apply(&rewards, scored.num_generations, &costs)?;
    }
    if let Some(overlong) = &recipe.overlong {
        rewards = (rewards + overlong.compute(&lengths)?)?;
    }
    Ok(Rewards { rewards, metrics })
}

fn is_zero(x: &Tensor) -> Result<bool> {
    let entries = x.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(entries.iter().all(|&entry| entry == 0.))
}
