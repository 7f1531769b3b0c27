//! The results table and its files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A row in `ops.json`, with medians.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) op: String,
    pub(crate) shape: String,
    pub(crate) dtype: String,
    pub(crate) device: String,
    /// `system` or `mimalloc`.
    pub(crate) allocator: String,
    /// `forward`, `backward` or `forward+backward`.
    pub(crate) direction: String,
    pub(crate) ours_ms: f64,
    pub(crate) composed_ms: f64,
    /// The median ratio between neighboring runs.
    pub(crate) ratio: f64,
    pub(crate) ours_peak_mib: f64,
    pub(crate) composed_peak_mib: f64,
}

impl Row {
    fn same_case(&self, other: &Self) -> bool {
        let key = |row: &Self| {
            [
                &row.op,
                &row.shape,
                &row.dtype,
                &row.device,
                &row.allocator,
                &row.direction,
            ]
            .map(String::clone)
        };
        key(self) == key(other)
    }
}

/// Replaces rows for the same cases in `folder`'s `ops.json` by `new`, and rewrites the table.
pub(crate) fn merge(folder: &Path, new: Vec<Row>) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join("ops.json");
    let mut rows: Vec<Row> = match fs::read(&path) {
        // Rows from an older version are dropped.
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    rows.retain(|row| !new.iter().any(|new| new.same_case(row)));
    rows.extend(new);
    write(&path, &(serde_json::to_string_pretty(&rows)? + "\n"))?;
    write(&folder.join("ops.md"), &table(&rows))
}

fn write(path: &Path, text: &str) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, text)
        .and_then(|()| fs::rename(&part, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Renders the rows as a Markdown table.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = String::from(
        "| operator | shape | dtype | device | allocator | direction | ours ms | composed ms | ratio | ours MiB | composed MiB |\n\
         | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows {
        table.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {:.3} | {:.3} | {:.3} | {:.1} | {:.1} |\n",
            row.op,
            row.shape,
            row.dtype,
            row.device,
            row.allocator,
            row.direction,
            row.ours_ms,
            row.composed_ms,
            row.ratio,
            row.ours_peak_mib,
            row.composed_peak_mib
        ));
    }
    table
}
