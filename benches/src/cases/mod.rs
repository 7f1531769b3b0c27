//! The cases, one file for each operator or family.

mod layers;
mod log_prob;

use crate::case::Case;

/// Every case, in the order of the table.
pub(crate) fn all() -> Vec<Case> {
    [log_prob::cases(), layers::cases()]
        .into_iter()
        .flatten()
        .collect()
}
