//! A program's processes, as a group that ends with this process.

use std::io;
use std::process::Command;

#[cfg(unix)]
pub(crate) use unix::ProcessGroup;

#[cfg(not(unix))]
pub(crate) use other::ProcessGroup;

#[cfg(unix)]
mod unix {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Stdio};

    use nix::sys::signal::{Signal, killpg};
    use nix::unistd::Pid;

    use super::{Command, io};

    /// Kills its process group as soon as the pipe from this process closes.
    const GUARD: &str = "read -r line; kill -9 0";

    /// A process group whose leader is a guard: a shell that reads a pipe from this process. If
    /// this process dies, even by `SIGKILL`, the system closes the pipe, and the guard kills the
    /// group.
    ///
    /// Linux's parent-death signal does less: it does not reach what the program has started, and
    /// it fires when the thread that started the program ends. The guard starts before the program,
    /// so the program never runs without it. The leader is reaped only after the group is killed,
    /// so no other group can get its number.
    pub(crate) struct ProcessGroup {
        guard: Child,
    }

    impl ProcessGroup {
        pub(crate) fn start() -> io::Result<Self> {
            let guard = Command::new("sh")
                .args(["-c", GUARD])
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            Ok(Self { guard })
        }

        /// Makes `command` start in this group.
        pub(crate) fn add(&self, command: &mut Command) {
            command.process_group(self.id());
        }

        /// Kills everything in the group. You can call it again.
        pub(crate) fn kill(&mut self) {
            // Once the guard is reaped, another group may get its number.
            if let Ok(None) = self.guard.try_wait() {
                // Fails only if nothing is left to kill.
                let _ = killpg(Pid::from_raw(self.id()), Signal::SIGKILL);
                let _ = self.guard.wait();
            }
        }

        fn id(&self) -> i32 {
            // A pid is positive and fits.
            self.guard.id().cast_signed()
        }
    }
}

#[cfg(not(unix))]
mod other {
    use super::{Command, io};

    /// No group: only the program itself is killed.
    pub(crate) struct ProcessGroup;

    impl ProcessGroup {
        pub(crate) fn start() -> io::Result<Self> {
            Ok(Self)
        }

        pub(crate) fn add(&self, _: &mut Command) {}

        pub(crate) fn kill(&mut self) {}
    }
}
