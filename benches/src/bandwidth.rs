//! How near an operator comes to the speed of a copy.

use crate::results::Row;

/// A goal for an operator whose time is that of its memory traffic. In the place of the twin is a copy that reads and writes
/// as many bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bandwidth {
    /// The bytes that the operator has to read and write.
    pub(crate) bytes: usize,
    /// The share of the speed of the copy that it should reach.
    pub(crate) goal: f64,
}

impl Bandwidth {
    /// What was reached, in a line.
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
