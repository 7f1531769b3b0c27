//! A translation in progress: a file's keys, one after the other.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::super::document::Document;
use super::super::former;
use super::super::schema::run_sections;
use super::super::suggestions::nearest;
use super::report::{OtherDefault, Sizes};
use super::rules::Rule;
use super::{Import, ImportedKey, Severity, System, Verdict};

/// The most bytes that all `${key}` may insert.
const INTERPOLATED: usize = 1 << 20;

/// The translation of another trainer's file.
pub(super) struct Translation<'a> {
    pub(super) source: &'a Document,
    keys: Vec<ImportedKey>,
    document: Document,
    /// The keys that have a verdict.
    done: BTreeSet<String>,
    /// The bytes left from [`INTERPOLATED`].
    room: usize,
}

impl<'a> Translation<'a> {
    pub(super) fn new(source: &'a Document) -> Self {
        Self {
            source,
            keys: Vec::new(),
            document: source.with_value(json!({})),
            done: BTreeSet::new(),
            room: INTERPOLATED,
        }
    }

    /// Returns the value at a path in the file, unless it is null.
    pub(super) fn get(&mut self, path: &str) -> Option<Value> {
        let value = self.source.get(path).filter(|value| !value.is_null())?;
        Some(self.interpolated(value))
    }

    /// Replaces `${key}` with that key's value in the file, repeatedly, while there is room.
    pub(super) fn interpolated(&mut self, value: &Value) -> Value {
        let mut value = value.clone();
        for _ in 0..8 {
            let Value::String(text) = &value else { break };
            let Some((before, rest)) = text.split_once("${") else {
                break;
            };
            let Some((name, after)) = rest.split_once('}') else {
                break;
            };
            // Of Hydra: a key, or else a value.
            let (name, other) = match name.strip_prefix("oc.select:") {
                Some(select) => select.split_once(',').unwrap_or((select, "null")),
                None => (name, ""),
            };
            let other = serde_json::from_str::<Value>(other.trim()).ok();
            let found = self.source.get(name).or(other.as_ref());
            let Some(found) = found.filter(|_| self.room > 0) else {
                break;
            };
            self.room = self.room.saturating_sub(found.to_string().len());
            value = match found {
                found if before.is_empty() && after.is_empty() => found.clone(),
                Value::String(found) => Value::String(format!("{before}{found}{after}")),
                found => Value::String(format!("{before}{found}{after}")),
            };
        }
        value
    }

    pub(super) fn number(&mut self, path: &str) -> Option<f64> {
        self.get(path)?.as_f64()
    }

    pub(super) fn text(&mut self, path: &str) -> Option<String> {
        self.get(path)?.as_str().map(str::to_owned)
    }

    pub(super) fn flag(&mut self, path: &str) -> bool {
        self.get(path) == Some(Value::Bool(true))
    }

    /// Sets `place` to `value`, which the key at `path` decides.
    pub(super) fn used(&mut self, path: &str, place: &str, value: Value) {
        let note = match self.source.get(path) {
            Some(given) if *given != value && !value.is_object() => format!("{place} = {value}"),
            _ => place.to_owned(),
        };
        let line = self.source.line_of(path);
        self.document.insert(place, value, path, line);
        self.record(path, Verdict::Used(note), Severity::Note);
    }

    /// Sets `place` to `value`, unless a key has set it: what the other trainer does by default.
    pub(super) fn default(&mut self, place: &str, value: Value) {
        if self.document.get(place).is_none() {
            self.document.set(place, value);
        }
    }

    /// Sets `place` to `value`. The paths that the file has count as used; without any, `value` is
    /// the other trainer's default.
    pub(super) fn decide(&mut self, paths: &[&str], place: &str, value: Value) {
        let given: Vec<&str> = paths
            .iter()
            .copied()
            .filter(|path| self.source.get(path).is_some_and(|value| !value.is_null()))
            .collect();
        if given.is_empty() {
            self.default(place, value);
            return;
        }
        for path in given {
            self.used(path, place, value.clone());
        }
    }

    /// Sets `place` to the number at `path`, or to the other trainer's default.
    pub(super) fn decide_number(&mut self, path: &str, place: &str, default: f64) {
        let value = self.number(path).unwrap_or(default);
        self.decide(&[path], place, json!(value));
    }

    /// Sets the decay of the learning rate to `kind`, a scheduler of transformers, over the
    /// translated `max_steps`.
    pub(super) fn decay(&mut self, path: &str, kind: &str) {
        let decay = match kind {
            "constant" | "constant_with_warmup" => {
                return self.no_meaning(path, "it is the default here");
            }
            "linear" => "linear",
            "cosine" | "cosine_with_min_lr" => "cosine",
            kind => {
                let known = "constant, linear, cosine or cosine_with_min_lr";
                return self.refuse(path, format!("{kind}, must be {known}"));
            }
        };
        match self.translated("max_steps") {
            Some(steps) => {
                self.decide(&[path], "schedule.decay", json!(decay));
                self.default("schedule.decay_until", steps);
            }
            None => self.refuse(path, "set max_steps, over which it decays"),
        }
    }

    /// The key at `path` has no meaning here.
    pub(super) fn no_meaning(&mut self, path: &str, why: impl Into<String>) {
        self.record(path, Verdict::NoMeaning(why.into()), Severity::Note);
    }

    /// Marks a section's keys as having no meaning here, unless they have a verdict.
    pub(super) fn section_without_meaning(&mut self, section: &str, why: &str) {
        for (path, _) in self.source.leaves() {
            if fits(section, &path) {
                self.no_meaning(&path, why);
            }
        }
    }

    /// Returns what the translation has at a place so far.
    pub(super) fn translated(&self, place: &str) -> Option<Value> {
        self.document.get(place).cloned()
    }

    /// The key at `path` changes what is learned, and is not supported.
    pub(super) fn refuse(&mut self, path: &str, why: impl Into<String>) {
        self.record(path, Verdict::NotSupported(why.into()), Severity::Changes);
    }

    fn record(&mut self, path: &str, verdict: Verdict, severity: Severity) {
        if self.source.get(path).is_some() && self.done.insert(path.to_owned()) {
            self.keys.push(ImportedKey {
                path: path.to_owned(),
                line: self.source.line_of(path),
                verdict,
                severity,
            });
        }
    }

    /// Gives each remaining key the verdict from the first matching rule. The keys in `idle`,
    /// separated by spaces, do not change what is learned. A key of ours stays as it is, unless the
    /// other trainer has a section with that name. There, only keys that a rule asks for are ours.
    pub(super) fn apply(&mut self, rules: &[(&str, Rule)], idle: &str) {
        let patterns = || {
            rules
                .iter()
                .map(|(pattern, _)| *pattern)
                .chain(idle.split_whitespace())
        };
        let theirs: BTreeSet<&str> = patterns().map(first).collect();
        let keys = &run_sections()[""];
        let is_ours =
            |top: &str| (keys.contains_key(top) || former::is_of(top)) && !theirs.contains(top);
        for (path, value) in self.source.leaves() {
            if self.is_done(&path) {
                continue;
            }
            let value = self.interpolated(value);
            let rule = rules.iter().find(|(pattern, _)| fits(pattern, &path));
            let is_advised = is_advised(rules, &path);
            let rule = rule.filter(|(pattern, _)| *pattern == path || !is_advised);
            let is_idle = || idle.split_whitespace().any(|pattern| fits(pattern, &path));
            match rule {
                Some((pattern, rule)) => self.follow(pattern, &path, value, rule),
                None if is_advised || is_ours(first(&path)) => {
                    self.used(&path, &former::place(&path), value);
                }
                None if is_idle() => self.no_meaning(&path, "it does not change what is learned"),
                None if value.is_null() => self.no_meaning(&path, "it is absent"),
                None => {
                    let ours = keys.keys().map(String::as_str).filter(|key| is_ours(key));
                    self.unknown(&path, &path, &patterns().chain(ours).collect::<Vec<_>>());
                }
            }
        }
    }

    /// Gives the key at `path`, which fits `pattern`, its verdict from a rule.
    pub(super) fn follow(&mut self, pattern: &str, path: &str, value: Value, rule: &Rule) {
        let is_empty = value == json!({}) || value == json!([]);
        let off = value == Value::Bool(false) || value.is_null() || is_empty;
        // Two trainers may have a name in common.
        let given = |place: &str| former::place(place) != path && self.source.sets(place);
        match *rule {
            Rule::To(place) | Rule::Set(place, _) | Rule::Advise(place) if given(place) => {
                self.no_meaning(path, format!("{place} is set"));
            }
            Rule::To(_) | Rule::Convert(..) if value.is_null() => {
                self.no_meaning(path, "it is absent");
            }
            Rule::To(place) => {
                // A key of a section has the same name in the section here.
                let key = path.strip_prefix(pattern).unwrap_or_default();
                self.used(path, &format!("{place}{key}"), value);
            }
            Rule::Convert(place, convert) => match convert(&value) {
                Some(value) => self.used(path, place, value),
                None => self.refuse(path, format!("{value} has no counterpart")),
            },
            Rule::NoMeaning(why) => self.no_meaning(path, why),
            Rule::Refuse(why) if off => self.no_meaning(path, format!("it is off ({why})")),
            Rule::Set(..) | Rule::Advise(_) | Rule::Unless(..) if off => {
                self.no_meaning(path, "it is off");
            }
            Rule::Unless(default, _) if is_same(&value, default) => {
                self.no_meaning(path, "it has no effect");
            }
            Rule::Unless(_, why) | Rule::Refuse(why) => self.refuse(path, why),
            Rule::Set(place, why) => {
                self.refuse(path, format!("set {}{why}", former::place(place)));
            }
            Rule::Advise(place) => {
                let why = format!("set {}", former::place(place));
                self.record(path, Verdict::NotSupported(why), Severity::Note);
            }
        }
    }

    /// The key at `path`, with this name, is not among the `known` ones.
    pub(super) fn unknown(&mut self, path: &str, name: &str, known: &[&str]) {
        let nearest = nearest(name, known).map(|name| format!(", did you mean `{name}`?"));
        let why = format!("not a known key{}", nearest.unwrap_or_default());
        self.record(path, Verdict::NotSupported(why), Severity::Unknown);
    }

    /// Returns whether the key at `path` has a verdict.
    pub(super) fn is_done(&self, path: &str) -> bool {
        self.done.contains(path)
    }

    /// Removes what a key has set at `place`, as it has no effect for a reason.
    pub(super) fn leave_out(&mut self, place: &str, why: &str) {
        self.document.remove(place);
        for key in &mut self.keys {
            if let Verdict::Used(used) = &key.verdict
                && used.split(" = ").next() == Some(place)
            {
                key.verdict = Verdict::NoMeaning(why.to_owned());
            }
        }
    }

    /// Returns the `defaults` keys that the file lacks, if the number of steps is `unknown`.
    pub(super) fn left_out<const N: usize>(
        &self,
        unknown: bool,
        defaults: [OtherDefault; N],
    ) -> Vec<OtherDefault> {
        let left_out = |default: &OtherDefault| unknown && self.source.get(default.key).is_none();
        defaults.into_iter().filter(left_out).collect()
    }

    /// Returns the translation, with its keys in file order.
    pub(super) fn finish(
        mut self,
        system: System,
        defaults: Vec<OtherDefault>,
        sizes: Option<Sizes>,
    ) -> Import {
        self.keys.sort_by_key(|key| key.line);
        Import {
            system,
            keys: self.keys,
            defaults,
            sizes,
            document: self.document,
        }
    }
}

/// Returns the first step of a path.
pub(super) fn first(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

/// Returns whether a rule asks for our key at `path`, possibly in a section that both trainers
/// have.
fn is_advised(rules: &[(&str, Rule)], path: &str) -> bool {
    rules.iter().any(|(_, rule)| match rule {
        Rule::Set(place, _) => fits(place, path),
        _ => false,
    })
}

/// Returns whether `value` equals `default`, which is JSON. `1` equals `1.0`.
fn is_same(value: &Value, default: &str) -> bool {
    let default: Value = serde_json::from_str(default).unwrap_or_default();
    match (value.as_f64(), default.as_f64()) {
        (Some(value), Some(default)) => value == default,
        _ => *value == default,
    }
}

/// Returns a count as a value: a whole number if it is one.
pub(super) fn count(x: f64) -> Value {
    if x.fract() == 0. && (0. ..1e15).contains(&x) {
        json!(x as u64)
    } else {
        json!(x)
    }
}

/// Returns whether `pattern`, in which `*` stands for one step, is `path` or a section around it.
pub(super) fn fits(pattern: &str, path: &str) -> bool {
    let mut steps = path.split(['.', '[']);
    pattern.split('.').all(|wanted| {
        steps
            .next()
            .is_some_and(|step| wanted == "*" || wanted == step)
    })
}
