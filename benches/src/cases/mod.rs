//! The cases, one file for each operator or family.

mod layers;
mod linear;
mod log_prob;

use crate::case::Case;

/// Every case, in the order of the table.
pub(crate) fn all() -> Vec<Case> {
    [log_prob::cases(), linear::cases(), layers::cases()]
        .into_iter()
        .flatten()
        .collect()
}
