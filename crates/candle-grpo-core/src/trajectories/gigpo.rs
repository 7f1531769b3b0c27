//! GiGPO: step advantages from two group levels.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::{Baseline, BaselinePopulation, SingletonGroup};
use crate::dtype::for_statistics;
use crate::groups::{GroupLayout, Groups};
use crate::metrics::Metrics;
use crate::rewards::{combine, mark_missing, to_result_dtype};
use crate::trajectories::{Steps, numbered};
use crate::validate::{self, Checked};
use crate::{AdvantageBatch, AdvantageEstimator, Advantages, GroupAdvantage};

/// Unit that the episode statistics count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EpisodePopulation {
    /// Trajectories: each counts once, as in the paper. The default.
    #[default]
    Trajectories,
    /// Steps: long trajectories have more weight (ROLL, verl-agent).
    Steps,
}

/// Group-in-group policy optimization (GiGPO, <https://arxiv.org/abs/2505.10978>; ROLL's `gigpo`).
///
/// ```text
/// A = episode_weight N(episode score) + step_weight N(G)     G_t = r_t + gamma G_(t+1)
/// ```
///
/// The first `N` normalizes over trajectories for the same task, the second over rows with the same
/// task and state. With `episode_weight` 0 and one state everywhere, the result is ROLL's
/// `step_reinforce`.
///
/// Use GiGPO for multi-turn agents that often revisit a state: the step term then compares actions
/// from the same state. If states rarely repeat, it adds little, and the metric
/// `state_alone_fraction` is near 1.
///
/// Each row in the batch is a step. Pass step rewards as `rewards`, tasks as `groups`, and
/// trajectories and states as `steps`. An episode's score is the sum of its rewards, unless you
/// pass `episode_rewards`. Advantages are `[B]`. To whiten and clip them over tokens, as ROLL does,
/// use [`crate::TokenAdvantage`].
///
/// ```
/// # use candle_core::{Device, Tensor};
/// use candle_grpo_core::trajectories::{Gigpo, Steps};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Scale};
///
/// // Two trajectories of one task start in state 5. The first succeeds at its second step.
/// let rewards = Tensor::new(&[0f32, 1., 0., 0.], &Device::Cpu)?;
/// let steps = Steps::new([0u32, 0, 1, 1].as_slice(), [5u32, 6, 5, 7].as_slice());
/// let batch = AdvantageBatch::new(&rewards, 4).steps(&steps);
///
/// let mut gigpo = Gigpo { gamma: 0.5, ..Gigpo::default() };
/// gigpo.normalization.scale = Scale::None;
/// let advantages = gigpo.estimate(&batch)?.advantages;
/// // 0.5 or -0.5 for the episode; returns of 0.5 and 0 in state 5; the other states occur once.
/// assert_eq!(advantages.to_vec1::<f32>()?, [0.75, 0.5, -0.75, -0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Gigpo {
    /// Discount from one step to the next. Default 0.95.
    pub gamma: f64,
    /// Weight for the episode term. Default 1.
    pub episode_weight: f64,
    /// Weight for the step term (omega in the paper). Default 1.
    pub step_weight: f64,
    /// Unit that the episode statistics count. Default `trajectories`.
    pub episode_population: EpisodePopulation,
    /// `N` at both levels, without a KL penalty. In ROLL's terms, GRPO is `mean_std`; `mean` has
    /// the scale none, `identity` the scale and baseline none, `asym_clip` a clip from -1 to 3.
    /// The paper has `mean_std` and `mean`. Default `GroupAdvantage { single_sample:
    /// SingletonGroup::Zero, ..Default::default() }`.
    pub normalization: GroupAdvantage,
}

impl Default for Gigpo {
    /// Both weights are 1 and the discount is 0.95. Divides by standard deviations, and gives 0 to
    /// states that occur once.
    fn default() -> Self {
        Self {
            gamma: 0.95,
            episode_weight: 1.,
            step_weight: 1.,
            episode_population: EpisodePopulation::Trajectories,
            normalization: GroupAdvantage {
                single_sample: SingletonGroup::Zero,
                ..GroupAdvantage::grpo()
            },
        }
    }
}

impl Gigpo {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::unit_interval("gamma", self.gamma)?;
        validate::non_negative("episode_weight", self.episode_weight)?;
        validate::non_negative("step_weight", self.step_weight)?;
        let function = &self.normalization;
        validate::check(
            function.kl_penalty.is_none(),
            "normalization.kl_penalty",
            "given",
            "be absent: steps and episodes have none",
        )?;
        let needs_more = matches!(
            function.baseline,
            Baseline::LengthWeighted | Baseline::Given
        );
        validate::check(
            !needs_more && function.population == BaselinePopulation::All,
            "normalization",
            format_args!("{:?} of {:?}", function.baseline, function.population),
            "be a baseline of rewards alone over all of them",
        )?;
        function.validate().map_err(|e| e.within("normalization"))
    }

    fn normalize(&self, scores: &Tensor, groups: Groups) -> Result<Advantages> {
        self.normalization
            .estimate(&AdvantageBatch::new(scores, groups))
    }

    /// Computes the unweighted first term from `scores` `[B]`, which repeat each trajectory's
    /// score.
    fn episode_term(&self, scores: &Tensor, tasks: &Groups, steps: &Steps) -> Result<Tensor> {
        let rows = scores.dims1()?;
        let trajectories = steps.trajectories.to_ids("trajectories", rows)?;
        let tasks = tasks.to_ids("groups", rows)?;
        let episodes = numbered(trajectories.iter().zip(&tasks));
        let mut first_rows = Vec::new();
        for (row, &episode) in episodes.iter().enumerate() {
            if episode == first_rows.len() as i64 {
                first_rows.push(row as u32);
            }
        }
        if numbered(trajectories.iter()) != episodes {
            bail!("groups: a trajectory is in two groups, all its steps must be in one");
        }
        match self.episode_population {
            EpisodePopulation::Steps => Ok(self.normalize(scores, Groups::Ids(tasks))?.advantages),
            EpisodePopulation::Trajectories => {
                let device = scores.device();
                let tasks = first_rows.iter().map(|&row| tasks[row as usize]).collect();
                let first_rows = Tensor::new(first_rows, device)?;
                let once = scores.contiguous()?.index_select(&first_rows, 0)?;
                let advantages = self.normalize(&once, Groups::Ids(tasks))?.advantages;
                advantages.index_select(&Tensor::new(episodes, device)?, 0)
            }
        }
    }
}

impl AdvantageEstimator for Gigpo {
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        self.validate()?;
        let Some(steps) = &batch.steps else {
            bail!("steps: absent, must be given for this estimator");
        };
        let rewards = batch.sequence_rewards()?;
        let policy = self.normalization.non_finite;
        let (sums, scored) = combine(&rewards, None, policy)?;
        let rows = sums.dims1()?;
        // The return of a step without a score is missing, and so are the returns before it.
        let step_rewards = mark_missing(&sums, &scored)?;
        let returns = steps.discounted_returns(&step_rewards, self.gamma)?;
        let episodes = match &batch.episode_rewards {
            Some(scores) if scores.dims() == [rows] => for_statistics(scores)?,
            Some(scores) => bail!(
                "episode_rewards: shape {:?}, must be [{rows}], one for each row",
                scores.dims()
            ),
            None => steps.sums(&step_rewards)?,
        };
        let episode = self.episode_term(&episodes, &batch.groups, steps)?;
        let states = steps.state_groups(&batch.groups, rows)?;
        let mut metrics = state_metrics(&states, &returns)?;
        let step = self.normalize(&returns, states)?;
        metrics.extend(step.metrics);
        let advantages =
            ((episode * self.episode_weight)? + (step.advantages * self.step_weight)?)?;
        Ok(Advantages {
            advantages: to_result_dtype("advantage", &advantages, rewards.result_dtype)?,
            returns: None,
            metrics,
        })
    }
}

/// The mean number of steps in a state, and the fraction of steps that are alone in their state.
fn state_metrics(states: &Groups, like: &Tensor) -> Result<Metrics> {
    let layout = GroupLayout::new(states, like.dim(0)?, like.device())?;
    let sizes = layout.sizes();
    let scalar = |x: usize| Tensor::new(x as f32, like.device());
    let rows = scalar(like.dim(0)?)?;
    let alone = sizes.iter().filter(|&&size| size == 1).count();
    let mut metrics = Metrics::new();
    metrics.push_mean("state_group_size", &rows, &scalar(sizes.len())?)?;
    metrics.push_mean("state_alone_fraction", &scalar(alone)?, &rows)?;
    Ok(metrics)
}
