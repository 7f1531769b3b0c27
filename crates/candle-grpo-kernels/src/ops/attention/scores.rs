//! Attention scores.

use candle_core::{Result, bail};

use crate::check;

/// Score options for [`attention`](crate::attention()) and
/// [`paged_attention`](crate::paged_attention()). You can pass a plain number as the scale, without
/// other options.
///
/// ```
/// use candle_grpo_kernels::Scores;
///
/// assert_eq!(Scores::from(0.5), Scores { scale: 0.5, window: None, cap: None });
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// Multiplies the query-key products.
    pub scale: f64,
    /// Number of nearest positions that a query attends to, including its own. `None` means all
    /// positions up to its own.
    pub window: Option<usize>,
    /// Replaces each scaled score x by `cap * tanh(x / cap)`, before the softmax (Gemma 2,
    /// <https://arxiv.org/abs/2408.00118>).
    pub cap: Option<f64>,
}

impl From<f64> for Scores {
    fn from(scale: f64) -> Self {
        Self {
            scale,
            window: None,
            cap: None,
        }
    }
}

impl Scores {
    /// Fails if a value is out of range.
    pub(crate) fn check(&self) -> Result<()> {
        check::positive("scale", self.scale)?;
        if self.window == Some(0) {
            bail!("window: 0, must be at least 1");
        }
        self.cap.map_or(Ok(()), |cap| check::positive("cap", cap))
    }

    /// Returns the window and cap in the form that the CUDA kernels require, if either is set.
    #[cfg(feature = "cuda")]
    pub(crate) fn kernel_options(&self) -> Option<(i32, f32)> {
        let window = self
            .window
            .map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX));
        let is_plain = self.window.is_none() && self.cap.is_none();
        (!is_plain).then_some((window, self.cap.unwrap_or(0.0) as f32))
    }

    /// The first position before `end` that the query at `end - 1` attends to.
    pub(crate) fn first_visible(&self, end: usize) -> usize {
        end.saturating_sub(self.window.unwrap_or(end))
    }
}
