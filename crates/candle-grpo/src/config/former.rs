//! Files in the words of earlier versions, which had the keys of a run in the sections `algorithm`,
//! `sampler` and `training`.

use std::borrow::Cow;
use std::cmp::Reverse;

use candle_grpo_train::TrainConfig;
use candle_grpo_train::learn::DemonstrationConfig;
use serde_json::{Map, Value, json};

use super::algorithm::AlgorithmConfig;
use super::algorithm_keys::KeyError;
use super::document::Document;
use super::error::ConfigError;
use super::merge::{merge, patch_of};
use super::run::settings;
use super::schema::keys_of;
use super::suggestions::unknown_key;

const ALGORITHM: &str = "algorithm";
const TRAINING: &str = "training";
const ROWS: &str = "demonstrations";

/// The sections that a file no longer has.
pub(super) const SECTIONS: [&str; 3] = [ALGORITHM, "sampler", TRAINING];

/// Keys that have another place now.
const MOVED: [(&str, &str); 8] = [
    ("sampler", "sampling"),
    ("algorithm.response_length", "sampling.max_new_tokens"),
    ("algorithm.preset", "preset"),
    ("algorithm.recipe", "recipe"),
    ("algorithm.rollout_batch_size", "prompts_per_step"),
    ("algorithm.num_return_sequences_in_group", "num_generations"),
    ("algorithm.prompt_length", "max_prompt_tokens"),
    ("algorithm.ppo_epochs", "epochs"),
];

/// A switch of earlier versions, and the key in its place.
const SHARDING: [&str; 2] = ["sharded_optimizer", "sharding"];

/// The settings that keys of the section `algorithm` change together.
const EFFECTS: [&str; 4] = ["recipe", "critic", "reward_kl", "sample_filters"];

/// Returns the place of a key that keeps its value.
pub(super) fn place(path: &str) -> Cow<'_, str> {
    if let Some(key) = path.strip_prefix("training.") {
        return Cow::Borrowed(key);
    }
    let moved = MOVED.iter().find_map(|(from, to)| {
        let rest = path.strip_prefix(from)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
    });
    moved.map_or(Cow::Borrowed(path), Cow::Owned)
}

/// Returns whether a path is in a section that a file no longer has.
pub(super) fn is_of(path: &str) -> bool {
    let section = path.split('.').next().unwrap_or(path);
    SECTIONS.contains(&section)
}

/// Returns the paths that a key at `place` had.
fn paths(place: &str) -> impl Iterator<Item = String> {
    let moved = MOVED.iter().filter_map(move |(from, to)| {
        let rest = place.strip_prefix(to)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{from}{rest}"))
    });
    moved.chain([format!("{TRAINING}.{place}")])
}

/// Returns whether the section `demonstrations` has rows, whose section is now another one.
fn has_rows(document: &Document) -> bool {
    let Some(Value::Object(section)) = document.get(ROWS) else {
        return false;
    };
    let settings = keys_of::<DemonstrationConfig>();
    section.keys().any(|key| !settings.contains(key))
        && document.get("demonstration_data").is_none()
}

impl Document {
    /// Returns whether the file has a value for the key at `path`, in the words of any version.
    pub(super) fn sets(&self, path: &str) -> bool {
        let place = place(path);
        let given = |path: &str| self.get(path).is_some_and(|value| !value.is_null());
        given(&place) || paths(&place).any(|path| given(&path))
    }

    /// Returns whether the file has sections of earlier versions.
    pub fn is_former(&self) -> bool {
        SECTIONS.iter().any(|section| self.get(section).is_some()) || has_rows(self)
    }

    /// Returns the file with the keys of this version. Errors about them still have the key and the
    /// line of the file.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if a key of an earlier version is unknown or not valid, or is
    /// given in both words.
    pub fn native(&self) -> Result<Cow<'_, Self>, ConfigError> {
        match self.with_sharding()? {
            document if !document.is_former() => Ok(document),
            document => document.translated().map(Cow::Owned),
        }
    }

    /// Returns the file with `sharding` in place of the switch of earlier versions.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if the switch is not valid, or both are given.
    pub(super) fn with_sharding(&self) -> Result<Cow<'_, Self>, ConfigError> {
        let mut document = Cow::Borrowed(self);
        for section in ["", "training.", "sft."] {
            let [from, to] = SHARDING.map(|key| format!("{section}{key}"));
            let sharding = match self.get(&from) {
                None => continue,
                Some(Value::Bool(true)) => "optimizer",
                Some(Value::Bool(false) | Value::Null) => "none",
                Some(other) => {
                    return Err(self.error(&from, format!("{other}, must be true or false")));
                }
            };
            let document = document.to_mut();
            document.rename(&from, &to)?;
            document.set(&to, json!(sharding));
        }
        Ok(document)
    }

    /// [`Self::native`] of a file with sections of earlier versions.
    fn translated(&self) -> Result<Self, ConfigError> {
        let mut native = self.clone();
        if has_rows(self) {
            native.rename(ROWS, "demonstration_data")?;
        }
        let section = self.get(TRAINING).filter(|section| !section.is_null());
        let keys: Map<String, Value> = self.parse(TRAINING, section.unwrap_or(&json!({})))?;
        for key in keys.keys() {
            let path = format!("{TRAINING}.{key}");
            if !settings().contains_key(key) {
                let known: Vec<&str> = settings().keys().map(String::as_str).collect();
                return Err(self.error(&path, unknown_key(TRAINING, key, &known)));
            }
            native.rename(&path, key)?;
        }
        native.remove(TRAINING);
        for (from, to) in MOVED {
            native.rename(from, to)?;
        }
        if let Some(mut keys) = native.remove(ALGORITHM) {
            // Keys that others depend on.
            for (key, place) in [
                ("response_length", "sampling.max_new_tokens"),
                ("preset", "preset"),
            ] {
                if let (Some(value), Value::Object(keys)) = (native.get(place), &mut keys) {
                    keys.insert(key.to_owned(), value.clone());
                }
            }
            native.lay_in(self, &keys)?;
        }
        Ok(native)
    }

    /// Sets what the keys of the section `algorithm` of `former` change together.
    fn lay_in(&mut self, former: &Self, keys: &Value) -> Result<(), ConfigError> {
        let with = effects(former, keys)?;
        let with = with.map_err(|error| former.error(&path_of(error.key), error.message))?;
        self.note_causes(former, keys, &with)?;
        let preset = json!({"preset": keys["preset"], "response_length": keys["response_length"]});
        let base = effects(former, &preset)?.unwrap_or_default();
        for field in EFFECTS {
            let with = with[field].clone();
            let value = match self.get(field) {
                // A section without keys.
                Some(Value::Null) if base[field].is_object() => with,
                Some(ours) => merge(with, ours.clone()),
                None => with,
            };
            if let Some(patch) = patch_of(&base[field], value) {
                self.set(field, patch);
            }
        }
        Ok(())
    }

    /// Notes which key of the section `algorithm` each setting of `with` follows from: the one
    /// without which it is another.
    fn note_causes(
        &mut self,
        former: &Self,
        keys: &Value,
        with: &Value,
    ) -> Result<(), ConfigError> {
        let mut causes = Vec::new();
        let given = keys.as_object().into_iter().flatten();
        for (key, value) in given.filter(|(_, value)| !value.is_null()) {
            let mut rest = keys.clone();
            let mut left_out: &str = key;
            let without = loop {
                if let Value::Object(rest) = &mut rest {
                    rest.shift_remove(left_out);
                }
                match effects(former, &rest)? {
                    Ok(without) => break without,
                    // Another key has no effect without this one.
                    Err(error) if rest.get(error.key).is_some() => left_out = error.key,
                    Err(_) => break with.clone(),
                }
            };
            let mut paths = Vec::new();
            for field in EFFECTS {
                changed(field, &with[field], &without[field], &mut paths);
            }
            causes.push((path_of(key), value, paths));
        }
        // A key that sets less is a closer cause, and a value is a closer one than its switch.
        causes.sort_by_key(|(_, value, paths)| (Reverse(paths.len()), !value.is_boolean()));
        for (key, value, paths) in causes {
            let key = match former.get(&key) {
                Some(_) => Cow::Borrowed(key.as_str()),
                None => place(&key),
            };
            for path in paths {
                if self.get(&path).is_none() {
                    self.note_cause(&path, former, &key, value);
                }
            }
        }
        Ok(())
    }
}

/// Returns the path of a key of the section `algorithm`.
fn path_of(key: &str) -> String {
    format!("{ALGORITHM}.{key}")
}

/// Returns the default settings with these keys of the section `algorithm` of `former`.
fn effects(former: &Document, keys: &Value) -> Result<Result<Value, KeyError>, ConfigError> {
    let mut keys = keys.clone();
    AlgorithmConfig::expand(&mut keys);
    let keys: AlgorithmConfig = former.parse(ALGORITHM, &keys)?;
    let mut config = TrainConfig::default();
    Ok(keys.apply(&mut config).map(|()| json!(config)))
}

/// Lists the paths at and below `path` whose value is another in `without`.
fn changed(path: &str, with: &Value, without: &Value, paths: &mut Vec<String>) {
    if with == without {
        return;
    }
    match with {
        Value::Object(fields) => {
            if !without.is_object() || path.ends_with(']') {
                paths.push(path.to_owned());
            }
            for (key, value) in fields {
                let other = without.get(key).unwrap_or(&Value::Null);
                changed(&format!("{path}.{key}"), value, other, paths);
            }
        }
        Value::Array(items) => {
            paths.push(path.to_owned());
            for (i, value) in items.iter().enumerate() {
                let other = without.get(i).unwrap_or(&Value::Null);
                changed(&format!("{path}[{i}]"), value, other, paths);
            }
        }
        _ => paths.push(path.to_owned()),
    }
}
