//! Sampling of tokens from logits.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::check;

/// The distribution that tokens are drawn from: `softmax(logits / temperature)`, of which the
/// filters keep the most likely tokens.
///
/// The filters are those of transformers, in its order: the `top_k` most likely tokens, of these
/// the most likely ones with a total probability of `top_p`, of these the ones with at least
/// `min_p` times the greatest probability. vLLM differs in one case: with both `min_p` and `top_p`
/// it applies `min_p` first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawOptions {
    /// Divisor of the logits before the softmax, one of [`TEMPERATURES`](crate::TEMPERATURES).
    /// Default 1.
    pub temperature: f64,
    /// Number of tokens, ties included. 0 disables the filter. Default 0.
    pub top_k: usize,
    /// Total probability, above 0. 1 disables the filter. Default 1.
    pub top_p: f64,
    /// Share of the greatest probability, from 0 to 1. 0 disables the filter. Default 0.
    pub min_p: f64,
    /// Takes the most likely token, the first of equals, whatever the filters. Default `false`.
    pub greedy: bool,
}

impl Default for DrawOptions {
    /// The softmax itself.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            greedy: false,
        }
    }
}

impl DrawOptions {
    fn check(&self) -> Result<()> {
        check::temperature(self.temperature)?;
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            bail!("top_p: {}, must be above 0 and at most 1", self.top_p);
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            bail!("min_p: {}, must be at least 0 and at most 1", self.min_p);
        }
        Ok(())
    }
}

/// A token to draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// The row of the logits.
    pub row: usize,
    /// A uniform random number in [0, 1). The same number draws the same token.
    pub uniform: f64,
}

/// A token that was drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawnToken {
    /// The token.
    pub token: u32,
    /// Its log-prob under `softmax(logits / temperature)`.
    pub log_prob: f32,
    /// Its log-prob in the filtered distribution. 0 for the most likely token of `greedy`.
    pub drawn_log_prob: f32,
}

/// Draws tokens from rows of logits.
///
/// Without filters the token is the first one with a cumulative probability above the uniform
/// number. With filters the tokens are ordered by probability first, equals by token.
///
/// A result is `None` if a logit of its row is NaN or infinity, or all are minus infinity. Terms
/// are in f32, and sums of 512 of them in f64. On CUDA the weights are in f32, so that a number at
/// the border of two tokens may draw the other one; the logits stay on the device, and 12 bytes for
/// each draw come back.
///
/// # Shapes
///
/// `logits` is `[N, V]`, any float dtype.
///
/// # Errors
///
/// Fails on other shapes and dtypes, on options and numbers out of range, and if `logits` are in a
/// graph.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{Draw, DrawOptions, draw_tokens};
///
/// // Probabilities of 0.2 and 0.8.
/// let logits = Tensor::new(&[[0f32, 4f32.ln()]], &Device::Cpu)?;
/// let draws = [0.1, 0.3].map(|uniform| Draw { row: 0, uniform });
/// let drawn = draw_tokens(&logits, &draws, &DrawOptions::default())?;
/// let tokens: Vec<u32> = drawn.into_iter().flatten().map(|drawn| drawn.token).collect();
/// assert_eq!(tokens, [0, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn draw_tokens(
    logits: &Tensor,
    draws: &[Draw],
    options: &DrawOptions,
) -> Result<Vec<Option<DrawnToken>>> {
    check::float("logits", logits)?;
    check::constant("logits", logits)?;
    options.check()?;
    let &[rows, vocab] = logits.dims() else {
        bail!("logits: shape {:?}, must be [N, V]", logits.dims());
    };
    if vocab == 0 {
        bail!(
            "logits: shape {:?}, must have at least one token",
            logits.dims()
        );
    }
    for (index, draw) in draws.iter().enumerate() {
        if draw.row >= rows {
            bail!("draws[{index}]: row {}, must be below {rows}", draw.row);
        }
        if !(0.0..1.0).contains(&draw.uniform) {
            bail!(
                "draws[{index}]: uniform {}, must be at least 0 and below 1",
                draw.uniform
            );
        }
    }
    if draws.is_empty() {
        return Ok(Vec::new());
    }
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() && crate::path::is_fused(logits) {
        return cuda::draw(&logits.contiguous()?, draws, options);
    }
    let logits = logits
        .to_device(&Device::Cpu)?
        .to_dtype(DType::F32)?
        .contiguous()?;
    let (storage, layout) = logits.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        bail!("logits: not f32 on the CPU");
    };
    let values = &values[layout.start_offset()..];
    Ok(draws
        .par_iter()
        .map(|draw| cpu::draw(&values[draw.row * vocab..][..vocab], draw.uniform, options))
        .collect())
}
