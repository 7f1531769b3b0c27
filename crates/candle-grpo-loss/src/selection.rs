//! The tokens of high covariance, selected from a whole step.

use candle_core::{DType, Result, Tensor};
use candle_grpo_core::Mask;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::batch::{PolicyBatch, over_tokens};
use crate::policy_loss::PolicyLoss;
use crate::surrogate::{ClipCov, KlCov, Surrogate};

impl PolicyLoss {
    /// The tokens that [`ClipCov`] and [`KlCov`] treat on their own, u8 `[B, T]`; nothing for other surrogates.
    ///
    /// `batch` holds the whole step, so that the choice does not depend on how it is split into micro-batches; pass the
    /// rows of each on with [`PolicyBatch::selected_tokens`]. The tensors are copied to the host, where they are ranked.
    /// `seed` decides which of the candidates of [`ClipCov`] are drawn.
    pub fn select_tokens_to_host(&self, batch: &PolicyBatch, seed: u64) -> Result<Option<Tensor>> {
        self.validate()?;
        let mask = Mask::new(batch.response_mask)?;
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

/// A token of the mask.
struct Token {
    /// Its place in the flattened batch.
    index: usize,
    ratio: f64,
    advantage: f64,
    covariance: f64,
}

fn tokens(batch: &PolicyBatch, mask: &Mask) -> Result<Vec<Token>> {
    let numbers = |name: &str, x: &Tensor| -> Result<Vec<f64>> {
        mask.check_shape(name, x)?;
        x.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
    };
    let log_probs = numbers("log_probs", batch.log_probs()?)?;
    let old_log_probs = match batch.old.log_probs() {
        Some(old) => numbers("old_log_probs", old)?,
        None => log_probs.clone(),
    };
    let advantages = over_tokens("advantages", batch.advantages, mask)?;
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

/// At least one token, as long as there is one to take.
fn share(ratio: f64, tokens: usize) -> usize {
    ((ratio * tokens as f64) as usize).max(1)
}

/// Some of the tokens whose covariance is between the bounds and that the clip leaves alone.
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
    candidates.truncate(share(surrogate.ratio, tokens.len()));
    candidates
}

/// The tokens of highest covariance.
fn highest(surrogate: &KlCov, tokens: &[Token]) -> Vec<usize> {
    let mut ranked: Vec<&Token> = tokens.iter().collect();
    ranked.sort_by(|a, b| b.covariance.total_cmp(&a.covariance));
    ranked
        .iter()
        .take(share(surrogate.ratio, tokens.len()))
        .map(|t| t.index)
        .collect()
}
