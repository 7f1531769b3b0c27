//! Recorded operations of a GPU.

use std::fmt;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream};
use candle_core::{Device, Result, bail};

use super::device::stream;

/// Operations of a GPU that run again with one call of the driver: a CUDA graph.
///
/// They use the same memory again. Tensors that exist before the recording are its inputs and
/// results.
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
    /// Records the operations of `operations` on `device`, which do not run.
    ///
    /// `operations` writes its results to tensors that exist before. No other thread may use the
    /// device during the call, because its operations would be recorded, too.
    ///
    /// # Errors
    ///
    /// Fails if `operations` fails, copies between the host and the device or waits for the
    /// device, or if the device has Candle's events. Nothing has run in this case.
    ///
    /// # Safety
    ///
    /// No tensor that `operations` makes may exist after it: its memory does not.
    #[allow(unsafe_code)]
    pub unsafe fn record(device: &Device, operations: impl FnOnce() -> Result<()>) -> Result<Self> {
        let candle = device.as_cuda_device()?;
        if candle.is_event_tracking() {
            bail!("device: has events, must be opened with cuda_device");
        }
        let stream = stream(candle)?;
        // Loads of modules are not recorded, and allowed in this mode.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(mode).w()?;
        let capture = Capture(Some(&stream));
        // Candle refuses copies from the host while this exists.
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

    /// Runs the operations.
    ///
    /// # Safety
    ///
    /// The memory of all tensors that the operations read or wrote must still exist, except that of
    /// tensors made within. Indices that they read, as those of
    /// [`StepInputs`](crate::StepInputs), must be those of memory that exists.
    ///
    /// # Errors
    ///
    /// Fails if the GPU has failed before.
    #[allow(unsafe_code)]
    pub unsafe fn run(&mut self) -> Result<()> {
        self.graph.launch().w()
    }
}

/// A stream that records.
struct Capture<'a>(Option<&'a Arc<CudaStream>>);

impl Capture<'_> {
    fn end(mut self) -> Result<Option<CudaGraph>> {
        match self.0.take() {
            Some(stream) => end(stream),
            None => Ok(None),
        }
    }
}

/// After a panic the stream must not record further.
impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            drop(end(stream));
        }
    }
}

fn end(stream: &Arc<CudaStream>) -> Result<Option<CudaGraph>> {
    // Frees in a failed recording fail. The next call returns their error, and does nothing else:
    // it must not be the one that ends the recording.
    let failed = stream.context().check_err();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    let _ = stream.context().check_err();
    failed.w()?;
    graph.w()
}
