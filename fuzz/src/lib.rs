//! Helpers for the fuzz targets.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use candle_grpo_nn::DecoderConfig;
use tempfile::TempDir;

/// Returns this process's temporary folder, where targets write the parsed files.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().expect("a folder for temporary files"));
    folder.path()
}

/// Writes a file to [`folder`].
pub fn write(name: &str, bytes: &[u8]) {
    fs::write(folder().join(name), bytes).expect("room for a temporary file");
}

/// Splits `input` into files in [`folder`] and removes the other files in `names`.
///
/// A line `--- NAME` starts each file.
pub fn write_files(input: &[u8], names: &[&str]) {
    for name in names {
        let _ = fs::remove_file(folder().join(name));
    }
    let mut rest = input;
    while let Some((name, from)) = names.iter().find_map(|name| {
        let begin = [b"--- ", name.as_bytes(), b"\n"].concat();
        Some((name, rest.strip_prefix(begin.as_slice())?))
    }) {
        let end = from
            .windows(5)
            .position(|window| window == b"\n--- ")
            .map_or(from.len(), |at| at + 1);
        write(name, &from[..end]);
        rest = &from[end..];
    }
}

/// Returns the smallest decoder, with 200 bytes of weights.
pub fn decoder() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 4,
        hidden_size: 2,
        intermediate_size: 2,
        num_hidden_layers: 1,
        num_attention_heads: 1,
        num_key_value_heads: 1,
        max_position_embeddings: 8,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}
