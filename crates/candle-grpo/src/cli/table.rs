//! Text tables.

use std::fmt;

/// A table with a header. The first column is left-aligned, the others are right-aligned.
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(header: Vec<String>) -> Self {
        Self { rows: vec![header] }
    }

    /// Adds a row with one cell per column.
    pub(super) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        for (i, row) in self.rows.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            for (column, cell) in row.iter().enumerate() {
                let width = width(column);
                match column {
                    0 => write!(f, "{cell:width$}")?,
                    _ => write!(f, "  {cell:>width$}")?,
                }
            }
        }
        Ok(())
    }
}
