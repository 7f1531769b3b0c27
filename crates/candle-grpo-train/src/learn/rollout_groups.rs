//! Completions with their scores.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_core::GroupAdvantage;
use candle_grpo_core::dtype::statistics_dtype;
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::selection::{GroupSummary, TaskScores};
use serde::{Deserialize, Serialize};

use super::step_metrics::RewardStatistics;
use crate::rewards::{RewardFaults, RewardRequests, Scores};
use crate::sequence::{Batch, Column};
use crate::{Rollout, TokenBatch};

/// Metric name for an unnamed reward.
const UNNAMED: &str = "reward";

/// Completions in contiguous groups with equal size, and their scores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RolloutGroups {
    /// Number of completions per group.
    pub num_generations: usize,
    /// Index of each group's prompt.
    pub rows: Vec<usize>,
    /// Completions, group by group.
    pub rollouts: Vec<Rollout>,
    /// Each completion's score: the sum over its components. NaN if missing.
    pub scores: Vec<f32>,
    /// For each reward component, one score per completion.
    pub components: Vec<Scores>,
    /// Greedy completion's score for each group's prompt, if the advantages need it. NaN if
    /// missing.
    pub greedy_scores: Option<Vec<f32>>,
}

impl RolloutGroups {
    /// Returns the components in the statistics dtype, `[B, K]`, or `[B]` if there is one.
    pub(crate) fn component_tensor(&self, device: &Device) -> Result<Tensor> {
        let dtype = statistics_dtype(device);
        let columns = self
            .components
            .iter()
            .map(|component| Tensor::new(&**component, device)?.to_dtype(dtype))
            .collect::<candle_core::Result<Vec<_>>>()?;
        Ok(match columns.as_slice() {
            [one] => one.clone(),
            several => Tensor::stack(several, 1)?,
        })
    }

    /// Returns each group's score mean and spread.
    pub(crate) fn groups(&self) -> Result<Vec<GroupSummary>> {
        let function = GroupAdvantage {
            non_finite: NonFinite::Exclude,
            ..GroupAdvantage::grpo()
        };
        let statistics = function.group_statistics(self.scores.as_slice(), self.num_generations)?;
        Ok(statistics.summaries()?)
    }

    /// For each completion, true if it has a score and, if the advantages compare with a greedy
    /// completion, that one has a score too.
    pub(crate) fn is_scored(&self) -> impl Iterator<Item = bool> {
        self.scores.iter().enumerate().map(|(i, score)| {
            let greedy = self.greedy_scores.as_ref();
            !score.is_nan()
                && greedy.is_none_or(|greedy| !greedy[i / self.num_generations].is_nan())
        })
    }

    /// Returns the missing scores per reward name, if there are any.
    pub(crate) fn faults(&self) -> BTreeMap<String, RewardFaults> {
        let mut faults = BTreeMap::<String, RewardFaults>::new();
        for component in &self.components {
            let name = component.name().unwrap_or(UNNAMED);
            *faults.entry(name.to_owned()).or_default() += component.faults();
        }
        faults.retain(|_, faults| !faults.is_empty());
        faults
    }

    /// Returns the number of requests per reward name, for rewards that send any.
    pub(crate) fn requests(&self) -> BTreeMap<String, RewardRequests> {
        let mut requests = BTreeMap::<String, RewardRequests>::new();
        for component in &self.components {
            let name = component.name().unwrap_or(UNNAMED);
            *requests.entry(name.to_owned()).or_default() += component.requests();
        }
        requests.retain(|_, requests| !requests.is_empty());
        requests
    }

    /// Returns what the environment and the rewards say about a completion, in words.
    pub(super) fn feedback(&self, completion: usize) -> Option<String> {
        let episode = self.rollouts[completion].episode.as_ref();
        let environment = episode.and_then(|episode| episode.feedback.as_deref());
        let rewards = self.components.iter();
        let rewards = rewards.filter_map(|component| component.feedback(completion));
        let all: Vec<&str> = environment.into_iter().chain(rewards).collect();
        (!all.is_empty()).then(|| all.join("\n\n"))
    }

    /// Adds the request counts in `others`.
    pub(crate) fn add_requests(&mut self, others: &Self) {
        for (component, other) in self.components.iter_mut().zip(&others.components) {
            component.add_requests(other.requests());
        }
    }

    /// Returns the reward components by name. A repeated name gets a number.
    pub(crate) fn named_components(&self) -> Vec<(String, &Scores)> {
        let mut seen = BTreeMap::<&str, usize>::new();
        let component = |scores| {
            let name = Scores::name(scores).unwrap_or(UNNAMED);
            let count = seen.entry(name).or_default();
            *count += 1;
            let name = match *count {
                1 => name.to_owned(),
                count => format!("{name}-{count}"),
            };
            (name, scores)
        };
        self.components.iter().map(component).collect()
    }

    /// Returns the mean and standard deviation for each reward component, over the completions that
    /// have it.
    pub(crate) fn reward_statistics(&self) -> BTreeMap<String, RewardStatistics> {
        let components = self.named_components().into_iter();
        let statistics = |(name, scores): (String, &Scores)| (name, RewardStatistics::of(scores));
        components.map(statistics).collect()
    }

    /// Returns a group's sequences.
    pub(crate) fn group_batch(&self, group: usize) -> Result<Batch> {
        let n = self.num_generations;
        batch_of(&self.rollouts[group * n..(group + 1) * n])
    }

    /// No groups: the share for a rank without a prompt.
    pub(crate) fn none(num_generations: usize) -> Self {
        Self {
            num_generations,
            rows: Vec::new(),
            rollouts: Vec::new(),
            scores: Vec::new(),
            components: Vec::new(),
            greedy_scores: None,
        }
    }

    /// Joins the groups from all `ranks`, in rank order.
    pub(crate) fn of_all_ranks(ranks: Vec<Self>) -> Result<Self> {
        let mut parts = ranks.into_iter().filter(|part| !part.rows.is_empty());
        let mut all = parts.next().context("groups: none on any rank")?;
        parts.try_for_each(|part| all.extend(part))?;
        Ok(all)
    }

    /// Appends the groups in `other`, whose rewards must have as many components.
    pub(crate) fn extend(&mut self, other: Self) -> Result<()> {
        self.ensure_as_many_components(&other)?;
        self.rows.extend(other.rows);
        self.rollouts.extend(other.rollouts);
        self.scores.extend(other.scores);
        for (component, more) in self.components.iter_mut().zip(other.components) {
            component.extend(more);
        }
        Ok(())
    }

    /// Replaces the groups with these indices by those in `other`, whose rewards must have as many
    /// components.
    pub(crate) fn replace(&mut self, groups: &[usize], other: Self) -> Result<()> {
        self.ensure_as_many_components(&other)?;
        let n = self.num_generations;
        self.add_requests(&other);
        let places = groups.iter().flat_map(|&group| group * n..(group + 1) * n);
        for (from, (place, rollout)) in places.zip(other.rollouts).enumerate() {
            self.rollouts[place] = rollout;
            self.scores[place] = other.scores[from];
            for (component, new) in self.components.iter_mut().zip(&other.components) {
                component.replace(place, new, from);
            }
        }
        Ok(())
    }

    fn ensure_as_many_components(&self, other: &Self) -> Result<()> {
        ensure!(
            self.components.len() == other.components.len(),
            "rewards: {} components after {}, there must always be as many",
            other.components.len(),
            self.components.len()
        );
        Ok(())
    }

    /// Returns the groups with these indices.
    pub(crate) fn select(&self, groups: &[usize]) -> Result<Self> {
        let n = self.num_generations;
        let samples = || groups.iter().flat_map(|&group| group * n..(group + 1) * n);
        let rollouts = samples()
            .map(|i| self.rollouts.get(i).cloned())
            .collect::<Option<Vec<_>>>()
            .context("groups: out of range")?;
        Ok(Self {
            num_generations: n,
            rows: groups.iter().map(|&group| self.rows[group]).collect(),
            rollouts,
            scores: samples().map(|i| self.scores[i]).collect(),
            components: self
                .components
                .iter()
                .map(|c| c.select(samples()))
                .collect(),
            greedy_scores: None,
        })
    }

    /// Greedy scores `[B]`, repeated for each completion in a group.
    pub(crate) fn greedy_baselines(&self, device: &Device) -> Result<Option<Tensor>> {
        let Some(scores) = &self.greedy_scores else {
            return Ok(None);
        };
        let repeated: Vec<f32> = scores
            .iter()
            .flat_map(|&score| std::iter::repeat_n(score, self.num_generations))
            .collect();
        Ok(Some(Tensor::new(repeated, device)?))
    }
}

/// Records each group's mean score. A group without scores changes nothing.
pub(super) fn record(scores: &mut TaskScores, drawn: &RolloutGroups) -> Result<()> {
    let groups = drawn.scores.chunks(drawn.num_generations.max(1));
    for (&prompt, group) in drawn.rows.iter().zip(groups) {
        let known = group.iter().filter(|score| !score.is_nan());
        let known: Vec<f64> = known.map(|score| f64::from(*score)).collect();
        if !known.is_empty() {
            scores.record(prompt, &known)?;
        }
    }
    Ok(())
}

impl TokenBatch {
    /// Creates a batch from the rows of `rollouts`, see [`Rollout::rows`]. Tokens that the policy
    /// did not write are context: they are not in the response mask.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    pub fn from_rollouts(rollouts: &[Rollout], device: &Device) -> Result<Self> {
        Self::of_batch(&batch_of(rollouts)?, device)
    }

    /// Creates a batch as [`Self::from_rollouts`] does, with the experts that the sampler recorded.
    /// In training, the policy then replays them instead of choosing (rollout routing replay,
    /// <https://arxiv.org/abs/2510.11370>). Other models choose their experts.
    ///
    /// # Errors
    ///
    /// Also fails with the name of a completion that has no
    /// [`experts`](crate::Completion::experts), or has another number of them.
    pub fn replaying(rollouts: &[Rollout], device: &Device) -> Result<Self> {
        let rows = rollouts.iter();
        let rows = rows.flat_map(|rollout| rollout.rows().map(move |row| (rollout, row.1)));
        let batch = batch_of(rollouts)?;
        let pairs = batch.sequences().iter().zip(rows);
        let sequences = pairs.map(|(sequence, (rollout, completion))| {
            let experts = completion.experts.clone();
            let experts = experts.context("no experts, must have them to be replayed");
            let replayed = experts.and_then(|experts| sequence.clone().with_experts(experts));
            replayed.with_context(|| {
                format!(
                    "completion {} of prompt {}",
                    rollout.sample_index, rollout.prompt_index
                )
            })
        });
        Self::of_batch(&Batch::new(sequences.collect::<Result<_>>()?)?, device)
    }
}

/// Batch with the rows of `rollouts`. Each rollout is a trajectory.
fn batch_of(rollouts: &[Rollout]) -> Result<Batch> {
    let (mut sequences, mut trajectories) = (Vec::new(), Vec::new());
    for (trajectory, rollout) in rollouts.iter().enumerate() {
        for (prompt, completion) in rollout.rows() {
            let sequence = completion.sequence(prompt);
            let number = sequences.len();
            sequences.push(sequence.map_err(|error| anyhow!("sequence {number}: {error}"))?);
            trajectories.push(trajectory);
        }
    }
    Batch::new(sequences)?.with_trajectories(trajectories)
}

/// Returns the log-probs that the generator reported for the rows of `rollouts`, f32 `[B, T]`:
/// under the policy, or under the sampling distribution if it does not compute these. 0 for padding
/// and for tokens that the policy did not write.
///
/// # Errors
///
/// Fails if there are no rollouts, or one has no tokens or another number of log-probs.
pub fn rollout_log_probs(rollouts: &[Rollout], device: &Device) -> Result<Tensor> {
    let width = batch_of(rollouts)?.width();
    let rows = rollouts.iter().flat_map(Rollout::rows).enumerate();
    let rows = rows.map(|(number, (_, completion))| {
        let log_probs = completion.reported_log_probs();
        log_probs.map_err(|error| anyhow!("sequence {number}: {error}"))
    });
    Column::per_token::<f32>(rows.collect::<Result<_>>()?).padded(width, device)
}
