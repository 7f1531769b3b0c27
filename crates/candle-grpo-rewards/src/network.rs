//! Networks of isolated programs.

use serde::{Deserialize, Serialize};

/// An isolated program's network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// None.
    #[default]
    None,
    /// A loopback interface of its own. Only root can provide it; for other users, this machine's
    /// network remains, and isolation is incomplete.
    Loopback,
    /// This machine's.
    Host,
}
