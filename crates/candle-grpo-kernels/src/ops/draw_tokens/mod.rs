//! Token sampling from logits.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::check;

/// The distribution to sample tokens from: `softmax(logits / temperature)`, reduced to the most
/// likely tokens by the filters.
///
/// Filters apply in the same order as in transformers. First, `top_k` keeps the most likely tokens.
/// Then `top_p` keeps the most likely of these, up to that total probability. Then `min_p` keeps
/// those with at least `min_p` times the greatest probability. vLLM differs in one case: with both
/// `min_p` and `top_p`, it applies `min_p` first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawOptions {
    /// Divides the logits before the softmax, must be in [`TEMPERATURES`](crate::TEMPERATURES).
    /// Default 1.
    pub temperature: f64,
    /// Number of tokens to keep, ties included. 0 disables the filter. Default 0.
    pub top_k: usize,
    /// Total probability to keep, above 0. 1 disables the filter. Default 1.
    pub top_p: f64,
    /// Minimum probability relative to the greatest, from 0 to 1. 0 disables the filter. Default
    /// 0.
    pub min_p: f64,
    /// Returns the most likely token, the first if several tie, whatever the filters. Default
    /// `false`.
    pub greedy: bool,
}

impl Default for DrawOptions {
    /// The plain softmax.
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

/// A token to sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// Row in the logits.
    pub row: usize,
    /// A uniform random number in [0, 1). The same number samples the same token.
    pub uniform: f64,
}

/// A sampled token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawnToken {
    /// The token.
    pub token: u32,
    /// Its log-prob under `softmax(logits / temperature)`.
    pub log_prob: f32,
    /// Its log-prob in the filtered distribution. With `greedy`, this is 0.
    pub drawn_log_prob: f32,
}

/// Samples tokens from rows of logits.
///
/// Without filters, this returns the first token whose cumulative probability exceeds the uniform
/// number. With filters, tokens are sorted by probability first, and ties by token.
///
/// A result is `None` if a logit in its row is NaN or infinity, or all are minus infinity. Terms
/// are f32, and sums of 512 terms are added in f64. On CUDA the weights are f32, so a number at the
/// boundary between two tokens may sample the other one. The logits stay on the device, and only 12
/// bytes per draw are copied back.
///
/// # Shapes
///
/// `logits` is `[N, V]`, any float dtype.
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, if options or numbers are out of range, or if `logits`
/// are in a graph.
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
