//! A domain of Landlock, from which no process outside can be read.

use anyhow::Result;

/// Puts the calling thread, and all that it starts, into a domain of its own.
///
/// They cannot read the environment, the memory and the open files of processes outside, not even
/// as root. They may do anything else except make block devices, which no program does.
///
/// # Errors
///
/// If the kernel has no Landlock.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(super) fn enter() -> Result<()> {
    use anyhow::ensure;
    use landlock::{
        AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    };

    // A domain that does not allow it forbids moves between folders.
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
