//! Demonstrations that the policy learns from in addition to its rewards.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_core::Invalid;
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_core::validate::{at_least_one, check, unit_interval};
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::{DecoderConfig, ModelConfig};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::LikelihoodSums;
use super::collector::Collector;
use super::teacher_samples::{TeacherSampler, TeacherSamplesConfig};
use crate::data::MixedOrder;
use crate::ranks::share_of;
use crate::sequence::Batch;
use crate::{Generator, Sequence, TrainConfig};
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
    /// Number of rows per optimizer step. Must be absent with `teacher_samples`, all of which
    /// train in each epoch.
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
    /// Lets the teacher sample the demonstrations for the prompts of each step, in place of given
    /// rows: sequence-level distillation (<https://arxiv.org/abs/1606.07947>). `{}` has the default
    /// of each key. Absent: the rows are given.
    pub teacher_samples: Option<TeacherSamplesConfig>,
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
            teacher_samples: None,
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
        let Some(samples) = &self.teacher_samples else {
            return Ok(());
        };
        let is_default = self.batch_size == Self::default().batch_size;
        let must = "be absent with teacher_samples, all of which train in each epoch";
        check(is_default, "batch_size", self.batch_size, must)?;
        let valid = samples.validate();
        valid.map_err(|error| within("teacher_samples", error))
    }

    /// Returns the most rows in an optimizer step of a run with the settings `train`.
    pub(super) fn most_rows(&self, train: &TrainConfig) -> usize {
        match &self.teacher_samples {
            None => self.batch_size,
            Some(samples) => {
                let prompts = train.most_prompts_per_step();
                prompts.saturating_mul(samples.samples_per_prompt)
            }
        }
    }
}

/// The source of the demonstrations of [`TrainConfig::demonstrations`].
pub enum DemonstrationPart<C = DecoderConfig> {
    /// Rows, and the order of their visits, such as [`MixedOrder::single`].
    Rows(Vec<Sequence>, MixedOrder),
    /// The generator of a teacher, for [`DemonstrationConfig::teacher_samples`]. It must have the
    /// tokens of the policy, and receives no weights.
    Teacher(Arc<dyn Generator<C>>),
}

/// The source of a trainer's demonstrations.
pub(super) enum DemonstrationSource<C: ModelConfig> {
    Rows(Demonstrations),
    Teacher(Box<TeacherSampler<C>>),
}

impl<C: ModelConfig> DemonstrationSource<C> {
    /// Creates the source for a trainer with `collector`.
    pub(super) fn new(part: DemonstrationPart<C>, collector: &Collector<C>) -> Result<Self> {
        let config = collector.config.demonstrations;
        let found = match &part {
            DemonstrationPart::Rows(rows, _) => rows.len().to_string(),
            DemonstrationPart::Teacher(_) => "a teacher".to_owned(),
        };
        let wrong = |must: &str| Err(Invalid::new("demonstrations", &found, must).into());
        let Some(config) = config else {
            return wrong("be none, as the settings have no demonstrations");
        };
        match (part, config.teacher_samples) {
            (DemonstrationPart::Rows(examples, order), None) => {
                Ok(Self::Rows(Demonstrations::new(config, examples, order)?))
            }
            (DemonstrationPart::Teacher(generator), Some(samples)) => {
                let sampler = TeacherSampler::new(collector, generator, config, samples)?;
                Ok(Self::Teacher(Box::new(sampler)))
            }
            (DemonstrationPart::Rows(..), Some(_)) => {
                wrong("be a teacher, as the settings have teacher_samples")
            }
            (DemonstrationPart::Teacher(_), None) => {
                wrong("be rows, as the settings have no teacher_samples")
            }
        }
    }
}

/// Rows to train on, and the order in which steps visit them.
pub struct Demonstrations {
    pub(super) config: DemonstrationConfig,
    examples: Vec<Sequence>,
    /// Absent if the rows are those of one step, each of whose epochs visits all of them.
    order: Option<MixedOrder>,
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
            order: Some(order),
        })
    }

    /// Creates the demonstrations of one step, which its mini-batches divide.
    pub(super) fn of_step(config: DemonstrationConfig, examples: Vec<Sequence>) -> Self {
        Self {
            config,
            examples,
            order: None,
        }
    }

    /// Returns whether there are no rows.
    pub(super) fn is_empty(&self) -> bool {
        self.examples.is_empty()
    }

    /// Returns the number of updates of a step that trains on these rows alone, with the settings
    /// `config`.
    pub(super) fn epochs(&self, config: &TrainConfig) -> usize {
        match &self.order {
            Some(_) => 1,
            None => config.epochs,
        }
    }

    /// Returns the number of rows in the update of mini-batch `number` of `count`.
    pub(super) fn count(&self, (number, count): (usize, usize)) -> usize {
        match &self.order {
            Some(_) => self.config.batch_size,
            None => self.part((number, count)).len(),
        }
    }

    /// The rows of a mini-batch of the step.
    fn part(&self, (number, count): (usize, usize)) -> Range<usize> {
        share_of(number, count, self.examples.len())
    }

    /// Returns the batch of mini-batch `number` of `count`, after the first `visited` rows of the
    /// order. `None` without any row.
    pub(super) fn batch(
        &self,
        visited: usize,
        (number, count): (usize, usize),
    ) -> Result<Option<Batch>> {
        let rows = match &self.order {
            Some(order) => order.pick(&self.examples, visited, self.config.batch_size),
            None => self.examples[self.part((number, count))].to_vec(),
        };
        (!rows.is_empty()).then(|| Batch::new(rows)).transpose()
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
    let has_learned = share > 0. && sums.tokens > 0.;
    let of_rows = of_rows.into_iter().filter(move |_| has_learned);
    let metrics = [("demonstration_coef", share)].into_iter().chain(of_rows);
    metrics.map(|(name, value)| (name.to_owned(), value))
}
