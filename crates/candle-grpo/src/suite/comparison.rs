//! Comparisons between two models on the same prompts.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_train::statistics::{PairedComparison, compare_paired};
use serde::{Deserialize, Serialize};

use super::PromptResult;

/// A comparison between two models A and B on a suite, over the prompts that both have answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuiteComparison {
    /// The suite's name.
    pub suite: String,
    /// Compares the share of passing completions, prompt by prompt.
    #[serde(flatten)]
    pub comparison: PairedComparison,
    /// The number of prompts that only A has answered. They are not compared.
    pub only_a: usize,
    /// The number of prompts that only B has answered. They are not compared.
    pub only_b: usize,
    /// The number of pairs with different prompt texts, as with another chat template.
    pub other_prompts: usize,
    /// The number of pairs with different completion counts.
    pub other_counts: usize,
}

/// Compares two results suite by suite. Prompts are paired by suite and id, in any order.
///
/// # Errors
///
/// Returns an error if a result has a prompt twice or a prompt without completions, a pair has
/// different rows, or no prompt is in both.
pub fn compare(a: &[PromptResult], b: &[PromptResult]) -> Result<Vec<SuiteComparison>> {
    let a = by_suite(a).context("A")?;
    let b = by_suite(b).context("B")?;
    let mut comparisons = Vec::new();
    for (suite, of_a) in &a {
        let Some(of_b) = b.get(suite) else { continue };
        let (mut values_a, mut values_b) = (Vec::new(), Vec::new());
        let (mut other_prompts, mut other_counts) = (0, 0);
        for (id, result) in of_a {
            let Some(other) = of_b.get(id) else { continue };
            ensure!(
                result.columns == other.columns,
                "suite {suite}: the prompt {id:?} has different rows in A and B, must be the same"
            );
            other_prompts += usize::from(result.prompt != other.prompt);
            other_counts += usize::from(result.samples.len() != other.samples.len());
            values_a.push(result.mean());
            values_b.push(other.mean());
        }
        if values_a.is_empty() {
            continue;
        }
        comparisons.push(SuiteComparison {
            suite: (*suite).to_owned(),
            comparison: compare_paired(&values_a, &values_b)?,
            only_a: of_a.len() - values_a.len(),
            only_b: of_b.len() - values_b.len(),
            other_prompts,
            other_counts,
        });
    }
    if comparisons.is_empty() {
        let names = |results: &BTreeMap<&str, Results<'_>>| {
            let names: Vec<&str> = results.keys().copied().collect();
            names.join(", ")
        };
        bail!(
            "A and B have no prompt in common; A has the suites {}, B has {}",
            names(&a),
            names(&b)
        );
    }
    Ok(comparisons)
}

/// Results by their ids.
type Results<'a> = BTreeMap<&'a str, &'a PromptResult>;

fn by_suite(results: &[PromptResult]) -> Result<BTreeMap<&str, Results<'_>>> {
    let mut suites: BTreeMap<&str, Results<'_>> = BTreeMap::new();
    for result in results {
        let (suite, id) = (result.suite.as_str(), result.id.as_str());
        ensure!(
            !result.samples.is_empty(),
            "suite {suite}: the prompt {id:?} has no completions, must have at least one"
        );
        let before = suites.entry(suite).or_default().insert(id, result);
        ensure!(
            before.is_none(),
            "suite {suite}: the prompt {id:?} occurs twice"
        );
    }
    Ok(suites)
}

#[cfg(test)]
mod tests {
    use super::super::SampleResult;
    use super::*;
    use candle_grpo_train::FinishReason;
    use candle_grpo_train::statistics::PairedTest;
    use serde_json::json;

    fn result(id: &str, passes: &[bool]) -> PromptResult {
        let sample = |passes: &bool| SampleResult {
            completion: String::new(),
            reward: None,
            passes: *passes,
            vote: None,
            response_length: 1,
            finish_reason: FinishReason::StopToken,
        };
        PromptResult {
            suite: "s".to_owned(),
            id: id.to_owned(),
            prompt: id.to_owned(),
            columns: json!({ "id": id }),
            samples: passes.iter().map(sample).collect(),
        }
    }

    #[test]
    fn prompts_are_paired_by_id_and_not_by_order() {
        let a = ["p", "q", "r"].map(|id| result(id, &[id == "p"]));
        let mut b = a.to_vec();
        b.reverse();
        let same = &compare(&a, &b).unwrap()[0];
        assert_eq!((same.comparison.a_better, same.comparison.b_better), (0, 0));
        // By order, `p` and `r` would differ.
        b.push(result("s", &[true]));
        let more = &compare(&a, &b).unwrap()[0];
        assert_eq!(
            (more.comparison.prompts, more.only_a, more.only_b),
            (3, 0, 1)
        );
        assert_eq!(more.comparison.test, PairedTest::McnemarExact);
        b[0] = result("r", &[true, false]);
        let several = &compare(&a, &b).unwrap()[0];
        assert_eq!(several.comparison.test, PairedTest::PairedT);
        assert!((several.comparison.difference - 1. / 6.).abs() < 1e-12);
        assert_eq!((several.other_prompts, several.other_counts), (0, 1));
        b[1].prompt = "zzz".to_owned();
        assert_eq!(compare(&a, &b).unwrap()[0].other_prompts, 1);
    }

    #[test]
    fn results_that_do_not_fit_are_named() {
        let p = result("p", &[true]);
        let other_row = PromptResult {
            columns: json!({"id": "other"}),
            ..p.clone()
        };
        let other_suite = PromptResult {
            suite: "t".to_owned(),
            ..p.clone()
        };
        for (a, b, words) in [
            (
                vec![p.clone(), p.clone()],
                vec![p.clone()],
                "A: suite s: the prompt \"p\" occurs twice",
            ),
            (
                vec![p.clone()],
                vec![result("p", &[])],
                "B: suite s: the prompt \"p\" has no completions",
            ),
            (vec![p.clone()], vec![other_row], "has different rows"),
            (
                vec![p.clone()],
                vec![other_suite],
                "A has the suites s, B has t",
            ),
            (vec![p], vec![], "no prompt in common"),
        ] {
            let error = format!("{:#}", compare(&a, &b).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
