//! The composed twin of [`adamw`](crate::adamw()).

use candle_core::{Device, Result, Tensor};
use half::bf16;

use super::moments::{CodeMap, SIGNED, UNSIGNED};
use super::rounding::{Random, stochastic};
use super::{AdamWStep, AdamWTensors, check_arguments};
use crate::precision::arithmetic_dtype;

/// [`adamw`](crate::adamw()) in plain Candle operations, on the device of the moments. Moments in
/// blocks are converted on the CPU, and parameters are rounded at random there.
pub fn adamw(parameters: &[AdamWTensors], step: &AdamWStep) -> Result<()> {
    check_arguments(parameters, step)?;
    parameters
        .iter()
        .try_for_each(|tensors| unchecked(tensors, step))
}

pub(crate) fn unchecked(tensors: &AdamWTensors, step: &AdamWStep) -> Result<()> {
    if tensors.parameter.elem_count() == 0 {
        // For empty tensors Candle returns an operand, and a variable cannot be set to itself.
        return Ok(());
    }
    let c = step.coefficients(tensors.weight_decay);
    let dtype = arithmetic_dtype(tensors.parameter.dtype());
    let moved = |numbers: &Tensor| {
        let numbers = numbers.detach().to_device(tensors.average.device())?;
        numbers.to_dtype(dtype)
    };
    let gradient = (moved(tensors.gradient)? * c.gradient_factor)?;
    let p = moved(tensors.master.unwrap_or(tensors.parameter))?;
    let read = |moment: &Tensor, map: &CodeMap| {
        if tensors.is_quantized() {
            map.read_blocks(moment, p.shape())
        } else {
            Ok(moment.detach())
        }
    };
    let (average, square) = (
        read(tensors.average, &SIGNED)?,
        read(tensors.square, &UNSIGNED)?,
    );
    let m = ((average * c.beta1)? + (&gradient * (1.0 - c.beta1))?)?;
    let v = ((square * c.beta2)? + (gradient.sqr()? * (1.0 - c.beta2))?)?;
    let denominator = ((v.sqrt()? / c.root_correction)? + c.epsilon)?;
    let p = ((p * c.keep)? - ((&m / denominator)? * c.step_size)?)?;
    let stored = |moment: Tensor, map: &CodeMap| {
        if tensors.is_quantized() {
            map.write_blocks(&moment)
        } else {
            Ok(moment)
        }
    };
    write(tensors.average, &stored(m, &SIGNED)?)?;
    write(tensors.square, &stored(v, &UNSIGNED)?)?;
    if let Some(master) = tensors.master {
        write(master, &p)?;
    }
    let p = match tensors.random(step) {
        None => p.to_dtype(tensors.parameter.dtype())?,
        Some(random) => rounded_at_random(&p, random)?,
    };
    write(tensors.parameter, &p)
}

fn rounded_at_random(p: &Tensor, random: Random) -> Result<Tensor> {
    let values = p.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
    let mut numbers = vec![0; values.len()];
    random.fill(&mut numbers);
    let rounded = values.iter().zip(numbers);
    let rounded: Vec<bf16> = rounded
        .map(|(&value, number)| stochastic(value, number))
        .collect();
    Tensor::from_vec(rounded, p.shape(), &Device::Cpu)?.to_device(p.device())
}

/// Overwrites `tensor`.
fn write(tensor: &Tensor, values: &Tensor) -> Result<()> {
    let values = values.to_device(tensor.device())?;
    let tensor = tensor.detach().flatten_all()?;
    tensor.slice_set(&values.flatten_all()?, 0, 0)
}
