//! Suggestions for keys and names that are unknown.

use super::document::join;
use super::former;
use super::import;
use super::other_names;
use super::schema::{SectionKeys, run_sections, sft_sections};
use super::sft_names;

/// Returns the message about a key that `section` does not have. `known` are the fields of the
/// section's struct.
pub(super) fn unknown_key(section: &str, key: &str, known: &[&str]) -> String {
    let place = other_names::place(key)
        .or_else(|| place_of(run_sections(), key))
        .or_else(|| import::place(key));
    unknown(run_sections(), place, section, key, known)
}

/// [`unknown_key`] in a supervised training file.
pub(super) fn unknown_sft_key(section: &str, key: &str, known: &[&str]) -> String {
    let place = sft_names::place(key).or_else(|| place_of(sft_sections(), key));
    unknown(sft_sections(), place, section, key, known)
}

/// Returns the message about an unknown key in a file with these sections. It may stand for the key
/// at `place`.
fn unknown(
    sections: &SectionKeys,
    place: Option<String>,
    section: &str,
    key: &str,
    known: &[&str],
) -> String {
    let path = join(section, key);
    // The place of a field that is a key elsewhere.
    let moved = |field: &str| {
        let is_here = sections.get(section)?.contains_key(field);
        place_of(sections, field).filter(|_| !is_here)
    };
    let keys = known.iter().copied().filter(|field| moved(field).is_none());
    let keys: Vec<&str> = keys.collect();
    // The sampler of evaluations has the keys of `sampling`.
    let place = place.map(|place| match place.strip_prefix("sampling.") {
        Some(key) if section == "evaluation" => format!("sampler.{key}"),
        _ => place,
    });
    if let Some(place) = place.filter(|place| *place != path) {
        // A section of the same name inside this one is nearer.
        let first = place.split('.').next().unwrap_or(&place);
        let is_inside = !section.is_empty() && !former::is_of(section) && keys.contains(&first);
        return if is_inside {
            format!("unknown key; here it is {section}.{place}")
        } else {
            format!("unknown key; here it is {place}")
        };
    }
    if let Some(nearest) = nearest(key, known) {
        return match moved(nearest) {
            Some(place) => format!("unknown key, did you mean {place}?"),
            None => format!("unknown key, did you mean `{nearest}`?"),
        };
    }
    match keys.as_slice() {
        [] => "unknown key, there are no keys here".to_owned(),
        keys => format!("unknown key, must be one of {}", keys.join(", ")),
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

/// Returns the path to a key that only one section has, or one alone of those nearest to the top.
fn place_of(sections: &SectionKeys, key: &str) -> Option<String> {
    let with_key = sections.iter().filter(|(_, keys)| keys.contains_key(key));
    let depth = |section: &str| join(section, key).matches('.').count();
    let least = with_key.clone().map(|(section, _)| depth(section)).min()?;
    let mut nearest = with_key.filter(|(section, _)| depth(section) == least);
    let (section, _) = nearest.next()?;
    nearest.next().is_none().then(|| join(section, key))
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
    use std::collections::BTreeSet;

    use super::super::schema::{has_key, run_schema};
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
        let message = unknown_sft_key("sft", "epoch", &["epochs"]);
        assert_eq!(message, "unknown key, did you mean epochs?");
    }

    /// A suggestion is a key that the program accepts, whatever section has the wrong key.
    #[test]
    fn every_suggestion_for_every_name_and_section_is_a_key() {
        let (sections, schema) = (run_sections(), run_schema());
        let names = other_names::NAMES.iter().map(|(name, _)| *name);
        let keys = sections
            .values()
            .flat_map(|keys| keys.keys().map(String::as_str));
        let all: BTreeSet<&str> = names.chain(keys).collect();
        for (section, known) in sections {
            let fields: Vec<&str> = known.keys().map(String::as_str).collect();
            for name in all.iter().filter(|name| !known.contains_key(**name)) {
                let message = unknown_key(section, name, &fields);
                let place = message.split_once("here it is ").map(|(_, place)| place);
                let place = place.filter(|place| !place.contains(" or "));
                let near = message.split_once("did you mean ").map(|(_, near)| near);
                let near = near.map(|near| match near.trim_end_matches('?') {
                    key if key.starts_with('`') => join(section, key.trim_matches('`')),
                    place => place.to_owned(),
                });
                for path in place.into_iter().chain(near.as_deref()) {
                    assert!(has_key(&schema, path), "{section}.{name}: {message}");
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
