//! A model's results on a suite.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_grpo_train::rewards::Votes;
use candle_grpo_train::statistics::{Estimate, majority_at, mean, pass_at};
use candle_grpo_train::{FinishReason, Progress, RewardFunction, Sampler, SamplingConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::SuitePrompts;
use crate::config::{EvaluationConfig, SuiteConfig};
use crate::run::evaluate_policy;

/// The completions for a prompt and their scores: one line in a results file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptResult {
    /// The suite's name.
    pub suite: String,
    /// The prompt's id in the suite.
    pub id: String,
    /// The prompt's text.
    pub prompt: String,
    /// The row's columns, with the correct answer.
    pub columns: Value,
    /// The completions.
    pub samples: Vec<SampleResult>,
}

/// A completion and its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleResult {
    /// The completion's text.
    pub completion: String,
    /// The score; `None` if it is missing.
    pub reward: Option<f32>,
    /// True if the score is at least `pass_reward`.
    pub passes: bool,
    /// The index of the first completion with an equal answer. `None` if it has no answer, or no
    /// reward compares answers.
    pub vote: Option<usize>,
    /// The completion's length in tokens, including the stop token.
    pub response_length: usize,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}

/// A model's metrics on a suite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuiteSummary {
    /// The suite's name.
    pub suite: String,
    /// The number of prompts.
    pub prompts: usize,
    /// Completions per prompt.
    pub samples_per_prompt: usize,
    /// The smallest reward that counts as a pass.
    pub pass_reward: f64,
    /// `pass@1` (the mean over all completions, also called avg@k), `pass@k` and `maj@k`.
    pub metrics: BTreeMap<String, Estimate>,
    /// The mean reward of completions that have one.
    pub reward_mean: f64,
    /// The number of completions without a score. They do not pass.
    pub rewards_missing: usize,
    /// The mean completion length in tokens.
    pub response_length: f64,
    /// The share of completions that end at the maximum length.
    pub truncated: f64,
    /// The sampler.
    pub sampler: SamplingConfig,
}

/// Answers a suite's prompts with the policy in `sampler`. Returns a result per prompt, and whether
/// `reward` compares answers. The numbers in `config` replace the suite's.
///
/// # Errors
///
/// As in [`evaluate`](candle_grpo_train::evaluate), or if a prompt's votes cannot be computed.
pub fn evaluate_suite(
    suite: &SuiteConfig,
    prompts: &SuitePrompts,
    sampler: &Sampler,
    reward: &dyn RewardFunction,
    tokenizer: &Tokenizer,
    config: &EvaluationConfig,
    progress: &dyn Progress,
) -> Result<(Vec<PromptResult>, bool)> {
    let texts = &prompts.prompts;
    let evaluation = evaluate_policy(sampler, texts, reward, tokenizer, config, progress)?;
    let mut has_votes = true;
    let groups = evaluation.samples.chunks(config.samples_per_prompt);
    let results = texts.iter().zip(&prompts.ids).zip(groups);
    let results = results.map(|((prompt, id), group)| {
        let completions: Vec<&str> = group.iter().map(|s| s.completion.as_str()).collect();
        let votes = reward.votes(&completions, &prompt.columns)?;
        has_votes &= votes.is_some();
        let votes: Votes = votes.unwrap_or_else(|| vec![None; group.len()]);
        ensure!(
            votes.len() == group.len(),
            "votes: {} of {} completions, must be one for each",
            votes.len(),
            group.len()
        );
        let samples = group.iter().zip(votes).map(|(sample, vote)| SampleResult {
            completion: sample.completion.clone(),
            reward: sample.reward,
            passes: sample.passes(config.pass_reward),
            vote,
            response_length: sample.response_length,
            finish_reason: sample.finish_reason,
        });
        Ok(PromptResult {
            suite: suite.name.clone(),
            id: id.clone(),
            prompt: prompt.text.clone(),
            columns: prompt.columns.clone(),
            samples: samples.collect(),
        })
    });
    Ok((results.collect::<Result<_>>()?, has_votes))
}

impl PromptResult {
    /// Returns the share of completions that pass.
    pub fn mean(&self) -> f64 {
        self.passing() as f64 / self.samples.len().max(1) as f64
    }

    fn passing(&self) -> usize {
        let passing = self.samples.iter().filter(|sample| sample.passes);
        passing.count()
    }

    fn majority_at(&self, k: usize) -> Result<f64> {
        let votes: Votes = self.samples.iter().map(|sample| sample.vote).collect();
        let passes: Vec<bool> = self.samples.iter().map(|sample| sample.passes).collect();
        majority_at(&votes, &passes, k)
    }
}

impl SuiteSummary {
    /// Computes the metrics for `results`: pass@k for each k in `config.pass_at`. If `has_votes`,
    /// also maj@k for each k above 1.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no results, or a k is above a prompt's number of completions.
    pub fn new(
        suite: &SuiteConfig,
        results: &[PromptResult],
        has_votes: bool,
        config: &EvaluationConfig,
    ) -> Result<Self> {
        let mut metrics = BTreeMap::new();
        for &k in &config.pass_at {
            let passes = |result: &PromptResult| pass_at(result.samples.len(), result.passing(), k);
            let passes = results.iter().map(passes).collect::<Result<Vec<_>>>()?;
            metrics.insert(format!("pass@{k}"), mean(&passes)?);
            if k > 1 && has_votes {
                let majorities = results.iter().map(|result| result.majority_at(k));
                let majorities = majorities.collect::<Result<Vec<_>>>()?;
                metrics.insert(format!("maj@{k}"), mean(&majorities)?);
            }
        }
        let samples = || results.iter().flat_map(|result| &result.samples);
        let count = samples().count();
        let rewards: Vec<f64> = samples()
            .filter_map(|sample| sample.reward.map(f64::from))
            .collect();
        let tokens: usize = samples().map(|sample| sample.response_length).sum();
        let truncated = samples().filter(|sample| sample.finish_reason == FinishReason::Length);
        Ok(Self {
            suite: suite.name.clone(),
            prompts: results.len(),
            samples_per_prompt: config.samples_per_prompt,
            pass_reward: config.pass_reward,
            metrics,
            reward_mean: rewards.iter().sum::<f64>() / rewards.len().max(1) as f64,
            rewards_missing: count - rewards.len(),
            response_length: tokens as f64 / count.max(1) as f64,
            truncated: truncated.count() as f64 / count.max(1) as f64,
            sampler: config.sampler.clone(),
        })
    }
}
