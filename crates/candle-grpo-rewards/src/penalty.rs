//! Length and repetition penalties as reward functions.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_grpo_core::rewards::{OverlongPenalty, RepetitionPenalty};
use serde_json::Value;

use super::Score;
use super::options::{RewardInputs, RewardOptions};
use crate::{RewardFunction, Sample};

/// The soft penalty for completions close to the maximum length, in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LengthReward(pub OverlongPenalty);

impl RewardFunction for LengthReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let lengths: Vec<i64> = samples
            .iter()
            .map(|sample| sample.completion_tokens.len() as i64)
            .collect();
        let penalties = self.0.compute(&Tensor::new(lengths, &Device::Cpu)?)?;
        let penalties: Vec<f32> = penalties.to_dtype(candle_core::DType::F32)?.to_vec1()?;
        Ok(penalties.into_iter().map(Score::from).collect())
    }
}

impl RewardOptions for OverlongPenalty {
    fn validate(&self) -> Result<()> {
        Ok(Self::validate(self)?)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(LengthReward(*self)))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::none()
    }
}

/// The penalty for repeated token n-grams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RepetitionReward(pub RepetitionPenalty);

impl RewardFunction for RepetitionReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        samples
            .iter()
            .map(|sample| Ok((self.0.compute(sample.completion_tokens)? as f32).into()))
            .collect()
    }
}

impl RewardOptions for RepetitionPenalty {
    fn validate(&self) -> Result<()> {
        Ok(Self::validate(self)?)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(RepetitionReward(*self)))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::none()
    }
}
