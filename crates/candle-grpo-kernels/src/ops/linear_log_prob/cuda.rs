//! The CUDA path of [`linear_log_prob`](crate::linear_log_prob()).
//!
//! Computes the logits in vocabulary tiles. The forward pass keeps the first tiles, as many as fit,
//! for the backward pass. The backward pass computes a tile's gradient in the dtype that products
//! use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{DType, Layout, Result, Shape, Tensor, bail};
use half::bf16;

use super::{CUDA_KEPT_LOGITS, CUDA_TILE_COLUMNS, CUDA_TILE_LOGITS, Wanted};
use crate::cpu::with_element;
use crate::cuda::in_place::write;
use crate::cuda::matmul::{Matrix, matmul, product};
use crate::cuda::{CudaElement, In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::ops::log_prob::cuda::THREADS;
use crate::ops::log_prob::{Backward, Rows, rows_and_width};

/// Tile sizes in logits.
#[derive(Debug, Clone, Copy)]
struct Tiling {
    /// Approximate logits per tile.
    tile: usize,
    /// Minimum columns per tile.
    min_columns: usize,
    /// Maximum logits to keep for the backward pass.
    kept: usize,
}

const TILING: Tiling = Tiling {
    tile: CUDA_TILE_LOGITS,
    min_columns: CUDA_TILE_COLUMNS,
    kept: CUDA_KEPT_LOGITS,
};

impl Tiling {
    /// Returns each tile's first column and number of columns.
    fn tiles(self, n: usize, vocab: usize) -> Result<impl Iterator<Item = (usize, usize)>> {
        if vocab > i32::MAX as usize {
            bail!("weight: a vocabulary of {vocab}, must be below 2^31 on CUDA");
        }
        // Rows with whole packs are aligned, both for the kernels and for cuBLAS.
        let columns = (self.tile / n.max(1)).max(self.min_columns) / 64 * 64;
        let columns = columns.max(64);
        Ok((0..vocab)
            .step_by(columns)
            .map(move |start| (start, columns.min(vocab - start))))
    }
}

/// The first logit tiles from a forward pass on CUDA, for one backward pass.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeptLogits(Arc<Mutex<Vec<Tensor>>>);

impl KeptLogits {
    fn set(&self, tiles: Vec<Tensor>) {
        *self.lock() = tiles;
    }

    /// Takes the tiles. Returns none if there are none or a backward pass has already taken them.
    fn take(&self) -> Vec<Tensor> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Tensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The unmasked rows, in a separate tensor.
pub(crate) struct KeptRows {
    /// u32 `[K]`
    indices: Tensor,
    /// Each of the N rows' position among these, 0 for other rows, u32 `[N]`.
    positions: Tensor,
    /// u8 `[N]`
    mask: Tensor,
}

impl KeptRows {
    /// Returns the rows where `mask`, u8 `[N]`, is not 0. Returns `None` if that is all or none,
    /// because Candle has no empty tensors on CUDA. Synchronizes with the device.
    pub(super) fn new(mask: &Tensor) -> Result<Option<Self>> {
        let mut indices = Vec::new();
        let mut positions = Vec::new();
        for (row, is_kept) in (0u32..).zip(mask.to_vec1::<u8>()?) {
            if is_kept != 0 {
                positions.push(indices.len() as u32);
                indices.push(row);
            } else {
                positions.push(0);
            }
        }
        if indices.is_empty() || indices.len() == positions.len() {
            return Ok(None);
        }
        Ok(Some(Self {
            indices: Tensor::new(indices, mask.device())?,
            positions: Tensor::new(positions, mask.device())?,
            mask: mask.clone(),
        }))
    }

    /// Returns these rows in `x`, along `dim`.
    pub(super) fn select(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        x.index_select(&self.indices, dim)
    }

    /// Scatters `x`, which has these rows, along `dim`; the other rows are 0.
    ///
    /// Gathers each row, which is parallel. Candle's `index_add` processes rows sequentially.
    pub(super) fn spread(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let rows = x.index_select(&self.positions, dim)?;
        let mut shape = vec![1; x.rank()];
        shape[dim] = self.mask.elem_count();
        let mask = self.mask.reshape(shape)?.broadcast_as(rows.shape())?;
        let zero = Tensor::zeros((), rows.dtype(), rows.device())?;
        mask.where_cond(&rows, &zero.broadcast_as(rows.shape())?)
    }
}

/// Maps contiguous hidden states `[.., H]`, the weight `[V, H]` and an f32 bias `[V]` to log-probs,
/// entropy and log-sum-exp, `[3, N]`.
///
/// Products are in the dtype of hidden states and weight, or in f32 if their dtypes differ. Sums
/// are in f32. Sets `kept` to the first logit tiles, as many as fit.
pub(crate) fn forward(
    hidden: (&CudaStorage, &Layout),
    weight: (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
    rows: &Rows,
    kept: Option<&KeptLogits>,
) -> Result<(CudaStorage, Shape)> {
    forward_in(TILING, hidden, weight, bias, rows, kept)
}

fn forward_in(
    tiling: Tiling,
    (hidden, hidden_layout): (&CudaStorage, &Layout),
    (weight, weight_layout): (&CudaStorage, &Layout),
    bias: Option<(&CudaStorage, &Layout)>,
    rows: &Rows,
    kept: Option<&KeptLogits>,
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
    let mut kept_tiles = Vec::new();
    for (start, columns) in tiling.tiles(n, vocab)?.filter(|_| n > 0) {
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
            // SAFETY: hidden has n * width elements, the weight tile has columns * width, and the
            // logits have n * columns.
            #[allow(unsafe_code)]
            unsafe {
                matmul(device, [n, width, columns], &hidden, &weight, &logits, bias.is_some())?;
            }
        });
        // SAFETY: the logits have n * columns elements, targets and mask n, state 4 * n, packed 3 *
        // n. There is a block per row.
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
        if kept.is_some() && n.saturating_mul(start + columns) <= tiling.kept {
            kept_tiles.push(as_tensor(logits, &Shape::from((n, columns))));
        }
    }
    if let Some(kept) = kept {
        kept.set(kept_tiles);
    }
    let packed = CudaStorage::wrap_cuda_slice(packed, device.clone());
    Ok((packed, Shape::from((3, n))))
}

/// Returns the requested gradients for detached, contiguous `hidden` `[.., H]`, `weight` `[V, H]`
/// and f32 `bias` `[V]`. Weight and bias gradients are f32. If there is a weight sum beside
/// `wanted`, adds the weight gradient to it instead.
///
/// Products are as in [`forward`], except that f16 uses f32, because logit gradients would
/// underflow in f16. Takes the first logit tiles from `kept`.
pub(crate) fn backward(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    pass: &Backward,
    wanted: (Wanted, Option<&Tensor>),
    kept: &KeptLogits,
) -> Result<[Option<Tensor>; 3]> {
    backward_in(TILING, hidden, weight, bias, pass, wanted, kept.take())
}

fn backward_in(
    tiling: Tiling,
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    pass: &Backward,
    (wanted, weight_sum): (Wanted, Option<&Tensor>),
    kept: Vec<Tensor>,
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
        // Candle cannot convert empty tensors on CUDA.
        let zeros = |wanted: bool, x: &Tensor| wanted.then(|| x.zeros_like()).transpose();
        return Ok([
            zeros(wanted.hidden, &hidden)?
                .map(|x| x.reshape(shape))
                .transpose()?,
            zeros(wanted.weight && weight_sum.is_none(), weight)?
                .map(|x| x.to_dtype(DType::F32))
                .transpose()?,
            bias.filter(|_| wanted.bias)
                .map(Tensor::zeros_like)
                .transpose()?,
        ]);
    }
    let gpu = device.as_cuda_device()?;
    let stream = gpu.cuda_stream();
    let mut states = hidden.clone();
    if let Some(mask) = &pass.rows.mask {
        // The weight gradient is a product with all rows, and 0 times NaN is NaN.
        let mask = mask.unsqueeze(1)?.broadcast_as(states.shape())?;
        let zero = Tensor::zeros((), states.dtype(), device)?;
        states = mask.where_cond(&states, &zero.broadcast_as(states.shape())?)?;
    }
    let states = states.to_dtype(dtype)?;
    // A tensor that is written completely.
    let unwritten = |shape: &[usize], dtype| {
        let n = shape.iter().product();
        let storage = with_element!(dtype, "weight", T => {
            // SAFETY: see above.
            #[allow(unsafe_code)]
            let elements = unsafe { alloc::<T>(gpu, n)? };
            CudaStorage::wrap_cuda_slice(elements, gpu.clone())
        });
        Result::Ok(as_tensor(storage, &Shape::from(shape)))
    };
    let sum =
        |wanted: bool, shape: &[usize]| wanted.then(|| unwritten(shape, DType::F32)).transpose();
    let hidden_gradient = sum(wanted.hidden, &[n, width])?;
    let weight_gradient = sum(wanted.weight && weight_sum.is_none(), &[vocab, width])?;
    let bias_gradient = sum(wanted.bias, &[vocab])?;
    let mut kept = kept.into_iter();
    for (start, columns) in tiling.tiles(n, vocab)? {
        let weight = weight.narrow(0, start, columns)?.to_dtype(dtype)?;
        let logits = match (kept.next(), bias) {
            (Some(logits), _) => logits,
            (None, bias) => {
                let logits = match bias {
                    // Candle treats a single broadcast row as contiguous, but this tensor is
                    // written.
                    Some(bias) => bias
                        .narrow(0, start, columns)?
                        .broadcast_as((n, columns))?
                        .force_contiguous()?,
                    None => unwritten(&[n, columns], DType::F32)?,
                };
                product(&states, &weight.t()?, &logits, bias.is_some())?;
                logits
            }
        };
        // The bias gradient is an f32 sum.
        let gradient = if dtype == DType::F32 || wanted.bias {
            write(&logits, |storage, layout| {
                let gradient = Out::<f32>::in_place(storage, layout, &stream)?;
                launch_gradient(gpu, (n, columns), start, pass, gradient.read(), gradient)
            })?;
            if let Some(bias_gradient) = &bias_gradient {
                bias_gradient.slice_set(&logits.sum(0)?, 0, start)?;
            }
            logits.to_dtype(dtype)?
        } else {
            let gradient = unwritten(&[n, columns], dtype)?;
            write(&gradient, |storage, layout| {
                let logits = logits.storage_and_layout();
                let logits = In::from_tensor(&logits, &stream)?;
                let gradient = Out::<bf16>::in_place(storage, layout, &stream)?;
                launch_gradient(gpu, (n, columns), start, pass, logits, gradient)
            })?;
            gradient
        };
        drop(logits);
        if let Some(hidden_gradient) = &hidden_gradient {
            product(&gradient, &weight, hidden_gradient, start > 0)?;
        }
        if let Some(target) = weight_sum.or(weight_gradient.as_ref()) {
            let of_tile = target.narrow(0, start, columns)?;
            product(&gradient.t()?, &states, &of_tile, weight_sum.is_some())?;
        }
    }
    let hidden_gradient = hidden_gradient
        .map(|gradient| gradient.to_dtype(hidden.dtype())?.reshape(shape))
        .transpose()?;
    Ok([hidden_gradient, weight_gradient, bias_gradient])
}

/// Maps f32 logits `[N, columns]`, which start at vocabulary column `first_column`, to their
/// gradient, which may share their memory.
fn launch_gradient<T: CudaElement>(
    device: &CudaDevice,
    (n, columns): (usize, usize),
    first_column: usize,
    pass: &Backward,
    logits: In<f32>,
    gradient: Out<T>,
) -> Result<()> {
    let stream = device.cuda_stream();
    let targets = pass.rows.targets.storage_and_layout();
    let mask = pass.rows.mask.as_ref().map(Tensor::storage_and_layout);
    let packed = pass.packed.storage_and_layout();
    let packed_gradient = pass.gradient.storage_and_layout();
    // SAFETY: targets and mask have n elements, logits and gradient n * columns, packed and its
    // gradient 3 * n. There is a block per row, and a thread reads elements before it writes them.
    #[allow(unsafe_code)]
    unsafe {
        kernels::linear_log_prob_gradient::<T> {
            logits,
            targets: In::from_tensor(&targets, &stream)?,
            mask: In::optional(mask.as_ref(), &stream)?,
            packed: In::from_tensor(&packed, &stream)?,
            packed_gradient: In::from_tensor(&packed_gradient, &stream)?,
            gradient,
            n: n as u64,
            columns: columns as u64,
            first_column: first_column as u32,
            inverse_temperature: pass.rows.inverse_temperature,
        }
        .launch(device, grid(n, THREADS)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};
    use candle_grpo_test_support::{CudaCalls, assert_close, cuda, noise_tensor, numbers};

    use crate::{LinearLogProb, LogProbOptions, TokenLogProbs};

    /// Returns the results and the gradients with respect to hidden states, weight and bias.
    fn run(
        tiling: Tiling,
        inputs: [&Tensor; 3],
        has_bias: bool,
        keeps: bool,
        device: &Device,
    ) -> Result<Vec<Tensor>> {
        run_with(tiling, inputs, has_bias, keeps, device, None)
    }

    /// [`run`], which adds the weight gradient to a sum if there is one.
    fn run_with(
        tiling: Tiling,
        [hidden, weight, bias]: [&Tensor; 3],
        has_bias: bool,
        keeps: bool,
        device: &Device,
        weight_sum: Option<&Tensor>,
    ) -> Result<Vec<Tensor>> {
        let (n, vocab) = (hidden.dim(0)?, weight.dim(0)?);
        let targets = Tensor::arange(0, n as u32, device)?.affine(50.0, 3.0)?;
        let mask = Tensor::from_iter((0..n).map(|row| u8::from(row != 2)), device)?;
        let options = LogProbOptions {
            mask: Some(&mask),
            ..Default::default()
        };
        let rows = Rows::new(("hidden", hidden), &[n], vocab, &targets, 0.8, options)?;
        let bias = has_bias.then_some(bias);
        let kept = KeptLogits::default();
        let (packed, shape) = {
            let tensors =
                [Some(hidden), Some(weight), bias].map(|x| x.map(Tensor::storage_and_layout));
            let gpu = tensors.each_ref().map(|x| match x {
                Some((storage, layout)) => match &**storage {
                    candle_core::Storage::Cuda(storage) => Some((storage, *layout)),
                    _ => None,
                },
                None => None,
            });
            let [Some(hidden), Some(weight), bias] = gpu else {
                bail!("a tensor is on the CPU");
            };
            forward_in(tiling, hidden, weight, bias, &rows, keeps.then_some(&kept))?
        };
        let packed = as_tensor(packed, &shape);
        let gradient = noise_tensor((3, n), 4, DType::F32, &Device::Cpu)?.to_device(device)?;
        let pass = Backward {
            rows: &rows,
            packed: packed.clone(),
            gradient,
        };
        let wanted = Wanted {
            hidden: true,
            weight: true,
            bias: has_bias,
        };
        let wanted = (wanted, weight_sum);
        let gradients = backward_in(tiling, hidden, weight, bias, &pass, wanted, kept.take())?;
        Ok([Some(packed)]
            .into_iter()
            .chain(gradients)
            .flatten()
            .collect())
    }

    /// Counts the products in `run`. `None` without the emulation.
    fn products_of(run: impl FnOnce() -> Result<Vec<Tensor>>) -> Result<Option<u64>> {
        let before = CudaCalls::now();
        run()?;
        let calls = CudaCalls::now().zip(before);
        Ok(calls.map(|(after, before)| (after - before).products))
    }

    #[test]
    fn several_tiles_equal_one_tile_and_kept_logits_are_bit_identical() -> Result<()> {
        let Ok(device) = cuda() else {
            println!("skipped: no GPU");
            return Ok(());
        };
        let (n, vocab, width) = (9, 600, 24);
        let one = Tiling {
            tile: usize::MAX,
            ..TILING
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let noise = |shape: &[usize], seed, dtype| {
                noise_tensor(shape, seed, dtype, &Device::Cpu)?.to_device(device)
            };
            let hidden = noise(&[n, width], 1, dtype)?;
            let weight = noise(&[vocab, width], 2, dtype)?;
            let bias = noise(&[vocab], 3, DType::F32)?;
            let inputs = [&hidden, &weight, &bias];
            for has_bias in [false, true] {
                let expected = run(one, inputs, has_bias, false, device)?;
                // Nine tiles with 64 columns, and one with 24.
                let many = Tiling {
                    tile: 64 * n,
                    min_columns: 1,
                    ..TILING
                };
                let found = run(many, inputs, has_bias, false, device)?;
                let kept = run(many, inputs, has_bias, true, device)?;
                // As much as five tiles, and not six.
                let five = Tiling {
                    kept: 6 * 64 * n - 1,
                    ..many
                };
                let some_kept = run(five, inputs, has_bias, true, device)?;
                // One product per tile for the logits, and two for the gradients.
                for (tiling, keeps, again) in [(many, false, 10), (many, true, 0), (five, true, 5)]
                {
                    let products = products_of(|| run(tiling, inputs, has_bias, keeps, device))?;
                    assert!(products.is_none_or(|products| products == 30 + again));
                }
                assert_eq!(found.len(), expected.len());
                let rounding = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                let sum = weight.ones_like()?.to_dtype(DType::F32)?;
                let others = run_with(many, inputs, has_bias, false, device, Some(&sum))?;
                assert_eq!(others.len() + 1, found.len());
                let total = numbers(&(&expected[2] + 1.)?)?;
                assert_close(&numbers(&sum)?, &total, rounding);
                assert_eq!(numbers(&others[1])?, numbers(&found[1])?);
                for (i, expected) in expected.iter().enumerate() {
                    let (found, expected) = (numbers(&found[i])?, numbers(expected)?);
                    assert_close(&found, &expected, rounding);
                    for kept in [&kept, &some_kept] {
                        let kept = numbers(&kept[i])?;
                        if dtype == DType::F16 {
                            // Without kept logits the backward pass computes them in f32.
                            assert_close(&kept, &expected, rounding);
                        } else {
                            assert_eq!(kept, found);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The CPU path checks that the result without masked rows is bit-identical, over several tiles
    /// of rows.
    #[test]
    fn dropping_masked_rows_first_does_not_change_a_bit() -> Result<()> {
        for dtype in [DType::F32, DType::BF16] {
            let masks: [fn(u32) -> bool; 4] =
                [|row| row % 3 != 1, |row| row == 7, |_| false, |_| true];
            for keep in masks {
                let (rows, vocab, width) = (3100u32, 37, 5);
                let variable = |shape: &[usize], seed, dtype| {
                    Var::from_tensor(&noise_tensor(shape, seed, dtype, &Device::Cpu)?)
                };
                let hidden = variable(&[31, 100, width], 1, dtype)?;
                let weight = variable(&[vocab, width], 2, dtype)?;
                let bias = variable(&[vocab], 3, DType::F32)?;
                let targets = (0..rows).map(|row| row % vocab as u32);
                let targets = Tensor::from_iter(targets, &Device::Cpu)?.reshape((31, 100))?;
                let mask =
                    Tensor::from_iter((0..rows).map(|row| u8::from(keep(row))), &Device::Cpu)?
                        .reshape(targets.shape())?;
                let options = LogProbOptions {
                    mask: Some(&mask),
                    ..Default::default()
                };
                let new =
                    || LinearLogProb::new(&hidden, &weight, Some(&bias), &targets, 0.7, options);
                let (whole, compact) = (new()?, new()?.without_dropped_rows()?);
                let (expected, found) = (whole.forward()?, compact.forward()?);
                let flat = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                let same = |a: &Tensor, b: &Tensor| -> Result<()> {
                    assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
                    assert_eq!(flat(a)?, flat(b)?);
                    Ok(())
                };
                same(&found.log_probs, &expected.log_probs)?;
                same(&found.entropy, &expected.entropy)?;
                same(&found.log_sum_exp, &expected.log_sum_exp)?;
                let derivative =
                    |seed| noise_tensor(targets.dims(), seed, DType::F32, &Device::Cpu);
                let derivatives = TokenLogProbs {
                    log_probs: derivative(4)?,
                    entropy: derivative(5)?,
                    log_sum_exp: derivative(6)?,
                };
                let expected = whole.backward(&expected, &derivatives)?;
                let found = compact.backward(&found, &derivatives)?;
                for (found, expected) in [
                    (found.hidden, expected.hidden),
                    (found.weight, expected.weight),
                    (found.bias, expected.bias),
                ] {
                    same(&found.expect("wanted"), &expected.expect("wanted"))?;
                }
            }
        }
        Ok(())
    }
}
