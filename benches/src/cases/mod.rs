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

/// Every case on that device, in the order of the table.
pub(crate) fn on(device: &Device) -> Vec<Case> {
    let of_the_device = if device.is_cpu() {
        vec![linear::products()]
    } else {
        vec![bandwidth::cases(), linear::large(), logits::cases()]
    };
    [
        log_prob::cases(),
        linear::cases(),
        layers::cases(),
        optimizer::cases(),
    ]
    .into_iter()
    .chain(of_the_device)
    .flatten()
    .collect()
}
