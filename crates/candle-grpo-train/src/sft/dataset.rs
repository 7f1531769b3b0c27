//! A supervised run's rows as tokens.

use std::collections::HashSet;

use anyhow::Result;
use candle_grpo_core::Invalid;
use rayon::prelude::*;

use super::SftDataConfig;
use super::row_encoder::{Encoded, RowEncoder};
use crate::Sequence;
use crate::data::{MixedOrder, Row};
use crate::run::{RowDigest, row_digest};
use crate::{ChatTemplate, Pretrained};

/// A supervised run's rows.
#[derive(Debug, Clone)]
pub struct SftDataset {
    /// Rows to train on.
    pub train: SftRows,
    /// Rows to evaluate on, possibly none.
    pub held_out: SftRows,
    /// Order of the training rows.
    pub order: MixedOrder,
    /// Number of `held_out` rows that are also trained on.
    pub held_out_in_train: usize,
}

/// Rows as tokens, and how many were dropped or truncated.
#[derive(Debug, Clone, Default)]
pub struct SftRows {
    /// Rows in file order.
    pub examples: Vec<Sequence>,
    /// Each row's column digest.
    pub digests: Vec<RowDigest>,
    /// Number of rows dropped because they are too long.
    pub too_long: usize,
    /// Number of truncated rows.
    pub truncated: usize,
    /// Number of rows dropped because their weight is 0.
    pub without_weight: usize,
    /// Length of the longest row in tokens before truncation, including dropped rows.
    pub longest: usize,
    /// Each row's file index.
    sources: Vec<usize>,
}

impl SftDataset {
    /// Returns the length of the longest row in tokens.
    pub fn longest_row(&self) -> usize {
        self.train.longest_kept().max(self.held_out.longest_kept())
    }
}

impl SftDataConfig {
    /// Reads the files and encodes their rows for `model`. `template` is its chat template with
    /// [`Self::chat_template_kwargs`]. `seed` decides which rows are held out, and the order.
    ///
    /// # Errors
    ///
    /// Fails if a row cannot be read or encoded, with file and line. If `max_length` exceeds the
    /// model's maximum or leaves no row, or `weights` do not fit, with the key.
    pub fn load(
        &self,
        model: &Pretrained,
        template: Option<&ChatTemplate>,
        seed: u64,
    ) -> Result<SftDataset> {
        self.validate()?;
        let positions = model.model.max_position_embeddings;
        if let Some(max_length) = self.max_length.filter(|&length| length > positions) {
            let must = format!("be at most {positions}, the positions of the model");
            return Err(Invalid::new("max_length", max_length, must).into());
        }
        let encoder = RowEncoder::new(self, model, template)?;
        let (train, held_out) = self.sources().read(seed)?;
        let max_length = self.max_length(&model.model);
        let train = SftRows::encode(&train, &encoder, |row| row.source(&self.train).unwrap_or(0))?;
        let held_out = SftRows::encode(&held_out, &encoder, |_| 0)?;
        for rows in [&train, &held_out] {
            if rows.examples.is_empty() && rows.too_long > 0 {
                let must = format!(
                    "leave a row: all {} are longer, up to {} tokens",
                    rows.too_long, rows.longest
                );
                return Err(Invalid::new("max_length", max_length, must).into());
            }
        }
        if train.examples.is_empty() {
            let all = "all rows have the weight 0";
            return Err(Invalid::new("train", all, "have one to train on").into());
        }
        let trained: HashSet<&RowDigest> = train.digests.iter().collect();
        let held_out_in_train = held_out.digests.iter();
        let held_out_in_train = held_out_in_train
            .filter(|digest| trained.contains(digest))
            .count();
        Ok(SftDataset {
            order: self.sources().order(&train.sources, seed)?,
            held_out_in_train,
            train,
            held_out,
        })
    }
}

impl SftDataset {
    /// Logs warnings about rows in `section` that are dropped, truncated, or both trained on and
    /// held out.
    pub fn warn(&self, section: &str) {
        for (name, rows) in [("train", &self.train), ("held_out", &self.held_out)] {
            let all = rows.examples.len() + rows.too_long + rows.without_weight;
            if rows.too_long > 0 {
                tracing::warn!(
                    "{section}.{name}: {} of {all} rows are too long and left out; the longest has {} tokens",
                    rows.too_long,
                    rows.longest
                );
            }
            if rows.truncated > 0 {
                tracing::warn!(
                    "{section}.{name}: {} of {all} rows are cut off; the longest has {} tokens",
                    rows.truncated,
                    rows.longest
                );
            }
        }
        if self.held_out_in_train > 0 {
            tracing::warn!(
                "{} of {} held-out rows are also rows to train on, so evaluations measure memory too",
                self.held_out_in_train,
                self.held_out.examples.len()
            );
        }
    }
}

impl SftRows {
    fn encode(rows: &[Row], encoder: &RowEncoder, source: impl Fn(&Row) -> usize) -> Result<Self> {
        // The first error in row order, whichever thread finds one first.
        let encoded: Vec<Result<Encoded>> =
            rows.par_iter().map(|row| encoder.encode(row)).collect();
        let mut all = Self::default();
        for (row, encoded) in rows.iter().zip(encoded) {
            match encoded? {
                Encoded::Example { example, tokens } => {
                    all.truncated += usize::from(tokens > example.tokens().len());
                    all.longest = all.longest.max(tokens);
                    all.examples.push(example);
                    all.digests.push(row_digest(&row.columns));
                    all.sources.push(source(row));
                }
                Encoded::TooLong(tokens) => {
                    all.too_long += 1;
                    all.longest = all.longest.max(tokens);
                }
                Encoded::NoWeight => all.without_weight += 1,
            }
        }
        Ok(all)
    }

    /// Returns how many tokens train.
    pub fn num_trained_tokens(&self) -> usize {
        self.examples.iter().map(Sequence::num_trained_tokens).sum()
    }

    /// Returns the number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.examples.iter().map(|row| row.tokens().len()).sum()
    }

    /// Returns the length in tokens of the longest row that is not dropped.
    pub fn longest_kept(&self) -> usize {
        let lengths = self.examples.iter().map(|row| row.tokens().len());
        lengths.max().unwrap_or(0)
    }
}
