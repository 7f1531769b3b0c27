//! How good a completion is.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{FinishReason, Prompt, Rollout};

/// A completion as a reward function sees it.
#[derive(Debug, Clone, Copy)]
pub struct Sample<'a> {
    /// The text of the prompt.
    pub prompt: &'a str,
    /// The text of the completion, without special tokens.
    pub completion: &'a str,
    /// The tokens of the prompt.
    pub prompt_tokens: &'a [u32],
    /// The tokens of the completion, the stop token included.
    pub completion_tokens: &'a [u32],
    /// Why the completion ended.
    pub finish_reason: FinishReason,
    /// All columns of the row of the data set.
    pub columns: &'a Value,
}

/// Scores a batch of samples; a higher score is better.
///
/// A closure that scores one sample is one too:
///
/// ```
/// use candle_grpo_train::{RewardFunction, Sample};
///
/// let shorter_is_better = |sample: &Sample| -(sample.completion.len() as f32);
/// let _: &dyn RewardFunction = &shorter_is_better;
/// ```
pub trait RewardFunction {
    /// One finite score for each sample, in their order.
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>>;

    /// The parts whose sum the score is, each with one finite number for each sample: one part, unless the function says
    /// otherwise. Their number is always the same.
    ///
    /// An advantage may look at them one by one: GDPO does.
    fn components(&self, samples: &[Sample]) -> Result<Vec<Vec<f32>>> {
        Ok(vec![self.score(samples)?])
    }
}

impl<F: Fn(&Sample) -> f32> RewardFunction for F {
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        Ok(samples.iter().map(self).collect())
    }
}

/// A reward function that several threads may ask.
pub(crate) type SharedReward = Box<dyn RewardFunction + Send + Sync>;

/// The weighted sum of several reward functions, which are its components. They run side by side, each in a thread.
#[derive(Default)]
pub struct WeightedRewards {
    terms: Vec<Term>,
}

struct Term {
    name: String,
    weight: f32,
    function: SharedReward,
}

impl WeightedRewards {
    /// A sum of nothing: add at least one function.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `weight` times `function`; `name` is for error messages.
    pub fn with(
        self,
        name: &str,
        weight: f32,
        function: impl RewardFunction + Send + Sync + 'static,
    ) -> Self {
        self.with_boxed(name, weight, Box::new(function))
    }

    pub(crate) fn with_boxed(mut self, name: &str, weight: f32, function: SharedReward) -> Self {
        self.terms.push(Term {
            name: name.to_owned(),
            weight,
            function,
        });
        self
    }
}

impl RewardFunction for WeightedRewards {
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        Ok(sums(&self.components(samples)?, samples.len()))
    }

    fn components(&self, samples: &[Sample]) -> Result<Vec<Vec<f32>>> {
        ensure!(
            !self.terms.is_empty(),
            "rewards: a sum of no reward functions, add at least one"
        );
        let functions: Vec<&SharedReward> = self.terms.iter().map(|term| &term.function).collect();
        self.terms
            .iter()
            .zip(score_in_parallel(&functions, samples))
            .map(|(term, scores)| {
                let mut scores =
                    scores.with_context(|| format!("reward function {:?}", term.name))?;
                scores.iter_mut().for_each(|score| *score *= term.weight);
                Ok(scores)
            })
            .collect()
    }
}

/// The scores of each function, one finite number for each sample. Every function but the first has a thread of its own: some
/// only wait for a program.
pub(crate) fn score_in_parallel(
    functions: &[&SharedReward],
    samples: &[Sample],
) -> Vec<Result<Vec<f32>>> {
    let score = |function: &SharedReward| check_scores(function.score(samples)?, samples);
    let Some((first, others)) = functions.split_first() else {
        return Vec::new();
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = others
            .iter()
            .map(|function| scope.spawn(move || score(function)))
            .collect();
        let first = score(first);
        let joined = others.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the reward function panicked")))
        });
        std::iter::once(first).chain(joined).collect()
    })
}

/// The sum of the components of each sample.
pub(crate) fn sums(components: &[Vec<f32>], samples: usize) -> Vec<f32> {
    let mut sums = vec![0.; samples];
    for component in components {
        for (sum, score) in sums.iter_mut().zip(component) {
            *sum += score;
        }
    }
    sums
}

/// The components of the rewards of `rollouts`, whose completions read `texts` and which answer `prompts` in groups of
/// equal size.
pub(crate) fn score_rollouts(
    function: &dyn RewardFunction,
    prompts: &[&Prompt],
    rollouts: &[Rollout],
    texts: &[String],
) -> Result<Vec<Vec<f32>>> {
    let num_generations = rollouts.len() / prompts.len().max(1);
    let samples: Vec<Sample> = rollouts
        .iter()
        .zip(texts)
        .enumerate()
        .map(|(i, (rollout, text))| {
            let prompt = prompts[i / num_generations];
            Sample {
                prompt: &prompt.text,
                completion: text,
                prompt_tokens: &rollout.prompt_tokens,
                completion_tokens: &rollout.completion_tokens,
                finish_reason: rollout.finish_reason,
                columns: &prompt.columns,
            }
        })
        .collect();
    let components = function.components(&samples)?;
    ensure!(
        !components.is_empty(),
        "rewards: no components, there must be at least one"
    );
    components
        .into_iter()
        .map(|scores| check_scores(scores, &samples))
        .collect()
}

/// The scores, if there is one finite number for each of `samples`.
fn check_scores(scores: Vec<f32>, samples: &[Sample]) -> Result<Vec<f32>> {
    ensure!(
        scores.len() == samples.len(),
        "rewards: {} scores for {} samples, there must be one for each",
        scores.len(),
        samples.len()
    );
    for (i, (score, sample)) in scores.iter().zip(samples).enumerate() {
        ensure!(
            score.is_finite(),
            "rewards: sample {i} (prompt {:?}, completion {:?}) has reward {score}, must be finite",
            sample.prompt,
            sample.completion
        );
    }
    Ok(scores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples<'a>(completions: &[&'a str]) -> Vec<Sample<'a>> {
        completions
            .iter()
            .map(|completion| Sample {
                prompt: "say",
                completion,
                prompt_tokens: &[1],
                completion_tokens: &[2],
                finish_reason: FinishReason::StopToken,
                columns: &Value::Null,
            })
            .collect()
    }

    struct OneTooFew;

    impl RewardFunction for OneTooFew {
        fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
            Ok(vec![0.; samples.len() - 1])
        }
    }

    #[test]
    fn a_weighted_sum() {
        let rewards = WeightedRewards::new()
            .with("length", 0.5, |s: &Sample| s.completion.len() as f32)
            .with("polite", 2., |s: &Sample| {
                f32::from(s.completion.contains("please"))
            });
        let scores = rewards.score(&samples(&["yes", "please"])).unwrap();
        assert_eq!(scores, [1.5, 5.]);
        let components = rewards.components(&samples(&["yes", "please"])).unwrap();
        assert_eq!(components, [[1.5, 3.], [0., 2.]]);
    }

    #[test]
    fn a_reward_that_is_not_finite_names_sample_and_function() {
        let rewards = WeightedRewards::new()
            .with("fine", 1., |_: &Sample| 1.)
            .with("ratio", 1., |s: &Sample| 0. / s.completion.len() as f32);
        let error = rewards.score(&samples(&["yes", ""])).unwrap_err();
        let error = format!("{error:#}");
        assert_eq!(
            error,
            "reward function \"ratio\": rewards: sample 1 (prompt \"say\", completion \"\") has reward NaN, must be finite"
        );
    }

    #[test]
    fn a_wrong_number_of_scores_is_an_error() {
        let samples = samples(&["a", "b", "c"]);
        let error = check_scores(OneTooFew.score(&samples).unwrap(), &samples).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rewards: 2 scores for 3 samples, there must be one for each"
        );
    }

    #[test]
    fn a_sum_of_nothing_is_an_error() {
        let error = WeightedRewards::new().score(&samples(&["a"])).unwrap_err();
        assert!(error.to_string().contains("add at least one"));
    }
}
