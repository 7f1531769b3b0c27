//! Published algorithms by name.

use std::fmt;

use candle_grpo_loss::Recipe;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::algorithm::AdvEstimator;

/// The KL coefficient of REINFORCE++ unless the configuration has one.
const REINFORCE_KL_COEF: f64 = 0.01;

/// A published algorithm: the constructor of [`Recipe`] with its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // Each variant is documented at the constructor of that name.
pub enum Preset {
    Grpo,
    Dapo,
    DrGrpo,
    LitePpo,
    Gspo,
    Luspo,
    Gmpo,
    Cispo,
    Sapo,
    Vespo,
    Gpg,
    Rloo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Trl,
    Verl,
    Roll,
    Twinkle,
    Openrlhf,
    PrimeRl,
    Fipo,
    M2po,
    Gkd,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 23] = [
        Self::Grpo,
        Self::Dapo,
        Self::DrGrpo,
        Self::LitePpo,
        Self::Gspo,
        Self::Luspo,
        Self::Gmpo,
        Self::Cispo,
        Self::Sapo,
        Self::Vespo,
        Self::Gpg,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::ReinforcePlusPlusBaseline,
        Self::Trl,
        Self::Verl,
        Self::Roll,
        Self::Twinkle,
        Self::Openrlhf,
        Self::PrimeRl,
        Self::Fipo,
        Self::M2po,
        Self::Gkd,
    ];

    /// Returns the advantage estimator of the algorithm, if a key has a name for it.
    pub(super) fn estimator(self) -> Option<AdvEstimator> {
        match self {
            Self::Gpg | Self::Rloo | Self::ReinforcePlusPlusBaseline => None,
            Self::ReinforcePlusPlus => Some(AdvEstimator::Reinforce),
            Self::Grpo
            | Self::Dapo
            | Self::DrGrpo
            | Self::LitePpo
            | Self::Gspo
            | Self::Luspo
            | Self::Gmpo
            | Self::Cispo
            | Self::Sapo
            | Self::Vespo
            | Self::Trl
            | Self::Verl
            | Self::Roll
            | Self::Twinkle
            | Self::Openrlhf
            | Self::PrimeRl
            | Self::Fipo
            | Self::M2po
            | Self::Gkd => Some(AdvEstimator::Grpo),
        }
    }

    /// Returns the recipe for completions of at most `response_length` tokens. The penalty of DAPO
    /// grows over the last fifth of them, as in the paper.
    pub fn recipe(self, response_length: usize) -> Recipe {
        match self {
            Self::Grpo => Recipe::grpo(),
            Self::Dapo => Recipe::dapo(response_length, (response_length / 5).max(1)),
            Self::DrGrpo => Recipe::dr_grpo(response_length as f64),
            Self::LitePpo => Recipe::lite_ppo(),
            Self::Gspo => Recipe::gspo(),
            Self::Luspo => Recipe::luspo(),
            Self::Gmpo => Recipe::gmpo(),
            Self::Cispo => Recipe::cispo(),
            Self::Sapo => Recipe::sapo(),
            Self::Vespo => Recipe::vespo(),
            Self::Gpg => Recipe::gpg(),
            Self::Rloo => Recipe::rloo(),
            Self::ReinforcePlusPlus => Recipe::reinforce_plus_plus(REINFORCE_KL_COEF),
            Self::ReinforcePlusPlusBaseline => Recipe::reinforce_plus_plus_baseline(),
            Self::Trl => Recipe::trl(),
            Self::Verl => Recipe::verl(),
            Self::Roll => Recipe::roll(),
            Self::Twinkle => Recipe::twinkle(),
            Self::Openrlhf => Recipe::openrlhf(),
            Self::PrimeRl => Recipe::prime_rl(),
            Self::Fipo => Recipe::fipo(),
            Self::M2po => Recipe::m2po(),
            Self::Gkd => Recipe::gkd(),
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(json!(self).as_str().unwrap_or_default())
    }
}

/// The algorithm of a run: a preset, and what differs from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Algorithm {
    /// The preset that the file names, or the one that differs least.
    pub preset: Preset,
    /// The options of the recipe that differ, as `path: value`.
    pub differences: Vec<String>,
}

impl Algorithm {
    /// Compares `recipe` with the preset of that name, or with the nearest one if there is none.
    pub(super) fn new(recipe: &Recipe, named: Option<Preset>, response_length: usize) -> Self {
        let ours = json!(recipe);
        let compare = |preset: Preset| {
            let mut differences = Vec::new();
            let theirs = json!(preset.recipe(response_length));
            differ("", &ours, &theirs, &mut differences);
            Self {
                preset,
                differences,
            }
        };
        match named {
            Some(preset) => compare(preset),
            None => Preset::ALL
                .into_iter()
                .map(compare)
                .min_by_key(|algorithm| algorithm.differences.len())
                .unwrap_or_else(|| compare(Preset::Grpo)),
        }
    }
}

/// Lists the parts of `ours` that differ from `theirs`.
fn differ(path: &str, ours: &Value, theirs: &Value, differences: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) if a.keys().eq(b.keys()) => {
            for (key, ours) in a {
                let path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                differ(&path, ours, &b[key], differences);
            }
        }
        _ if ours != theirs => differences.push(format!("{path}: {}", compact(ours))),
        _ => {}
    }
}

/// Returns a value as YAML on one line, without options that are absent.
fn compact(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(compact).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(map) => {
            let given = map.iter().filter(|(_, value)| !value.is_null());
            let entries: Vec<String> = given
                .map(|(key, value)| format!("{key}: {}", compact(value)))
                .collect();
            format!("{{{}}}", entries.join(", "))
        }
        value => value.to_string(),
    }
}
