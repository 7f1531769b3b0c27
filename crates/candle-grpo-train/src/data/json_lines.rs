//! A run's JSON files: a single value, or one value per line in growing files.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Error, Result, anyhow};
use candle_grpo_base::atomic_file;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::error::Category;

/// Reads a file with a single JSON value.
///
/// # Errors
///
/// Fails if the value cannot be read, with file, line and column.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).map_err(|error| damage(path, error.line(), &error))
}

/// Reads a file with one JSON value per line; returns none if it does not exist.
///
/// An incomplete last line, as after a kill, is skipped.
///
/// # Errors
///
/// Fails if any other line cannot be read, with file, line and column.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let lines = read_lines(path)?;
    Ok(lines.into_iter().map(|line| line.value).collect())
}

/// A line in a file and its value.
pub(crate) struct Line<T> {
    text: String,
    pub(crate) value: T,
}

/// Reads a file's complete lines; returns none if it does not exist.
pub(crate) fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<Line<T>>> {
    let text = match fs::read(path) {
        // A killed run's last line may end within a character.
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let mut read = Vec::new();
    let mut rest = text.lines().enumerate().peekable();
    while let Some((i, line)) = rest.next() {
        match serde_json::from_str(line) {
            Ok(value) => read.push(Line {
                text: line.to_owned(),
                value,
            }),
            Err(_) if rest.peek().is_none() && !text.ends_with('\n') => {}
            Err(error) => return Err(damage(path, i + 1, &error)),
        }
    }
    Ok(read)
}

/// Keeps only the `lines` in a file that `keep` selects, and returns their values. A file that does
/// not exist is not created.
pub(crate) fn retain_lines<T>(
    path: &Path,
    mut lines: Vec<Line<T>>,
    keep: impl Fn(&T) -> bool,
) -> Result<Vec<T>> {
    lines.retain(|line| keep(&line.value));
    if path.exists() {
        let text: String = lines
            .iter()
            .flat_map(|line| [line.text.as_str(), "\n"])
            .collect();
        atomic_file::write(path, text.as_bytes())?;
    }
    Ok(lines.into_iter().map(|line| line.value).collect())
}

/// Reads a number. Null is NaN, because JSON cannot represent numbers that are not finite.
pub(crate) fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads numbers by name, skipping those that are null because they were not finite.
pub(crate) fn finite_numbers<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?.into_iter();
    Ok(numbers
        .filter_map(|(name, number)| Some((name, number?)))
        .collect())
}

fn damage(path: &Path, line: usize, error: &serde_json::Error) -> Error {
    let what = match error.classify() {
        Category::Eof => "ends within a JSON value",
        Category::Data => "has a value that is missing, unknown or of another kind",
        Category::Syntax | Category::Io => "is not JSON",
    };
    let (path, column) = (path.display(), error.column());
    anyhow!("{path}:{line}:{column}: the file is damaged or of another version: it {what}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Step {
        step: usize,
    }

    #[test]
    fn an_incomplete_last_line_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let retain = |last: usize| {
            let lines = read_lines::<Step>(&path).unwrap();
            retain_lines(&path, lines, |line| line.step <= last).unwrap()
        };
        assert_eq!(retain(9).len(), 0);
        assert!(!path.exists());
        fs::write(
            &path,
            b"{\"step\":1}\n{\"step\":2,\"a\":1.50}\n{\"step\":3}\n{\"st\xc3",
        )
        .unwrap();
        assert_eq!(read_json_lines::<Step>(&path).unwrap().len(), 3);
        assert_eq!(retain(2).len(), 2);
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "{\"step\":1}\n{\"step\":2,\"a\":1.50}\n"
        );
    }

    #[test]
    fn damage_is_described_with_file_line_and_column() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        for (line, column, what) in [
            ("{\"st", 4, "ends within a JSON value"),
            ("{\"step\" 2}", 9, "is not JSON"),
            (
                "{\"step\": -2}",
                11,
                "has a value that is missing, unknown or of another kind",
            ),
        ] {
            fs::write(&path, format!("{{\"step\":1}}\n{line}\n{{\"step\":3}}\n")).unwrap();
            let message = format!("the file is damaged or of another version: it {what}");
            let expected = format!("metrics.jsonl:2:{column}: {message}");
            let error = read_json_lines::<Step>(&path).unwrap_err().to_string();
            assert!(error.ends_with(&expected), "{error}");
            fs::write(&path, format!("\n{line}")).unwrap();
            let error = read_json::<Step>(&path).unwrap_err().to_string();
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}
