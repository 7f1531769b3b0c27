//! Recognizes unsupported data formats, to name them in errors.

use std::path::Path;

/// Names an unsupported file's format, and how to convert it.
pub(super) fn other_format(path: &Path, bytes: &[u8]) -> Option<String> {
    let file = path.display();
    // No command overwrites the file.
    let to = path.with_extension("converted.jsonl");
    let to = to.display();
    let pandas = |read: &str| {
        format!(
            "python3 -c 'import pandas; pandas.{read}(\"{file}\").to_json(\"{to}\", orient=\"records\", lines=True)'"
        )
    };
    let (name, convert) = if bytes.starts_with(PARQUET) {
        // With the feature, these files are supported.
        let name = "a Parquet file, which this program reads with the feature parquet";
        (name, pandas("read_parquet"))
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
    } else {
        return None;
    };
    Some(format!(
        "{name}, must be JSON lines in UTF-8, CSV or Parquet; to convert it: {convert}"
    ))
}

/// First bytes in a Parquet file.
pub(super) const PARQUET: &[u8] = b"PAR1";

/// The field separator in a file whose name says that it is CSV.
pub(super) fn separator(path: &Path) -> Option<u8> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    match extension.as_str() {
        "csv" => Some(b','),
        "tsv" => Some(b'\t'),
        _ => None,
    }
}

/// Returns whether this is text that is not JSON and has commas or tabs in its first line.
pub(super) fn looks_separated(text: &str) -> bool {
    let text = text.trim_start();
    let is_text = !text.starts_with(['{', '[']) && !text.contains('\0');
    let header = text.lines().next().unwrap_or(text);
    is_text && header.contains([',', '\t'])
}
