//! Surrogates, losses and recipes that few projects use yet.
//!
//! An item here may change, move or disappear in any release, as in TRL. Prefer the constructors on
//! [`PolicyLoss`](crate::PolicyLoss) and [`Recipe`](crate::Recipe) unless you want to try a recent
//! paper. Configuration keys stay valid as long as the item exists.
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
