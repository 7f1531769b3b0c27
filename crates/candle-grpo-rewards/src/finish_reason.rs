//! The end of a completion.

use serde::{Deserialize, Serialize};

/// The reason why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The policy sampled a stop token.
    StopToken,
    /// The completion's text contains a stop string.
    StopString,
    /// The completion has the maximum length.
    Length,
}
