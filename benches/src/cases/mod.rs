//! The cases, one file for each operator or family.

mod bandwidth;
mod layers;
mod linear;
mod log_prob;
mod logits;
mod optimizer;
mod step;

use candle_core::Device;

use crate::case::Case;

/// Every case on that device, in the order of the table. Those of a GPU have the sizes of large
/// models.
pub(crate) fn on(device: &Device) -> Vec<Case> {
    if device.is_cpu() {
        vec![
            log_prob::cases(),
            linear::cases(),
            layers::small(),
            optimizer::small(),
            linear::products(),
            linear::rows(),
        ]
    } else {
        vec![
            bandwidth::cases(),
            linear::large(),
            logits::cases(),
            layers::large(),
            optimizer::large(),
        ]
    }
    .into_iter()
    .flatten()
    .collect()
}
