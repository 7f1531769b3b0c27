//! The CUDA path of [`linear_log_prob`](crate::linear_log_prob()): the logits are made tile by tile of the vocabulary, read
//! (forward) or turned into their gradient (backward), and forgotten.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{DType, Layout, Result, Shape, Tensor, bail};

use super::in_place::write;
use super::log_prob::{THREADS, launch_backward};
use super::{In, Out, alloc, grid, kernels};
use crate::log_prob::{Backward, Rows};

/// A tile has about this many logits, 256 MiB of f32: large enough that its products keep the GPU busy.
const TILE_LOGITS: usize = 1 << 26;

/// And at least this many columns.
const MIN_COLUMNS: usize = 1024;

/// The columns of each tile: where they begin, and how many they are.
fn tiles(n: usize, vocab: usize) -> Result<impl Iterator<Item = (usize, usize)>> {
    if vocab > i32::MAX as usize {
        bail!("weight: a vocabulary of {vocab}, must be below 2^31 on CUDA");
    }
    let columns = (TILE_LOGITS / n.max(1)).max(MIN_COLUMNS);
    Ok((0..vocab)
        .step_by(columns)
        .map(move |start| (start, columns.min(vocab - start))))
}

/// Hidden states `[N, H]` and the weight `[V, H]`, contiguous, to log-probs, entropy and log-sum-exp, `[3, N]`.
pub(crate) fn forward(
    hidden: &CudaStorage,
    hidden_layout: &Layout,
    weight: &CudaStorage,
    weight_layout: &Layout,
    rows: &Rows,
) -> Result<(CudaStorage, Shape)> {
    let device = hidden.device();
    let stream = device.cuda_stream();
    let (n, width) = hidden_layout.shape().dims2()?;
    let (vocab, _) = weight_layout.shape().dims2()?;
    // SAFETY: the last tile writes all of `packed`; the first one reads nothing of `state`.
    #[allow(unsafe_code)]
    let (mut packed, mut state) =
        unsafe { (alloc::<f32>(device, 3 * n)?, alloc::<f32>(device, 4 * n)?) };
    let (converted, contiguous);
    let (hidden, hidden_layout) = if hidden.dtype() == DType::F32 {
        (hidden, hidden_layout)
    } else {
        converted = hidden.to_dtype(hidden_layout, DType::F32)?;
        contiguous = Layout::contiguous((n, width));
        (&converted, &contiguous)
    };
    let targets = rows.targets.storage_and_layout();
    let mask = rows.mask.as_ref().map(Tensor::storage_and_layout);
    for (start, columns) in tiles(n, vocab)?.filter(|_| n > 0) {
        let first = weight_layout.start_offset() + start * width;
        let of_tile = Layout::contiguous_with_offset((columns, width), first);
        let sizes = (1, n, columns, width);
        let logits = if weight.dtype() == DType::F32 {
            hidden.matmul(weight, sizes, hidden_layout, &of_tile.transpose(0, 1)?)?
        } else {
            let weight = weight.to_dtype(&of_tile, DType::F32)?;
            let transposed = Layout::contiguous((columns, width)).transpose(0, 1)?;
            hidden.matmul(&weight, sizes, hidden_layout, &transposed)?
        };
        // SAFETY: the logits have n * columns elements, targets and mask n, state 4 * n, packed 3 * n; a block for each row.
        #[allow(unsafe_code)]
        unsafe {
            kernels::log_prob_forward_tile::<f32> {
                logits: In::new(&logits, &Layout::contiguous((n, columns)), &stream)?,
                targets: In::of(&targets, &stream)?,
                mask: In::optional(mask.as_ref(), &stream)?,
                state: Out::new(&mut state, &stream),
                packed: Out::new(&mut packed, &stream),
                n: n as u64,
                columns: columns as u64,
                first_column: start as u32,
                vocab: vocab as u64,
                inverse_temperature: rows.inverse_temperature,
            }
            .launch(device, grid(n, THREADS)?)?;
        }
    }
    let packed = CudaStorage::wrap_cuda_slice(packed, device.clone());
    Ok((packed, Shape::from((3, n))))
}

/// The gradients of `hidden` `[N, H]` and `weight` `[V, H]`, which are detached and contiguous, where they are wanted.
pub(crate) fn backward(
    hidden: &Tensor,
    weight: &Tensor,
    pass: &Backward,
    (hidden_wanted, weight_wanted): (bool, bool),
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (n, _) = hidden.dims2()?;
    let (vocab, _) = weight.dims2()?;
    let mut states = hidden.to_dtype(DType::F32)?;
    if let Some(mask) = &pass.rows.mask {
        // The gradient of the weight is a product with all rows: 0 times NaN would be NaN.
        let mask = mask.unsqueeze(1)?.broadcast_as(states.shape())?;
        states = mask.where_cond(&states, &states.zeros_like()?)?;
    }
    let mut hidden_gradient: Option<Tensor> = None;
    let weight_gradient = if weight_wanted {
        Some(weight.zeros_like()?)
    } else {
        None
    };
    for (start, columns) in tiles(n, vocab)?.filter(|_| n > 0) {
        let weight = weight.narrow(0, start, columns)?.to_dtype(DType::F32)?;
        let logits = states.matmul(&weight.t()?)?;
        write(&logits, |storage, layout| {
            let device = storage.device().clone();
            let stream = device.cuda_stream();
            let gradient = Out::<f32>::in_place(storage, layout, &stream)?;
            launch_backward(
                &device,
                (n, columns),
                start as u32,
                pass,
                gradient.read(),
                gradient,
            )
        })?;
        let gradient = logits;
        if hidden_wanted {
            let part = gradient.matmul(&weight)?;
            hidden_gradient = Some(match hidden_gradient {
                None => part,
                Some(sum) => (sum + part)?,
            });
        }
        if let Some(weight_gradient) = &weight_gradient {
            let part = gradient.t()?.matmul(&states)?;
            weight_gradient.slice_set(&part.to_dtype(weight_gradient.dtype())?, 0, start)?;
        }
    }
    let hidden_gradient = match hidden_gradient {
        None if hidden_wanted => Some(hidden.zeros_like()?),
        None => None,
        Some(gradient) => Some(gradient.to_dtype(hidden.dtype())?),
    };
    Ok((hidden_gradient, weight_gradient))
}
