//! Compares an operator with the speed of a copy.

use crate::results::Row;

/// A goal for a memory-bound operator. A copy of as many bytes replaces the twin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bandwidth {
    /// The bytes that the operator must read and write.
    pub(crate) bytes: usize,
    /// The goal, as a fraction of the copy's speed.
    pub(crate) goal: f64,
}

impl Bandwidth {
    /// Returns one line with the fraction reached.
    pub(crate) fn verdict(&self, row: &Row) -> String {
        let speed = |ms: f64| self.bytes as f64 / ms / 1e6;
        let share = 1.0 / row.ratio;
        format!(
            "goal {}: {} {} {} {}: {:.0} GB/s, {:.1} % of the {:.0} GB/s of a copy, at least {:.0} %",
            if share >= self.goal { "met" } else { "MISSED" },
            row.op,
            row.shape,
            row.dtype,
            row.direction,
            speed(row.ours_ms),
            100.0 * share,
            speed(row.composed_ms),
            100.0 * self.goal,
        )
    }
}
