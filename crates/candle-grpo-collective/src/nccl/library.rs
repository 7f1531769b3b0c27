//! NCCL functions, from a library loaded on first use.
//!
//! In a program that links CUDA, as Candle does, cudarc also links NCCL, so the program would not
//! start without it. This module also finds `libnccl.so.2`, the only name in NVIDIA's packages.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{DType, Error, Result, bail};

use crate::gpu::Memory;
use crate::transfer::Waiting;

/// A job's identifier, made by rank 0.
pub(super) type UniqueId = crate::transfer::GroupId;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawId(UniqueId);

/// The first fields of `ncclConfig_t`, those of NCCL 2.14. A later library sets the others to their
/// defaults.
#[repr(C)]
struct RawConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// A field of later versions, undefined: `c_int::MIN`.
    undefined: c_int,
}

type RawComm = *mut c_void;
type RawStream = *mut c_void;

/// `ncclInProgress`
const IN_PROGRESS: c_int = 7;
/// `ncclSum`
const SUM: c_int = 0;

/// Declares the functions that return `ncclResult_t`.
macro_rules! library {
    ($($field:ident = $name:literal($($argument:ty),*);)*) => {
        pub(super) struct Library {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
            _library: libloading::Library,
        }

        impl Library {
            fn open(name: &str) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: NCCL's initializers have no requirements, and the types match nccl.h. The
                // functions live as long as the library, which this type owns.
                unsafe {
                    let library = libloading::Library::new(name)?;
                    Ok(Self {
                        $($field: *library.get(concat!($name, "\0").as_bytes())?,)*
                        error_string: *library.get(b"ncclGetErrorString\0")?,
                        last_error: *library.get(b"ncclGetLastError\0")?,
                        _library: library,
                    })
                }
            }
        }
    };
}

library! {
    get_unique_id = "ncclGetUniqueId"(*mut RawId);
    get_version = "ncclGetVersion"(*mut c_int);
    init_rank = "ncclCommInitRank"(*mut RawComm, c_int, RawId, c_int);
    init_rank_config = "ncclCommInitRankConfig"(*mut RawComm, c_int, RawId, c_int, *mut RawConfig);
    destroy = "ncclCommDestroy"(RawComm);
    abort = "ncclCommAbort"(RawComm);
    async_error = "ncclCommGetAsyncError"(RawComm, *mut c_int);
    group_start = "ncclGroupStart"();
    group_end = "ncclGroupEnd"();
    all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream);
    reduce_scatter = "ncclReduceScatter"(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream);
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, RawComm, RawStream);
    broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, RawStream);
}

impl Library {
    /// Loads NCCL, once per process.
    ///
    /// # Errors
    ///
    /// Fails if NCCL is not installed, and says how to install it.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| {
            let open = |name| Self::open(name).map_err(|error| error.to_string());
            open("libnccl.so.2").or_else(|first| open("libnccl.so").map_err(|_| first))
        });
        match loaded {
            Ok(library) => Ok(library),
            Err(reason) => bail!(
                "NCCL: {reason}. Install NCCL 2 (Debian and Ubuntu: libnccl2 of NVIDIA's repository; pip: \
                 nvidia-nccl-cu13), and add its directory to LD_LIBRARY_PATH"
            ),
        }
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = RawId([0; 128]);
        // SAFETY: the function writes 128 bytes.
        self.check("ncclGetUniqueId", ptr::null_mut(), unsafe {
            (self.get_unique_id)(&mut id)
        })?;
        Ok(id.0)
    }

    /// Returns the library's version: `2.27.3`.
    pub(super) fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: the function writes one number.
        if unsafe { (self.get_version)(&mut version) } != 0 {
            return "of an unknown version".to_owned();
        }
        format!(
            "{}.{}.{}",
            version / 10_000,
            version / 100 % 100,
            version % 100
        )
    }

    fn check(&self, name: &str, comm: RawComm, result: c_int) -> Result<()> {
        if result == 0 || result == IN_PROGRESS {
            return Ok(());
        }
        let text = |text: *const c_char| {
            if text.is_null() {
                String::new()
            } else {
                // SAFETY: NCCL returns strings that end in 0 and are never freed.
                unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned()
            }
        };
        // SAFETY: both functions accept any error, and a communicator or null.
        let (error, last) = unsafe { ((self.error_string)(result), (self.last_error)(comm)) };
        bail!("NCCL: {name}: {} {}", text(error), text(last))
    }
}

/// An in-place operation on a tensor's memory.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    AllReduceSum,
    ReduceScatterSum,
    AllGather,
    Broadcast { root: usize },
}

/// One rank's connection to the others.
pub(super) struct Comm {
    library: &'static Library,
    raw: RawComm,
    rank: usize,
    world_size: usize,
    /// After an abort, no call may use the communicator.
    is_aborted: Mutex<bool>,
}

// SAFETY: NCCL allows calls from all threads. Calls that use the stream never overlap, because
// `Nccl` holds a lock, and a transfer group runs one operation at a time.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// Connects to the other ranks, on this thread's current GPU. Waits for all ranks.
    pub(super) fn connect(
        library: &'static Library,
        id: UniqueId,
        rank: usize,
        world_size: usize,
    ) -> Result<Self> {
        let number = |number: usize| c_int::try_from(number).map_err(Error::wrap);
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes the pointer.
        let result =
            unsafe { (library.init_rank)(&mut raw, number(world_size)?, RawId(id), number(rank)?) };
        library.check("ncclCommInitRank", ptr::null_mut(), result)?;
        Ok(Self {
            library,
            raw,
            rank,
            world_size,
            is_aborted: Mutex::new(false),
        })
    }

    /// Does the same as [`Self::connect`], but gives up once `waiting` fails, which is called after
    /// each `interval`. Later operations may still be [in progress](Self::is_in_progress) when
    /// [`Self::enqueue`] returns.
    pub(super) fn connect_while(
        library: &'static Library,
        id: UniqueId,
        rank: usize,
        world_size: usize,
        interval: Duration,
        waiting: &mut Waiting<'_>,
    ) -> Result<Self> {
        let number = |number: usize| c_int::try_from(number).map_err(Error::wrap);
        let mut config = RawConfig {
            size: size_of::<RawConfig>(),
            magic: 0xcafe_beef,
            version: 21_400,
            blocking: 0,
            undefined: c_int::MIN,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes the pointer, and reads the configuration, whose size is in
        // it.
        let result = unsafe {
            (library.init_rank_config)(
                &mut raw,
                number(world_size)?,
                RawId(id),
                number(rank)?,
                &mut config,
            )
        };
        library.check("ncclCommInitRankConfig", ptr::null_mut(), result)?;
        let comm = Self {
            library,
            raw,
            rank,
            world_size,
            is_aborted: Mutex::new(false),
        };
        loop {
            match comm.is_in_progress() {
                Ok(false) => return Ok(comm),
                Ok(true) => {
                    thread::sleep(interval);
                    waiting().inspect_err(|_| comm.abort())?;
                }
                Err(error) => {
                    comm.abort();
                    return Err(error);
                }
            }
        }
    }

    /// Enqueues an operation on several tensors.
    ///
    /// # Safety
    ///
    /// The memory must be on the stream's device, and stay allocated until the stream has finished
    /// the operation. For sums, elements must be f32 or f64.
    pub(super) unsafe fn enqueue(
        &self,
        operation: Operation,
        tensors: &[Memory],
        stream: &CudaStream,
    ) -> Result<()> {
        let check = |name, result| self.library.check(name, self.raw, result);
        // SAFETY: the functions have no arguments.
        check("ncclGroupStart", unsafe { (self.library.group_start)() })?;
        let enqueued = tensors
            .iter()
            .filter(|memory| memory.elements > 0)
            .try_for_each(|memory| {
                // SAFETY: as for this function.
                unsafe { self.enqueue_one(operation, memory, stream) }
            });
        // SAFETY: as above. A group must end even after an error.
        check("ncclGroupEnd", unsafe { (self.library.group_end)() })?;
        enqueued
    }

    unsafe fn enqueue_one(
        &self,
        operation: Operation,
        memory: &Memory,
        stream: &CudaStream,
    ) -> Result<()> {
        let library = self.library;
        let (raw, stream) = (self.raw, stream.cu_stream().cast());
        let all = memory.address as *mut c_void;
        let bytes = memory.elements * memory.dtype.size_in_bytes();
        let own = (memory.address + (bytes / self.world_size * self.rank) as u64) as *mut c_void;
        // `ncclFloat32`, `ncclFloat64`; other operations copy `ncclUint8`.
        let summed = if memory.dtype == DType::F64 { 8 } else { 7 };
        let copied = 1;
        let part = memory.elements / self.world_size;
        // SAFETY: the pointers are in the tensor's memory. In place, this rank's part is within the
        // whole.
        let (name, result) = unsafe {
            match operation {
                Operation::AllReduceSum => (
                    "ncclAllReduce",
                    (library.all_reduce)(all, all, memory.elements, summed, SUM, raw, stream),
                ),
                Operation::ReduceScatterSum => (
                    "ncclReduceScatter",
                    (library.reduce_scatter)(all, own, part, summed, SUM, raw, stream),
                ),
                Operation::AllGather => (
                    "ncclAllGather",
                    (library.all_gather)(own, all, bytes / self.world_size, copied, raw, stream),
                ),
                Operation::Broadcast { root } => {
                    let root = c_int::try_from(root).map_err(Error::wrap)?;
                    (
                        "ncclBroadcast",
                        (library.broadcast)(all, all, bytes, copied, root, raw, stream),
                    )
                }
            }
        };
        library.check(name, raw, result)
    }

    /// Fails if an operation has failed after it was enqueued.
    pub(super) fn async_error(&self) -> Result<()> {
        self.is_in_progress().map(drop)
    }

    /// Returns whether NCCL still connects, or still enqueues an operation.
    ///
    /// # Errors
    ///
    /// Fails if an operation has failed after it was enqueued, or if the communicator is aborted.
    pub(super) fn is_in_progress(&self) -> Result<bool> {
        let is_aborted = self.is_aborted();
        if *is_aborted {
            bail!("NCCL: the communicator is aborted");
        }
        let mut error = 0;
        // SAFETY: the communicator is open, and the function writes one number.
        let result = unsafe { (self.library.async_error)(self.raw, &mut error) };
        self.library
            .check("ncclCommGetAsyncError", self.raw, result)?;
        self.library.check("an operation", self.raw, error)?;
        Ok(error == IN_PROGRESS)
    }

    /// Ends the operations that wait for other ranks, and the communicator. No operation may
    /// follow.
    pub(super) fn abort(&self) {
        let mut is_aborted = self.is_aborted();
        if !*is_aborted {
            *is_aborted = true;
            // SAFETY: the communicator is open.
            let _ = unsafe { (self.library.abort)(self.raw) };
        }
    }

    fn is_aborted(&self) -> MutexGuard<'_, bool> {
        self.is_aborted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // After a panic, other ranks may wait for operations that never come.
        if !thread::panicking() && !*self.is_aborted() {
            // SAFETY: nothing else has the communicator.
            let _ = unsafe { (self.library.destroy)(self.raw) };
        }
    }
}
