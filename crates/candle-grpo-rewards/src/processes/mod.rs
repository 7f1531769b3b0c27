//! Running programs, and everything that they have started.

mod group;
mod running;

pub(crate) use running::Running;
