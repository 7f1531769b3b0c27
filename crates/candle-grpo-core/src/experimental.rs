//! Advantage estimators that few projects use yet.
//!
//! A function here may change, move or disappear in any release, as in TRL. Prefer an estimator in
//! [`AdvantagePipeline`] unless you want to try a recent paper. A name in a configuration file
//! stays valid as long as the function exists.
//!
//! ```
//! # use candle_core::{Device, Tensor};
//! use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, experimental};
//!
//! let rewards = Tensor::new(&[1f32, 0., 1., 0.], &Device::Cpu)?;
//! let response_mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], &Device::Cpu)?;
//! let batch = AdvantageBatch::new(&rewards, 4).response_mask(&response_mask);
//! let opo = experimental::opo().estimate(&batch)?;
//! assert!((opo.advantages.to_vec1::<f32>()?[0] - 0.4444).abs() < 1e-4);
//! # Ok::<(), candle_core::Error>(())
//! ```

use crate::AdvantagePipeline;
use crate::advantage::AdvantageName;

/// Lite PPO: `(r - group mean) / (batch std + epsilon)` (<https://arxiv.org/abs/2508.08221>), with
/// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON).
pub fn lite_ppo() -> AdvantagePipeline {
    AdvantageName::LitePpo.into()
}

/// MaxRL: `(r - group mean) / (group mean + epsilon)`, for nonnegative rewards, with
/// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON).
pub fn max_rl() -> AdvantagePipeline {
    AdvantageName::MaxRl.into()
}

/// OPO: `r - length-weighted group mean` (<https://arxiv.org/abs/2505.23585>). Needs
/// `response_mask`.
pub fn opo() -> AdvantagePipeline {
    AdvantageName::Opo.into()
}

/// OpenRLHF's `flash_reinforce`: `r - batch mean`.
pub fn flash_reinforce() -> AdvantagePipeline {
    AdvantageName::FlashReinforce.into()
}
