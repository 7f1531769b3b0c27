//! Tinker's losses as policy losses.

use std::collections::BTreeMap;

use candle_grpo_base::server::Refusal;
use candle_grpo_loss::surrogate::{Clip, DetachedWeight};
use candle_grpo_loss::{Aggregation, PolicyLoss, Surrogate};
use candle_grpo_train::learn::TargetRow;
use serde::{Deserialize, Serialize};

use crate::wire::Datum;

/// Default ratio bounds in `ppo` and `cispo`.
const CLIP_LOW: f64 = 0.8;
const CLIP_HIGH: f64 = 1.2;

/// An API loss. All are sums over tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum LossFn {
    /// `-w log_prob`
    CrossEntropy,
    /// `-r A` with the ratio r and the advantage A
    ImportanceSampling,
    /// `-min(r A, clip(r, low, high) A)`
    Ppo { low: f64, high: f64 },
    /// `-sg[clip(r, low, high)] A log_prob`
    Cispo { low: f64, high: f64 },
}

impl LossFn {
    /// Creates the loss with this name.
    pub(crate) fn new(name: &str, config: &BTreeMap<String, f64>) -> Result<Self, Refusal> {
        let clips = matches!(name, "ppo" | "cispo");
        for key in config.keys() {
            if !clips || !matches!(key.as_str(), "clip_low_threshold" | "clip_high_threshold") {
                let must = if clips {
                    "be clip_low_threshold or clip_high_threshold"
                } else {
                    "be absent for this loss_fn"
                };
                return Err(Refusal::invalid("loss_fn_config", key, must));
            }
        }
        let value = |key: &str, default: f64| config.get(key).copied().unwrap_or(default);
        let low = value("clip_low_threshold", CLIP_LOW);
        let high = value("clip_high_threshold", CLIP_HIGH);
        if !(0. ..=1.).contains(&low) {
            let name = "loss_fn_config.clip_low_threshold";
            return Err(Refusal::invalid(name, low, "be a ratio from 0 to 1"));
        }
        if !(high >= 1. && high.is_finite()) {
            let name = "loss_fn_config.clip_high_threshold";
            return Err(Refusal::invalid(
                name,
                high,
                "be a finite ratio of at least 1",
            ));
        }
        match name {
            "cross_entropy" => Ok(Self::CrossEntropy),
            "importance_sampling" => Ok(Self::ImportanceSampling),
            "ppo" => Ok(Self::Ppo { low, high }),
            "cispo" => Ok(Self::Cispo { low, high }),
            _ => Err(Refusal::invalid(
                "loss_fn",
                name,
                "be cross_entropy, importance_sampling, ppo or cispo (docs/tinker.md)",
            )),
        }
    }

    /// Returns the policy loss that computes it.
    pub(crate) fn policy_loss(self) -> PolicyLoss {
        let surrogate = match self {
            Self::CrossEntropy => Surrogate::PolicyGradient,
            // Bounds that no ratio reaches: a clip from 0 to infinity.
            Self::ImportanceSampling => Clip::asymmetric(1., f64::MAX).into(),
            Self::Ppo { low, high } => Clip::asymmetric(1. - low, high - 1.).into(),
            Self::Cispo { low, high } => DetachedWeight {
                ratio_min: Some(low),
                ..DetachedWeight::at_most(high)
            }
            .into(),
        };
        PolicyLoss {
            surrogate,
            aggregation: Aggregation::TokenSum,
            log_ratio_clamp: None,
            ..PolicyLoss::default()
        }
    }

    /// Returns an example's row. `name` is its place in the request.
    pub(crate) fn row(self, name: &str, datum: &Datum) -> Result<TargetRow, Refusal> {
        let (advantages, needs_log_probs) = match self {
            Self::CrossEntropy => ("weights", false),
            _ => ("advantages", true),
        };
        let given = |key: &str| datum.inputs.get(key);
        let missing = |key: &str| Refusal::invalid(&format!("{name}.{key}"), "absent", "be given");
        let known = ["target_tokens", "weights", "advantages", "logprobs", "mask"];
        if let Some(key) = datum
            .inputs
            .keys()
            .find(|key| !known.contains(&key.as_str()))
        {
            let name = format!("{name}.loss_fn_inputs");
            return Err(Refusal::invalid(&name, key, "be an input of the loss_fn"));
        }
        let targets = given("target_tokens").ok_or_else(|| missing("target_tokens"))?;
        let advantages = match (given(advantages), self) {
            (Some(values), _) => values.numbers(),
            (None, Self::CrossEntropy) => vec![1.; datum.tokens.len()],
            (None, _) => return Err(missing(advantages)),
        };
        let rollout_log_probs = match given("logprobs") {
            _ if !needs_log_probs => None,
            Some(values) => Some(values.numbers()),
            None => return Err(missing("logprobs")),
        };
        let length = datum.tokens.len();
        for (key, values) in &datum.inputs {
            if values.len() != length {
                let (name, value) = (format!("{name}.{key}"), format!("{} values", values.len()));
                let must = format!("have {length}, one for each token of model_input");
                return Err(Refusal::invalid(&name, value, &must));
            }
        }
        Ok(TargetRow {
            tokens: datum.tokens.clone(),
            targets: targets.tokens(&format!("{name}.target_tokens"))?,
            advantages,
            rollout_log_probs,
        })
    }
}
