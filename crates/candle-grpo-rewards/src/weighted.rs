//! Weighted sums over reward functions.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{RewardFunction, RewardRequests, Sample, Score, Scores, Votes};
use crate::Progress;

/// A weighted sum over several reward functions, which are its components. They run concurrently,
/// one thread each. A missing score does not enter the sum. If all are missing, so is the sum.
#[derive(Default)]
pub struct WeightedRewards {
    terms: Vec<Term>,
}

struct Term {
    name: String,
    weight: f32,
    function: Box<dyn RewardFunction>,
}

impl WeightedRewards {
    /// Creates an empty sum: add at least one function.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `weight` times `function`. Error messages and metrics use `name`.
    #[must_use]
    pub fn with(self, name: &str, weight: f32, function: impl RewardFunction + 'static) -> Self {
        self.with_boxed(name, weight, Box::new(function))
    }

    pub(super) fn with_boxed(
        mut self,
        name: &str,
        weight: f32,
        function: Box<dyn RewardFunction>,
    ) -> Self {
        self.terms.push(Term {
            name: name.to_owned(),
            weight,
            function,
        });
        self
    }
}

impl RewardFunction for WeightedRewards {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(self.scores(samples)?.iter_scores().collect())
    }

    fn scores(&self, samples: &[Sample]) -> Result<Scores> {
        ensure!(
            !self.terms.is_empty(),
            "rewards: a sum of no reward functions, add at least one"
        );
        let components = self.components(samples)?;
        let scores = Scores::new(total(&components, samples), samples)?;
        Ok(scores.with_requests(all_requests(&components)))
    }

    fn components(&self, samples: &[Sample]) -> Result<Vec<Scores>> {
        let weigh = |term: &Term| {
            let scores = term.function.scores(samples)?;
            let weighed = scores.iter_scores();
            let weighed = weighed.map(|score| score.map(|number| number * term.weight));
            let weighed = Scores::new(weighed.collect(), samples)?.named(&term.name);
            let weighed = weighed.with_feedback(scores.all_feedback())?;
            Ok(weighed.with_requests(scores.requests()))
        };
        self.terms
            .iter()
            .zip(in_parallel(&self.terms, weigh))
            .map(|(term, scores)| {
                scores.with_context(|| format!("reward function {:?}", term.name))
            })
            .collect()
    }

    /// Returns the votes from the first function that compares answers.
    fn votes(&self, completions: &[&str], columns: &Value) -> Result<Option<Votes>> {
        for term in &self.terms {
            let votes = term.function.votes(completions, columns);
            let votes = votes.with_context(|| format!("reward function {:?}", term.name))?;
            if votes.is_some() {
                return Ok(votes);
            }
        }
        Ok(None)
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        for term in &mut self.terms {
            term.function.set_progress(Arc::clone(&progress));
        }
    }

    fn set_clock(&mut self, now: &str) -> Result<()> {
        let mut terms = self.terms.iter_mut();
        terms.try_for_each(|term| term.function.set_clock(now))
    }

    fn finish(&self) -> Result<()> {
        self.terms.iter().try_for_each(|term| {
            let finished = term.function.finish();
            finished.with_context(|| format!("reward function {:?}", term.name))
        })
    }
}

/// Returns the results from `score` for each of `functions`. Each but the first has its own thread,
/// because some only wait for a program.
pub(super) fn in_parallel<F: Sync, T: Send>(
    functions: &[F],
    score: impl Fn(&F) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let Some((first, others)) = functions.split_first() else {
        return Vec::new();
    };
    let score = &score;
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

/// Sums the requests over all `scores`.
pub(super) fn all_requests(scores: &[Scores]) -> RewardRequests {
    let mut all = RewardRequests::default();
    for scores in scores {
        all += scores.requests();
    }
    all
}

/// Sums each sample's components, without missing ones.
pub fn total(components: &[Scores], samples: &[Sample]) -> Vec<Score> {
    let mut sums = vec![Score::NONE; samples.len()];
    for component in components {
        for (sum, score) in sums.iter_mut().zip(component.iter_scores()) {
            if let Some(number) = score.value() {
                *sum = (sum.value().unwrap_or(0.) + number).into();
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;
    fn samples<'a>(completions: &[&'a str]) -> Vec<Sample<'a>> {
        completions
            .iter()
            .map(|completion| Sample {
                prompt: "say",
                messages: &[],
                completion,
                prompt_tokens: &[1],
                completion_tokens: &[2],
                finish_reason: FinishReason::StopToken,
                columns: &Value::Null,
                group: 0,
            })
            .collect()
    }

    #[test]
    fn components_are_weighted_and_add_up() {
        let rewards = WeightedRewards::new()
            .with("length", 0.5, |s: &Sample| s.completion.len() as f32)
            .with("polite", 2., |s: &Sample| {
                f32::from(s.completion.contains("please"))
            });
        let scores = rewards.score(&samples(&["yes", "please"])).unwrap();
        assert_eq!(scores, [1.5, 5.]);
        let components = rewards.components(&samples(&["yes", "please"])).unwrap();
        let components: Vec<&[f32]> = components.iter().map(|scores| &**scores).collect();
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
    fn a_weight_that_overflows_names_the_function() {
        let rewards = WeightedRewards::new().with("large", 1e30, |_: &Sample| 1e30);
        let error = format!("{:#}", rewards.score(&samples(&["yes"])).unwrap_err());
        assert!(
            error.contains("\"large\"") && error.contains("reward inf"),
            "{error}"
        );
    }

    #[test]
    fn an_empty_sum_is_an_error() {
        let error = WeightedRewards::new().score(&samples(&["a"])).unwrap_err();
        assert!(error.to_string().contains("add at least one"));
    }
}
