//! The Kullback-Leibler divergence KL(policy || reference): estimators ([`Kl`](crate::Kl),
//! [`KlEstimator`](crate::KlEstimator)), and controllers for the penalty coefficient.
//!
//! A mean near 0 means that the policy still matches the reference. Watch the trend: one batch is
//! noisy.

mod controller;
pub(crate) mod estimator;

pub use controller::KlController;
pub use estimator::KlGradient;
