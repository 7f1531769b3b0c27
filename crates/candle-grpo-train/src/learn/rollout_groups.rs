//! Completions with their scores.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_core::GroupAdvantage;
use candle_grpo_core::dtype::statistics_dtype;
use candle_grpo_core::rewards::NonFinite;
use candle_grpo_core::selection::{GroupSummary, TaskScores};
use serde::{Deserialize, Serialize};

use super::step_metrics::RewardStatistics;
use crate::rewards::{RewardFaults, RewardRequests, Scores};
use crate::sequence::{Batch, Column};
use crate::{Completion, Rollout, Sequence, TokenBatch};

/// The name of a reward that has none, in metrics.
const UNNAMED: &str = "reward";

/// Completions in groups of one size, side by side, and their scores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RolloutGroups {
    /// The number of completions of each group.
    pub num_generations: usize,
    /// The prompt that each group answers, by its place.
    pub rows: Vec<usize>,
    /// The completions.
    pub rollouts: Vec<Rollout>,
    /// The score of each completion: the sum of its components. NaN if it is missing.
    pub scores: Vec<f32>,
    /// For each component of the reward one score for each completion.
    pub components: Vec<Scores>,
    /// The score of the greedy completion of each group's prompt, if the advantages need it. NaN
    /// if it is missing.
    pub greedy_scores: Option<Vec<f32>>,
}

impl RolloutGroups {
    /// Components in the dtype of statistics, `[B, K]`, or `[B]` if there is one.
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

    /// Mean and spread of the scores of each group.
    pub(crate) fn groups(&self) -> Result<Vec<GroupSummary>> {
        let function = GroupAdvantage {
            non_finite: NonFinite::Exclude,
            ..GroupAdvantage::grpo()
        };
        let statistics = function.group_statistics(self.scores.as_slice(), self.num_generations)?;
        Ok(statistics.summaries()?)
    }

    /// For each completion, true if it has a score, and a greedy one to compare it with if the
    /// advantages need that.
    pub(crate) fn is_scored(&self) -> impl Iterator<Item = bool> {
        self.scores.iter().enumerate().map(|(i, score)| {
            let greedy = self.greedy_scores.as_ref();
            !score.is_nan()
                && greedy.is_none_or(|greedy| !greedy[i / self.num_generations].is_nan())
        })
    }

    /// The missing scores of each reward, by its name, if there are any.
    pub(crate) fn faults(&self) -> BTreeMap<String, RewardFaults> {
        let mut faults = BTreeMap::<String, RewardFaults>::new();
        for component in &self.components {
            let name = component.name().unwrap_or(UNNAMED);
            *faults.entry(name.to_owned()).or_default() += component.faults();
        }
        faults.retain(|_, faults| !faults.is_empty());
        faults
    }

    /// The requests that the scores of each reward took, by its name, if it sends any.
    pub(crate) fn requests(&self) -> BTreeMap<String, RewardRequests> {
        let mut requests = BTreeMap::<String, RewardRequests>::new();
        for component in &self.components {
            let name = component.name().unwrap_or(UNNAMED);
            *requests.entry(name.to_owned()).or_default() += component.requests();
        }
        requests.retain(|_, requests| !requests.is_empty());
        requests
    }

    /// Counts the requests of `others` with these.
    pub(crate) fn add_requests(&mut self, others: &Self) {
        for (component, other) in self.components.iter_mut().zip(&others.components) {
            component.add_requests(other.requests());
        }
    }

    /// The components of the reward by name. A name that occurs again has its number.
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

    /// Mean and standard deviation of each component of the reward, over the completions that have
    /// it.
    pub(crate) fn reward_statistics(&self) -> BTreeMap<String, RewardStatistics> {
        let components = self.named_components().into_iter();
        let statistics = |(name, scores): (String, &Scores)| (name, RewardStatistics::of(scores));
        components.map(statistics).collect()
    }

    /// The sequences of a group.
    pub(crate) fn group_batch(&self, group: usize) -> Result<Batch> {
        let n = self.num_generations;
        batch_of(&self.rollouts[group * n..(group + 1) * n])
    }

    /// No groups: the share of a rank without a prompt.
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

    /// The groups of the first of `ranks`, those of the second, and so on.
    pub(crate) fn of_all_ranks(ranks: Vec<Self>) -> Result<Self> {
        let mut parts = ranks.into_iter().filter(|part| !part.rows.is_empty());
        let mut all = parts.next().context("groups: none on any rank")?;
        parts.try_for_each(|part| all.extend(part))?;
        Ok(all)
    }

    /// Adds the groups of `other`, whose rewards must have as many components.
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

    /// Replaces the groups of these numbers by those of `other`, whose rewards must have as many
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

    /// The groups of these numbers.
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

    /// The greedy scores `[B]`, repeated for each completion of a group.
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

/// Records the mean score of each group. A group without scores changes nothing.
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
    /// Creates the batch of the rows of `rollouts`, see [`Rollout::rows`]. Tokens that the policy
    /// did not write are context: they are not in the response mask.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn from_rollouts(rollouts: &[Rollout], device: &Device) -> Result<Self> {
        Self::of_batch(&batch_of(rollouts)?, device)
    }

    /// Returns this batch of `rollouts` with the experts that the sampler recorded. The policy then
    /// replays them in training and does not choose (rollout routing replay,
    /// <https://arxiv.org/abs/2510.11370>). Other models choose their experts.
    ///
    /// # Errors
    ///
    /// Returns an error that names a completion without [`experts`](crate::Completion::experts),
    /// with another number of them, or with other tokens than the batch.
    pub fn replaying(self, rollouts: &[Rollout]) -> Result<Self> {
        let rows = rollouts.iter();
        let rows = rows.flat_map(|rollout| rollout.rows().map(move |row| (rollout, row)));
        let rows: Vec<_> = rows.collect();
        ensure!(
            self.sequences().len() == rows.len(),
            "rollouts: {} with {} rows, must be {}, those of the batch",
            rollouts.len(),
            rows.len(),
            self.sequences().len()
        );
        let pairs = self.sequences().iter().zip(rows);
        let pairs = pairs.map(|(sequence, (rollout, (prompt, completion)))| {
            replayed(sequence, prompt, completion).with_context(|| {
                format!(
                    "completion {} of prompt {}",
                    rollout.sample_index, rollout.prompt_index
                )
            })
        });
        let sequences = pairs.collect::<Result<_>>()?;
        Ok(self.with_sequences(sequences))
    }
}

/// `sequence`, the tokens of `prompt` and `completion`, with the experts.
fn replayed(sequence: &Sequence, prompt: &[u32], completion: &Completion) -> Result<Sequence> {
    let response = &completion.tokens;
    ensure!(
        sequence.prompt() == prompt && sequence.response() == response,
        "{} prompt tokens and {} response tokens, must be the {} and {} of the batch",
        prompt.len(),
        response.len(),
        sequence.prompt().len(),
        sequence.response().len()
    );
    let Some(experts) = &completion.experts else {
        bail!("no experts, must have them to be replayed");
    };
    sequence.clone().with_experts(experts.clone())
}

/// The name of the log-probs that the generator reported, in [`batch_of`].
const ROLLOUT_LOG_PROBS: &str = "rollout_log_probs";

/// The rows of `rollouts`, with the log-probs that the generator reported. A rollout is a
/// trajectory.
fn batch_of(rollouts: &[Rollout]) -> Result<Batch> {
    let (mut sequences, mut trajectories, mut log_probs) = (Vec::new(), Vec::new(), Vec::new());
    for (trajectory, rollout) in rollouts.iter().enumerate() {
        for (prompt, completion) in rollout.rows() {
            let sequence = completion.sequence(prompt);
            let number = sequences.len();
            sequences.push(sequence.map_err(|error| anyhow!("sequence {number}: {error}"))?);
            trajectories.push(trajectory);
            log_probs.push(completion.reported_log_probs());
        }
    }
    Batch::new(sequences)?
        .with_trajectories(trajectories)?
        .with_column(ROLLOUT_LOG_PROBS, Column::per_token(log_probs))
}

/// Returns the log-probs that the generator reported for the rows of `rollouts`, f32 `[B, T]`:
/// those of the policy, or of the distribution drawn from if it does not compute these. 0 for
/// padding and for tokens that the policy did not write.
///
/// # Errors
///
/// If there are no rollouts, or one has no tokens.
pub fn rollout_log_probs(rollouts: &[Rollout], device: &Device) -> Result<Tensor> {
    batch_of(rollouts)?.tensor(ROLLOUT_LOG_PROBS, device)
}
