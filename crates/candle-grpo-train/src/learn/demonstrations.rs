//! Demonstrations that the policy learns from in addition to its rewards.

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

/// Demonstrations in the policy updates (CHORD, <https://arxiv.org/abs/2508.11408>; ms-swift's
/// `chord_*`).
///
/// An update's loss is `(1 - coef) * policy_loss + coef * sft_loss`. The second term is the
/// weighted mean over the trained tokens in a demonstration batch. A step that would be skipped
/// trains on the demonstrations alone.
///
/// Choose this if you have good answers, and the policy rarely finds one by itself. Start with a
/// `coef` that decays from near 1, as in the example.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DemonstrationConfig {
    /// Number of rows per optimizer step.
    pub batch_size: usize,
    /// The demonstrations' share in the loss: `peak` and `end` are from 0 to 1, and the first step
    /// is step 1. At 0, the step reads no demonstration.
    #[serde(deserialize_with = "over_default")]
    pub coef: CoefSchedule,
    /// Multiplies a token's loss by `p (1 - p)`, where p is its probability (CHORD-phi). Tokens
    /// that the policy already predicts with certainty count less, and so do those that it almost
    /// never samples.
    pub uncertainty_weight: bool,
    /// Number of tokens per backward pass over demonstrations. It limits memory and does not
    /// change the update. A longer row gets its own pass.
    pub micro_batch_tokens: usize,
}

/// Default share for demonstrations.
const SHARE: f64 = 0.1;

/// Deserializes a schedule, whose `peak` defaults to that in [`DemonstrationConfig::default`].
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
    /// Fails with the name of the invalid field.
    pub fn validate(&self) -> Result<()> {
        at_least_one("batch_size", self.batch_size)?;
        at_least_one("micro_batch_tokens", self.micro_batch_tokens)?;
        for (name, share) in [("peak", self.coef.peak), ("end", self.coef.end)] {
            unit_interval(name, share).map_err(|error| within("coef", error.into()))?;
        }
        Ok(())
    }
}

/// The rows for [`TrainConfig::demonstrations`](crate::TrainConfig::demonstrations), and the order
/// in which steps visit them.
pub struct Demonstrations {
    pub(super) config: DemonstrationConfig,
    examples: Vec<Sequence>,
    order: MixedOrder,
}

impl Demonstrations {
    /// Creates demonstrations that steps visit in `order`, such as [`MixedOrder::single`].
    ///
    /// # Errors
    ///
    /// Fails if `order` has another number of rows.
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

    /// Returns the share in the policy's loss at step `step`: 0 while only the critic trains.
    pub(super) fn share(&self, config: &TrainConfig, step: usize) -> f64 {
        if config.only_critic_trains(step) {
            0.
        } else {
            self.config.coef.at(step)
        }
    }

    /// Returns the batch after the first `visited` examples.
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

/// Metrics for a step's demonstrations.
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
