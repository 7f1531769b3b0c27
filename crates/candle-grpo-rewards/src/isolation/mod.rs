//! Isolation for programs: what they can read and use, and how much of it.

mod cgroup;
mod command_line;
mod domain;
mod execution;
mod interpreter;
mod limits;
mod loopback;
mod paths;
mod place;
mod probe;
mod sandbox;
mod system_calls;
mod thread;

pub(crate) use command_line::{text, words};
pub(crate) use execution::End;
pub(crate) use interpreter::Interpreter;
pub use limits::CodeLimits;
pub(crate) use paths::{check_visible, real_path, with_targets};
pub(crate) use probe::Probed;
pub(crate) use sandbox::{Job, Sandbox};
