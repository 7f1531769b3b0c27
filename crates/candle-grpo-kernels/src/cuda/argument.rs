//! Kernel arguments: element pointers and numbers.

use std::marker::PhantomData;
use std::ops::Deref;

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::{CudaStorage, Layout, Result, Storage, bail};

/// A value that can be passed to a kernel.
pub(crate) trait Argument {
    /// The kernel's parameter type.
    type Bits: DeviceRepr;

    /// Returns the value.
    fn bits(&self) -> &Self::Bits;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Argument for $number {
            type Bits = Self;

            fn bits(&self) -> &Self {
                self
            }
        }
    )*};
}
numbers!(u64, u32, i32, f64, f32);

/// Elements that a kernel reads. Marks the access for other streams when dropped, which must be
/// after the launch.
pub(crate) struct In<'a, T> {
    pointer: CUdeviceptr,
    _reading: Option<SyncOnDrop<'a>>,
    element: PhantomData<T>,
}

impl<'a, T: CudaDType + 'a> In<'a, T> {
    /// Returns the elements in a contiguous layout.
    pub(crate) fn new(
        storage: &'a CudaStorage,
        layout: &Layout,
        stream: &'a CudaStream,
    ) -> Result<Self> {
        let (start, reading) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
        Ok(Self {
            pointer: start + offset_of::<T>(layout)?,
            _reading: Some(reading),
            element: PhantomData,
        })
    }

    /// Returns a contiguous tensor's elements, given its `storage_and_layout()`.
    pub(crate) fn from_tensor(
        (storage, layout): &'a (impl Deref<Target = Storage>, &Layout),
        stream: &'a CudaStream,
    ) -> Result<Self> {
        match &**storage {
            Storage::Cuda(storage) => Self::new(storage, layout, stream),
            _ => bail!("a tensor is on the CPU, must be on a GPU"),
        }
    }

    /// Like [`from_tensor`](Self::from_tensor), or null for `None`.
    pub(crate) fn optional(
        tensor: Option<&'a (impl Deref<Target = Storage>, &Layout)>,
        stream: &'a CudaStream,
    ) -> Result<Self> {
        tensor.map_or(Ok(Self::null()), |tensor| Self::from_tensor(tensor, stream))
    }
}

impl<'a, T: 'a> In<'a, T> {
    /// Returns a null pointer.
    pub(crate) fn null() -> Self {
        Self {
            pointer: 0,
            _reading: None,
            element: PhantomData,
        }
    }

    /// Returns all elements in a slice.
    pub(crate) fn from_slice(slice: &'a CudaSlice<T>, stream: &'a CudaStream) -> Self {
        let (pointer, reading) = slice.device_ptr(stream);
        Self {
            pointer,
            _reading: Some(reading),
            element: PhantomData,
        }
    }
}

impl<T> Argument for In<'_, T> {
    type Bits = CUdeviceptr;

    fn bits(&self) -> &CUdeviceptr {
        &self.pointer
    }
}

/// Elements that a kernel writes, or null for none. Marks the access for other streams when
/// dropped, which must be after the launch.
pub(crate) struct Out<'a, T> {
    pointer: CUdeviceptr,
    _writing: Option<SyncOnDrop<'a>>,
    element: PhantomData<T>,
}

impl<'a, T: CudaDType + 'a> Out<'a, T> {
    /// Returns a null pointer.
    pub(crate) fn null() -> Self {
        Self {
            pointer: 0,
            _writing: None,
            element: PhantomData,
        }
    }

    /// Returns all elements in a slice or view.
    pub(crate) fn new(elements: &'a mut impl DevicePtrMut<T>, stream: &'a CudaStream) -> Self {
        let (pointer, writing) = elements.device_ptr_mut(stream);
        Self {
            pointer,
            _writing: Some(writing),
            element: PhantomData,
        }
    }

    /// Returns the elements in a contiguous layout.
    pub(crate) fn in_place(
        storage: &'a mut CudaStorage,
        layout: &Layout,
        stream: &'a CudaStream,
    ) -> Result<Self> {
        let mut out = Self::new(storage.as_cuda_slice_mut::<T>()?, stream);
        out.pointer += offset_of::<T>(layout)?;
        Ok(out)
    }

    /// Returns the same elements, for a kernel that reads each element before it writes it.
    pub(crate) fn read(&self) -> In<'a, T> {
        In {
            pointer: self.pointer,
            _reading: None,
            element: PhantomData,
        }
    }
}

impl<T> Argument for Out<'_, T> {
    type Bits = CUdeviceptr;

    fn bits(&self) -> &CUdeviceptr {
        &self.pointer
    }
}

/// Returns a contiguous layout's offset in bytes.
fn offset_of<T>(layout: &Layout) -> Result<CUdeviceptr> {
    match layout.contiguous_offsets() {
        Some((start, _)) => Ok((start * size_of::<T>()) as CUdeviceptr),
        None => bail!(
            "a tensor has the strides {:?}, must be contiguous",
            layout.stride()
        ),
    }
}
