//! Advantages of the steps of trajectories, of two levels of groups.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::returns::check_discount;
use crate::advantage::{
    AdvantageBatch, AdvantageEstimator, Advantages, Baseline, BaselinePopulation, GroupAdvantage,
    Scale, SequenceAdvantage, SingleSample,
};
use crate::dtype::for_statistics;
use crate::groups::{GroupLayout, Groups};
use crate::metrics::Metrics;
use crate::rewards::combine;
use crate::trajectories::{Steps, numbered};

/// What the mean and deviation of the scores of episodes are taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpisodePopulation {
    /// Each trajectory counts once, as in the paper.
    #[default]
    Trajectories,
    /// Each step counts, so long trajectories count for more (ROLL, verl-agent).
    Steps,
}

/// Group-in-group policy optimisation (GiGPO, <https://arxiv.org/abs/2505.10978>; ROLL's `gigpo`): how good the whole
/// trajectory was among those of the same task, plus how good the step was among those taken in the same state.
///
/// `A = episode_weight N(episode score) + step_weight N(G)`, where `G_t = r_t + gamma G_(t+1)` runs over the steps of a
/// trajectory, the first `N` is over the trajectories of a group of the batch, and the second over the rows of a group that
/// were taken in the same state. With an `episode_weight` of 0 and the same state everywhere it is ROLL's
/// `step_reinforce`.
///
/// The rows of the batch are steps: `rewards` are theirs, `groups` are the tasks, and `steps` says which trajectory and
/// state each is of. The score of an episode is the sum of its rewards, unless `episode_rewards` are given. Advantages are
/// `[B]`; [`crate::TokenShaping::apply`] whitens and clips them over tokens, as ROLL does.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Gigpo, Scale, Steps};
///
/// // Two trajectories of one task meet in state 5 at first; the one that succeeds does so at its second step.
/// let rewards = Tensor::new(&[0f32, 1., 0., 0.], &Device::Cpu)?;
/// let steps = Steps::new([0u32, 0, 1, 1].as_slice(), [5u32, 6, 5, 7].as_slice());
/// let batch = AdvantageBatch::new(&rewards, 4).steps(&steps);
///
/// let mut gigpo = Gigpo { gamma: 0.5, ..Gigpo::default() };
/// gigpo.normalization.scale = Scale::None;
/// let advantages = gigpo.estimate(&batch)?.advantages;
/// // 0.5 or -0.5 for the episode; in state 5 returns of 0.5 and 0, the other states were seen once.
/// assert_eq!(advantages.to_vec1::<f32>()?, [0.75, 0.5, -0.75, -0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gigpo {
    /// The discount from one step to the next.
    pub gamma: f64,
    /// The weight of the episode.
    pub episode_weight: f64,
    /// The weight of the step, omega in the paper.
    pub step_weight: f64,
    /// What the statistics of episodes are of.
    pub episode_population: EpisodePopulation,
    /// `N`, at both levels: ROLL's `mean_std` is the default, `mean` has the scale none, `identity` the baseline none as
    /// well, and `asym_clip` a clip from -1 to 3. The paper has `mean_std` and `mean`. A KL penalty does not belong here.
    pub normalization: SequenceAdvantage,
}

impl Default for Gigpo {
    /// Weights of 1 and a discount of 0.95, divided by deviations; a state that was seen once says nothing.
    fn default() -> Self {
        let group = GroupAdvantage {
            single_sample: SingleSample::Zero,
            ..GroupAdvantage::grpo()
        };
        Self {
            gamma: 0.95,
            episode_weight: 1.,
            step_weight: 1.,
            episode_population: EpisodePopulation::Trajectories,
            normalization: SequenceAdvantage::new(group, Scale::Group),
        }
    }
}

impl Gigpo {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        check_discount("gamma", self.gamma)?;
        for (name, weight) in [
            ("episode_weight", self.episode_weight),
            ("step_weight", self.step_weight),
        ] {
            if !(weight >= 0. && weight.is_finite()) {
                bail!("{name}: {weight}, must be finite and at least 0");
            }
        }
        self.normalization.validate()?;
        if self.normalization.kl_penalty.is_some() {
            bail!("normalization.kl_penalty: given, must be absent: steps and episodes have none");
        }
        let group = &self.normalization.group;
        if matches!(group.baseline, Baseline::LengthWeighted | Baseline::Given)
            || group.population == BaselinePopulation::Unmasked
        {
            bail!(
                "normalization.group: {:?} of {:?}, must be a baseline of rewards alone over all of them",
                group.baseline,
                group.population
            );
        }
        Ok(())
    }

    fn normalize(&self, scores: &Tensor, groups: Groups) -> Result<Advantages> {
        self.normalization
            .estimate(&AdvantageBatch::new(scores, groups))
    }

    /// The first term before its weight: `scores` `[B]` are those of the trajectory of each row.
    fn of_episodes(&self, scores: &Tensor, tasks: &Groups, steps: &Steps) -> Result<Tensor> {
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
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
        self.validate()?;
        let Some(steps) = batch.steps else {
            bail!("steps: absent, must be given for this estimator");
        };
        let rewards = batch.sequence_rewards()?;
        let policy = self.normalization.group.non_finite;
        let (sums, scored) = combine(&rewards, None, policy)?;
        let rows = sums.dims1()?;
        // A step without a score has none, and neither have those before it.
        let missing = (sums.zeros_like()? + f64::NAN)?;
        let of_steps = scored.where_cond(&sums, &missing)?;
        let returns = steps.discounted_returns(&of_steps, self.gamma)?;
        let episodes = match batch.episode_rewards {
            Some(scores) if scores.dims() == [rows] => for_statistics(scores)?,
            Some(scores) => bail!(
                "episode_rewards: shape {:?}, must be [{rows}], one for each row",
                scores.dims()
            ),
            None => steps.sums(&of_steps)?,
        };
        let episode = self.of_episodes(&episodes, &batch.groups, steps)?;
        let states = steps.of_states(&batch.groups, rows)?;
        let mut metrics = state_metrics(&states, &returns)?;
        let step = self.normalize(&returns, states)?;
        metrics.extend(step.metrics);
        let advantages =
            ((episode * self.episode_weight)? + (step.advantages * self.step_weight)?)?;
        Ok(Advantages {
            advantages: advantages.to_dtype(rewards.result_dtype)?,
            returns: None,
            metrics,
        })
    }
}

/// How many steps there were in a state, and the fraction of steps that were alone in theirs, of which the second level
/// says nothing.
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
