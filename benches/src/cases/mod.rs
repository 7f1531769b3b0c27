//! The cases, one file for each operator or family.

mod layers;
mod linear;
mod log_prob;
mod losses;
mod optimizer;

use crate::case::Case;

/// Every case, in the order of the table.
pub(crate) fn all() -> Vec<Case> {
    [
        log_prob::cases(),
        linear::cases(),
        losses::cases(),
        layers::cases(),
        optimizer::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
