//! Suggestions for keys and names that are unknown.

use std::collections::BTreeSet;

use candle_grpo_nn::AdamWConfig;
use candle_grpo_train::learn::LearningRateSchedule;
use candle_grpo_train::rollout::RolloutConfig;
use candle_grpo_train::{DatasetConfig, SamplingConfig, TrainConfig};
use serde::Serialize;
use serde_json::Value;

use super::document::join;
use super::former;
use super::other_names;
use super::run::{RunKeys, SAMPLER_ELSEWHERE};
use super::sections::{CheckpointConfig, EvaluationKeys};
use super::sft::{SFT, SFT_ELSEWHERE};
use super::sft_names;

/// Returns the message about a key that `section` does not have.
pub(super) fn unknown_key(section: &str, key: &str, known: &[&str]) -> String {
    let place = other_names::place(key).or_else(|| place_of(key));
    unknown(place, section, key, known)
}

/// [`unknown_key`] in a supervised training file.
pub(super) fn unknown_sft_key(section: &str, key: &str, known: &[&str]) -> String {
    unknown(sft_names::place(key), section, key, known)
}

/// Returns the message about an unknown key whose place in the file may be `place`.
fn unknown(place: Option<String>, section: &str, key: &str, known: &[&str]) -> String {
    let path = join(section, key);
    // The sampler of evaluations has the keys of `sampling`.
    let place = place.map(|place| match place.strip_prefix("sampling.") {
        Some(key) if section == "evaluation" => format!("sampler.{key}"),
        _ => place,
    });
    if let Some(place) = place.filter(|place| *place != path) {
        // A section of the same name inside this one is nearer.
        let inside = place.split('.').next().filter(|inside| {
            let is_section = !section.is_empty() && !former::is_of(section);
            is_section && known.contains(inside) && moved(section, inside).is_none()
        });
        return match inside {
            Some(_) => format!("unknown key; here it is {section}.{place}"),
            None => format!("unknown key; here it is {place}"),
        };
    }
    let place = |key: &str| moved(section, key);
    if let Some(nearest) = nearest(key, known) {
        return match place(nearest) {
            Some(place) => format!("unknown key, did you mean {place}?"),
            None => format!("unknown key, did you mean `{nearest}`?"),
        };
    }
    let known: Vec<&str> = known
        .iter()
        .copied()
        .filter(|key| place(key).is_none())
        .collect();
    match known.as_slice() {
        [] => "unknown key, there are no keys here".to_owned(),
        known => format!("unknown key, must be one of {}", known.join(", ")),
    }
}

/// Returns the message about a name that is not among `known`.
pub(super) fn unknown_name(name: &str, known: &[&str]) -> String {
    let suggestion = match nearest(name, known) {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None => String::new(),
    };
    format!("{name:?}, must be one of {}{suggestion}", known.join(", "))
}

/// Returns the place in a file for a field that is not in its struct's section.
fn moved(section: &str, key: &str) -> Option<&'static str> {
    let found = elsewhere(section).iter().find(|(name, _)| *name == key);
    found.map(|(_, place)| *place)
}

/// The fields that a file has outside their struct's section.
fn elsewhere(section: &str) -> &'static [(&'static str, &'static str)] {
    match section {
        SFT => &SFT_ELSEWHERE,
        "sampling" | "evaluation.sampler" => &SAMPLER_ELSEWHERE,
        _ => &[],
    }
}

/// Returns each section's keys.
pub(super) fn sections() -> Vec<(&'static str, BTreeSet<String>)> {
    vec![
        ("", keys_of(&RunKeys::default())),
        ("", keys_of(&TrainConfig::default())),
        ("data", keys_of(&DatasetConfig::default())),
        ("sampling", keys_of(&SamplingConfig::default())),
        ("rollout", keys_of(&RolloutConfig::default())),
        ("optimizer", keys_of(&AdamWConfig::default())),
        ("schedule", keys_of(&LearningRateSchedule::default())),
        ("evaluation", keys_of(&EvaluationKeys::default())),
        ("checkpoint", keys_of(&CheckpointConfig::default())),
    ]
}

/// Returns a section's keys.
pub(super) fn keys_of(section: &impl Serialize) -> BTreeSet<String> {
    match serde_json::to_value(section) {
        Ok(Value::Object(map)) => map.into_iter().map(|(key, _)| key).collect(),
        _ => BTreeSet::new(),
    }
}

/// Returns the path to a key that only one section has.
pub(super) fn place_of(key: &str) -> Option<String> {
    let mut places = sections()
        .into_iter()
        .filter(|(section, keys)| keys.contains(key) && moved(section, key).is_none())
        .map(|(section, _)| join(section, key));
    let place = places.next()?;
    places.next().is_none().then_some(place)
}

/// Returns the name that differs least from `unknown`, if it differs little.
pub(super) fn nearest<'a>(unknown: &str, names: &[&'a str]) -> Option<&'a str> {
    let length = unknown.chars().count();
    let most = 1 + length / 3;
    // Names of other lengths differ more.
    let names = names
        .iter()
        .filter(|name| name.chars().count().abs_diff(length) <= most);
    let (distance, name) = names
        .map(|name| (edit_distance(unknown, name), *name))
        .min()?;
    (distance <= most).then_some(name)
}

/// Returns how many letters have to be added, removed or changed (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_near_name_is_suggested() {
        let known = ["low", "high", "dual_clip"];
        assert_eq!(nearest("hihg", &known), Some("high"));
        assert_eq!(nearest("dual-clip", &known), Some("dual_clip"));
        assert_eq!(nearest("temperature", &known), None);
    }

    #[test]
    fn a_key_that_would_be_refused_is_not_suggested() {
        let known = ["seed", "temperature"];
        let message = unknown_key("sampling", "sed", &known);
        assert_eq!(message, "unknown key, did you mean seed?");
        let message = unknown_key("sampling", "zzzzzz", &known);
        assert_eq!(message, "unknown key, must be one of temperature");
    }

    /// A suggestion is a key that the program accepts, whatever section has the wrong key.
    #[test]
    fn every_suggestion_for_every_name_and_section_is_a_key() {
        let valid = other_names::all_keys();
        let sections = sections();
        let names = other_names::NAMES
            .iter()
            .map(|(name, _)| (*name).to_owned());
        let keys = sections.iter().flat_map(|(_, keys)| keys.iter().cloned());
        let all: BTreeSet<String> = names.chain(keys).collect();
        for (section, known) in &sections {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            for name in &all {
                if known.contains(&name.as_str()) {
                    continue;
                }
                let message = unknown_key(section, name, &known);
                let place = message.split_once("here it is ").map(|(_, place)| place);
                let place = place.filter(|place| !place.contains(" or "));
                let near = message.split_once("did you mean ").map(|(_, near)| near);
                let near = near.map(|near| match near.trim_end_matches('?') {
                    key if key.starts_with('`') => join(section, key.trim_matches('`')),
                    place => place.to_owned(),
                });
                for path in place.into_iter().chain(near.as_deref()) {
                    let pointer = format!("/{}", path.replace('.', "/"));
                    let is_key = valid.pointer(&pointer).is_some();
                    assert!(is_key, "{section}.{name}: {message}");
                }
            }
        }
    }

    #[test]
    fn a_key_of_another_section_is_found() {
        let message = unknown_key("", "response_length", &["model"]);
        assert_eq!(message, "unknown key; here it is sampling.max_new_tokens");
        let message = unknown_key("rollout", "temperature", &["engine"]);
        assert_eq!(message, "unknown key; here it is sampling.temperature");
        let message = unknown_key("evaluation", "temperature", &["pass_at", "sampler"]);
        assert_eq!(
            message,
            "unknown key; here it is evaluation.sampler.temperature"
        );
    }

    #[test]
    fn edit_distance_counts_letters() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }
}
