//! Surrogates, losses and recipes that few projects use yet.
//!
//! Experimental means that an item here may change, move or go in any release, as in TRL. Its keys
//! in configuration files stay valid as long as the item exists.
//!
//! ```
//! use candle_grpo_loss::PolicyLoss;
//! use candle_grpo_loss::experimental::{Vespo, policy_loss};
//!
//! let vespo = PolicyLoss {
//!     surrogate: Vespo { k_pos: 1., ..Vespo::default() }.into(),
//!     ..policy_loss::vespo()
//! };
//! vespo.validate()?;
//! # Ok::<(), candle_core::Error>(())
//! ```

pub mod policy_loss;
pub mod recipe;

pub use crate::surrogate::future_kl::FutureKl;
pub use crate::surrogate::group_contrast::GroupContrast;
pub use crate::surrogate::vespo::Vespo;
