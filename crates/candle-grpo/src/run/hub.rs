//! Hub files.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_train::Progress;
use candle_grpo_train::hub::{HubContent, HubName, Located};

use crate::config::Configuration;

/// Locates the files that a name stands for, as `Hub::locate` does, on the hub that the environment
/// configures.
///
/// # Errors
///
/// As in `Hub::locate`, or if this program was built without the feature `hub`.
pub fn locate(
    name: &HubName,
    content: HubContent,
    commit: Option<&str>,
    progress: &dyn Progress,
) -> Result<Located> {
    #[cfg(feature = "hub")]
    {
        candle_grpo_train::hub::Hub::from_environment()?.locate(name, content, commit, progress)
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = (content, commit, progress);
        anyhow::bail!(
            "{name}: there is no such file or folder, and this program was built without the feature hub"
        )
    }
}

/// Replaces hub names in a configuration with local paths, and downloads missing files. `model`
/// selects the needed model files. `commits` has the repository commits that the run started with.
///
/// # Errors
///
/// Returns a [`ConfigError`](crate::config::ConfigError) with the line if a name does not exist or
/// has no such file. Other errors come from [`locate`].
pub fn locate_files(
    run: &mut impl Configuration,
    model: HubContent,
    commits: &BTreeMap<String, String>,
    progress: &dyn Progress,
) -> Result<()> {
    run.replace_hub_names(model, commits, &mut |name, content, commit| {
        locate(name, content, commit, progress)
    })
}
