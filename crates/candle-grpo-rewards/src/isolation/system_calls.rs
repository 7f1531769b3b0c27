//! Kernel calls that no program in a completion needs.

use std::io;

use anyhow::Result;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
pub(super) use linux::Filter;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
pub(super) use other::Filter;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod linux {
    use std::collections::BTreeMap;
    use std::env::consts::ARCH;

    use nix::libc;
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, apply_filter,
    };

    use super::super::thread::on_thread;
    use super::{Result, io};

    /// Calls that are refused whatever their arguments: io_uring, keyrings, and calls that local
    /// kernel attacks start with.
    const REFUSED: [i64; 9] = [
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
    ];

    /// Calls that create sockets. Their first argument is the family.
    const SOCKETS: [i64; 2] = [libc::SYS_socket, libc::SYS_socketpair];

    /// Socket families that are allowed.
    const FAMILIES: [libc::c_int; 3] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];

    /// The bit that marks a call in the x32 ABI, which x86-64 may support too.
    const X32: i64 = 1 << 30;

    /// A seccomp filter. A refused call fails with `EPERM`, and a call from a 32-bit program ends
    /// that program.
    #[derive(Debug, Clone)]
    pub(in crate::isolation) struct Filter(BpfProgram);

    impl Filter {
        /// Creates the filter, and tries it.
        ///
        /// # Errors
        ///
        /// Fails if the kernel has no filters, or if there is none for this architecture.
        pub(in crate::isolation) fn new() -> Result<Self> {
            let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
            let mut refuse = |call: i64, rule: Vec<SeccompRule>| {
                if cfg!(target_arch = "x86_64") {
                    rules.insert(call | X32, rule.clone());
                }
                rules.insert(call, rule);
            };
            for call in REFUSED {
                refuse(call, Vec::new());
            }
            let is_another = |family: libc::c_int| {
                let family = u64::from(family.cast_unsigned());
                SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family)
            };
            let others = FAMILIES
                .map(is_another)
                .into_iter()
                .collect::<Result<_, _>>();
            let others = SeccompRule::new(others?)?;
            for call in SOCKETS {
                refuse(call, vec![others.clone()]);
            }
            let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
            let filter =
                SeccompFilter::new(rules, SeccompAction::Allow, refused, ARCH.try_into()?)?;
            let filter = Self(filter.try_into()?);
            on_thread(|| filter.apply())?;
            Ok(filter)
        }

        /// Puts the calling thread, and everything that it starts, under the filter, which none of
        /// them can remove.
        pub(in crate::isolation) fn apply(&self) -> io::Result<()> {
            apply_filter(&self.0).map_err(io::Error::other)
        }
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
mod other {
    use anyhow::bail;

    use super::{Result, io};

    /// A filter, which this system does not have.
    #[derive(Debug, Clone)]
    pub(in crate::isolation) enum Filter {}

    impl Filter {
        pub(in crate::isolation) fn new() -> Result<Self> {
            bail!("only 64-bit Linux has a filter")
        }

        pub(in crate::isolation) fn apply(&self) -> io::Result<()> {
            match *self {}
        }
    }
}
