//! Estimators of the Kullback-Leibler divergence of a policy from a reference:
//! [`Kl`](crate::Kl), [`KlEstimator`](crate::KlEstimator), and controllers of their coefficient.

mod controller;
pub(crate) mod estimator;

pub use controller::KlController;
pub use estimator::KlGradient;
