//! Page-locked main memory, and the stream that copies to and from it.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};
use candle_core::{Error, Result};

use crate::TensorStack;

/// Memory to which the stream of [`Copies`] copies. Only that stream uses it.
#[derive(Debug)]
pub(super) struct PageLocked {
    address: *mut c_void,
    bytes: usize,
}

// SAFETY: it is an allocation of the process, which no thread reads or writes.
#[allow(unsafe_code)]
unsafe impl Send for PageLocked {}

/// A GPU's stream for copies, and the memory that is free for them.
///
/// Whatever is copied later to the same memory comes later in the stream. So memory is free as soon
/// as its last copy is in the stream.
#[derive(Debug)]
pub(super) struct Copies {
    pub(super) stream: Arc<CudaStream>,
    free: Mutex<Vec<PageLocked>>,
}

impl Copies {
    /// Returns the one of the GPU with the stream `compute`.
    pub(super) fn of(compute: &CudaStream) -> Result<Arc<Self>> {
        static ALL: Mutex<BTreeMap<usize, Arc<Copies>>> = Mutex::new(BTreeMap::new());
        let context = compute.context();
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copies) = all.get(&context.ordinal()) {
            return Ok(Arc::clone(copies));
        }
        let copies = Arc::new(Self {
            stream: context.new_stream().map_err(Error::wrap)?,
            free: Mutex::default(),
        });
        all.insert(context.ordinal(), Arc::clone(&copies));
        Ok(copies)
    }

    /// Returns memory for this many bytes. If all that is free is too small, returns it to the
    /// system, which waits for the copies.
    pub(super) fn take(&self, bytes: usize) -> Result<PageLocked> {
        let mut free = self.lock();
        let fitting = free.iter().enumerate();
        let fitting = fitting.filter(|(_, memory)| memory.bytes >= bytes);
        let smallest = fitting.min_by_key(|(_, memory)| memory.bytes);
        if let Some((at, _)) = smallest {
            return Ok(free.swap_remove(at));
        }
        if !free.is_empty() {
            self.release(&mut free)?;
        }
        // Drivers differ in what they do for no bytes.
        let size = TensorStack::main_memory_bytes(bytes.max(1));
        self.allocate(size).map_err(|error| {
            Error::msg(format!(
                "{size} bytes of page-locked main memory for a tensor of the GPU: {error}"
            ))
        })
    }

    /// Makes memory free, of which all copies are in the stream.
    pub(super) fn give_back(&self, memory: PageLocked) {
        self.lock().push(memory);
    }

    /// Starts to copy from the GPU. Both have as many bytes.
    ///
    /// # Safety
    ///
    /// The stream must have waited for the kernels that write `from`, and the tensor there must
    /// stay until the copy has ended.
    #[allow(unsafe_code)]
    pub(super) unsafe fn to_main_memory(
        &self,
        memory: &PageLocked,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the memory has as many bytes, and the caller's promise.
        let copied = unsafe {
            sys::cuMemcpyDtoHAsync_v2(memory.address, from, bytes, self.stream.cu_stream())
        };
        copied.result().map_err(Error::wrap)
    }

    /// Starts to copy to the GPU. Both have as many bytes.
    ///
    /// # Safety
    ///
    /// The stream must have waited for what used `to` before, and the tensor there must stay until
    /// the copy has ended.
    #[allow(unsafe_code)]
    pub(super) unsafe fn to_gpu(&self, to: u64, memory: &PageLocked, bytes: usize) -> Result<()> {
        // SAFETY: the memory has as many bytes, and the caller's promise.
        let copied = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, memory.address, bytes, self.stream.cu_stream())
        };
        copied.result().map_err(Error::wrap)
    }

    fn allocate(&self, bytes: usize) -> Result<PageLocked> {
        let context = self.stream.context();
        context.bind_to_thread().map_err(Error::wrap)?;
        // SAFETY: the context is current.
        #[allow(unsafe_code)]
        let address = unsafe { result::malloc_host(bytes, 0) }.map_err(Error::wrap)?;
        Ok(PageLocked { address, bytes })
    }

    /// Returns memory to the system, once all copies have ended.
    fn release(&self, free: &mut Vec<PageLocked>) -> Result<()> {
        self.stream.synchronize().map_err(Error::wrap)?;
        let released = free.drain(..).map(|memory| {
            // SAFETY: it was allocated in this way, and nothing uses it.
            #[allow(unsafe_code)]
            unsafe {
                result::free_host(memory.address)
            }
        });
        // All of it, also after an error.
        let results: Vec<_> = released.collect();
        results
            .into_iter()
            .collect::<std::result::Result<(), _>>()
            .map_err(Error::wrap)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PageLocked>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
