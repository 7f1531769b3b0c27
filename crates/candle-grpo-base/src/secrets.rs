//! Environment variables with keys, which programs do not inherit.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Environment variables with the Hugging Face token.
pub const HUB_TOKENS: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

static HIDDEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Hides an environment variable from all programs started from now on: rewards, tools,
/// environments and trackers. This process keeps it.
///
/// Hugging Face tokens are always hidden, and so is every variable from which this process has read
/// a key. A program may run what the policy has written, and that must not read them.
pub fn hide_from_programs(variable: &str) {
    // No variable has such a name, and the system would reject the removal.
    if !variable.is_empty() && !variable.contains(['=', '\0']) {
        let mut hidden = HIDDEN.lock().unwrap_or_else(PoisonError::into_inner);
        hidden.insert(variable.to_owned());
    }
}

/// Removes the hidden variables from a program's environment.
pub fn remove_from(command: &mut Command) {
    for variable in hidden_variables() {
        command.env_remove(variable);
    }
}

/// Returns the variables that programs do not inherit.
pub(crate) fn hidden_variables() -> Vec<String> {
    let hidden = HIDDEN.lock().unwrap_or_else(PoisonError::into_inner);
    let always = HUB_TOKENS.into_iter().map(str::to_owned);
    always.chain(hidden.iter().cloned()).collect()
}
