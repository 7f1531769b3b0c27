//! The CUDA path of [`linear_log_prob`](crate::linear_log_prob()).
//!
//! Computes the logits in tiles of the vocabulary. The forward pass reads a tile, and the backward
//! pass replaces it by its gradient.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{DType, Layout, Result, Shape, Tensor, bail};

use super::in_place::write;
use super::log_prob::{THREADS, launch_backward};
use super::matmul::{Matrix, matmul, product};
use super::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::cpu::linear_log_prob::Wanted;
use crate::log_prob::{Backward, Rows, rows_and_width};

/// Approximate logits of a tile, 256 MiB of f32, for efficient products.
const TILE_LOGITS: usize = 1 << 26;

/// Minimum columns of a tile.
const MIN_COLUMNS: usize = 1024;

/// Returns the first column and the number of columns of each tile.
fn tiles(n: usize, vocab: usize) -> Result<impl Iterator<Item = (usize, usize)>> {
    if vocab > i32::MAX as usize {
        bail!("weight: a vocabulary of {vocab}, must be below 2^31 on CUDA");
    }
    let columns = (TILE_LOGITS / n.max(1)).max(MIN_COLUMNS);
    Ok((0..vocab)
        .step_by(columns)
        .map(move |start| (start, columns.min(vocab - start))))
}

/// Maps contiguous hidden states `[.., H]`, the weight `[V, H]` and an f32 bias `[V]` to log-probs,
/// entropy and log-sum-exp, `[3, N]`.
///
/// Products are in the dtype of hidden states and weight, or in f32 if the dtypes differ. Sums are
/// in f32.
pub(crate) fn forward(
    (hidden, hidden_layout): (&CudaStorage, &Layout),
    (weight, weight_layout): (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
    rows: &Rows,
) -> Result<(CudaStorage, Shape)> {
    let device = hidden.device();
    let stream = device.cuda_stream();
    let (n, width) = rows_and_width(hidden_layout);
    let (vocab, _) = weight_layout.shape().dims2()?;
    // SAFETY: the last tile writes all of `packed`. The first tile does not read `state`.
    #[allow(unsafe_code)]
    let (mut packed, mut state) =
        unsafe { (alloc::<f32>(device, 3 * n)?, alloc::<f32>(device, 4 * n)?) };
    let is_alike = hidden.dtype() == weight.dtype();
    let (converted, contiguous);
    let (hidden, hidden_layout) = if is_alike || n == 0 {
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
        let converted;
        let (weight, of_tile) = if is_alike {
            (weight, of_tile)
        } else {
            converted = weight.to_dtype(&of_tile, DType::F32)?;
            (&converted, Layout::contiguous((columns, width)))
        };
        let of_logits = Layout::contiguous((n, columns));
        let mut logits = if let Some((bias, bias_layout)) = bias {
            // Stride 0: every row starts with the bias.
            let first = bias_layout.start_offset() + start;
            let rows = Layout::new(Shape::from((n, columns)), vec![0, 1], first);
            bias.to_dtype(&rows, DType::F32)?
        } else {
            // SAFETY: the product writes every element.
            #[allow(unsafe_code)]
            let logits = unsafe { alloc::<f32>(device, n * columns)? };
            CudaStorage::wrap_cuda_slice(logits, device.clone())
        };
        with_cuda_floats!(hidden, "hidden", T => {
            let hidden = Matrix {
                elements: In::<T>::new(hidden, hidden_layout, &stream)?,
                is_transposed: false,
            };
            let weight = Matrix {
                elements: In::<T>::new(weight, &of_tile, &stream)?,
                is_transposed: true,
            };
            let logits = Out::<f32>::in_place(&mut logits, &of_logits, &stream)?;
            // SAFETY: hidden has n * width elements, the tile of the weight columns * width, and
            // the logits n * columns.
            #[allow(unsafe_code)]
            unsafe {
                matmul(device, [n, width, columns], &hidden, &weight, &logits, bias.is_some())?;
            }
        });
        // SAFETY: the logits have n * columns elements, targets and mask n, state 4 * n, packed
        // 3 * n. There is a block for each row.
        #[allow(unsafe_code)]
        unsafe {
            kernels::linear_log_prob_tile {
                logits: In::new(&logits, &of_logits, &stream)?,
                targets: In::from_tensor(&targets, &stream)?,
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

/// Returns the requested gradients of detached, contiguous `hidden` `[.., H]`, `weight` `[V, H]`
/// and f32 `bias` `[V]`.
///
/// Products are as in [`forward`], except that f16 uses f32: in f16 the gradients of logits would
/// underflow.
pub(crate) fn backward(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    pass: &Backward,
    wanted: Wanted,
) -> Result<[Option<Tensor>; 3]> {
    let shape = hidden.shape();
    let (n, width) = rows_and_width(hidden.layout());
    let hidden = hidden.reshape((n, width))?;
    let (vocab, _) = weight.dims2()?;
    let dtype = match (hidden.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => DType::BF16,
        _ => DType::F32,
    };
    let device = hidden.device();
    if n == 0 {
        // Candle does not convert empty tensors on CUDA.
        let zeros = |wanted: bool, x: &Tensor| wanted.then(|| x.zeros_like()).transpose();
        return Ok([
            zeros(wanted.hidden, &hidden)?
                .map(|x| x.reshape(shape))
                .transpose()?,
            zeros(wanted.weight, weight)?,
            bias.filter(|_| wanted.bias)
                .map(Tensor::zeros_like)
                .transpose()?,
        ]);
    }
    let gpu = device.as_cuda_device()?;
    let mut states = hidden.clone();
    if let Some(mask) = &pass.rows.mask {
        // The gradient of the weight is a product with all rows, and 0 times NaN is NaN.
        let mask = mask.unsqueeze(1)?.broadcast_as(states.shape())?;
        states = mask.where_cond(&states, &states.zeros_like()?)?;
    }
    let states = states.to_dtype(dtype)?;
    // A matrix that a product writes completely.
    let unwritten = |rows: usize, columns: usize| {
        // SAFETY: see above.
        #[allow(unsafe_code)]
        let elements = unsafe { alloc::<f32>(gpu, rows * columns)? };
        let storage = CudaStorage::wrap_cuda_slice(elements, gpu.clone());
        Result::Ok(as_tensor(storage, &Shape::from((rows, columns))))
    };
    let zeros = |wanted: bool, shape: &Shape, dtype| {
        wanted
            .then(|| Tensor::zeros(shape, dtype, device))
            .transpose()
    };
    let hidden_gradient = zeros(wanted.hidden, hidden.shape(), DType::F32)?;
    let weight_gradient = match weight.dtype() {
        DType::F32 if wanted.weight => Some(unwritten(vocab, width)?),
        dtype => zeros(wanted.weight, weight.shape(), dtype)?,
    };
    let bias_gradient = zeros(wanted.bias, &Shape::from(vocab), DType::F32)?;
    for (start, columns) in tiles(n, vocab)? {
        let weight = weight.narrow(0, start, columns)?.to_dtype(dtype)?;
        let logits = if let Some(bias) = bias {
            let rows = bias.narrow(0, start, columns)?.broadcast_as((n, columns))?;
            // Candle treats a single broadcast row as contiguous, but this tensor is written.
            rows.force_contiguous()?
        } else {
            unwritten(n, columns)?
        };
        product(&states, &weight.t()?, &logits, bias.is_some())?;
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
        if let Some(bias_gradient) = &bias_gradient {
            bias_gradient.slice_set(&logits.sum(0)?, 0, start)?;
        }
        let gradient = logits.to_dtype(dtype)?;
        if let Some(hidden_gradient) = &hidden_gradient {
            product(&gradient, &weight, hidden_gradient, true)?;
        }
        if let Some(weight_gradient) = &weight_gradient {
            // In f32, because cuBLAS may add partial sums in the dtype of the result.
            let of_tile = match weight_gradient.dtype() {
                DType::F32 => weight_gradient.narrow(0, start, columns)?,
                _ => unwritten(columns, width)?,
            };
            product(&gradient.t()?, &states, &of_tile, false)?;
            if weight_gradient.dtype() != DType::F32 {
                weight_gradient.slice_set(&of_tile.to_dtype(weight_gradient.dtype())?, 0, start)?;
            }
        }
    }
    let hidden_gradient = hidden_gradient
        .map(|gradient| gradient.to_dtype(hidden.dtype())?.reshape(shape))
        .transpose()?;
    Ok([hidden_gradient, weight_gradient, bias_gradient])
}
