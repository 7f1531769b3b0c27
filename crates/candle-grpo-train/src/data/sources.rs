//! A run's files, and how their rows are divided.

use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::Invalid;
use candle_grpo_core::validate::{at_least_one, check};

use super::mixed_order::check_weights;
use super::rows::{Row, read_first_rows};
use super::{MixedOrder, ShuffledOrder};

/// The data section keys that select files and rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// Files to train on.
    pub(crate) train: &'a [PathBuf],
    /// Files to evaluate on.
    pub(crate) held_out: &'a [PathBuf],
    /// Number of `train` rows to hold out.
    pub(crate) held_out_rows: Option<usize>,
    /// Share of each `train` file.
    pub(crate) weights: Option<&'a [f64]>,
    /// Maximum number of rows per file.
    pub(crate) max_rows: Option<usize>,
}

impl Sources<'_> {
    /// Checks the keys. Opens no file.
    ///
    /// # Errors
    ///
    /// Fails if keys contradict each other.
    pub(crate) fn validate(&self) -> Result<()> {
        check(
            !self.train.is_empty(),
            "train",
            "absent",
            "be a file of rows or several",
        )?;
        check(
            self.held_out.is_empty() || self.held_out_rows.is_none(),
            "held_out_rows",
            "given",
            "be absent with held_out",
        )?;
        for (name, value) in [
            ("held_out_rows", self.held_out_rows),
            ("max_rows", self.max_rows),
        ] {
            at_least_one(name, value.unwrap_or(1))?;
        }
        if let Some(weights) = self.weights {
            check_weights(weights)?;
            let (found, files) = (weights.len(), self.train.len());
            let must = format!("be one for each of {files} files of train");
            check(found == files, "weights", format!("{found} weights"), &must)?;
        }
        Ok(())
    }

    /// Reads the rows to train on and those to evaluate on. `seed` decides which are held out.
    ///
    /// # Errors
    ///
    /// Fails if something cannot be read, with file and line, or if all rows are held out.
    pub(crate) fn read(&self, seed: u64) -> Result<(Vec<Row>, Vec<Row>)> {
        let (train, held_out) = (self.rows(self.train)?, self.rows(self.held_out)?);
        let Some(count) = self.held_out_rows else {
            return Ok((train, held_out));
        };
        if count >= train.len() {
            let must = format!("be less than the {} rows of train", train.len());
            return Err(Invalid::new("held_out_rows", count, must).into());
        }
        split(train, count, seed)
    }

    fn rows(&self, paths: &[PathBuf]) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for path in paths {
            rows.extend(read_first_rows(path, self.max_rows.unwrap_or(usize::MAX))?);
        }
        Ok(rows)
    }

    /// Returns the row order. `sources` has the index in `train` of each row's file.
    ///
    /// # Errors
    ///
    /// Fails if there are no rows, or none from a file that has a weight.
    pub(crate) fn order(&self, sources: &[usize], seed: u64) -> Result<MixedOrder> {
        match self.weights {
            Some(weights) => MixedOrder::new(sources, weights, seed),
            None => MixedOrder::single(sources.len(), seed),
        }
    }
}

/// Splits off `count` rows. Returns the rest, and those split off.
fn split(rows: Vec<Row>, count: usize, seed: u64) -> Result<(Vec<Row>, Vec<Row>)> {
    let mut is_held_out = vec![false; rows.len()];
    for row in ShuffledOrder::new(rows.len(), seed)?.slice(0, count) {
        is_held_out[row] = true;
    }
    let mut is_held_out = is_held_out.into_iter();
    let (held_out, train) = rows
        .into_iter()
        .partition(|_| is_held_out.next().unwrap_or(false));
    Ok((train, held_out))
}
