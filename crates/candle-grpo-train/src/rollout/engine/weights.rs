//! Weight directories that servers read.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_grpo_nn::{CheckpointForm, Lora, Parameters, atomic_file};

use super::live_weights::LiveWeights;
use crate::config_json::set_dtype;
use crate::folder_lock::{FolderLock, LOCK};
use crate::owned_files::{CONFIG, WEIGHTS};
use crate::owned_files::{ENGINE_VERSION, Owned};
use crate::rollout::PolicyWeights;

/// The form in which an engine loads weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightFormat {
    /// Adapters in PEFT's format.
    Adapter,
    /// All weights as a Hugging Face directory, in the dtype in which the policy trains.
    Disk,
    /// All weights, which the processes of a server receive from the policy's memory.
    Memory,
    /// All weights, which a server reads from memory of the policy's GPU.
    SharedMemory,
}

/// One weight version, in a directory or in memory.
#[derive(Debug, Clone)]
pub struct EngineWeights {
    /// Number of training steps that the weights have seen.
    pub version: u64,
    /// The form.
    pub format: WeightFormat,
    /// The directory, an absolute path. Empty for weights in memory.
    pub path: PathBuf,
    /// Names of the versions that it replaces.
    pub replaced: Vec<String>,
    /// True if the server also samples from other weights, and has never had weights of this name.
    /// Its cache of keys and values must then stay as it is.
    pub is_beside_others: bool,
    /// The weights in memory.
    pub(super) live: Option<Arc<LiveWeights>>,
}

impl EngineWeights {
    /// Returns the version's name, which is also the adapter's: `policy-000012`.
    pub fn name(&self) -> String {
        name(self.version)
    }

    /// Returns weights in memory, which servers receive in `format`.
    pub(super) fn in_memory(version: u64, format: WeightFormat, live: Arc<LiveWeights>) -> Self {
        Self {
            version,
            format,
            path: PathBuf::new(),
            replaced: Vec::new(),
            is_beside_others: false,
            live: Some(live),
        }
    }

    /// Returns saved adapters.
    pub(super) fn saved(version: u64, folder: &Path) -> Result<Self> {
        Ok(Self {
            version,
            format: WeightFormat::Adapter,
            path: std::path::absolute(folder)?,
            replaced: Vec::new(),
            is_beside_others: true,
            live: None,
        })
    }
}

fn name(version: u64) -> String {
    format!("{ENGINE_VERSION}{version:06}")
}

/// The directory in which versions appear. It has one writer, and is emptied at the end.
pub(super) struct WeightFolder {
    path: PathBuf,
    versions: Vec<u64>,
    /// The form of the served checkpoint, if it has other parts.
    form: Option<CheckpointForm>,
    /// The dtype of whole weights.
    dtype: DType,
    _lock: FolderLock,
}

impl WeightFolder {
    /// Creates the directory if it is absent, and removes a killed program's versions.
    ///
    /// # Errors
    ///
    /// Fails if another program writes weights there, if the directory has versions but no lock
    /// from this program, or if it cannot be written.
    pub(super) fn open(path: &Path, form: Option<CheckpointForm>, dtype: DType) -> Result<Self> {
        let open = || -> Result<Self> {
            fs::create_dir_all(path)?;
            // Links stay, because they may lead elsewhere where the server runs.
            let path = std::path::absolute(path)?;
            let is_own = path.join(LOCK).is_file();
            let mut versions = Vec::new();
            for entry in fs::read_dir(&path)? {
                let entry = entry?.path();
                if Owned::EngineWeights.owns_folder(&entry) {
                    versions.push(entry);
                }
            }
            if let (false, Some(version)) = (is_own, versions.first()) {
                bail!(
                    "has {}, must be a directory for the weights of one run",
                    version.display()
                );
            }
            let lock = FolderLock::take(&path, "weights")?;
            if is_own {
                atomic_file::remove_leftovers(&path)?;
            }
            for version in versions {
                Owned::EngineVersion.remove(&version)?;
            }
            Ok(Self {
                path,
                versions: Vec::new(),
                form,
                dtype,
                _lock: lock,
            })
        };
        open().with_context(|| format!("weight_sync_folder {}", path.display()))
    }

    /// Writes the weights, and checks what was written. The directory appears once it is complete.
    pub(super) fn write(
        &mut self,
        weights: &PolicyWeights<'_>,
        format: WeightFormat,
    ) -> Result<EngineWeights> {
        let path = self.path.join(name(weights.version));
        let write = || match (format, weights.adapters) {
            (WeightFormat::Adapter, Some(adapters)) => {
                atomic_file::write_folder(&path, |folder| adapters.save(folder, None))?;
                Lora::load(&path, weights.model, &Device::Cpu).map(drop)?;
                Ok(())
            }
            (WeightFormat::Adapter, None) => {
                bail!("weight_sync: adapter, must be disk as no adapters train")
            }
            (WeightFormat::Memory | WeightFormat::SharedMemory, _) => {
                bail!("weights in memory, must be in a directory")
            }
            (WeightFormat::Disk, _) => {
                // A server may keep an output layer separate from a tied embedding.
                let all = weights.export().in_dtype(self.dtype);
                let (model, all) = all.with_untied_output(weights.model);
                let form = self.form.as_ref();
                let mut config = match form {
                    Some(form) => form.config(&model)?.into(),
                    None => model.to_hugging_face(&[])?,
                };
                set_dtype(&mut config, self.dtype);
                let config = serde_json::to_vec_pretty(&config)?;
                atomic_file::write_folder(&path, |folder| -> Result<()> {
                    atomic_file::write(&folder.join(CONFIG), &config)?;
                    let path = folder.join(WEIGHTS);
                    // The engine has the other parts, which do not train.
                    match form {
                        Some(form) => form.save_text(&all, &path)?,
                        None => all.save(&path)?,
                    }
                    Ok(())
                })?;
                Ok(Parameters::check_folder(&model, &path)?)
            }
        };
        write().with_context(|| format!("writing {}", path.display()))?;
        let replaced = self.versions.iter().filter(|&&v| v != weights.version);
        let replaced = replaced.map(|&version| name(version)).collect();
        self.versions.retain(|&version| version != weights.version);
        self.versions.push(weights.version);
        Ok(EngineWeights {
            version: weights.version,
            format,
            path,
            replaced,
            is_beside_others: false,
            live: None,
        })
    }

    /// Removes all versions except the last, which recovering servers need.
    pub(super) fn remove_replaced(&mut self) -> Result<()> {
        let last = self.versions.pop();
        let removed = self.remove_all();
        self.versions.extend(last);
        removed
    }

    /// Leaves all versions in place, until the directory is opened again.
    pub(super) fn keep(&mut self) {
        self.versions.clear();
    }

    fn remove_all(&mut self) -> Result<()> {
        for version in self.versions.drain(..) {
            let path = self.path.join(name(version));
            if path.exists() {
                atomic_file::remove_folder(&path)
                    .with_context(|| format!("removing {}", path.display()))?;
            }
        }
        Ok(())
    }
}

impl Drop for WeightFolder {
    fn drop(&mut self) {
        // A leftover is removed when the directory is opened again.
        let _ = self.remove_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_nn::{DecoderConfig, LoraConfig};

    fn model() -> DecoderConfig {
        DecoderConfig {
            vocab_size: 11,
            hidden_size: 8,
            intermediate_size: 16,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            max_position_embeddings: 8,
            tie_word_embeddings: true,
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn versions_are_whole_and_only_the_last_one_stays() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("weights");
        let model = model();
        let parameters = Parameters::init(&model, 1, &Device::Cpu).unwrap();
        let lora = LoraConfig::all_linear(2, 4.);
        let adapters = Lora::init(lora, &model, 1, &Device::Cpu).unwrap();
        let mut folder = WeightFolder::open(&path, None, DType::F32).unwrap();
        let weights = |version| PolicyWeights {
            version,
            model: &model,
            parameters: &parameters,
            adapters: Some(&adapters),
        };
        let first = folder.write(&weights(3), WeightFormat::Disk).unwrap();
        assert_eq!(first.name(), "policy-000003");
        // A tied model includes its output layer, for engines that keep it separate.
        let untied = DecoderConfig {
            tie_word_embeddings: false,
            ..model.clone()
        };
        let read = Parameters::load_folder(&untied, &first.path, &Device::Cpu).unwrap();
        let values = |name: &str| {
            let tensor = read.get(name).unwrap().as_detached_tensor();
            tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(
            values("lm_head.weight"),
            values("model.embed_tokens.weight")
        );

        let second = folder.write(&weights(4), WeightFormat::Adapter).unwrap();
        assert_eq!(second.replaced, ["policy-000003"]);
        assert!(second.path.join("adapter_config.json").is_file());
        folder.remove_replaced().unwrap();
        assert!(!first.path.exists() && second.path.exists());

        let error = format!(
            "{:#}",
            WeightFolder::open(&path, None, DType::F32).err().unwrap()
        );
        assert!(
            error.ends_with("another program has the weights open"),
            "{error}"
        );
        drop(folder);
        assert!(!second.path.exists());
    }

    #[test]
    fn whole_weights_have_the_dtype_in_which_the_policy_trains() {
        let temporary = tempfile::tempdir().unwrap();
        let model = model();
        let parameters = Parameters::init(&model, 1, &Device::Cpu).unwrap();
        let lora = LoraConfig::all_linear(2, 4.);
        let adapters = Lora::init(lora, &model, 1, &Device::Cpu).unwrap();
        let write = |dtype: DType| {
            let path = temporary.path().join(format!("{dtype:?}"));
            let mut folder = WeightFolder::open(&path, None, dtype).unwrap();
            let weights = PolicyWeights {
                version: 1,
                model: &model,
                parameters: &parameters,
                adapters: Some(&adapters),
            };
            let written = folder.write(&weights, WeightFormat::Disk).unwrap();
            let tensors = candle_core::safetensors::load(written.path.join(WEIGHTS), &Device::Cpu);
            let config = fs::read(written.path.join(CONFIG)).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
            (tensors.unwrap(), config["torch_dtype"].clone())
        };
        let ((whole, whole_name), (half, half_name)) = (write(DType::F32), write(DType::BF16));
        assert_eq!(
            (whole_name, half_name),
            ("float32".into(), "bfloat16".into())
        );
        assert_eq!(whole.len(), half.len());
        for (name, tensor) in &whole {
            let rounded = tensor.to_dtype(DType::BF16).unwrap();
            let values = |tensor: &candle_core::Tensor| {
                assert_eq!(tensor.dtype(), DType::BF16, "{name}");
                let tensor = tensor.to_dtype(DType::F32).unwrap();
                tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            assert_eq!(values(&half[name]), values(&rounded), "{name}");
        }
    }

    #[test]
    fn versions_of_a_killed_program_are_removed_and_files_of_others_are_not() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        fs::create_dir_all(path.join("policy-000007")).unwrap();
        fs::write(path.join("policy-000007/model.safetensors"), "").unwrap();
        fs::create_dir_all(path.join("policy-best")).unwrap();
        fs::write(path.join("notes.txt"), "mine").unwrap();
        // Without this program's lock, the version may be a user's model.
        let error = format!(
            "{:#}",
            WeightFolder::open(path, None, DType::F32).err().unwrap()
        );
        assert!(
            error.ends_with("must be a directory for the weights of one run"),
            "{error}"
        );
        assert!(path.join("policy-000007/model.safetensors").exists());
        fs::write(path.join(LOCK), "").unwrap();
        drop(WeightFolder::open(path, None, DType::F32).unwrap());
        assert!(!path.join("policy-000007").exists());
        assert!(path.join("policy-best").exists() && path.join("notes.txt").exists());
    }
}
