//! The comparison of a server's weights with the files that it has loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use candle_grpo_base::checksum::hex;
use candle_grpo_nn::tensor_places;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::protocol::{Checksums, Failure};
use super::weights::EngineWeights;
use crate::owned_files::WEIGHTS;

/// Number of bytes to hash at once.
const PART: usize = 1 << 20;

/// Weights that an engine stacks into one: its name, and those of its parts.
const STACKS: &[(&str, &[&str])] = &[
    ("qkv_proj", &["q_proj", "k_proj", "v_proj"]),
    ("gate_up_proj", &["gate_proj", "up_proj"]),
];

/// The checksum of each weight in a file, and of each stack of them.
type FileChecksums = BTreeMap<String, String>;

/// Compares the weights of servers with the transferred files.
///
/// A server may keep some weights in another form: padded, packed for its processor, or divided. So
/// after its first transfer, the weights with equal checksums are found. They are compared after
/// each later transfer.
pub(super) struct WeightCheck {
    /// The checksums of the files in a directory.
    expected: Mutex<Option<(PathBuf, Arc<FileChecksums>)>>,
    /// The weights to compare on each server, once they are known.
    comparable: Vec<Mutex<Option<BTreeSet<String>>>>,
}

impl WeightCheck {
    /// Creates the comparison for a number of servers.
    pub(super) fn new(servers: usize) -> Self {
        Self {
            expected: Mutex::new(None),
            comparable: (0..servers).map(|_| Mutex::new(None)).collect(),
        }
    }

    /// Compares the checksums that the server at `index` reports with those of `weights`.
    ///
    /// # Errors
    ///
    /// [`Failure::LostWeights`] if a weight differs that did not differ at first, and
    /// [`Failure::Unsupported`] if all differ at first.
    pub(super) fn compare(
        &self,
        index: usize,
        reported: &Checksums,
        weights: &EngineWeights,
    ) -> Result<(), Failure> {
        let expected = self.expected(&weights.path);
        let expected = expected.map_err(|error| Failure::Malformed(format!("{error:#}")))?;
        let is_equal = |name: &String| {
            let reported = reported.get(name).into_iter().flatten();
            reported.eq(expected.get(name)) && expected.contains_key(name)
        };
        let mut comparable = lock(&self.comparable[index]);
        if let Some(names) = &*comparable {
            let different: Vec<&str> = names
                .iter()
                .filter(|name| !is_equal(name))
                .map(String::as_str)
                .collect();
            return match different.as_slice() {
                [] => Ok(()),
                [first, others @ ..] => Err(Failure::LostWeights(format!(
                    "{first} and {} other weights differ from those of {}",
                    others.len(),
                    weights.name()
                ))),
            };
        }
        let names = expected.keys().filter(|name| is_equal(name));
        let names: BTreeSet<String> = names.cloned().collect();
        if names.is_empty() {
            return Err(Failure::Unsupported(format!(
                "none of its {} weights has the name and checksum of a transferred one; either they did not arrive, or the server keeps them in another form, for which it must be false",
                reported.len()
            )));
        }
        tracing::info!(
            "the checksums of {} of the server's {} weights are compared after each transfer",
            names.len(),
            reported.len()
        );
        *comparable = Some(names);
        Ok(())
    }

    /// Returns the checksums of the files in `folder`, which all servers share.
    fn expected(&self, folder: &Path) -> Result<Arc<FileChecksums>> {
        let mut expected = lock(&self.expected);
        if let Some((path, checksums)) = &*expected
            && path == folder
        {
            return Ok(Arc::clone(checksums));
        }
        let path = folder.join(WEIGHTS);
        let checksums = checksums(&path).with_context(|| path.display().to_string())?;
        let checksums = Arc::new(checksums);
        *expected = Some((folder.to_path_buf(), Arc::clone(&checksums)));
        Ok(checksums)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The checksums of a safetensors file's tensors, and of their stacks.
fn checksums(path: &Path) -> Result<FileChecksums> {
    let places = tensor_places(path)?;
    let mut sources: Vec<(String, Vec<Range<u64>>)> = Vec::new();
    for (name, place) in &places {
        sources.push((name.clone(), vec![place.clone()]));
        for (stack, parts) in STACKS {
            let of = |part: &str| name.replace(&format!(".{}.", parts[0]), &format!(".{part}."));
            let stacked = of(stack);
            if stacked == *name {
                continue;
            }
            let places = parts.iter().map(|part| places.get(&of(part)).cloned());
            if let Some(places) = places.collect() {
                sources.push((stacked, places));
            }
        }
    }
    let checksums = sources.into_par_iter().map(|(name, places)| {
        let mut file = File::open(path)?;
        let mut hash = Sha256::new();
        let mut part = vec![0; PART];
        for place in places {
            file.seek(SeekFrom::Start(place.start))?;
            let mut left = place.end - place.start;
            while left > 0 {
                let count = PART.min(usize::try_from(left).unwrap_or(PART));
                file.read_exact(&mut part[..count])?;
                hash.update(&part[..count]);
                left -= count as u64;
            }
        }
        Ok((name, hex(&hash.finalize())))
    });
    checksums.collect()
}
