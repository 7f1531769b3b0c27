//! The comparison of a server's weights with those that it has received.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_grpo_base::checksum::hex;
use candle_grpo_nn::tensor_places;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::live_weights::{Listed, LiveWeights};
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

/// The checksum of each transferred weight, and of each stack of them.
type Expected = BTreeMap<String, String>;

/// The checksums of some weights: those in a directory, or those in memory.
type OfWeights = (PathBuf, Weak<LiveWeights>, Arc<Expected>);

/// Compares the weights of servers with the transferred ones.
///
/// A server may keep some weights in another form: padded, packed for its processor, or divided. So
/// after its first transfer, the weights with equal checksums are found. They are compared after
/// each later transfer.
pub(super) struct WeightCheck {
    /// The checksums of the last weights.
    expected: Mutex<Option<OfWeights>>,
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
        let expected = self.expected(weights);
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

    /// Returns the checksums of `weights`, which all servers share.
    fn expected(&self, weights: &EngineWeights) -> Result<Arc<Expected>> {
        let mut expected = lock(&self.expected);
        let live = weights.live.as_ref().map(Arc::downgrade);
        let live = live.unwrap_or_default();
        if let Some((path, last, checksums)) = &*expected
            && *path == weights.path
            && Weak::ptr_eq(last, &live)
        {
            return Ok(Arc::clone(checksums));
        }
        let checksums = match &weights.live {
            Some(live) => memory_checksums(live)?,
            None => {
                let path = weights.path.join(WEIGHTS);
                file_checksums(&path).with_context(|| path.display().to_string())?
            }
        };
        let checksums = Arc::new(checksums);
        *expected = Some((weights.path.clone(), live, Arc::clone(&checksums)));
        Ok(checksums)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The checksums of the weights `names`, whose bytes `update` adds to a hash, and of their stacks.
fn checksums(
    names: &BTreeSet<&str>,
    update: impl Fn(&str, &mut Sha256) -> Result<()> + Sync,
) -> Result<Expected> {
    let mut sources: Vec<(String, Vec<String>)> = Vec::new();
    for &name in names {
        sources.push((name.to_owned(), vec![name.to_owned()]));
        for (stack, parts) in STACKS {
            let of = |part: &str| name.replace(&format!(".{}.", parts[0]), &format!(".{part}."));
            let stacked = of(stack);
            let parts: Vec<String> = parts.iter().map(|part| of(part)).collect();
            if stacked != name && parts.iter().all(|part| names.contains(&**part)) {
                sources.push((stacked, parts));
            }
        }
    }
    let checksums = sources.into_par_iter().map(|(name, parts)| {
        let mut hash = Sha256::new();
        for part in parts {
            update(&part, &mut hash)?;
        }
        Ok((name, hex(&hash.finalize())))
    });
    checksums.collect()
}

/// The checksums of a safetensors file's tensors.
fn file_checksums(path: &Path) -> Result<Expected> {
    let places = tensor_places(path)?;
    let names = places.keys().map(String::as_str).collect();
    checksums(&names, |name, hash| {
        let place = &places[name];
        let mut file = File::open(path)?;
        let mut part = vec![0; PART];
        file.seek(SeekFrom::Start(place.start))?;
        let mut left = place.end - place.start;
        while left > 0 {
            let count = PART.min(usize::try_from(left).unwrap_or(PART));
            file.read_exact(&mut part[..count])?;
            hash.update(&part[..count]);
            left -= count as u64;
        }
        Ok(())
    })
}

/// The checksums of weights in memory.
fn memory_checksums(live: &LiveWeights) -> Result<Expected> {
    let listed = live.list()?;
    let listed: BTreeMap<&str, &Listed> = listed.iter().map(|of| (&*of.name, of)).collect();
    let names = listed.keys().copied().collect();
    checksums(&names, |name, hash| {
        let mut bytes = Vec::with_capacity(listed[name].bytes);
        let copy =
            |tensors: &[Tensor]| tensors.iter().try_for_each(|of| of.write_bytes(&mut bytes));
        live.read(std::slice::from_ref(listed[name]), copy)?;
        hash.update(&bytes);
        Ok(())
    })
}
