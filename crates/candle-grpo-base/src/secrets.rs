//! Environment variables with keys, which programs do not inherit.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The variables with the token of Hugging Face.
pub const HUB_TOKENS: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

static HIDDEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Removes an environment variable from the environment of all programs that are started from now
/// on: rewards, tools, environments and trackers. This process keeps it.
///
/// The tokens of Hugging Face are always removed, and so is the variable of each key that this
/// process has read. A program may run what the policy has written, which must not read them.
pub fn hide_from_programs(variable: &str) {
    // No variable has such a name, and the system refuses to remove it.
    if !variable.is_empty() && !variable.contains(['=', '\0']) {
        let mut hidden = HIDDEN.lock().unwrap_or_else(PoisonError::into_inner);
        hidden.insert(variable.to_owned());
    }
}

/// Returns the variables that programs do not inherit.
pub fn hidden_variables() -> Vec<String> {
    let hidden = HIDDEN.lock().unwrap_or_else(PoisonError::into_inner);
    let always = HUB_TOKENS.into_iter().map(str::to_owned);
    always.chain(hidden.iter().cloned()).collect()
}
