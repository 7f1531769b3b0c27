//! Data files of other formats, to name them in errors.

use std::path::Path;

/// The name of the format of a file that is not JSON, and how to convert it.
pub(super) fn other_format(path: &Path, bytes: &[u8]) -> Option<String> {
    let file = path.display();
    // No command replaces the file.
    let to = path.with_extension("converted.jsonl");
    let to = to.display();
    let pandas = |read: &str| {
        format!(
            "python3 -c 'import pandas; pandas.{read}(\"{file}\").to_json(\"{to}\", orient=\"records\", lines=True)'"
        )
    };
    let (name, convert) = if bytes.starts_with(b"PAR1") {
        ("a Parquet file", pandas("read_parquet"))
    } else if bytes.starts_with(b"ARROW1") {
        ("an Arrow file", pandas("read_feather"))
    } else if bytes.starts_with(&[0x1f, 0x8b]) {
        ("a gzip file", format!("gunzip < {file} > {to}"))
    } else if bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        ("a Zstandard file", format!("zstd -d < {file} > {to}"))
    } else if bytes.starts_with(b"\xfd7zXZ\0") {
        ("an xz file", format!("xz -d < {file} > {to}"))
    } else if bytes.starts_with(b"BZh") {
        ("a bzip2 file", format!("bzip2 -d < {file} > {to}"))
    } else if bytes.starts_with(b"PK\x03\x04") {
        ("a ZIP file", format!("unzip {file}"))
    } else if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        let convert = format!("iconv -f UTF-16 -t UTF-8 {file} > {to}");
        ("a file in UTF-16", convert)
    } else if is_csv(path, bytes) {
        ("a CSV file", pandas("read_csv"))
    } else {
        return None;
    };
    Some(format!(
        "{name}, must be JSON lines in UTF-8; to convert it: {convert}"
    ))
}

/// Returns true for a file that is not JSON and is named as CSV, or has a first line with commas or
/// tabs.
fn is_csv(path: &Path, bytes: &[u8]) -> bool {
    let text = bytes.trim_ascii_start();
    if text.is_empty() || text.starts_with(b"{") || text.starts_with(b"[") {
        return false;
    }
    let extension = path.extension().and_then(|extension| extension.to_str());
    let named =
        extension.is_some_and(|e| ["csv", "tsv"].contains(&e.to_ascii_lowercase().as_str()));
    let header = text.split(|&byte| byte == b'\n').next().unwrap_or(text);
    let is_text = str::from_utf8(text).is_ok() && !text.contains(&0);
    named || is_text && header.iter().any(|byte| matches!(byte, b',' | b'\t'))
}
