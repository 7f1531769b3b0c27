//! `adamw` and `gradient_norm` over a model's vocabulary.

use std::rc::Rc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, Rounding, adamw, composed, moment_blocks, squared_gradient_norms,
};
use candle_nn::{Optimizer, ParamsAdamW};

use crate::case::{Case, Direction, Pair, Run};
use crate::noise::noise;
use crate::region::region;

/// SmolLM2-135M's: 28 million parameters.
pub(super) fn small() -> Vec<Case> {
    let shape = [49_152, 576];
    vec![
        case("adamw", shape, adamw_pair),
        case("adamw_8bit", shape, adamw_in_blocks_pair),
        case("gradient_norm", shape, gradient_norm_pair),
    ]
}

/// Llama 3 8B's: 525 million parameters.
pub(super) fn large() -> Vec<Case> {
    let shape = [128_256, 4096];
    vec![
        case("adamw", shape, adamw_pair),
        case("gradient_norm", shape, gradient_norm_pair),
    ]
}

fn case(
    op: &'static str,
    shape: [usize; 2],
    prepare: fn([usize; 2], &Device) -> Result<Pair>,
) -> Case {
    Case {
        op,
        shape: format!("{shape:?}"),
        dtype: DType::F32,
        direction: Direction::Forward,
        prepare: Box::new(move |device| prepare(shape, device)),
        bandwidth: None,
    }
}

/// Compares with `candle_nn::AdamW`.
fn adamw_pair(shape: [usize; 2], device: &Device) -> Result<Pair> {
    let variable = |seed| Var::from_tensor(&noise(&shape, 0.1, seed, DType::F32, device)?);
    let zeros = || Var::zeros(&shape, DType::F32, device);
    let (parameter, average, square) = (variable(1)?, zeros()?, zeros()?);
    let gradient = noise(&shape, 0.01, 2, DType::F32, device)?;

    // The twin takes its gradient from a store, which only a backward pass can create.
    let theirs = variable(1)?;
    let mut store = theirs.sum_all()?.backward()?;
    store.insert(&theirs, gradient.clone());
    let mut optimizer = candle_nn::AdamW::new(vec![theirs], ParamsAdamW::default())?;

    let (ours_device, device, mut step) = (device.clone(), device.clone(), 0);
    Ok(Pair {
        ours: Box::new(move || {
            step += 1;
            let tensors = AdamWTensors {
                parameter: &parameter,
                master: None,
                rounding: Rounding::Nearest,
                average: &average,
                square: &square,
                gradient: &gradient,
                weight_decay: 0.01,
            };
            region(&ours_device, || adamw(&[tensors], &step_of(step)))
        }),
        composed: Box::new(move || region(&device, || optimizer.step(&store))),
    })
}

/// Compares with the composed twin, which converts the state on the CPU.
fn adamw_in_blocks_pair(shape: [usize; 2], device: &Device) -> Result<Pair> {
    let run = |twin: fn(&[AdamWTensors], &AdamWStep) -> Result<()>| -> Result<_> {
        let device = device.clone();
        let parameter = Var::from_tensor(&noise(&shape, 0.1, 1, DType::F32, &device)?)?;
        let zeros = || Var::zeros(moment_blocks(parameter.elem_count()), DType::U8, &device);
        let (average, square) = (zeros()?, zeros()?);
        let gradient = noise(&shape, 0.01, 2, DType::F32, &device)?;
        let mut index = 0;
        let step: Run = Box::new(move || {
            index += 1;
            let tensors = AdamWTensors {
                parameter: &parameter,
                master: None,
                rounding: Rounding::Nearest,
                average: &average,
                square: &square,
                gradient: &gradient,
                weight_decay: 0.01,
            };
            region(&device, || twin(&[tensors], &step_of(index)))
        });
        Ok(step)
    };
    Ok(Pair {
        ours: run(adamw)?,
        composed: run(composed::adamw)?,
    })
}

fn step_of(step: usize) -> AdamWStep {
    AdamWStep {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        step,
        gradient_factor: 1.0,
    }
}

fn gradient_norm_pair(shape: [usize; 2], device: &Device) -> Result<Pair> {
    let gradient = Rc::new(noise(&shape, 0.01, 2, DType::F32, device)?);
    let run = |norms: fn(&[&Tensor]) -> Result<Tensor>| {
        let gradient = gradient.clone();
        Direction::Forward.run(device, move || norms(&[&gradient]))
    };
    Ok(Pair {
        ours: run(squared_gradient_norms),
        composed: run(composed::squared_gradient_norms),
    })
}
