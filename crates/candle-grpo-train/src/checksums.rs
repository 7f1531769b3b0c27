//! SHA-256 checksums for files and weights.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_base::checksum::hex;
use candle_grpo_nn::{Parameters, atomic_file};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use sha2::{Digest, Sha256};

/// In `sha256sum` format, so that you can check it with `sha256sum --check`.
const CHECKSUMS: &str = "SHA256SUMS";
/// Number of weight values to hash at once.
const PART: usize = 1 << 18;

/// Writes checksums for all files in `folder` and its subfolders.
pub(crate) fn write_checksums(folder: &Path) -> Result<()> {
    let sums = file_sums(folder)?.into_iter();
    let text: String = sums.map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    Ok(atomic_file::write(
        &folder.join(CHECKSUMS),
        text.as_bytes(),
    )?)
}

/// Checks the files against their checksums.
///
/// # Errors
///
/// Fails if a file is missing, added or changed. The error names it.
pub(crate) fn check_checksums(folder: &Path) -> Result<()> {
    let text = fs::read_to_string(folder.join(CHECKSUMS)).context(CHECKSUMS)?;
    let mut found = file_sums(folder)?;
    for line in text.lines() {
        let (sum, name) = line
            .split_once("  ")
            .with_context(|| format!("{CHECKSUMS}: {line:?}, must be a sum and a name"))?;
        let Some(found) = found.remove(name) else {
            bail!("{name}: is missing");
        };
        ensure!(found == sum, "{name}: is damaged");
    }
    if let Some(name) = found.keys().next() {
        bail!("{name}: was not written with the others");
    }
    Ok(())
}

/// Computes checksums for the files in `folder` and its subfolders except [`CHECKSUMS`], in
/// parallel. The keys are relative names with slashes.
fn file_sums(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = Vec::new();
    let mut folders = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, folder)) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                folders.push((format!("{name}/"), entry.path()));
            } else if name != CHECKSUMS {
                found.push((name, entry.path()));
            }
        }
    }
    let sums = found.into_par_iter();
    sums.map(|(name, path)| Ok((name, sha256_of_file(&path)?)))
        .collect()
}

/// A file's checksum.
pub(crate) fn sha256_of_file(path: &Path) -> Result<String> {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex(&hash.finalize())),
                read => hash.update(&buffer[..read]),
            }
        }
    };
    read().with_context(|| path.display().to_string())
}

/// A checksum over all parameters' names and values, in f32. They are converted piece by piece.
pub(crate) fn sha256_of_parameters(parameters: &Parameters) -> Result<String> {
    let values = parameters.iter();
    sha256_of(values.map(|(name, variable)| Ok((name, variable.as_detached_tensor()))))
}

/// [`sha256_of_parameters`], with the f32 weights that ranks divide in place of the rounded ones.
/// All ranks must call it together.
pub(crate) fn sha256_of_whole_parameters(parameters: &Parameters) -> Result<String> {
    let names = parameters.iter().map(|(name, _)| name);
    sha256_of(names.map(|name| Ok((name, parameters.whole(name)?))))
}

fn sha256_of<'a>(values: impl Iterator<Item = Result<(&'a str, Tensor)>>) -> Result<String> {
    let mut hash = Sha256::new();
    let mut bytes = Vec::new();
    for value in values {
        let (name, value) = value?;
        hash.update(name);
        let values = value.flatten_all()?;
        let count = values.elem_count();
        for start in (0..count).step_by(PART) {
            let part = values.narrow(0, start, PART.min(count - start))?;
            let part = part.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            bytes.clear();
            bytes.extend(part.iter().flat_map(|number| number.to_le_bytes()));
            hash.update(&bytes);
        }
    }
    Ok(hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_grpo_nn::{BaseWeights, DecoderConfig};
    use rstest::rstest;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("b")).unwrap();
        fs::write(folder.path().join("a"), "abc").unwrap();
        fs::write(folder.path().join("b/c"), "").unwrap();
        write_checksums(folder.path()).unwrap();
        folder
    }

    #[test]
    fn the_sums_are_those_of_sha256sum() {
        // FIPS 180-4, appendix B.1, and the empty text.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a\n\
                        e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  b/c\n";
        let folder = folder();
        let text = fs::read_to_string(folder.path().join(CHECKSUMS)).unwrap();
        assert_eq!(text, expected);
        check_checksums(folder.path()).unwrap();
    }

    #[test]
    fn the_sum_of_weights_is_that_of_their_names_and_numbers_in_f32() -> Result<()> {
        let device = Device::Cpu;
        let model = DecoderConfig {
            vocab_size: PART / 8 + 3,
            hidden_size: 8,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            tie_word_embeddings: true,
            ..DecoderConfig::default()
        };
        let weights = Parameters::init(&model, 3, &device)?;
        let weights = weights.frozen_as(&model, BaseWeights::Dense, DType::BF16)?;
        let mut hash = Sha256::new();
        for (name, weight) in weights.iter() {
            hash.update(name);
            let numbers = weight.to_dtype(DType::F32)?.flatten_all()?;
            for number in numbers.to_vec1::<f32>()? {
                hash.update(number.to_le_bytes());
            }
        }
        assert_eq!(sha256_of_parameters(&weights)?, hex(&hash.finalize()));
        Ok(())
    }

    #[rstest]
    #[case::changed("a", Some("abd"), "a: is damaged")]
    #[case::shortened("a", Some("ab"), "a: is damaged")]
    #[case::removed("b/c", None, "b/c: is missing")]
    #[case::added("b/d", Some(""), "b/d: was not written with the others")]
    #[case::no_sums(CHECKSUMS, None, CHECKSUMS)]
    #[case::no_line(
        CHECKSUMS,
        Some("abc"),
        "SHA256SUMS: \"abc\", must be a sum and a name"
    )]
    fn a_file_that_is_not_as_it_was_is_named(
        #[case] file: &str,
        #[case] text: Option<&str>,
        #[case] expected: &str,
    ) {
        let folder = folder();
        let path = folder.path().join(file);
        match text {
            Some(text) => fs::write(path, text).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        let error = check_checksums(folder.path()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}
