//! Work for the engine and its outcomes, in the form that the folder keeps.

use candle_grpo_train::learn::{TargetOutput, TargetRow};
use serde::{Deserialize, Serialize};

use crate::loss::LossFn;
use crate::store::Digest;
use crate::wire::request::AdamParams;

/// A model's training request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Work {
    /// Create the model, from [`ModelRecord`](crate::store::ModelRecord).
    Create,
    /// Compute the loss of rows and, if `backward`, accumulate its gradient.
    Pass {
        rows: Vec<TargetRow>,
        loss: LossFn,
        backward: bool,
    },
    /// Make an optimizer step.
    OptimStep(AdamParams),
    /// Save the adapters, and the optimizer state for training weights.
    Save(SaveRequest),
    /// Load saved weights.
    Load { path: String, optimizer: bool },
    /// Report an error that was found when the request arrived.
    Refused(String),
}

/// Maximum number of tokens in a pass that joins those of other models. With more, the products
/// take the time, and sharing the base weights saves nothing on a CPU.
const JOINED_TOKENS: usize = 32;

impl Work {
    /// Returns the number of tokens in a pass that may join those of other models.
    pub(crate) fn joined_tokens(&self) -> Option<usize> {
        let Self::Pass {
            rows,
            backward: true,
            ..
        } = self
        else {
            return None;
        };
        let tokens: usize = rows.iter().map(|row| row.tokens.len()).sum();
        // Products of a single row have other bits.
        let has_rows = rows.iter().any(|row| row.tokens.len() > 1);
        (has_rows && tokens <= JOINED_TOKENS).then_some(tokens)
    }

    /// Returns whether it adds to the accumulated gradients or uses them.
    pub(crate) fn uses_gradients(&self) -> bool {
        match self {
            Self::Pass { backward, .. } => *backward,
            Self::OptimStep(_) => true,
            Self::Create | Self::Save(_) | Self::Load { .. } | Self::Refused(_) => false,
        }
    }

    /// Returns whether its failure clears the accumulated gradients.
    pub(crate) fn clears_gradients(&self, outcome: &Outcome) -> bool {
        matches!(outcome, Outcome::Failed(_)) && self.uses_gradients()
    }
}

/// A request to save weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SaveRequest {
    pub(crate) kind: WeightsKind,
    pub(crate) name: String,
    pub(crate) overwrite: bool,
    /// The sampling session to create.
    pub(crate) sampler: Option<u64>,
}

/// Purpose for which weights are saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WeightsKind {
    Training,
    Sampler,
}

impl WeightsKind {
    /// Name in paths.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Training => "weights",
            Self::Sampler => "sampler_weights",
        }
    }
}

/// A request's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Created {
        model_id: String,
    },
    Pass {
        loss: f64,
        log_probs: Vec<Vec<f32>>,
    },
    OptimStep {
        grad_norm: f64,
        learning_rate: f64,
    },
    Saved {
        kind: WeightsKind,
        path: Option<String>,
        sampling_session_id: Option<String>,
    },
    Loaded {
        path: String,
    },
    Samples {
        sequences: Vec<SampledTokens>,
        /// NaN where there is none.
        prompt_log_probs: Option<Vec<f32>>,
    },
    /// The request is wrong.
    Refused(String),
    /// The work failed.
    Failed(String),
}

impl From<TargetOutput> for Outcome {
    fn from(found: TargetOutput) -> Self {
        Self::Pass {
            loss: found.loss,
            log_probs: found.log_probs,
        }
    }
}

impl Outcome {
    /// Returns whether the folder gets the model's state with this result.
    pub(crate) fn starts_state(&self) -> bool {
        matches!(
            self,
            Self::Created { .. } | Self::OptimStep { .. } | Self::Loaded { .. }
        )
    }
}

/// A sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SampledTokens {
    pub(crate) tokens: Vec<u32>,
    pub(crate) log_probs: Vec<f32>,
    /// True if it has the maximum length, without an end.
    pub(crate) is_cut: bool,
}

/// A result, with the identity of its request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answered {
    pub(crate) digest: Digest,
    pub(crate) outcome: Outcome,
}
