//! Tinker's losses as policy losses.

use std::collections::BTreeMap;

use candle_grpo_base::server::Refusal;
use candle_grpo_loss::surrogate::{Clip, DetachedWeight};
use candle_grpo_loss::{Aggregation, PolicyLoss, Surrogate};
use candle_grpo_train::learn::TargetRow;
use serde::{Deserialize, Serialize};

use crate::base::BaseInfo;
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

    /// Returns the keys of an example's inputs.
    fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::CrossEntropy => &["target_tokens", "weights"],
            _ => &["target_tokens", "logprobs", "advantages"],
        }
    }

    /// Returns an example's row. `name` is its place in the request.
    pub(crate) fn row(
        self,
        name: &str,
        datum: &Datum,
        base: &BaseInfo,
    ) -> Result<TargetRow, Refusal> {
        let keys = self.inputs();
        if let Some(other) = datum
            .inputs
            .keys()
            .find(|key| !keys.contains(&key.as_str()))
        {
            let (last, others) = keys.split_last().unwrap_or((&"", &[]));
            let must = format!(
                "be {} or {last}, the inputs of this loss_fn",
                others.join(", ")
            );
            let name = format!("{name}.loss_fn_inputs");
            return Err(Refusal::invalid(&name, other, &must));
        }
        let length = datum.tokens.len();
        let positions = base.model.max_position_embeddings;
        let place = format!("{name}.model_input");
        base.ensure_tokens(&place, &datum.tokens)?;
        if length > positions {
            let must = format!("be at most {positions}, the positions of the model");
            return Err(Refusal::invalid(&place, format!("{length} tokens"), &must));
        }
        for (key, values) in &datum.inputs {
            if values.len() != length {
                let (name, value) = (format!("{name}.{key}"), format!("{} values", values.len()));
                let must = format!("have {length}, one for each token of model_input");
                return Err(Refusal::invalid(&name, value, &must));
            }
        }
        let given = |key: &str| {
            let values = datum.inputs.get(key);
            values.ok_or_else(|| Refusal::invalid(&format!("{name}.{key}"), "absent", "be given"))
        };
        let numbers = |key: &str| {
            let values = given(key)?.numbers();
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let name = format!("{name}.{key}[{at}]");
                return Err(Refusal::invalid(&name, values[at], "be finite"));
            }
            Ok(values)
        };
        let place = format!("{name}.target_tokens");
        let targets = given("target_tokens")?.tokens(&place)?;
        base.ensure_tokens(&place, &targets)?;
        let (advantages, rollout_log_probs) = match self {
            Self::CrossEntropy if !datum.inputs.contains_key("weights") => (vec![1.; length], None),
            Self::CrossEntropy => (numbers("weights")?, None),
            _ => (numbers("advantages")?, Some(numbers("logprobs")?)),
        };
        Ok(TargetRow {
            tokens: datum.tokens.clone(),
            targets,
            advantages,
            rollout_log_probs,
        })
    }
}
