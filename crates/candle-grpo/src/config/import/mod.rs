//! Other trainers' configuration files, translated to our own.

mod openrlhf;
mod overrides;
mod report;
mod roll;
mod rules;
mod translation;
mod trl;
mod verl;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use super::document::Document;
use super::error::ConfigError;
use super::former;
use rules::Rule;

pub(super) use overrides::of as overrides_of;
pub use report::{OtherDefault, Sizes};
pub(super) use verl::SIGN as VERL_SIGN;

/// A trainer whose files are imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// ROLL 0.3.0.
    Roll,
    /// TRL 1.16.0: a flat file for `trl grpo`.
    Trl,
    /// verl 0.9.1: a Hydra file, or the overrides in a script.
    Verl,
    /// OpenRLHF: `train_ppo_ray` options in a script, or as a file.
    OpenRlhf,
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Roll => "ROLL",
            Self::Trl => "TRL",
            Self::Verl => "verl",
            Self::OpenRlhf => "OpenRLHF",
        })
    }
}

/// The outcome for a key of another trainer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is used under this key.
    Used(String),
    /// It has no meaning here for this reason.
    NoMeaning(String),
    /// It has a meaning that is not supported.
    NotSupported(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Used(key) => write!(f, "used: {key}"),
            Self::NoMeaning(why) => write!(f, "no meaning here: {why}"),
            Self::NotSupported(why) => write!(f, "not supported: {why}"),
        }
    }
}

/// The severity of leaving a key out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The run learns the same without it.
    Note,
    /// The run would learn something else, or from other batches.
    Changes,
    /// Neither this program nor the other trainer has the key.
    Unknown,
}

/// A key in another trainer's file, and its verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedKey {
    /// Its path in the file.
    pub path: String,
    /// Its line.
    pub line: Option<usize>,
    /// Its verdict.
    pub verdict: Verdict,
    /// Its weight if it is not used.
    pub severity: Severity,
}

/// Another trainer's file, translated.
#[derive(Debug, Clone)]
pub struct Import {
    /// The trainer.
    pub system: System,
    /// Every key, in file order.
    pub keys: Vec<ImportedKey>,
    /// The keys that the file leaves out, and whose defaults differ.
    pub defaults: Vec<OtherDefault>,
    /// The steps and the samples per update on both sides, if known.
    pub sizes: Option<Sizes>,
    /// The translation. Its errors have the file's keys and lines.
    pub document: Document,
}

impl Import {
    /// Translates `document` if it is another trainer's file for one process.
    pub fn new(document: &Document) -> Option<Self> {
        Self::of_processes(document, 1)
    }

    /// Translates as [`Self::new`] does, for a file meant for this number of processes. Only TRL's
    /// sizes count per process.
    pub fn of_processes(document: &Document, processes: usize) -> Option<Self> {
        let translate = match system(document)? {
            System::Roll => roll::translate,
            System::Trl => return Some(trl::translate(document, processes)),
            System::Verl => verl::translate,
            System::OpenRlhf => openrlhf::translate,
        };
        Some(translate(document))
    }

    /// Rejects a key that neither trainer has. Also rejects a key that changes what a run learns
    /// and has no equivalent, unless `allow_unsupported` is true.
    ///
    /// # Errors
    ///
    /// Returns an error with the first such key's line, and the reasons for all of them.
    pub fn check(&self, allow_unsupported: bool) -> Result<(), ConfigError> {
        let refused = |severity: Severity| match severity {
            Severity::Note => false,
            Severity::Changes => !allow_unsupported,
            Severity::Unknown => true,
        };
        let keys: Vec<&ImportedKey> = self
            .keys
            .iter()
            .filter(|key| refused(key.severity))
            .collect();
        let Some((first, rest)) = keys.split_first() else {
            return Ok(());
        };
        let mut message = format!("{}: {}", first.path, first.verdict);
        for key in rest {
            let line = key
                .line
                .map_or(String::new(), |line| format!("line {line}: "));
            message += &format!("\n  {line}{}: {}", key.path, key.verdict);
        }
        if keys.iter().any(|key| key.severity == Severity::Changes) {
            message += &format!(
                "\n  (a key of {} that changes the run; --allow-unsupported trains without it)",
                self.system
            );
        }
        Err(ConfigError {
            line: first.line,
            ..self.document.error("", message)
        })
    }
}

/// Returns the other trainer that wrote a file, if any.
fn system(document: &Document) -> Option<System> {
    let systems = [
        (verl::is_of as fn(&Document) -> bool, System::Verl),
        (openrlhf::is_of, System::OpenRlhf),
        (roll::is_of, System::Roll),
        (trl::is_of, System::Trl),
    ];
    let found = systems.iter().find(|(is_of, _)| is_of(document));
    found.map(|(_, system)| *system)
}

/// The rules for the keys of TRL, verl and OpenRLHF.
const RULES: [&[(&str, Rule)]; 3] = [trl::RULES, verl::RULES, openrlhf::RULES];

/// Returns our key for one that these trainers call `name`, in whatever section, if they agree on
/// it.
pub(super) fn place(name: &str) -> Option<String> {
    // A name of one word has other meanings in other sections.
    let is_named = |pattern: &str| name.contains('_') && pattern.rsplit('.').next() == Some(name);
    let rules = RULES.into_iter().flatten();
    let rules = rules.filter(|(pattern, _)| is_named(pattern));
    let places = rules.filter_map(|(_, rule)| rule.place().map(former::place));
    let places: BTreeSet<_> = places.filter(|place| !former::is_of(place)).collect();
    match places.len() {
        1 => places.into_iter().next().map(Cow::into_owned),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::algorithm::AlgorithmConfig;
    use super::super::former;
    use super::super::schema::{has_key, keys_of, run_schema};
    use super::{RULES, roll};

    #[test]
    fn every_rule_leads_to_a_key_that_exists() {
        let schema = run_schema();
        let algorithm = keys_of::<AlgorithmConfig>();
        for (name, rule) in RULES.into_iter().chain([roll::RULES]).flatten() {
            let Some(path) = rule.place() else {
                continue;
            };
            // A key that sets several options, or one that the preset has in another place.
            let key = path.strip_prefix("algorithm.");
            let is_key = key.is_some_and(|key| algorithm.contains(key));
            assert!(
                is_key || has_key(&schema, &former::place(path)),
                "{name}: {path}"
            );
        }
    }
}
