//! Published algorithms by name.

use std::fmt;

use candle_grpo_loss::{Recipe, experimental};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::algorithm::AdvEstimator;
use super::document::join;

/// REINFORCE++'s KL coefficient unless the configuration sets one.
const REINFORCE_KL_COEF: f64 = 0.01;

/// Makes the preset enum from a table: the variant, whose name in a file is in snake case, the
/// title, the publication, the advantage estimator with that name if there is one, and the recipe
/// for completions of at most `length` tokens.
macro_rules! presets {
    ($($variant:ident, $title:literal, $source:literal, $estimator:expr, $recipe:expr;)*) => {
        /// A published algorithm: the constructor of [`Recipe`] with its name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum Preset {
            $(#[doc = concat!($title, " (<", $source, ">).")] $variant,)*
        }

        impl Preset {
            /// All presets.
            pub const ALL: [Self; [$($title),*].len()] = [$(Self::$variant),*];

            /// Returns the algorithm's published name.
            pub fn title(self) -> &'static str {
                match self {
                    $(Self::$variant => $title,)*
                }
            }

            /// Returns the address of the paper, or of the trainer that has the algorithm.
            pub fn source(self) -> &'static str {
                match self {
                    $(Self::$variant => $source,)*
                }
            }

            /// Returns the algorithm's advantage estimator, if a key has a name for it.
            pub(super) fn estimator(self) -> Option<AdvEstimator> {
                use AdvEstimator::{Grpo, Reinforce};
                match self {
                    $(Self::$variant => $estimator,)*
                }
            }

            /// Returns the recipe for completions with at most `response_length` tokens. DAPO's
            /// penalty grows over the last fifth, as in the paper.
            pub fn recipe(self, response_length: usize) -> Recipe {
                let recipe: fn(usize) -> Recipe = match self {
                    $(Self::$variant => $recipe,)*
                };
                recipe(response_length)
            }
        }
    };
}

presets! {
    Grpo, "GRPO", "https://arxiv.org/abs/2402.03300", Some(Grpo), |_| Recipe::grpo();
    Dapo, "DAPO", "https://arxiv.org/abs/2503.14476", Some(Grpo), |length| Recipe::dapo(length, (length / 5).max(1));
    DrGrpo, "Dr. GRPO", "https://arxiv.org/abs/2503.20783", Some(Grpo), |length| Recipe::dr_grpo(length as f64);
    LitePpo, "Lite PPO", "https://arxiv.org/abs/2508.08221", Some(Grpo), |_| experimental::recipe::lite_ppo();
    Gspo, "GSPO", "https://arxiv.org/abs/2507.18071", Some(Grpo), |_| Recipe::gspo();
    Luspo, "LUSPO", "https://arxiv.org/abs/2602.05261", Some(Grpo), |_| experimental::recipe::luspo();
    Gmpo, "GMPO", "https://arxiv.org/abs/2507.20673", Some(Grpo), |_| Recipe::gmpo();
    Cispo, "CISPO", "https://arxiv.org/abs/2506.13585", Some(Grpo), |_| Recipe::cispo();
    Sapo, "SAPO", "https://arxiv.org/abs/2511.20347", Some(Grpo), |_| Recipe::sapo();
    Vespo, "VESPO", "https://arxiv.org/abs/2602.10693", Some(Grpo), |_| experimental::recipe::vespo();
    Gpg, "GPG", "https://arxiv.org/abs/2504.02546", None, |_| Recipe::gpg();
    Rloo, "RLOO", "https://arxiv.org/abs/2402.14740", None, |_| Recipe::rloo();
    ReinforcePlusPlus, "REINFORCE++", "https://arxiv.org/abs/2501.03262", Some(Reinforce), |_| Recipe::reinforce_plus_plus(REINFORCE_KL_COEF);
    ReinforcePlusPlusBaseline, "REINFORCE++-baseline", "https://arxiv.org/abs/2501.03262", None, |_| Recipe::reinforce_plus_plus_baseline();
    Trl, "the default of TRL", "https://github.com/huggingface/trl", Some(Grpo), |_| Recipe::trl();
    Verl, "GRPO in verl", "https://github.com/volcengine/verl", Some(Grpo), |_| Recipe::verl();
    Roll, "GRPO in ROLL", "https://github.com/alibaba/ROLL", Some(Grpo), |_| Recipe::roll();
    Twinkle, "GRPO in twinkle", "https://github.com/modelscope/twinkle", Some(Grpo), |_| Recipe::twinkle();
    Openrlhf, "group_norm in OpenRLHF", "https://github.com/OpenRLHF/OpenRLHF", Some(Grpo), |_| Recipe::openrlhf();
    PrimeRl, "the default of prime-rl", "https://github.com/PrimeIntellect-ai/prime-rl", Some(Grpo), |_| Recipe::prime_rl();
    Fipo, "FIPO", "https://arxiv.org/abs/2603.19835", Some(Grpo), |_| experimental::recipe::fipo();
    M2po, "M2PO", "https://arxiv.org/abs/2510.01161", Some(Grpo), |_| experimental::recipe::m2po();
    Gkd, "GKD on completions of the policy", "https://arxiv.org/abs/2306.13649", Some(Grpo), |_| Recipe::gkd();
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(json!(self).as_str().unwrap_or_default())
    }
}

/// A run's algorithm: a preset, and what differs from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Algorithm {
    /// The preset that the file names, or the one that differs least.
    pub preset: Preset,
    /// The recipe options that differ, as `path: value`.
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
                differ(&join(path, key), ours, &b[key], differences);
            }
        }
        _ if ours != theirs => differences.push(format!("{path}: {}", compact(ours))),
        _ => {}
    }
}

/// Returns a value as YAML on one line, without absent options.
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
