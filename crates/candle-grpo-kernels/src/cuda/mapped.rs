//! Tensors that grow in place: memory of the GPU is mapped to addresses that are reserved for them.

use std::ffi::c_int;
use std::mem::{MaybeUninit, replace, transmute};
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUdevice_attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationProp, CUmemAllocationType, CUmemLocation,
    CUmemLocationType, CUresult,
};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DriverError, result};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, WrapErr};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::device::{release_pool, stream};
use super::in_place::write as write_in_place;
use super::output::as_tensor;
use crate::cpu::with_element;

type DriverResult = std::result::Result<(), DriverError>;

/// A tensor of rows over a reserved range of addresses. Only the first rows have memory. Its
/// address and shape never change.
///
/// New memory does not come from the driver's pool, and is returned to the device, not to the pool.
#[derive(Debug)]
struct MappedTensor {
    /// All rows that the range has. Drop takes the addresses out of it.
    tensor: Tensor,
    row_bytes: usize,
    range: Range,
}

impl MappedTensor {
    /// Reserves addresses for rows of `shape`, without memory. `None` if the device cannot map
    /// memory.
    ///
    /// `bytes` is the largest size. The range is at least as large.
    fn reserve(
        shape: &[usize],
        dtype: DType,
        device: &Device,
        bytes: usize,
    ) -> Result<Option<Self>> {
        let candle = device.as_cuda_device()?;
        let Some(range) = Range::reserve(candle, bytes)? else {
            return Ok(None);
        };
        let elements: usize = shape.iter().product();
        let row_bytes = elements * dtype.size_in_bytes();
        let rows = range.bytes / row_bytes;
        let storage = with_element!(dtype, "dtype", T => {
            // SAFETY: the range has these addresses. Nothing reads elements without memory. Drop
            // takes the slice out of the tensor before it could free it.
            #[allow(unsafe_code)]
            let slice = unsafe { range.stream.upgrade_device_ptr::<T>(range.start, rows * elements) };
            CudaStorage::wrap_cuda_slice(slice, candle.clone())
        });
        let shape = [&[rows], shape].concat();
        Ok(Some(Self {
            tensor: as_tensor(storage, &shape.into()),
            row_bytes,
            range,
        }))
    }

    /// Gives memory to the rows before `rows`, and zeroes those from `first`. After an error, no
    /// more rows have memory than before.
    fn grow(&mut self, first: usize, rows: usize) -> Result<()> {
        let there = self.range.mapped;
        let bytes = rows.saturating_mul(self.row_bytes);
        if bytes > self.range.bytes {
            bail!(
                "rows: {rows}, must be at most {}, for which there are addresses",
                self.range.bytes / self.row_bytes
            );
        }
        self.range.map(bytes)?;
        let zeroed = self.range.zero(first * self.row_bytes, bytes);
        if zeroed.is_err() {
            self.range.unmap(there).w()?;
        }
        zeroed
    }

    /// Takes the memory of the rows from `rows`, except what is mapped together with earlier ones.
    /// Waits for the work on the stream.
    fn shrink(&mut self, rows: usize) -> Result<()> {
        self.range.unmap(rows * self.row_bytes).w()
    }
}

impl Drop for MappedTensor {
    fn drop(&mut self) {
        let dtype = self.tensor.dtype();
        // This cannot fail: the tensor is on a GPU and has this dtype.
        let _ = write_in_place(&self.tensor, |storage, _| {
            with_element!(dtype, "dtype", T => {
                let slice = storage.as_cuda_slice_mut::<T>()?;
                // SAFETY: it has no elements, and frees nothing.
                #[allow(unsafe_code)]
                let empty = unsafe { self.range.stream.upgrade_device_ptr::<T>(0, 0) };
                // The range frees the addresses.
                replace(slice, empty).leak();
            });
            Ok(())
        });
    }
}

/// Two tensors with the same number of rows, such as keys and values.
#[derive(Debug)]
pub(crate) struct MappedPair([MappedTensor; 2]);

impl MappedPair {
    /// Like [`MappedTensor::reserve`], for rows of each shape. `bytes` is the largest size of each.
    pub(crate) fn reserve(
        shapes: [&[usize]; 2],
        dtype: DType,
        device: &Device,
        bytes: usize,
    ) -> Result<Option<Self>> {
        let reserve = |shape| MappedTensor::reserve(shape, dtype, device, bytes);
        Ok(match reserve(shapes[0])? {
            None => None,
            Some(first) => reserve(shapes[1])?.map(|second| Self([first, second])),
        })
    }

    /// The tensors. Only rows with memory may be read or written.
    pub(crate) fn tensors(&self) -> [Tensor; 2] {
        self.0.each_ref().map(|mapped| mapped.tensor.clone())
    }

    /// Bytes of memory for this many rows.
    pub(crate) fn bytes(&self, rows: usize) -> usize {
        let of = |mapped: &MappedTensor| {
            (rows * mapped.row_bytes).next_multiple_of(mapped.range.granularity)
        };
        self.0.iter().map(of).sum()
    }

    /// The smallest number of rows for which the memory of the first tensor has no rest.
    pub(crate) fn rows_without_rest(&self) -> usize {
        let [
            MappedTensor {
                row_bytes, range, ..
            },
            _,
        ] = &self.0;
        crate::rows_without_rest(*row_bytes, range.granularity)
    }

    /// Gives memory to the rows before `rows`, and zeroes those from `first`. After an error, no
    /// more rows have memory than before.
    pub(crate) fn grow(&mut self, first: usize, rows: usize) -> Result<()> {
        let [a, b] = &mut self.0;
        a.grow(first, rows)?;
        if let Err(error) = b.grow(first, rows) {
            a.shrink(first)?;
            return Err(error);
        }
        Ok(())
    }

    /// Takes the memory of the rows from `rows`, except what is mapped together with earlier ones.
    /// Waits for the work on the stream.
    pub(crate) fn shrink(&mut self, rows: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|mapped| mapped.shrink(rows))
    }
}

/// A reserved range of addresses, with memory from its start.
#[derive(Debug)]
struct Range {
    stream: Arc<CudaStream>,
    start: CUdeviceptr,
    bytes: usize,
    /// Memory is mapped in multiples of this number of bytes.
    granularity: usize,
    /// Number of bytes with memory.
    mapped: usize,
    /// The size of each mapping, in order. The driver can only unmap whole ones.
    mappings: Vec<usize>,
}

impl Range {
    /// Reserves at least `bytes`. `None` if the device cannot map memory, or has no addresses.
    fn reserve(candle: &CudaDevice, bytes: usize) -> Result<Option<Self>> {
        let stream = stream(candle)?;
        let context = stream.context();
        context.bind_to_thread().w()?;
        let attribute =
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        if context.attribute(attribute).w()? == 0 {
            return Ok(None);
        }
        let properties = properties(context.cu_device());
        let (mut granularity, mut start) = (0, 0);
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the pointers receive the granularity and the address.
        #[allow(unsafe_code)]
        let reserved = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, minimum)
                .result()
                .and_then(|()| {
                    let bytes = bytes.next_multiple_of(granularity);
                    sys::cuMemAddressReserve(&raw mut start, bytes, 0, 0, 0).result()?;
                    Ok(bytes)
                })
        };
        // The system may limit the addresses of a process.
        let Ok(bytes) = reserved else {
            return Ok(None);
        };
        Ok(Some(Self {
            start,
            bytes,
            granularity,
            mapped: 0,
            mappings: Vec::new(),
            stream,
        }))
    }

    /// Maps memory until at least the first `bytes` bytes have it. After an error, none is added.
    fn map(&mut self, bytes: usize) -> Result<()> {
        let more = bytes
            .next_multiple_of(self.granularity)
            .saturating_sub(self.mapped);
        if more == 0 {
            return Ok(());
        }
        self.stream.context().bind_to_thread().w()?;
        let mapped = match self.map_more(more) {
            // The pool may have the memory. Recordings need theirs in the next step.
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                release_pool(&self.stream)?;
                self.map_more(more)
            }
            mapped => mapped,
        };
        mapped.w()?;
        self.mapped += more;
        self.mappings.push(more);
        Ok(())
    }

    fn map_more(&self, bytes: usize) -> DriverResult {
        let properties = properties(self.stream.context().cu_device());
        let access = CUmemAccessDesc {
            location: properties.location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let at = self.start + self.mapped as CUdeviceptr;
        let mut handle = 0;
        // SAFETY: the sizes are multiples of the granularity, and the addresses are reserved and
        // have no memory. The mapping keeps the memory after its handle.
        #[allow(unsafe_code)]
        unsafe {
            sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0).result()?;
            let mapped = sys::cuMemMap(at, bytes, 0, handle, 0).result();
            let released = sys::cuMemRelease(handle).result();
            mapped?;
            let usable = sys::cuMemSetAccess(at, bytes, &raw const access, 1).result();
            let done = released.and(usable);
            if done.is_err() {
                sys::cuMemUnmap(at, bytes).result()?;
            }
            done
        }
    }

    /// Zeroes the bytes from `first` to `end`, in the order of the stream.
    fn zero(&self, first: usize, end: usize) -> Result<()> {
        if first >= end {
            return Ok(());
        }
        let context = self.stream.context();
        context.bind_to_thread().w()?;
        let at = self.start + first as CUdeviceptr;
        // SAFETY: the caller has mapped these bytes.
        #[allow(unsafe_code)]
        unsafe { result::memset_d8_async(at, 0, end - first, self.stream.cu_stream()) }.w()
    }

    /// Unmaps the memory behind the first `bytes` bytes, except a mapping that begins before.
    fn unmap(&mut self, bytes: usize) -> DriverResult {
        let last_behind = |range: &Self| {
            Some(*range.mappings.last()?).filter(|last| range.mapped - last >= bytes)
        };
        if last_behind(self).is_none() {
            return Ok(());
        }
        // Errors of earlier work do not keep the memory.
        // SAFETY: the context and the stream exist. The driver does not wait for work that uses the
        // memory.
        #[allow(unsafe_code)]
        unsafe {
            result::ctx::set_current(self.stream.context().cu_ctx())?;
            result::stream::synchronize(self.stream.cu_stream())?;
        }
        while let Some(last) = last_behind(self) {
            let at = self.start + (self.mapped - last) as CUdeviceptr;
            // SAFETY: it is a whole mapping, and no work uses it.
            #[allow(unsafe_code)]
            unsafe { sys::cuMemUnmap(at, last) }.result()?;
            self.mappings.pop();
            self.mapped -= last;
        }
        Ok(())
    }

    fn free(&mut self) -> DriverResult {
        self.unmap(0)?;
        // SAFETY: the range is reserved, and nothing is mapped to it.
        #[allow(unsafe_code)]
        unsafe {
            result::ctx::set_current(self.stream.context().cu_ctx())?;
            sys::cuMemAddressFree(self.start, self.bytes).result()
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let freed = self.free();
        self.stream.context().record_err(freed);
    }
}

/// Memory of a device, for this process alone.
fn properties(device: c_int) -> CUmemAllocationProp {
    // SAFETY: zeros are valid for each field, or are replaced below.
    #[allow(unsafe_code)]
    let mut properties: CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    let kind = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // Versions of CUDA name the second field differently. SAFETY: in all of them, a location is a
    // type and a number of 32 bits each.
    #[allow(unsafe_code)]
    unsafe {
        properties.location = transmute::<[c_int; 2], CUmemLocation>([kind as c_int, device]);
    }
    properties
}
