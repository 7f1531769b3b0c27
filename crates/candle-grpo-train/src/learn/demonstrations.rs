//! Demonstrations that the policy learns from beside its rewards.

use anyhow::Result;
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::validate::{at_least_one, unit_interval};
use candle_grpo_loss::surrogate::Likelihood;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::LikelihoodSums;
use crate::data::MixedOrder;
use crate::sequence::Batch;
use crate::{Sequence, TrainConfig};
use candle_grpo_base::within;

/// Demonstrations in the updates of the policy (CHORD, <https://arxiv.org/abs/2508.11408>; ms-swift's
/// `chord_*`). The loss of an update is `(1 - coef) * policy_loss + coef * sft_loss`. The second
/// term is the weighted mean over the tokens of a batch of demonstrations that train.
///
/// A step that would be skipped trains on the demonstrations alone.
///
/// ```
/// use candle_grpo_core::schedule::{CoefSchedule, Decay};
/// use candle_grpo_train::learn::DemonstrationConfig;
///
/// let config = DemonstrationConfig {
///     coef: CoefSchedule {
///         warmup_steps: 10,
///         decay_steps: Some(100),
///         end: 0.05,
///         decay: Decay::Cosine,
///         ..CoefSchedule::constant(0.9)
///     },
///     ..DemonstrationConfig::default()
/// };
/// config.validate()?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DemonstrationConfig {
    /// Number of rows in an optimizer step.
    pub batch_size: usize,
    /// The share of the demonstrations in the loss: `peak` and `end` are from 0 to 1, and the
    /// first step is step 1. At 0 the step reads no demonstration.
    #[serde(deserialize_with = "over_default")]
    pub coef: CoefSchedule,
    /// Multiplies the loss of a token by `p (1 - p)` with its probability p (CHORD-phi). Tokens
    /// that the policy is sure about count less, and so do those that it would never say.
    pub uncertainty_weight: bool,
    /// Number of tokens in a backward pass over demonstrations. It bounds memory and does not
    /// change the update. A longer row is a pass of its own.
    pub micro_batch_tokens: usize,
}

/// The default of the share of the demonstrations.
const SHARE: f64 = 0.1;

/// Reads a schedule, whose `peak` is by default that of [`DemonstrationConfig::default`].
fn over_default<'de, D: Deserializer<'de>>(deserializer: D) -> Result<CoefSchedule, D::Error> {
    let mut keys = Map::deserialize(deserializer)?;
    keys.entry("peak").or_insert(SHARE.into());
    serde_json::from_value(Value::Object(keys)).map_err(D::Error::custom)
}

impl Default for DemonstrationConfig {
    fn default() -> Self {
        Self {
            batch_size: 32,
            coef: CoefSchedule::constant(SHARE),
            uncertainty_weight: false,
            micro_batch_tokens: 4096,
        }
    }
}

impl DemonstrationConfig {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// With the name of the field that is not valid.
    pub fn validate(&self) -> Result<()> {
        at_least_one("batch_size", self.batch_size)?;
        at_least_one("micro_batch_tokens", self.micro_batch_tokens)?;
        for (name, share) in [("peak", self.coef.peak), ("end", self.coef.end)] {
            unit_interval(name, share).map_err(|error| within("coef", error.into()))?;
        }
        Ok(())
    }
}

/// The rows of [`TrainConfig::demonstrations`](crate::TrainConfig::demonstrations), and the order
/// of their visits.
pub struct Demonstrations {
    pub(super) config: DemonstrationConfig,
    examples: Vec<Sequence>,
    order: MixedOrder,
}

impl Demonstrations {
    /// Creates the demonstrations that steps visit in `order`, such as
    /// [`MixedOrder::single`].
    ///
    /// # Errors
    ///
    /// If `order` has another number of rows.
    pub fn new(
        config: DemonstrationConfig,
        examples: Vec<Sequence>,
        order: MixedOrder,
    ) -> Result<Self> {
        order.ensure_rows(examples.len(), "demonstrations")?;
        Ok(Self {
            config,
            examples,
            order,
        })
    }

    /// The share in the loss of the policy in step `step`: 0 while only the critic trains.
    pub(super) fn share(&self, config: &TrainConfig, step: usize) -> f64 {
        if config.only_critic_trains(step) {
            0.
        } else {
            self.config.coef.at(step)
        }
    }

    /// The batch after the first `visited` examples.
    pub(super) fn batch(&self, visited: usize) -> Result<Batch> {
        let size = self.config.batch_size;
        Batch::new(self.order.pick(&self.examples, visited, size))
    }

    pub(super) fn likelihood(&self) -> Likelihood {
        Likelihood {
            uncertainty_weight: self.config.uncertainty_weight,
        }
    }
}

/// The metrics of the demonstrations of a step.
pub(super) fn demonstration_metrics(
    share: f64,
    sums: &LikelihoodSums,
) -> impl Iterator<Item = (String, f64)> {
    let of_rows = [
        ("demonstration_loss", sums.mean_loss()),
        ("demonstration_token_accuracy", sums.token_accuracy()),
    ];
    let of_rows = of_rows.into_iter().filter(move |_| share > 0.);
    let metrics = [("demonstration_coef", share)].into_iter().chain(of_rows);
    metrics.map(|(name, value)| (name.to_owned(), value))
}
