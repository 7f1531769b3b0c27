//! Row order across several sources.

use anyhow::{Result, ensure};
use candle_grpo_core::validate::{check, non_negative};

use super::ShuffledOrder;

/// Rows from several sources, each with a share. Rows from one source come in [`ShuffledOrder`].
///
/// After n rows, source k has contributed about `n * weight_k / sum(weights)`: each next row comes
/// from the source that is furthest behind. The order holds no position and depends only on the
/// sources, the weights and the seed, so a resumed run continues it.
///
/// ```
/// use candle_grpo_train::data::MixedOrder;
///
/// // Rows 0 to 2 are of the first source, rows 3 and 4 of the second one.
/// let order = MixedOrder::new(&[0, 0, 0, 1, 1], &[3., 1.], 7)?;
/// let first: Vec<usize> = order.slice(0, 8).into_iter().filter(|&row| row < 3).collect();
/// assert_eq!(first.len(), 6);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct MixedOrder {
    sources: Vec<Source>,
    len: usize,
}

#[derive(Debug, Clone, PartialEq)]
struct Source {
    rows: Vec<usize>,
    order: ShuffledOrder,
    /// Its share among the rows.
    share: f64,
}

impl MixedOrder {
    /// Creates the order for rows with these sources. `weights` has one weight per source.
    ///
    /// # Errors
    ///
    /// Fails if there are no rows, a row's source is unknown, a weight is negative or not finite,
    /// all weights are 0, or a source with a weight has no rows.
    pub fn new(sources: &[usize], weights: &[f64], seed: u64) -> Result<Self> {
        check_weights(weights)?;
        ensure!(
            !sources.is_empty(),
            "rows: 0, a data set must have at least one row"
        );
        let mut rows = vec![Vec::new(); weights.len()];
        for (row, &source) in sources.iter().enumerate() {
            let Some(rows) = rows.get_mut(source) else {
                anyhow::bail!(
                    "sources[{row}]: {source}, must be below {}, the number of weights",
                    weights.len()
                );
            };
            rows.push(row);
        }
        let sum: f64 = weights.iter().sum();
        let mut mixed = Vec::new();
        for (number, (rows, &weight)) in rows.into_iter().zip(weights).enumerate() {
            if weight == 0. {
                continue;
            }
            let has_rows = !rows.is_empty();
            let field = format!("weights[{number}]");
            check(has_rows, &field, weight, "be 0 for a source without rows")?;
            mixed.push(Source {
                // Sources with the same length have different orders.
                order: ShuffledOrder::new(rows.len(), seed ^ ((number as u64) << 32))?,
                rows,
                share: weight / sum,
            });
        }
        Ok(Self {
            sources: mixed,
            len: sources.len(),
        })
    }

    /// Creates the order for `rows` rows from a single source: [`ShuffledOrder`].
    ///
    /// # Errors
    ///
    /// Fails if there are no rows.
    pub fn single(rows: usize, seed: u64) -> Result<Self> {
        Self::new(&vec![0; rows], &[1.], seed)
    }

    /// Number of rows, including sources without a weight.
    pub fn num_rows(&self) -> usize {
        self.len
    }

    /// Checks that there are `count` rows, one for each of the `items` named in the error.
    ///
    /// # Errors
    ///
    /// Fails if the number differs.
    pub(crate) fn ensure_rows(&self, count: usize, items: &str) -> Result<()> {
        ensure!(
            self.len == count,
            "order: {} rows, must be {count}, the number of {items}",
            self.len
        );
        Ok(())
    }

    /// The items for the rows at places `start..start + count`.
    pub(crate) fn pick<T: Clone>(&self, items: &[T], start: usize, count: usize) -> Vec<T> {
        let rows = self.slice(start, count).into_iter();
        rows.map(|row| items[row].clone()).collect()
    }

    /// The rows at places `start..start + count`.
    pub fn slice(&self, start: usize, count: usize) -> Vec<usize> {
        if let [source] = self.sources.as_slice() {
            let picked = source.order.slice(start, count).into_iter();
            return picked.map(|row| source.rows[row]).collect();
        }
        let mut turns = Turns::new(&self.sources);
        let mut before = vec![0; self.sources.len()];
        for _ in 0..start {
            before[turns.advance()] += 1;
        }
        let picked: Vec<usize> = (0..count).map(|_| turns.advance()).collect();
        let mut rows: Vec<_> = self
            .sources
            .iter()
            .zip(&before)
            .enumerate()
            .map(|(number, (source, &before))| {
                let count = picked.iter().filter(|&&turn| turn == number).count();
                source.order.slice(before, count).into_iter()
            })
            .collect();
        let row = |source: usize| {
            let row = rows[source].next()?;
            self.sources[source].rows.get(row).copied()
        };
        picked.into_iter().filter_map(row).collect()
    }
}

/// Checks source weights.
pub(super) fn check_weights(weights: &[f64]) -> Result<()> {
    for (number, &weight) in weights.iter().enumerate() {
        non_negative(&format!("weights[{number}]"), weight)?;
    }
    let sum: f64 = weights.iter().sum();
    let valid = sum > 0. && sum.is_finite();
    check(
        valid,
        "weights",
        format!("{weights:?}"),
        "have a sum above 0",
    )?;
    Ok(())
}

/// Takes turns between the sources.
struct Turns<'a> {
    sources: &'a [Source],
    /// Number of rows that each source is behind its share.
    behind: Vec<f64>,
}

impl<'a> Turns<'a> {
    fn new(sources: &'a [Source]) -> Self {
        Self {
            behind: vec![0.; sources.len()],
            sources,
        }
    }

    fn advance(&mut self) -> usize {
        let mut furthest = 0;
        for (number, source) in self.sources.iter().enumerate() {
            self.behind[number] += source.share;
            if self.behind[number] > self.behind[furthest] {
                furthest = number;
            }
        }
        self.behind[furthest] -= 1.;
        furthest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three sources with 5, 2 and 11 rows.
    fn sources() -> Vec<usize> {
        (0..18)
            .map(|row| match row {
                0..5 => 0,
                5..7 => 1,
                _ => 2,
            })
            .collect()
    }

    #[test]
    fn each_source_has_its_share_of_any_beginning() {
        let weights = [0.5, 0.3, 0.2];
        let order = MixedOrder::new(&sources(), &weights, 3).unwrap();
        let rows = order.slice(0, 400);
        let mut counts = [0usize; 3];
        for (place, row) in rows.iter().enumerate() {
            counts[sources()[*row]] += 1;
            for (count, weight) in counts.iter().zip(weights) {
                let expected = (place + 1) as f64 * weight;
                assert!((*count as f64 - expected).abs() < 1., "{place}: {counts:?}");
            }
        }
    }

    #[test]
    fn a_source_visits_each_of_its_rows_before_any_again() {
        let order = MixedOrder::new(&sources(), &[1., 1., 1.], 3).unwrap();
        let rows = order.slice(0, 33);
        let mut of_last: Vec<usize> = rows.into_iter().filter(|&row| row >= 7).collect();
        assert_eq!(of_last.len(), 11);
        of_last.sort_unstable();
        assert_eq!(of_last, (7..18).collect::<Vec<_>>());
    }

    #[test]
    fn a_slice_is_a_part_of_the_whole_order() {
        let order = MixedOrder::new(&sources(), &[0.7, 0., 0.2], 9).unwrap();
        let all = order.slice(0, 90);
        assert!(!all.iter().any(|row| (5..7).contains(row)));
        for (start, count) in [(0, 1), (13, 20), (89, 1), (40, 0)] {
            assert_eq!(order.slice(start, count), all[start..start + count]);
        }
        let other = MixedOrder::new(&sources(), &[0.7, 0., 0.2], 10).unwrap();
        assert_ne!(other.slice(0, 90), all);
    }

    #[test]
    fn one_source_is_the_shuffled_order() {
        let order = MixedOrder::single(18, 5).unwrap();
        let shuffled = ShuffledOrder::new(18, 5).unwrap();
        assert_eq!(order.slice(7, 40), shuffled.slice(7, 40));
    }

    #[test]
    fn weights_that_fit_no_rows_are_errors() {
        let error = |sources: &[usize], weights: &[f64]| {
            let order = MixedOrder::new(sources, weights, 0);
            order.unwrap_err().to_string()
        };
        assert!(error(&[0], &[1., -1.]).starts_with("weights[1]: -1, must "));
        assert!(error(&[0], &[0.]).starts_with("weights: [0.0], must have a sum above 0"));
        assert!(
            error(&[0], &[1., 2.]).starts_with("weights[1]: 2, must be 0 for a source without")
        );
        assert!(error(&[0, 2], &[1., 2.]).starts_with("sources[1]: 2, must be below 2"));
        assert!(error(&[], &[1.]).starts_with("rows: 0"));
    }
}
