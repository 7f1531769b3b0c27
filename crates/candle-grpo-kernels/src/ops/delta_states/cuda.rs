//! The CUDA path of [`DeltaStates`](crate::DeltaStates), with the kernels in `gated_delta_rule.cu`
//! and `causal_conv.cu`.

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdeviceptr, CUstream};
use candle_core::cuda_backend::{CudaStorage, WrapErr};
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};

use super::{SlotRows, StateBatch};
use crate::cuda::argument::Argument;
use crate::cuda::in_place::write;
use crate::cuda::mapped::MappedPair;
use crate::cuda::{In, NO_SLOT, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::ops::causal_conv::cuda as causal_conv;
use crate::ops::gated_delta_rule::cuda as gated_delta_rule;
use crate::{DeltaHeads, cuda_memory};

/// Value columns per block, as in the kernel.
const STEP_COLUMNS: usize = 32;

/// Returns the convolution of the contiguous rows `x`, and advances `windows`
/// `[slots, taps - 1, channels]`.
pub(crate) fn causal_conv(
    windows: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    batch: &StateBatch,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (channels, taps) = weight.dims2()?;
    causal_conv::check(channels, taps)?;
    let sequences = table(batch)?.storage_and_layout();
    let (x_storage, weight) = (x.storage_and_layout(), weight.storage_and_layout());
    let Storage::Cuda(x_cuda) = &*x_storage.0 else {
        bail!("causal_conv: x left the GPU");
    };
    let mut blocks = grid(count(batch), causal_conv::THREADS)?;
    blocks.grid_dim.1 = channels.div_ceil(causal_conv::THREADS as usize) as u32;
    let y = with_cuda_floats!(x_cuda, "x", T => {
        // SAFETY: the kernel writes each element.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, x.elem_count())? };
        let mut launch = |windows: Out<f32>| {
            // SAFETY: the sequences' rows match x. The slots exist, and each occurs once. The
            // blocks cover the channels.
            #[allow(unsafe_code)]
            unsafe {
                kernels::causal_conv_step::<T> {
                    x: In::from_tensor(&x_storage, &stream)?,
                    weight: In::from_tensor(&weight, &stream)?,
                    sequences: In::from_tensor(&sequences, &stream)?,
                    windows,
                    y: Out::new(&mut y, &stream),
                    channels: channels as i32,
                    taps: taps as i32,
                }
                .launch(device, blocks)
            }
        };
        match taps {
            // Candle cannot write to an empty tensor.
            1 => launch(Out::null())?,
            _ => write(windows, |windows, layout| {
                launch(Out::in_place(windows, layout, &stream)?)
            })?,
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok(as_tensor(y, x.shape()))
}

/// Returns the result for contiguous inputs, and advances `states`
/// `[slots, value_heads, key_dim, value_dim]`.
pub(crate) fn gated_delta_rule(
    states: &Tensor,
    [qkv, g, beta]: [&Tensor; 3],
    heads: &DeltaHeads,
    batch: &StateBatch,
) -> Result<Tensor> {
    let device = qkv.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let sequences = table(batch)?.storage_and_layout();
    let (qkv_storage, g, beta) = (
        qkv.storage_and_layout(),
        g.storage_and_layout(),
        beta.storage_and_layout(),
    );
    let Storage::Cuda(qkv_cuda) = &*qkv_storage.0 else {
        bail!("gated_delta_rule: qkv left the GPU");
    };
    let shape = Shape::from((qkv.dim(0)?, heads.values()));
    let floats = heads.key_dim * (STEP_COLUMNS + 2) + gated_delta_rule::THREADS as usize;
    let by_sequence = gated_delta_rule::blocks(count(batch), heads, STEP_COLUMNS, floats)?;
    let o = with_cuda_floats!(qkv_cuda, "qkv", T => {
        // SAFETY: the kernel writes each element.
        #[allow(unsafe_code)]
        let mut o = unsafe { alloc::<T>(device, shape.elem_count())? };
        write(states, |states, layout| {
            // SAFETY: the sequences' rows match the inputs and the result. The slots exist, and
            // each occurs once. The blocks have the kernel's shared memory.
            #[allow(unsafe_code)]
            unsafe {
                kernels::gated_delta_rule_step::<T> {
                    qkv: In::from_tensor(&qkv_storage, &stream)?,
                    g: In::from_tensor(&g, &stream)?,
                    beta: In::from_tensor(&beta, &stream)?,
                    sequences: In::from_tensor(&sequences, &stream)?,
                    states: Out::in_place(states, layout, &stream)?,
                    o: Out::new(&mut o, &stream),
                    key_heads: heads.key_heads as i32,
                    value_heads: heads.value_heads as i32,
                    key_dim: heads.key_dim as i32,
                    value_dim: heads.value_dim as i32,
                }
                .launch(device, by_sequence)
            }
        })?;
        CudaStorage::wrap_cuda_slice(o, device.clone())
    });
    Ok(as_tensor(o, &shape))
}

/// Reserves addresses for states and for windows. `None` if the device cannot map memory.
pub(crate) fn reserve(
    heads: DeltaHeads,
    taps: usize,
    device: &Device,
) -> Result<Option<MappedPair>> {
    // Both together take at most all of the memory.
    let most = cuda_memory(device)?.total;
    let state: &[usize] = &[heads.value_heads, heads.key_dim, heads.value_dim];
    MappedPair::reserve(
        [state, &[taps - 1, heads.width()]],
        DType::F32,
        device,
        most,
    )
}

/// Copies a slot of contiguous f32 `tensor` to another.
pub(crate) fn copy(tensor: &Tensor, from: usize, to: usize) -> Result<()> {
    with_slots(tensor, |start, bytes, stream| {
        let at = |slot: usize| start + (slot * bytes) as CUdeviceptr;
        // SAFETY: both slots have memory, and do not overlap.
        #[allow(unsafe_code)]
        unsafe { result::memcpy_dtod_async(at(to), at(from), bytes, stream) }.w()
    })
}

/// Zeroes a slot of contiguous f32 `tensor`.
pub(crate) fn clear(tensor: &Tensor, slot: usize) -> Result<()> {
    with_slots(tensor, |start, bytes, stream| {
        let at = start + (slot * bytes) as CUdeviceptr;
        // SAFETY: the slot has memory.
        #[allow(unsafe_code)]
        unsafe { result::memset_d8_async(at, 0, bytes, stream) }.w()
    })
}

/// Calls `operation` with the address of contiguous f32 `tensor`, the bytes of a slot, and the
/// stream.
fn with_slots(
    tensor: &Tensor,
    operation: impl FnOnce(CUdeviceptr, usize, CUstream) -> Result<()>,
) -> Result<()> {
    let bytes = tensor.dims()[1..].iter().product::<usize>() * size_of::<f32>();
    write(tensor, |storage, layout| {
        let stream = storage.device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let elements = Out::<f32>::in_place(storage, layout, &stream)?;
        operation(*elements.bits(), bytes, stream.cu_stream())
    })
}

/// Returns the table's numbers for `count` sequences. Those after `sequences` have a row and no
/// state.
pub(crate) fn numbers(sequences: &[SlotRows], count: usize) -> Result<Vec<u32>> {
    let mut numbers = Vec::with_capacity(3 * count);
    let mut first = 0;
    for &SlotRows { slot, rows } in sequences {
        match (u32::try_from(slot), u32::try_from(rows)) {
            (Ok(slot), Ok(rows)) if slot != NO_SLOT => numbers.extend([slot, first, rows]),
            _ => bail!("batch: slot {slot} and {rows} rows, must fit in 32 bits on CUDA"),
        }
        first = match first.checked_add(rows as u32) {
            Some(first) => first,
            None => bail!("batch: more rows than fit in 32 bits, which CUDA requires"),
        };
    }
    for _ in sequences.len()..count {
        numbers.extend([NO_SLOT, first, 1]);
        first += 1;
    }
    Ok(numbers)
}

fn table<'a>(batch: &'a StateBatch) -> Result<&'a Tensor> {
    match &batch.table {
        Some(table) => Ok(table),
        None => bail!("batch: made for the CPU, must be made for the device of the states"),
    }
}

/// Number of sequences, with the padding.
fn count(batch: &StateBatch) -> usize {
    batch.sequences.len() + batch.padding
}
