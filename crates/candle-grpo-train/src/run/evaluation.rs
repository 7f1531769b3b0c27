//! Evaluates a policy.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use candle_grpo_core::validate::at_least_one;
use candle_grpo_nn::ModelConfig;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::environment::ensure_some_worked;
use crate::rewards::score_rollouts;
use crate::rollout::decode::{decode, decode_answers};
use crate::statistics::pass_at;
use crate::{FinishReason, Prompt, RewardFunction, Sampler};

/// The completions in an evaluation, and their scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Evaluation {
    /// Completions in prompt order; those for one prompt are adjacent.
    pub samples: Vec<EvaluatedSample>,
    /// Number of completions per prompt.
    pub samples_per_prompt: usize,
}

/// A completion and its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EvaluatedSample {
    /// The prompt's text.
    pub prompt: String,
    /// The completion's text, without special tokens. For a trajectory this is all turns, with
    /// special tokens.
    pub completion: String,
    /// The score; absent if missing.
    pub reward: Option<f32>,
    /// The completion's length in tokens, including the stop token, and the tokens of branches.
    pub response_length: usize,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}

impl EvaluatedSample {
    /// Returns whether the score is at least `pass_reward`. Without a score, it does not pass.
    pub fn passes(&self, pass_reward: f64) -> bool {
        let passes = |reward| f64::from(reward) >= pass_reward;
        self.reward.is_some_and(passes)
    }
}

impl Evaluation {
    /// Mean reward over completions that have one; 0 without any.
    pub fn reward_mean(&self) -> f64 {
        let rewards = self.samples.iter().filter_map(|sample| sample.reward);
        let rewards: Vec<f64> = rewards.map(f64::from).collect();
        rewards.iter().sum::<f64>() / rewards.len().max(1) as f64
    }

    /// Mean completion length in tokens.
    pub fn response_length_mean(&self) -> f64 {
        self.mean(|sample| sample.response_length as f64)
    }

    /// The chance that at least one of `k` completions for a prompt has a reward of at least
    /// `pass_reward`, averaged over prompts. This is the unbiased estimate from all completions
    /// (pass@k, Chen et al. 2021, <https://arxiv.org/abs/2107.03374>). A completion without a
    /// reward does not pass.
    ///
    /// # Errors
    ///
    /// If `k` is not in 1..=[`Self::samples_per_prompt`].
    pub fn pass_at(&self, k: usize, pass_reward: f64) -> Result<f64> {
        let n = self.samples_per_prompt;
        at_least_one("samples_per_prompt", n)?;
        let groups = self.samples.chunks(n);
        let prompts = groups.len() as f64;
        let chances = groups.map(|group| {
            let passes = group.iter().filter(|sample| sample.passes(pass_reward));
            pass_at(n, passes.count(), k)
        });
        Ok(chances.sum::<Result<f64>>()? / prompts)
    }

    /// `reward_mean`, `response_length`, and `pass_at_1` and so on for each k in `pass_at`: see
    /// [`Self::pass_at`].
    pub fn metrics(&self, pass_at: &[usize], pass_reward: f64) -> Result<BTreeMap<String, f64>> {
        let mut metrics = BTreeMap::from([
            ("reward_mean".to_owned(), self.reward_mean()),
            ("response_length".to_owned(), self.response_length_mean()),
        ]);
        for &k in pass_at {
            metrics.insert(format!("pass_at_{k}"), self.pass_at(k, pass_reward)?);
        }
        Ok(metrics)
    }

    /// Averages a value over the samples.
    pub fn mean(&self, value: impl Fn(&EvaluatedSample) -> f64) -> f64 {
        self.samples.iter().map(value).sum::<f64>() / self.samples.len() as f64
    }
}

/// Samples and scores `samples_per_prompt` completions per prompt. See [`Sampler::sample`] for
/// `stream`.
pub fn evaluate<C: ModelConfig>(
    sampler: &Sampler<C>,
    prompts: &[Prompt],
    samples_per_prompt: usize,
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    stream: u64,
) -> Result<Evaluation> {
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let share = sampler.share(prompts.len());
    let own = if share.is_empty() && !prompts.is_empty() {
        Vec::new()
    } else {
        evaluate_part(
            sampler,
            &prompts,
            share,
            samples_per_prompt,
            reward,
            tokenizer,
            stream,
        )?
    };
    let all = sampler.ranks().gather(own)?.concat();
    ensure_some_worked(all.iter().map(|(_, failure)| failure.as_deref()))?;
    Ok(Evaluation {
        samples: all.into_iter().map(|(sample, _)| sample).collect(),
        samples_per_prompt,
    })
}

/// Evaluates `prompts[part]`. Also returns, for each sample, the message if its environment failed.
fn evaluate_part<C: ModelConfig>(
    sampler: &Sampler<C>,
    prompts: &[&Prompt],
    part: Range<usize>,
    samples_per_prompt: usize,
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    stream: u64,
) -> Result<Vec<(EvaluatedSample, Option<String>)>> {
    let rollouts = sampler.sample_part(prompts, samples_per_prompt, stream, part.clone())?;
    let prompts = &prompts[part];
    let texts = decode(&rollouts, sampler.config(), tokenizer)?;
    let answers = decode_answers(&rollouts, sampler.config(), tokenizer)?;
    let scores = score_rollouts(reward, prompts, &rollouts, &answers)?.total;
    Ok(rollouts
        .into_iter()
        .zip(texts)
        .zip(scores.iter_scores())
        .enumerate()
        .map(|(i, ((rollout, completion), score))| {
            let sample = EvaluatedSample {
                prompt: prompts[i / samples_per_prompt].text.clone(),
                completion,
                reward: score.value(),
                response_length: rollout.response_length(),
                finish_reason: rollout.completion.finish_reason,
            };
            (sample, rollout.failure().map(str::to_owned))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    /// The expected values count the sets of k among four completions that contain a correct one.
    #[rstest]
    #[case(&[1., 0., 0., 0.], 1, 0.25)]
    #[case(&[1., 0., 0., 0.], 2, 0.5)]
    #[case(&[1., 0., 1., 0.], 2, 5. / 6.)]
    #[case(&[1., 0., 1., 0.], 3, 1.)]
    #[case(&[0., 0.5, 0.9, 0.], 4, 0.)]
    #[case(&[1., 0., 0., 0., 0., 0., 0., 0.], 4, 0.5)]
    fn pass_at_k_is_the_chance_of_a_right_one(
        #[case] rewards: &[f32],
        #[case] k: usize,
        #[case] expected: f64,
    ) {
        let samples = rewards.iter().map(|&reward| EvaluatedSample {
            prompt: String::new(),
            completion: String::new(),
            reward: Some(reward),
            response_length: 1,
            finish_reason: FinishReason::Length,
        });
        let evaluation = Evaluation {
            samples: samples.collect(),
            samples_per_prompt: 4,
        };
        let chance = evaluation.pass_at(k, 1.).unwrap();
        assert!((chance - expected).abs() < 1e-12, "{chance}");
        for wrong in [0, 5] {
            assert!(evaluation.pass_at(wrong, 1.).is_err());
        }
    }
}
