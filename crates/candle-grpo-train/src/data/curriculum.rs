//! Chooses prompts by how well the policy solves them.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use candle_grpo_core::selection::{DifficultyPools, TaskScores};
use candle_grpo_core::validate::check;

use crate::random::{generator, uniform};

/// Keeps these random numbers apart from those for completions and orders.
const STREAM: u64 = u64::from_le_bytes(*b"curricul");

/// Samples prompts by the weights of their pools.
///
/// A sample depends only on the seed, the scores and the number of prompts sampled before.
#[derive(Debug, Clone)]
pub(crate) struct Curriculum {
    pools: DifficultyPools,
    seed: u64,
}

/// Checks a run's pools, whose prompts have no score at first.
pub(super) fn validate(pools: &DifficultyPools) -> Result<()> {
    pools.validate()?;
    Ok(check(
        pools.unseen_weight > 0.,
        "unseen_weight",
        pools.unseen_weight,
        "be above 0, because no prompt has a score at first",
    )?)
}

impl Curriculum {
    pub(crate) fn new(pools: DifficultyPools, seed: u64) -> Result<Self> {
        validate(&pools)?;
        Ok(Self { pools, seed })
    }

    /// Samples `count` of `prompts` prompts after `visited` others, without replacement. The chance
    /// of each next prompt is proportional to its weight (Efraimidis and Spirakis 2006,
    /// <https://doi.org/10.1016/j.ipl.2005.11.003>).
    ///
    /// Prompts with weight 0 come after all others. Prompts in `drawn`, which the step already has,
    /// come after these. Then any prompt may repeat.
    pub(crate) fn draw(
        &self,
        scores: &TaskScores,
        prompts: usize,
        visited: usize,
        count: usize,
        drawn: &[usize],
    ) -> Result<Vec<usize>> {
        ensure!(prompts > 0, "prompts: none, there must be at least one");
        let weights = scores.weights(prompts, &self.pools)?;
        let mut is_drawn = vec![false; prompts];
        for &prompt in drawn {
            if let Some(is_drawn) = is_drawn.get_mut(prompt) {
                *is_drawn = true;
            }
        }
        let mut picked = Vec::with_capacity(count);
        for cycle in 0.. {
            let missing = count - picked.len();
            if missing == 0 {
                break;
            }
            let mut random = generator(self.seed, STREAM, visited as u64, cycle);
            let key = |(prompt, weight): (usize, &f64)| {
                let number = uniform(&mut random);
                // The logarithm of number^(1 / weight); 1 - number is above 0.
                let key = if *weight > 0. {
                    (1. - number).ln() / weight
                } else {
                    -number
                };
                (is_drawn[prompt], *weight == 0., -key, prompt)
            };
            let mut keys: Vec<_> = weights.iter().enumerate().map(key).collect();
            let order = |a: &(bool, bool, f64, usize), b: &(bool, bool, f64, usize)| {
                (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
            };
            let taken = missing.min(prompts);
            if taken < prompts {
                keys.select_nth_unstable_by(taken, order);
                keys.truncate(taken);
            }
            keys.sort_unstable_by(order);
            picked.extend(keys.into_iter().map(|(.., prompt)| prompt));
        }
        Ok(picked)
    }

    /// Number of prompts in each pool, and without a score.
    pub(crate) fn metrics(&self, scores: &TaskScores, prompts: usize) -> BTreeMap<String, f64> {
        let counts = scores.occupancy(prompts, &self.pools);
        let unseen = prompts - counts.iter().sum::<usize>();
        let pools = counts.into_iter().enumerate();
        let pools = pools.map(|(pool, count)| (format!("curriculum_pool_{pool}"), count as f64));
        pools
            .chain([("curriculum_unseen".to_owned(), unseen as f64)])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pools() -> DifficultyPools {
        DifficultyPools {
            thresholds: vec![0.2, 0.8, 1.],
            weights: vec![0., 3., 1.],
            unseen_weight: 1.,
        }
    }

    /// Prompts 0 to 3 are never solved, 4 to 7 sometimes, 8 to 11 always, 12 to 15 unseen.
    fn scores() -> TaskScores {
        let mut scores = TaskScores::default();
        for prompt in 0..12 {
            let reward = [0., 0.5, 1.][prompt / 4];
            scores.record(prompt, &[reward]).unwrap();
        }
        scores
    }

    #[test]
    fn a_first_prompt_is_drawn_in_proportion_to_its_weight() {
        let curriculum = Curriculum::new(pools(), 5).unwrap();
        let mut counts = [0usize; 4];
        for visited in 0..20_000 {
            let drawn = curriculum.draw(&scores(), 16, visited, 1, &[]).unwrap();
            counts[drawn[0] / 4] += 1;
        }
        // The pool weights are 0, 12, 4 and 4.
        for (count, share) in counts.iter().zip([0., 0.6, 0.2, 0.2]) {
            // Four standard deviations are 0.014.
            assert!(
                (*count as f64 / 20_000. - share).abs() < 0.014,
                "{counts:?}"
            );
        }
        assert_eq!(counts[0], 0);
    }

    #[test]
    fn a_draw_has_no_prompt_twice_unless_it_needs_more() {
        let curriculum = Curriculum::new(pools(), 5).unwrap();
        let draw = |count, drawn: &[usize]| {
            let drawn = curriculum.draw(&scores(), 16, 3, count, drawn);
            drawn.unwrap()
        };
        let mut all = draw(16, &[]);
        // Those with weight 0 come last.
        assert!(all[12..].iter().all(|prompt| *prompt < 4), "{all:?}");
        all.sort_unstable();
        assert_eq!(all, (0..16).collect::<Vec<_>>());
        assert_eq!(draw(5, &[]), draw(16, &[])[..5]);
        let other = draw(4, &[4, 5, 6, 7, 8, 9, 10, 11]);
        assert!(other.iter().all(|prompt| *prompt >= 12), "{other:?}");
        let more = draw(40, &[]);
        assert_eq!(more[..16], draw(16, &[]));
        assert_ne!(more[16..32], more[..16]);
        assert_ne!(
            curriculum.draw(&scores(), 16, 4, 16, &[]).unwrap(),
            draw(16, &[])
        );
    }

    #[test]
    fn pools_are_counted() {
        let curriculum = Curriculum::new(pools(), 5).unwrap();
        let metrics = curriculum.metrics(&scores(), 16);
        let names = [
            "curriculum_pool_0",
            "curriculum_pool_1",
            "curriculum_pool_2",
            "curriculum_unseen",
        ];
        assert_eq!(metrics.keys().collect::<Vec<_>>(), names);
        assert!(metrics.values().all(|count| *count == 4.));
    }

    #[test]
    fn prompts_that_cannot_be_drawn_at_first_are_an_error() {
        let never = DifficultyPools {
            unseen_weight: 0.,
            ..pools()
        };
        let error = Curriculum::new(never, 0).unwrap_err().to_string();
        assert!(
            error.contains("unseen_weight: 0, must be above 0"),
            "{error}"
        );
    }
}
