//! Judge ensembles.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candle_grpo_core::rewards::{NonFinite, ScoreEnsemble};

use super::weighted::{all_requests, in_parallel};
use super::{RewardFunction, Sample, Score, Scores};
use crate::Progress;

/// Combines the scores from several reward functions into one. The functions run concurrently, and
/// missing scores are left out.
///
/// ```
/// use candle_grpo_core::rewards::ScoreEnsemble;
/// use candle_grpo_rewards::Sample;
/// use candle_grpo_rewards::EnsembleReward;
///
/// let judges = EnsembleReward::new(ScoreEnsemble::Min)
///     .with(|sample: &Sample| sample.completion.len() as f32)
///     .with(|sample: &Sample| sample.completion_tokens.len() as f32);
/// ```
pub struct EnsembleReward {
    combine: ScoreEnsemble,
    judges: Vec<Box<dyn RewardFunction>>,
}

impl EnsembleReward {
    /// Creates an ensemble without judges: add at least one.
    pub fn new(combine: ScoreEnsemble) -> Self {
        Self {
            combine,
            judges: Vec::new(),
        }
    }

    /// Adds a judge.
    #[must_use]
    pub fn with(self, judge: impl RewardFunction + 'static) -> Self {
        self.with_boxed(Box::new(judge))
    }

    pub(super) fn with_boxed(mut self, judge: Box<dyn RewardFunction>) -> Self {
        self.judges.push(judge);
        self
    }
}

impl RewardFunction for EnsembleReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(self.scores(samples)?.iter_scores().collect())
    }

    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        anyhow::ensure!(
            !self.judges.is_empty(),
            "judges: none, an ensemble must have at least one"
        );
        if samples.is_empty() {
            return Scores::new(Vec::new(), samples);
        }
        let scores = in_parallel(&self.judges, |judge| judge.scores(samples));
        let scores = scores
            .into_iter()
            .enumerate()
            .map(|(i, scores)| scores.with_context(|| format!("judge {i}")))
            .collect::<Result<Vec<_>>>()?;
        let columns = scores
            .iter()
            .map(|scores| Tensor::new(&**scores, &Device::Cpu));
        let columns = columns.collect::<candle_core::Result<Vec<_>>>()?;
        let combined = Tensor::stack(&columns, 1)?;
        let combined = self.combine.combine(&combined, NonFinite::Exclude)?;
        let combined = combined.to_vec1::<f32>()?.into_iter().enumerate();
        let combined = combined
            .map(|(sample, number)| {
                // No score, or none with a positive weight.
                let score = if number.is_nan() {
                    Score::NONE
                } else {
                    number.into()
                };
                let mut failures = scores.iter().filter_map(|scores| scores.failure(sample));
                failures
                    .next()
                    .map_or(score, |failure| score.after(failure))
            })
            .collect();
        let feedback = (0..samples.len()).map(|sample| {
            let texts = scores.iter().filter_map(|scores| scores.feedback(sample));
            let texts: Vec<&str> = texts.collect();
            (!texts.is_empty()).then(|| texts.join("\n\n"))
        });
        let combined = Scores::new(combined, samples)?.with_feedback(feedback.collect())?;
        Ok(combined.with_requests(all_requests(&scores)))
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        for judge in &mut self.judges {
            judge.set_progress(Arc::clone(&progress));
        }
    }

    fn set_clock(&mut self, now: &str) -> Result<()> {
        let mut judges = self.judges.iter_mut();
        judges.try_for_each(|judge| judge.set_clock(now))
    }

    fn finish(&self) -> Result<()> {
        for (i, judge) in self.judges.iter().enumerate() {
            judge.finish().with_context(|| format!("judge {i}"))?;
        }
        Ok(())
    }
}
