//! The CUDA path of [`adamw`](crate::adamw()).

use candle_core::{CudaDevice, Result, Tensor};

use super::moments;
use super::{AdamWStep, AdamWTensors, Narrow};
use crate::cuda::tensor_list::{TensorList, address, dtype_number, word};
use crate::cuda::{In, grid, kernels};

/// Threads and elements per block, as in the kernels. With moments in blocks of codes, each warp
/// updates one.
const THREADS: u32 = 256;
const CHUNK: usize = THREADS as usize * 16;
const QUANTIZED_CHUNK: usize = THREADS as usize / 32 * moments::NUMBERS_IN_BLOCK;

/// Updates nonempty f32, bf16 and f16 parameters, in one launch per device and moment form.
pub(crate) fn step(parameters: &[&AdamWTensors], step: &AdamWStep) -> Result<()> {
    let Some(first) = parameters.first() else {
        return Ok(());
    };
    let device = first.parameter.device();
    let (here, others) = parameters.iter().partition::<Vec<_>, _>(|tensors| {
        tensors.parameter.device().same_device(device)
            && tensors.is_quantized() == first.is_quantized()
    });
    launch(&here, device.as_cuda_device()?, step)?;
    self::step(&others, step)
}

fn launch(parameters: &[&AdamWTensors], device: &CudaDevice, step: &AdamWStep) -> Result<()> {
    let stream = device.cuda_stream();
    let gradients = parameters
        .iter()
        .map(|tensors| tensors.gradient.contiguous())
        .collect::<Result<Vec<_>>>()?;
    let is_quantized = parameters.iter().any(|tensors| tensors.is_quantized());
    let chunk = if is_quantized { QUANTIZED_CHUNK } else { CHUNK };
    let mut list = TensorList::default();
    for (tensors, gradient) in parameters.iter().zip(&gradients) {
        let dtype = tensors.parameter.dtype();
        let of = |tensor: &Tensor| address(tensor, &stream);
        let words = [
            of(tensors.parameter)?,
            tensors.master.map_or(Ok(0), of)?,
            of(tensors.average)?,
            of(tensors.square)?,
            of(gradient)?,
            tensors.parameter.elem_count() as u64,
        ];
        let random = tensors.random(step);
        let dtypes = dtype_number(dtype)?
            + 4 * dtype_number(gradient.dtype())?
            + if random.is_some() { 16 } else { 0 };
        let (key, eight) = random.map_or((0, 0), |random| (random.key, random.eight));
        let keep = Narrow::from(step.coefficients(tensors.weight_decay)).keep;
        let blocks = tensors.parameter.elem_count().div_ceil(chunk);
        list.push(blocks, |first_block| {
            let [parameter, master, average, square, gradient, n] = words;
            let dtypes = word(first_block, dtypes);
            let keep = word(keep.to_bits(), 0);
            [
                parameter, master, average, square, gradient, n, dtypes, keep, key, eight,
            ]
        })?;
    }
    let (blocks, count) = (grid(list.blocks, THREADS)?, list.rows);
    let list = list.upload(device)?;
    let c = Narrow::from(step.coefficients(0.0));
    // Only stochastic rounding reads it, for which it is checked.
    let number = step.step as u32;
    if is_quantized {
        let maps = device.clone_htod(&moments::moment_codes().concat())?;
        // SAFETY: the list has the addresses of tensors with n elements and of their blocks (master
        // may be null), and the warps cover them. The tensors that the kernel writes share no
        // memory, and the stream orders the launch after all earlier uses.
        #[allow(unsafe_code)]
        return unsafe {
            kernels::adamw_quantized {
                list: In::from_slice(&list, &stream),
                maps: In::from_slice(&maps, &stream),
                count,
                gradient_factor: c.gradient_factor,
                beta1: c.beta1,
                one_minus_beta1: c.one_minus_beta1,
                beta2: c.beta2,
                one_minus_beta2: c.one_minus_beta2,
                epsilon: c.epsilon,
                step_size: c.step_size,
                inverse_root_correction: c.inverse_root_correction,
                number,
            }
            .launch(device, blocks)
        };
    }
    // SAFETY: the list has the addresses of tensors with n elements (master may be null), and the
    // blocks cover them. The tensors that the kernel writes share no memory, and the stream orders
    // the launch after all earlier uses.
    #[allow(unsafe_code)]
    unsafe {
        kernels::adamw {
            list: In::from_slice(&list, &stream),
            count,
            gradient_factor: c.gradient_factor,
            beta1: c.beta1,
            one_minus_beta1: c.one_minus_beta1,
            beta2: c.beta2,
            one_minus_beta2: c.one_minus_beta2,
            epsilon: c.epsilon,
            step_size: c.step_size,
            inverse_root_correction: c.inverse_root_correction,
            number,
        }
        .launch(device, blocks)
    }
}
