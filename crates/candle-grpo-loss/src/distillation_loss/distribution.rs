//! The distribution that logits define.

use candle_core::{D, Result, Tensor, bail};

use crate::softmax::statistics;

/// `softmax(logits)`, with gradient in the logits.
pub(super) struct Distribution {
    /// `[.., V]`
    pub(super) logits: Tensor,
    /// The logits' log-sum-exp, `[.., 1]`.
    pub(super) total: Tensor,
    /// In nats, `[..]`.
    pub(super) entropy: Tensor,
}

impl Distribution {
    /// Creates the distribution for `logits / temperature`.
    pub(super) fn new(logits: &Tensor, temperature: f64) -> Result<Self> {
        if logits.rank() == 0 || logits.elem_count() == 0 {
            bail!("student_logits: shape {:?}, must be [.., V]", logits.dims());
        }
        let logits = if temperature == 1. {
            logits.clone()
        } else {
            (logits / temperature)?
        };
        let statistics = statistics(&logits, None)?;
        Ok(Self {
            total: statistics.log_sum_exp.unsqueeze(D::Minus1)?,
            entropy: statistics.entropy.detach(),
            logits,
        })
    }

    /// Returns the log-probs for all entries, `[.., V]`.
    pub(super) fn log_probs(&self) -> Result<Tensor> {
        self.logits.broadcast_sub(&self.total)
    }
}
