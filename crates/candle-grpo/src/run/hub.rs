//! Files of the hub.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_train::Progress;
use candle_grpo_train::hub::{HubContent, HubName, Located};

use crate::config::Configuration;

/// Returns where the files of a name are: see `Hub::locate`, of the hub that the environment
/// describes.
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

/// Replaces the names of the hub in a configuration by paths of local files, which are downloaded
/// if they are missing. `model` is the needed part of models, and `commits` has the commits of
/// repositories that the run began with.
///
/// # Errors
///
/// With [`ConfigError`](crate::config::ConfigError) and the line of a name that does not exist, or
/// that has no file of this kind. Other errors are those of [`locate`].
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
