//! Ensembles of judges.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use candle_grpo_core::{NonFinite, ScoreEnsemble};

use super::function::{RewardFunction, Sample, Scores};
use super::weighted::in_parallel;
use crate::Progress;

/// One score combined from those of several reward functions, which run concurrently.
///
/// ```
/// use candle_grpo_core::ScoreEnsemble;
/// use candle_grpo_train::Sample;
/// use candle_grpo_train::rewards::EnsembleReward;
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
    /// No judges yet: add at least one.
    pub fn new(combine: ScoreEnsemble) -> Self {
        Self {
            combine,
            judges: Vec::new(),
        }
    }

    /// Adds a judge.
    pub fn with(self, judge: impl RewardFunction + 'static) -> Self {
        self.with_boxed(Box::new(judge))
    }

    pub(super) fn with_boxed(mut self, judge: Box<dyn RewardFunction>) -> Self {
        self.judges.push(judge);
        self
    }
}

impl RewardFunction for EnsembleReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        anyhow::ensure!(
            !self.judges.is_empty(),
            "judges: none, an ensemble must have at least one"
        );
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let scores = in_parallel(&self.judges, |judge| {
            Scores::new(judge.score(samples)?, samples)
        });
        let scores = scores
            .into_iter()
            .enumerate()
            .map(|(i, scores)| {
                let scores = scores.with_context(|| format!("judge {i}"))?;
                Ok(Tensor::new(scores.into_vec(), &Device::Cpu)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let scores = Tensor::stack(&scores, 1)?;
        Ok(self.combine.combine(&scores, NonFinite::Error)?.to_vec1()?)
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        for judge in &mut self.judges {
            judge.set_progress(Arc::clone(&progress));
        }
    }

    fn finish(&self) -> Result<()> {
        for (i, judge) in self.judges.iter().enumerate() {
            judge.finish().with_context(|| format!("judge {i}"))?;
        }
        Ok(())
    }
}
