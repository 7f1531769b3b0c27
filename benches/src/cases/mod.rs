//! The cases, one file per operator or family.

mod bandwidth;
mod decoding;
mod layers;
mod linear;
mod log_prob;
mod logits;
mod optimizer;
mod policy_loss;
mod step;

use candle_core::Device;

use crate::case::Case;

/// Every case on that device, in table order. GPU cases have the sizes of large models.
pub(crate) fn on(device: &Device) -> Vec<Case> {
    if device.is_cpu() {
        vec![
            log_prob::cases(),
            linear::cases(),
            policy_loss::cases(),
            layers::small(),
            optimizer::small(),
            linear::products(),
            linear::rows(),
        ]
    } else {
        vec![
            bandwidth::cases(),
            linear::large(),
            linear::blocks(),
            logits::cases(),
            policy_loss::cases(),
            layers::large(),
            decoding::large(),
            optimizer::large(),
        ]
    }
    .into_iter()
    .flatten()
    .collect()
}
