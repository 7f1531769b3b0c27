//! Files with one JSON value per line, which grow during a run.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Reads the values of a file; none if it is absent.
///
/// A last line that is incomplete, as after a kill, is left out.
///
/// # Errors
///
/// With file and line if any other line cannot be read.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let text = read(path)?;
    let lines = parse(path, &text)?;
    Ok(lines.into_iter().map(|(_, value)| value).collect())
}

/// Returns the lines for whose `step` the function `keep` returns true.
pub(crate) fn lines_of(path: &Path, keep: impl Fn(usize) -> bool) -> Result<String> {
    #[derive(Deserialize)]
    struct Line {
        step: usize,
    }
    let text = read(path)?;
    let mut kept = String::new();
    for (line, value) in parse::<Line>(path, &text)? {
        if keep(value.step) {
            kept += line;
            kept.push('\n');
        }
    }
    Ok(kept)
}

fn read(path: &Path) -> Result<String> {
    match fs::read(path) {
        // The last line of a killed run may end within a character.
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// The complete lines and their values.
fn parse<'a, T: DeserializeOwned>(path: &Path, text: &'a str) -> Result<Vec<(&'a str, T)>> {
    let mut read = Vec::new();
    let mut rest = text.lines().enumerate().peekable();
    while let Some((i, line)) = rest.next() {
        match serde_json::from_str(line) {
            Ok(value) => read.push((line, value)),
            Err(_) if rest.peek().is_none() && !text.ends_with('\n') => {}
            Err(error) => bail!("{}:{}: {error}", path.display(), i + 1),
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_last_line_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(lines_of(&path, |_| true).unwrap(), "");
        fs::write(
            &path,
            b"{\"step\":1}\n{\"step\":2,\"a\":1.50}\n{\"step\":3}\n{\"st\xc3",
        )
        .unwrap();
        assert_eq!(
            lines_of(&path, |step| step <= 2).unwrap(),
            "{\"step\":1}\n{\"step\":2,\"a\":1.50}\n"
        );
        assert_eq!(
            read_json_lines::<serde_json::Value>(&path).unwrap().len(),
            3
        );

        fs::write(&path, "{\"step\":1}\n{\"st\n{\"step\":3}\n").unwrap();
        let error = lines_of(&path, |step| step <= 2).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl:2: "), "{error}");
    }
}
