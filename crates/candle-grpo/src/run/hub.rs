//! Hub files.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use candle_grpo_train::Progress;
use candle_grpo_train::hub::{HubContent, HubName, Located, UploadOptions, Uploaded};

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
            "{name}: there is no such file or directory, and this program was built without the feature hub"
        )
    }
}

/// Checks an upload to the hub that the environment configures, as `Hub::check_upload` does,
/// without a request.
///
/// # Errors
///
/// As in `Hub::check_upload`, or if this program was built without the feature `hub`.
pub fn check_upload(repository: &HubName, options: &UploadOptions) -> Result<()> {
    #[cfg(feature = "hub")]
    {
        candle_grpo_train::hub::Hub::from_environment()?.check_upload(repository, options)
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = options;
        anyhow::bail!("{repository}: this program was built without the feature hub")
    }
}

/// Uploads a folder, as `Hub::upload` does, to the hub that the environment configures.
///
/// # Errors
///
/// As in `Hub::upload`, or if this program was built without the feature `hub`.
pub fn upload(
    folder: &Path,
    repository: &HubName,
    options: &UploadOptions,
    progress: &dyn Progress,
) -> Result<Uploaded> {
    #[cfg(feature = "hub")]
    {
        let hub = candle_grpo_train::hub::Hub::from_environment()?;
        hub.upload(folder, repository, options, progress)
    }
    #[cfg(not(feature = "hub"))]
    {
        let _ = (folder, options, progress);
        anyhow::bail!("{repository}: this program was built without the feature hub")
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
