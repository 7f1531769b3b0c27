//! Estimates for k completions per prompt from n.

use anyhow::{Result, ensure};

/// The chance that at least one of `k` completions passes, given that `passes` of `samples`
/// completions passed. This is the unbiased estimate `1 - C(n-c, k) / C(n, k)` (pass@k, Chen et al.
/// 2021, <https://arxiv.org/abs/2107.03374>).
///
/// ```
/// use candle_grpo_train::statistics::pass_at;
///
/// assert_eq!(pass_at(4, 1, 2)?, 0.5);
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// # Errors
///
/// Fails if `k` is not in 1..=`samples`, or `passes` is above `samples`.
pub fn pass_at(samples: usize, passes: usize, k: usize) -> Result<f64> {
    check_k(samples, k)?;
    ensure!(
        passes <= samples,
        "passes: {passes}, must be at most the {samples} completions"
    );
    let wrong = samples - passes;
    // All k, sampled without replacement, are wrong.
    let all_wrong = (0..k).map(|i| wrong.saturating_sub(i) as f64 / (samples - i) as f64);
    Ok(1. - all_wrong.product::<f64>())
}

/// The chance that the majority of `k` completions passes: the mean over all sets of `k` given
/// completions (maj@k, self-consistency, Wang et al. 2022, <https://arxiv.org/abs/2203.11171>). It
/// is computed exactly, without sampling.
///
/// `votes` has a number per completion, and equal numbers mean equal answers; `None` means no
/// answer and no vote. Ties are broken by chance among the answers with the most votes. `passes`
/// says which completions pass, and an answer counts as the mean over its completions.
///
/// # Errors
///
/// Fails if `k` is not in 1..=n for n completions, or `passes` and `votes` have different lengths.
pub fn majority_at(votes: &[Option<usize>], passes: &[bool], k: usize) -> Result<f64> {
    let samples = votes.len();
    check_k(samples, k)?;
    ensure!(
        passes.len() == samples,
        "passes: {}, must be one for each of {samples} votes",
        passes.len()
    );
    let answers = answers(votes, passes);
    let counts: Vec<usize> = answers.iter().map(|answer| answer.votes).collect();
    let abstentions = votes.iter().filter(|vote| vote.is_none()).count();
    let ln_choose = LnChoose::new(samples);
    let mut chance = 0.;
    for (winner, answer) in answers.iter().enumerate() {
        if answer.passes == 0 {
            continue;
        }
        let mut others = counts.clone();
        others.swap_remove(winner);
        let wins = chance_to_win(answer.votes, &others, abstentions, k, &ln_choose);
        chance += wins * answer.passes as f64 / answer.votes as f64;
    }
    Ok(chance.min(1.))
}

fn check_k(samples: usize, k: usize) -> Result<()> {
    ensure!(
        (1..=samples).contains(&k),
        "k: {k}, must be from 1 to the {samples} completions of each prompt"
    );
    Ok(())
}

/// Completions with the same answer.
struct Answer {
    vote: usize,
    votes: usize,
    passes: usize,
}

fn answers(votes: &[Option<usize>], passes: &[bool]) -> Vec<Answer> {
    let mut answers: Vec<Answer> = Vec::new();
    for (vote, passes) in votes.iter().zip(passes) {
        let Some(vote) = *vote else { continue };
        let passes = usize::from(*passes);
        match answers.iter_mut().find(|answer| answer.vote == vote) {
            Some(answer) => {
                answer.votes += 1;
                answer.passes += passes;
            }
            None => answers.push(Answer {
                vote,
                votes: 1,
                passes,
            }),
        }
    }
    answers
}

/// Probability that an answer with `own` votes wins among `k` completions, with ties broken at
/// random.
fn chance_to_win(
    own: usize,
    others: &[usize],
    abstentions: usize,
    k: usize,
    ln_choose: &LnChoose,
) -> f64 {
    let total = own + others.iter().sum::<usize>() + abstentions;
    (1..=own.min(k))
        .map(|count| {
            let mut population = total - own;
            if k - count > population {
                return 0.;
            }
            let begin = ln_choose.hypergeometric(own, count, total, k);
            // Probabilities by the number of completions still to choose and the number of tied
            // answers.
            let mut states = vec![vec![0.; others.len() + 1]; k - count + 1];
            states[k - count][0] = begin;
            for &votes in others {
                let mut next = vec![vec![0.; others.len() + 1]; k - count + 1];
                for (left, of_left) in states.iter().enumerate() {
                    for (tied, &chance) in of_left.iter().enumerate().filter(|(_, x)| **x > 0.) {
                        for taken in 0..=votes.min(count).min(left) {
                            let part = ln_choose.hypergeometric(votes, taken, population, left);
                            next[left - taken][tied + usize::from(taken == count)] += chance * part;
                        }
                    }
                }
                population -= votes;
                states = next;
            }
            // The rest are abstentions.
            let ends = states.iter().take(population + 1);
            ends.flat_map(|of_left| of_left.iter().enumerate())
                .map(|(tied, chance)| chance / (tied + 1) as f64)
                .sum::<f64>()
        })
        .sum()
}

/// Log binomial coefficients.
struct LnChoose {
    ln_factorials: Vec<f64>,
}

impl LnChoose {
    fn new(largest: usize) -> Self {
        let mut ln_factorials = vec![0.; largest + 1];
        for n in 1..=largest {
            ln_factorials[n] = ln_factorials[n - 1] + (n as f64).ln();
        }
        Self { ln_factorials }
    }

    fn ln(&self, n: usize, k: usize) -> f64 {
        self.ln_factorials[n] - self.ln_factorials[k] - self.ln_factorials[n - k]
    }

    /// Probability that `drawn` items, sampled from a `population` with `marked` marked ones,
    /// include `count` marked ones.
    fn hypergeometric(&self, marked: usize, count: usize, population: usize, drawn: usize) -> f64 {
        let unmarked = population - marked;
        if count > drawn || drawn > population || drawn - count > unmarked {
            return 0.;
        }
        (self.ln(marked, count) + self.ln(unmarked, drawn - count) - self.ln(population, drawn))
            .exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All sets of `k` numbers below `n`, as masks.
    fn sets(n: usize, k: usize) -> impl Iterator<Item = Vec<usize>> {
        (0u32..1 << n)
            .filter(move |mask| mask.count_ones() as usize == k)
            .map(move |mask| (0..n).filter(|i| mask >> i & 1 == 1).collect())
    }

    /// The mean over all sets of `k` completions, each with its majority.
    fn enumerated_majority(votes: &[Option<usize>], passes: &[bool], k: usize) -> f64 {
        let mut sum = 0.;
        let mut count = 0.;
        for set in sets(votes.len(), k) {
            let mut tally = std::collections::BTreeMap::<usize, usize>::new();
            for &i in &set {
                if let Some(vote) = votes[i] {
                    *tally.entry(vote).or_default() += 1;
                }
            }
            let most = tally.values().max().copied().unwrap_or(0);
            let winners: Vec<usize> = tally
                .into_iter()
                .filter(|(_, votes)| *votes == most)
                .map(|(vote, _)| vote)
                .collect();
            for winner in &winners {
                let of_winner: Vec<bool> = (0..votes.len())
                    .filter(|i| votes[*i] == Some(*winner))
                    .map(|i| passes[i])
                    .collect();
                let passing = of_winner.iter().filter(|passes| **passes).count();
                sum += passing as f64 / of_winner.len() as f64 / winners.len() as f64;
            }
            count += 1.;
        }
        sum / count
    }

    fn enumerated_pass(passes: &[bool], k: usize) -> f64 {
        let (mut passing, mut count) = (0., 0.);
        for set in sets(passes.len(), k) {
            passing += f64::from(u8::from(set.iter().any(|i| passes[*i])));
            count += 1.;
        }
        passing / count
    }

    #[test]
    fn pass_at_k_is_the_mean_over_all_sets() {
        for n in 1..=8 {
            for correct in 0..=n {
                let passes: Vec<bool> = (0..n).map(|i| i < correct).collect();
                for k in 1..=n {
                    let estimate = pass_at(n, correct, k).unwrap();
                    let expected = enumerated_pass(&passes, k);
                    assert!((estimate - expected).abs() < 1e-12, "{n} {correct} {k}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn majority_at_k_is_the_mean_over_all_sets(
            samples in prop::collection::vec((prop::option::weighted(0.8, 0usize..4), any::<bool>()), 1..9),
            part in 0.0..1.0f64,
        ) {
            let (votes, passes): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
            let k = 1 + (part * votes.len() as f64) as usize;
            let estimate = majority_at(&votes, &passes, k).unwrap();
            let expected = enumerated_majority(&votes, &passes, k);
            prop_assert!((estimate - expected).abs() < 1e-10, "{estimate} {expected}");
        }
    }

    #[test]
    fn the_majority_of_all_completions_decides() {
        let votes = [Some(0), Some(1), Some(0), None, Some(2)];
        let passes = [true, false, true, false, false];
        assert!((majority_at(&votes, &passes, 5).unwrap() - 1.).abs() < 1e-12);
        let wrong = [false, true, false, false, false];
        assert_eq!(majority_at(&votes, &wrong, 5).unwrap(), 0.);
        // One completion alone is its own majority.
        assert!((majority_at(&votes, &passes, 1).unwrap() - 0.4).abs() < 1e-12);
        // No answer passes.
        assert_eq!(majority_at(&[None, None], &[true, true], 2).unwrap(), 0.);
    }

    #[test]
    fn many_completions_do_not_overflow() {
        let votes: Vec<Option<usize>> = (0..4000).map(|i| Some(usize::from(i % 5 > 1))).collect();
        let passes: Vec<bool> = votes.iter().map(|vote| *vote == Some(0)).collect();
        let chance = majority_at(&votes, &passes, 1).unwrap();
        assert!((chance - 0.4).abs() < 1e-9, "{chance}");
        assert!(majority_at(&votes, &passes, 101).unwrap() < 0.05);
    }

    #[test]
    fn wrong_arguments_are_named() {
        for (error, words) in [
            (pass_at(4, 1, 0).unwrap_err(), "k: 0"),
            (
                pass_at(4, 1, 5).unwrap_err(),
                "k: 5, must be from 1 to the 4",
            ),
            (pass_at(4, 5, 1).unwrap_err(), "passes: 5"),
            (majority_at(&[], &[], 1).unwrap_err(), "k: 1"),
            (majority_at(&[None], &[], 1).unwrap_err(), "passes: 0"),
        ] {
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
