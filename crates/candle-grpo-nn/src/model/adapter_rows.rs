//! Rows that a joined decoder's adapters change.

use std::ops::Range;

use candle_core::{Result, Tensor};

/// Consecutive rows of a pass, with the index of their adapters in a joined decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AdapterRows {
    pub(crate) adapter: usize,
    pub(crate) rows: Range<usize>,
}

impl AdapterRows {
    /// Selects the rows.
    pub(crate) fn of(&self, all: &Tensor) -> Result<Tensor> {
        all.narrow(0, self.rows.start, self.rows.len())
    }
}

/// Divides rows into runs with the same adapters, from the adapters and the number of rows of each
/// sequence.
pub(crate) fn adapter_rows(
    sequences: impl IntoIterator<Item = (usize, usize)>,
) -> Vec<AdapterRows> {
    let mut runs: Vec<AdapterRows> = Vec::new();
    let mut start = 0;
    for (adapter, rows) in sequences {
        let rows = start..start + rows;
        start = rows.end;
        match runs.last_mut() {
            Some(run) if run.adapter == adapter => run.rows.end = rows.end,
            _ => runs.push(AdapterRows { adapter, rows }),
        }
    }
    runs
}
