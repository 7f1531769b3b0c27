//! The order in which data rows are visited.

use anyhow::{Result, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

use crate::random::generator;

/// Keeps these random numbers apart from those for completions.
const STREAM: u64 = u64::from_le_bytes(*b"shuffle\0");

/// All rows in random order, then all rows in another random order, and so on forever.
///
/// It holds no position: you can request any range at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShuffledOrder {
    rows: usize,
    seed: u64,
}

impl ShuffledOrder {
    /// Creates the order for `rows` rows, at least one, that `seed` determines.
    pub fn new(rows: usize, seed: u64) -> Result<Self> {
        ensure!(rows > 0, "rows: 0, a data set must have at least one row");
        Ok(Self { rows, seed })
    }

    /// The rows at places `start..start + count`.
    pub fn slice(&self, start: usize, count: usize) -> Vec<usize> {
        let mut picked = Vec::with_capacity(count);
        while picked.len() < count {
            let place = start + picked.len();
            let (epoch, first) = (place / self.rows, place % self.rows);
            let wanted = (count - picked.len()).min(self.rows - first);
            picked.extend_from_slice(&self.epoch(epoch)[first..first + wanted]);
        }
        picked
    }

    /// Fisher and Yates.
    fn epoch(&self, epoch: usize) -> Vec<usize> {
        let mut random = generator(self.seed, STREAM, epoch as u64, 0);
        let mut order: Vec<usize> = (0..self.rows).collect();
        for i in (1..self.rows).rev() {
            order.swap(i, below(&mut random, i as u64 + 1) as usize);
        }
        order
    }
}

/// A uniform random number in 0..n (Lemire, <https://arxiv.org/abs/1805.10941>).
fn below(random: &mut ChaCha8Rng, n: u64) -> u64 {
    loop {
        let product = u128::from(random.next_u64()) * u128::from(n);
        if product as u64 >= n.wrapping_neg() % n {
            return (product >> 64) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_visits_every_row_once_in_another_order() {
        let order = ShuffledOrder::new(50, 1).unwrap();
        let (first, second) = (order.slice(0, 50), order.slice(50, 50));
        for epoch in [&first, &second] {
            let mut sorted = epoch.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert_ne!(first, second);
        assert_ne!(first, ShuffledOrder::new(50, 2).unwrap().slice(0, 50));
    }

    #[test]
    fn a_slice_may_cross_epochs() {
        let order = ShuffledOrder::new(3, 7).unwrap();
        let all = order.slice(0, 10);
        assert_eq!(order.slice(2, 5), all[2..7]);
    }

    #[test]
    fn no_rows_is_an_error() {
        assert!(ShuffledOrder::new(0, 0).is_err());
    }
}
