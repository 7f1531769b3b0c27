//! A Landlock domain, whose processes cannot read outside processes.

use anyhow::Result;

/// Puts the calling thread, and everything that it starts, into its own domain.
///
/// They cannot read the environment, memory or open files that belong to outside processes, not
/// even as root. They may do anything else except create block devices, which no program does.
///
/// # Errors
///
/// Fails if the kernel has no Landlock.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(super) fn enter() -> Result<()> {
    use anyhow::ensure;
    use landlock::{
        AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    };

    // Unless it allows them, a domain forbids moves between directories.
    let moves = PathBeneath::new(PathFd::new("/")?, AccessFs::Refer);
    let domain = Ruleset::default()
        .handle_access(AccessFs::MakeBlock | AccessFs::Refer)?
        .create()?
        .add_rule(moves)?
        .restrict_self()?;
    ensure!(
        domain.ruleset != RulesetStatus::NotEnforced,
        "this kernel has no Landlock"
    );
    Ok(())
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub(super) fn enter() -> Result<()> {
    anyhow::bail!("only 64-bit Linux has Landlock")
}
