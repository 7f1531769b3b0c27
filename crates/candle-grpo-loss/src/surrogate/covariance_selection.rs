//! Selects high-covariance tokens from a whole step.

use candle_core::{DType, Result, Tensor};
use candle_grpo_core::Mask;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::{ClipCov, KlCov, Surrogate};
use crate::policy_loss::{PolicyBatch, PolicyLoss, over_tokens};

impl PolicyLoss {
    /// Selects the tokens for [`ClipCov`] and [`KlCov`], u8 `[B, T]`. Returns `None` for other
    /// surrogates.
    ///
    /// `batch` must hold the whole step, because the selection must not depend on micro-batches.
    /// Pass each micro-batch's rows to [`PolicyBatch::selected_tokens`]. `seed` determines the
    /// random choice among the candidates for [`ClipCov`]. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if `log_probs` are absent, or if a shape differs from the
    /// response mask's.
    pub fn select_tokens(&self, batch: &PolicyBatch, seed: u64) -> Result<Option<Tensor>> {
        self.validate()?;
        let mask = Mask::new(&batch.response_mask)?;
        let chosen = match &self.surrogate {
            Surrogate::ClipCov(s) => draw(s, &tokens(batch, &mask)?, seed),
            Surrogate::KlCov(s) => highest(s, &tokens(batch, &mask)?),
            _ => return Ok(None),
        };
        let (rows, columns) = mask.dims()?;
        let mut selected = vec![0u8; rows * columns];
        for index in chosen {
            selected[index] = 1;
        }
        Ok(Some(Tensor::from_vec(
            selected,
            (rows, columns),
            mask.selected().device(),
        )?))
    }
}

/// A masked-in token.
struct Token {
    /// Index in the flattened batch.
    index: usize,
    ratio: f64,
    advantage: f64,
    covariance: f64,
}

fn tokens(batch: &PolicyBatch, mask: &Mask) -> Result<Vec<Token>> {
    let numbers = |name: &str, x: &Tensor| -> Result<Vec<f64>> {
        mask.check(name, x)?;
        x.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
    };
    let log_probs = numbers("log_probs", batch.ensure_log_probs()?)?;
    let old_log_probs = match batch.old.log_probs() {
        Some(old) => numbers("old_log_probs", old)?,
        None => log_probs.clone(),
    };
    let advantages = over_tokens("advantages", &batch.advantages, mask)?;
    let advantages = numbers("advantages", &advantages)?;
    let flags = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    let valid: Vec<usize> = (0..flags.len()).filter(|&i| flags[i] != 0).collect();
    let mean = |x: &[f64]| valid.iter().map(|&i| x[i]).sum::<f64>() / valid.len().max(1) as f64;
    let (mean_log_prob, mean_advantage) = (mean(&log_probs), mean(&advantages));
    Ok(valid
        .iter()
        .map(|&index| Token {
            index,
            ratio: (log_probs[index] - old_log_probs[index]).exp(),
            advantage: advantages[index],
            covariance: (advantages[index] - mean_advantage) * (log_probs[index] - mean_log_prob),
        })
        .collect())
}

/// Returns the number of tokens to select, at least one.
fn selection_size(ratio: f64, tokens: usize) -> usize {
    ((ratio * tokens as f64) as usize).max(1)
}

/// Samples among the unclipped tokens whose covariance is within the bounds.
fn draw(surrogate: &ClipCov, tokens: &[Token], seed: u64) -> Vec<usize> {
    let clip = &surrogate.clip;
    let is_clipped = |t: &Token| {
        (t.advantage > 0. && t.ratio > 1. + clip.high)
            || (t.advantage < 0. && t.ratio < 1. - clip.low)
    };
    let mut candidates: Vec<usize> = tokens
        .iter()
        .filter(|t| {
            t.covariance > surrogate.lower && t.covariance < surrogate.upper && !is_clipped(t)
        })
        .map(|t| t.index)
        .collect();
    candidates.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    candidates.truncate(selection_size(surrogate.ratio, tokens.len()));
    candidates
}

/// Returns the highest-covariance tokens.
fn highest(surrogate: &KlCov, tokens: &[Token]) -> Vec<usize> {
    let mut ranked: Vec<&Token> = tokens.iter().collect();
    ranked.sort_by(|a, b| b.covariance.total_cmp(&a.covariance));
    ranked
        .iter()
        .take(selection_size(surrogate.ratio, tokens.len()))
        .map(|t| t.index)
        .collect()
}
