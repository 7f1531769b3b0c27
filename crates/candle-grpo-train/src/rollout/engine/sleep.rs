//! The sleep of a server that shares a GPU with the policy.
//!
//! While the policy trains, the server sleeps: it gives up the memory of its weights and of its
//! keys and values. It wakes up in this order, and in no other:
//!
//! | state | the server has | next |
//! | --- | --- | --- |
//! | [`Asleep`] | neither | [`Asleep::wake_weights`], after this process has released memory |
//! | [`Empty`] | memory for weights, without weights | [`Empty::load`] |
//! | [`Loaded`] | weights | [`Loaded::wake_cache`], after this process has released memory |
//!
//! A server that fails on the way begins again. The steps change nothing that is already awake.

use candle_core::{Device, Result};
use candle_grpo_kernels::release_cuda_memory;

use super::protocol::{Failure, Part, Protocol, Server};

/// A server that sleeps, and how it wakes up. One that has restarted is awake, with other weights.
pub(super) struct Asleep<'a> {
    pub(super) protocol: &'a dyn Protocol,
    pub(super) server: &'a Server,
    /// The policy's device.
    pub(super) device: &'a Device,
}

/// A server with memory for weights.
pub(super) struct Empty<'a>(Asleep<'a>);

/// A server with weights that cannot sample yet.
pub(super) struct Loaded<'a>(Asleep<'a>);

impl<'a> Asleep<'a> {
    pub(super) fn wake_weights(self) -> std::result::Result<Empty<'a>, Failure> {
        release(self.device)?;
        self.protocol.wake(self.server, Part::Weights)?;
        Ok(Empty(self))
    }
}

impl<'a> Empty<'a> {
    /// Transfers all weights with `load`.
    pub(super) fn load(
        self,
        load: impl FnOnce() -> std::result::Result<(), Failure>,
    ) -> std::result::Result<Loaded<'a>, Failure> {
        load()?;
        Ok(Loaded(self.0))
    }
}

impl Loaded<'_> {
    pub(super) fn wake_cache(self) -> std::result::Result<(), Failure> {
        release(self.0.device)?;
        self.0.protocol.wake(self.0.server, Part::Cache)
    }
}

/// Returns memory that this process no longer uses to the GPU. It changes none that is in use, so
/// another thread may compute meanwhile.
fn release(device: &Device) -> std::result::Result<(), Failure> {
    let released: Result<()> = release_cuda_memory(device);
    released.map_err(|error| Failure::Malformed(format!("releasing memory: {error}")))
}
