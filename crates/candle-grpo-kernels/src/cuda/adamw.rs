//! The CUDA path of [`adamw`](crate::adamw()).

use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{CudaStorage, DType, Layout, Result, Tensor};

use super::in_place::write;
use super::{In, Out, grid, kernels, with_cuda_floats};
use crate::adamw::{AdamWStep, AdamWTensors, Coefficients};

/// Threads of a block and elements of a thread, as in the kernel.
const THREADS: u32 = 256;
const ELEMENTS: usize = 4;

/// Updates one f32, bf16 or f16 parameter.
pub(crate) fn step(tensors: &AdamWTensors, step: &AdamWStep) -> Result<()> {
    if tensors.parameter.elem_count() == 0 {
        return Ok(());
    }
    // The kernels take a gradient in the dtype of the parameter, or in f32.
    let is_like = tensors.gradient.dtype() == tensors.parameter.dtype();
    let gradient = if is_like {
        tensors.gradient.contiguous()?
    } else {
        tensors.gradient.contiguous()?.to_dtype(DType::F32)?
    };
    let device = tensors.parameter.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let pass = Pass {
        gradient,
        is_like,
        coefficients: step.coefficients(tensors.weight_decay),
        stream: &stream,
    };
    // A closure writes one tensor, so the memory of several tensors needs nested closures.
    write(tensors.average, |average, layout| {
        let average = Out::in_place(average, layout, &stream)?;
        write(tensors.square, |square, layout| {
            let square = Out::in_place(square, layout, &stream)?;
            match tensors.master {
                None => write(tensors.parameter, |parameter, layout| {
                    pass.launch(parameter, layout, Out::null(), average, square)
                }),
                Some(master) => write(master, |master, layout| {
                    let master = Out::in_place(master, layout, &stream)?;
                    write(tensors.parameter, |parameter, layout| {
                        pass.launch(parameter, layout, master, average, square)
                    })
                }),
            }
        })
    })
}

struct Pass<'a> {
    gradient: Tensor,
    is_like: bool,
    coefficients: Coefficients,
    stream: &'a CudaStream,
}

impl Pass<'_> {
    fn launch(
        &self,
        parameter: &mut CudaStorage,
        layout: &Layout,
        master: Out<f32>,
        average: Out<f32>,
        square: Out<f32>,
    ) -> Result<()> {
        let device = parameter.device.clone();
        let n = layout.shape().elem_count();
        let blocks = grid(n.div_ceil(THREADS as usize * ELEMENTS), THREADS)?;
        let gradient = self.gradient.storage_and_layout();
        let c = self.coefficients;
        with_cuda_floats!(&*parameter, "parameter", T => {
            let parameter = Out::in_place(parameter, layout, self.stream)?;
            macro_rules! launch {
                ($kernel:ident) => {
                    // SAFETY: all have n elements (master may be null), and the blocks cover them.
                    #[allow(unsafe_code)]
                    unsafe {
                        kernels::$kernel::<T> {
                            parameter,
                            master,
                            average,
                            square,
                            gradient: In::from_tensor(&gradient, self.stream)?,
                            n: n as u64,
                            beta1: c.beta1 as f32,
                            one_minus_beta1: (1.0 - c.beta1) as f32,
                            beta2: c.beta2 as f32,
                            one_minus_beta2: (1.0 - c.beta2) as f32,
                            epsilon: c.epsilon as f32,
                            keep: c.keep as f32,
                            step_size: c.step_size as f32,
                            inverse_root_correction: (1.0 / c.root_correction) as f32,
                        }
                        .launch(&device, blocks)
                    }
                };
            }
            if self.is_like { launch!(adamw_like) } else { launch!(adamw) }
        })
    }
}
