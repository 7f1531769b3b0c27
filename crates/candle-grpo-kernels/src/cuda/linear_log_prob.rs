//! The CUDA path of [`linear_log_prob`](crate::linear_log_prob()): the logits are made tile by tile of the vocabulary, read
//! (forward) or turned into their gradient (backward), and forgotten.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{DType, Layout, Result, Shape, Storage, Tensor, bail};

use super::in_place::write;
use super::log_prob::{THREADS, launch_backward};
use super::matmul::{Matrix, matmul};
use super::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::cpu::linear_log_prob::Wanted;
use crate::log_prob::{Backward, Rows, rows_and_width};

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

/// Hidden states `[.., H]`, the weight `[V, H]` and a bias `[V]` of f32, contiguous, to log-probs, entropy and log-sum-exp,
/// `[3, N]`. Products are of the dtype that hidden states and weight have in common, f32 if there is none, with sums in f32. A
/// bias of other than V entries is none.
pub(crate) fn forward(
    (hidden, hidden_layout): (&CudaStorage, &Layout),
    (weight, weight_layout): (&CudaStorage, &Layout),
    (bias, bias_layout): (&CudaStorage, &Layout),
    rows: &Rows,
) -> Result<(CudaStorage, Shape)> {
    let device = hidden.device();
    let stream = device.cuda_stream();
    let (n, width) = rows_and_width(hidden_layout);
    let (vocab, _) = weight_layout.shape().dims2()?;
    let has_bias = bias_layout.shape().elem_count() == vocab;
    // SAFETY: the last tile writes all of `packed`; the first one reads nothing of `state`.
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
        let mut logits = if has_bias {
            // The same for each row.
            let first = bias_layout.start_offset() + start;
            let rows = Layout::new(Shape::from((n, columns)), vec![0, 1], first);
            bias.to_dtype(&rows, DType::F32)?
        } else {
            // SAFETY: the product writes all of it.
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
            // SAFETY: hidden has n * width elements, the tile of the weight columns * width, the logits n * columns.
            #[allow(unsafe_code)]
            unsafe {
                matmul(device, [n, width, columns], &hidden, &weight, &logits, has_bias)?;
            }
        });
        // SAFETY: the logits have n * columns elements, targets and mask n, state 4 * n, packed 3 * n; a block for each row.
        #[allow(unsafe_code)]
        unsafe {
            kernels::linear_log_prob_tile {
                logits: In::new(&logits, &of_logits, &stream)?,
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

/// The gradients of `hidden` `[.., H]`, `weight` `[V, H]` and `bias` `[V]` of f32, which are detached and contiguous, where they are
/// wanted. Products are as in [`forward`], but of f32 for f16, in which the gradients of logits would become 0.
pub(crate) fn backward(
    [hidden, weight, bias]: [&Tensor; 3],
    pass: &Backward,
    wanted: Wanted,
) -> Result<[Option<Tensor>; 3]> {
    let shape = hidden.shape();
    let (n, width) = rows_and_width(hidden.layout());
    let hidden = hidden.reshape((n, width))?;
    let (vocab, _) = weight.dims2()?;
    let has_bias = bias.elem_count() == vocab;
    let dtype = match (hidden.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => DType::BF16,
        _ => DType::F32,
    };
    let device = hidden.device();
    if n == 0 {
        // Candle converts no empty tensors on CUDA.
        let zeros = |wanted: bool, x: &Tensor| wanted.then(|| x.zeros_like()).transpose();
        return Ok([
            zeros(wanted.hidden, &hidden)?
                .map(|x| x.reshape(shape))
                .transpose()?,
            zeros(wanted.weight, weight)?,
            zeros(wanted.bias, bias)?,
        ]);
    }
    let gpu = device.as_cuda_device()?;
    let mut states = hidden.clone();
    if let Some(mask) = &pass.rows.mask {
        // The gradient of the weight is a product with all rows: 0 times NaN would be NaN.
        let mask = mask.unsqueeze(1)?.broadcast_as(states.shape())?;
        states = mask.where_cond(&states, &states.zeros_like()?)?;
    }
    let states = states.to_dtype(dtype)?;
    let zeros = |wanted: bool, shape: &Shape, dtype| {
        wanted
            .then(|| Tensor::zeros(shape, dtype, device))
            .transpose()
    };
    let hidden_gradient = zeros(wanted.hidden, hidden.shape(), DType::F32)?;
    let weight_gradient = zeros(wanted.weight, weight.shape(), weight.dtype())?;
    let bias_gradient = zeros(wanted.bias, bias.shape(), DType::F32)?;
    for (start, columns) in tiles(n, vocab)? {
        let weight = weight.narrow(0, start, columns)?.to_dtype(dtype)?;
        let logits = if has_bias {
            let rows = bias.narrow(0, start, columns)?.broadcast_as((n, columns))?;
            // Candle would call one row contiguous, and this is written.
            rows.force_contiguous()?
        } else {
            // SAFETY: the product writes all of it.
            #[allow(unsafe_code)]
            let logits = unsafe { alloc::<f32>(gpu, n * columns)? };
            let logits = CudaStorage::wrap_cuda_slice(logits, gpu.clone());
            as_tensor(logits, &Shape::from((n, columns)))
        };
        product(
            [n, width, columns],
            (&states, false),
            (&weight, true),
            &logits,
            has_bias,
        )?;
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
            let sizes = [n, columns, width];
            product(
                sizes,
                (&gradient, false),
                (&weight, false),
                hidden_gradient,
                true,
            )?;
        }
        if let Some(weight_gradient) = &weight_gradient {
            let sizes = [columns, n, width];
            // In f32, since cuBLAS may add parts of a sum in the dtype of its result.
            let of_tile = match weight_gradient.dtype() {
                DType::F32 => weight_gradient.narrow(0, start, columns)?,
                _ => Tensor::zeros((columns, width), DType::F32, device)?,
            };
            product(sizes, (&gradient, true), (&states, false), &of_tile, false)?;
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

/// `c = a b`, or `c += a b` if that `is_added`, of contiguous tensors, each of `a` and `b` transposed if that is said: `[m, k]` and
/// `[k, n]` to f32 `[m, n]`.
fn product(
    sizes: [usize; 3],
    (a, is_a_transposed): (&Tensor, bool),
    (b, is_b_transposed): (&Tensor, bool),
    c: &Tensor,
    is_added: bool,
) -> Result<()> {
    let (a, b) = (a.storage_and_layout(), b.storage_and_layout());
    write(c, |c, layout| {
        let device = c.device().clone();
        let stream = device.cuda_stream();
        let Storage::Cuda(of_a) = &*a.0 else {
            bail!("linear_log_prob: a tensor left the GPU");
        };
        with_cuda_floats!(of_a, "hidden", T => {
            let a = Matrix {
                elements: In::<T>::of(&a, &stream)?,
                is_transposed: is_a_transposed,
            };
            let b = Matrix {
                elements: In::<T>::of(&b, &stream)?,
                is_transposed: is_b_transposed,
            };
            // SAFETY: the sizes are those of the tensors.
            #[allow(unsafe_code)]
            unsafe {
                let c = Out::<f32>::in_place(c, layout, &stream)?;
                matmul(&device, sizes, &a, &b, &c, is_added)?;
            }
        });
        Ok(())
    })
}
