//! Recorded GPU operations.

use std::fmt;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream};
use candle_core::{Device, Result, bail};

use super::device::{release_recordings_memory, stream};

/// GPU operations that one driver call runs again: a CUDA graph.
///
/// They reuse the same memory. Tensors that exist before the recording serve as inputs and results.
pub struct Recording {
    graph: CudaGraph,
}

// SAFETY: a graph belongs to no thread, and only `run`, which is exclusive, uses it.
#[allow(unsafe_code)]
unsafe impl Send for Recording {}
// SAFETY: a shared reference gives no access to the graph.
#[allow(unsafe_code)]
unsafe impl Sync for Recording {}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl Recording {
    /// Records everything that `operations` launches on `device`, without running it.
    ///
    /// `operations` must write its results to existing tensors. No other thread may use the device
    /// during the call, because its operations would be recorded, too.
    ///
    /// # Errors
    ///
    /// Fails if `operations` fails, copies between host and device or waits for the device, or if
    /// Candle's events are enabled on the device. In that case nothing has run.
    ///
    /// # Safety
    ///
    /// No tensor created in `operations` may outlive it, because its memory does not.
    #[allow(unsafe_code)]
    pub unsafe fn record(device: &Device, operations: impl FnOnce() -> Result<()>) -> Result<Self> {
        let candle = device.as_cuda_device()?;
        if candle.is_event_tracking() {
            bail!("device: has events, must be opened with cuda_device");
        }
        let stream = stream(candle)?;
        // This mode allows loading modules, and does not record it.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(mode).w()?;
        let capture = Capture(Some(&stream));
        // Candle rejects copies from the host while this exists.
        let no_copies = candle.enable_cuda_graph_htod_cache();
        let recorded = operations();
        drop(no_copies);
        let graph = capture.end();
        recorded?;
        match graph? {
            Some(graph) => Ok(Self { graph }),
            None => bail!("operations: none on the GPU, must be at least one"),
        }
    }

    /// Returns the memory that recordings on `device` took for tensors within to the device, until
    /// they run again. Waits for the work on the device.
    ///
    /// # Errors
    ///
    /// Fails if work on the device has failed.
    pub fn release_memory(device: &Device) -> Result<()> {
        let stream = stream(device.as_cuda_device()?)?;
        release_recordings_memory(&stream)
    }

    /// Runs the operations.
    ///
    /// # Safety
    ///
    /// All tensors that the operations read or write must still exist, except those created within.
    /// Indices that they read, such as those in [`StepInputs`](crate::StepInputs), must point to
    /// existing memory.
    ///
    /// # Errors
    ///
    /// Fails if the GPU has failed before.
    #[allow(unsafe_code)]
    pub unsafe fn run(&mut self) -> Result<()> {
        self.graph.launch().w()
    }
}

/// A recording stream.
struct Capture<'a>(Option<&'a Arc<CudaStream>>);

impl Capture<'_> {
    fn end(mut self) -> Result<Option<CudaGraph>> {
        match self.0.take() {
            Some(stream) => end(stream),
            None => Ok(None),
        }
    }
}

/// After a panic the stream must stop recording.
impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            drop(end(stream));
        }
    }
}

fn end(stream: &Arc<CudaStream>) -> Result<Option<CudaGraph>> {
    // Frees in a failed recording fail. The next call returns that error and does nothing else, so
    // it must not be the one that ends the recording.
    let failed = stream.context().check_err();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    let _ = stream.context().check_err();
    failed.w()?;
    graph.w()
}
