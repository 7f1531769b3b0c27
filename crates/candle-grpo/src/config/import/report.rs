//! Import reports.

use std::fmt;

use super::super::former;
use super::{Import, ImportedKey, Severity, Verdict};

/// A key that a file leaves out, with two defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherDefault {
    /// The key.
    pub key: &'static str,
    /// Its default in the other trainer.
    pub theirs: &'static str,
    /// Its default here, which applies.
    pub here: &'static str,
}

impl OtherDefault {
    pub(super) const fn new(key: &'static str, theirs: &'static str, here: &'static str) -> Self {
        Self { key, theirs, here }
    }
}

/// A run's sizes: how much it samples for an update, and how often.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// Completions that are sampled at once.
    pub sampled: f64,
    /// Completions per update.
    pub update: f64,
    /// Updates from the completions that are sampled at once.
    pub updates: f64,
    /// Updates in the whole run, if the file bounds it.
    pub all_updates: Option<f64>,
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sampled,
            update,
            updates,
            all_updates,
        } = self;
        write!(
            f,
            "{sampled} completions per generation, at most {update} per update, updates per generation: {updates}"
        )?;
        match all_updates {
            Some(all) => write!(
                f,
                "; total: {} generations, {all} updates",
                (all / updates).ceil()
            ),
            None => Ok(()),
        }
    }
}

/// The report: one line for each key, and the counts on both sides.
impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Imported from {}. Keys:", self.system)?;
        let widths = self.keys.iter().map(|key| key.path.len());
        let width = widths.max().unwrap_or(0);
        let native = self.document.native().ok();
        for ImportedKey { path, verdict, .. } in &self.keys {
            write!(f, "  {path:width$}  ")?;
            match (verdict, &native) {
                (Verdict::Used(place), Some(native)) if former::is_of(place) => {
                    match native.places_of(path).join(", ").as_str() {
                        "" => writeln!(f, "used: it is the default")?,
                        places => writeln!(f, "used: {places}")?,
                    }
                }
                _ => writeln!(f, "{verdict}")?,
            }
        }
        if !self.defaults.is_empty() {
            writeln!(f, "Absent keys, whose default differs in {}:", self.system)?;
            for OtherDefault { key, theirs, here } in &self.defaults {
                writeln!(f, "  {key}: {here} here, {theirs} in {}", self.system)?;
            }
        }
        if let Some(sizes) = &self.sizes {
            writeln!(f, "In {}: {sizes}.", self.system)?;
        }
        Ok(())
    }
}

impl Import {
    /// Returns the report in short: how many keys have each verdict, and the counts.
    pub fn summary(&self) -> String {
        let count = |kind: fn(&Verdict) -> bool| {
            let verdicts = self.keys.iter().map(|key| &key.verdict);
            verdicts.filter(|verdict| kind(verdict)).count()
        };
        let defaults: Vec<&str> = self.defaults.iter().map(|default| default.key).collect();
        let left_out = if defaults.is_empty() {
            String::new()
        } else {
            format!(
                " Absent keys with different defaults: {}.",
                defaults.join(", ")
            )
        };
        let sizes = match &self.sizes {
            Some(sizes) => format!("In {}: {sizes}.\n", self.system),
            None => String::new(),
        };
        format!(
            "Imported from {}. Keys used: {}; without meaning here: {}; not supported: {} (`grpo import` lists them).{left_out}\n{sizes}",
            self.system,
            count(|verdict| matches!(verdict, Verdict::Used(_))),
            count(|verdict| matches!(verdict, Verdict::NoMeaning(_))),
            count(|verdict| matches!(verdict, Verdict::NotSupported(_))),
        )
    }

    /// Returns a warning for each key that would mean something, and is not supported.
    pub fn warnings(&self) -> Vec<String> {
        let unsupported = self.keys.iter().filter_map(|key| match &key.verdict {
            Verdict::NotSupported(reason) => Some((key, reason)),
            _ => None,
        });
        unsupported
            .map(|(key, reason)| {
                let ignored = match key.severity {
                    Severity::Note => "not supported",
                    _ => "not supported and ignored",
                };
                let message = format!("{}: {ignored}: {reason}", key.path);
                let error = super::ConfigError {
                    line: key.line,
                    ..self.document.error("", message)
                };
                error.to_string()
            })
            .collect()
    }
}
