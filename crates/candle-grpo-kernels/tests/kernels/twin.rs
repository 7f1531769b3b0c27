//! Compares an operator with its composed twin.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::arithmetic_dtype;
use candle_grpo_test_support::{assert_close, devices, gradient, noise_tensor, numbers};

use crate::layout::Layout;

/// Returns a noise tensor on the CPU.
pub(crate) fn noisy(shape: &[usize], seed: u64, dtype: DType) -> Result<Tensor> {
    noise_tensor(shape, seed, dtype, &Device::Cpu)
}

/// Returns the bits of all entries in a float tensor with at most 32 bits per entry.
pub(crate) fn bits(x: &Tensor) -> Result<Vec<u32>> {
    // The copy comes first, because Candle cannot convert empty tensors on CUDA.
    let x = x.to_device(&Device::Cpu)?;
    let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// Returns the tolerance for a result near 1 in this dtype, compared with f64 on the same inputs.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 4e-6,
        DType::BF16 => 8e-3,
        _ => 1e-3,
    }
}

/// Checks that an operator gives the same results for views and for copies, and that gradients
/// reach the memory behind the views. `operator` returns its results and a scalar to differentiate.
pub(crate) fn check_views(
    device: &Device,
    inputs: &[(&Tensor, Layout)],
    operator: impl Fn(&[&Tensor]) -> Result<(Vec<Tensor>, Tensor)>,
) -> Result<()> {
    let run = |copied: bool| -> Result<_> {
        let (mut variables, mut arguments) = (Vec::new(), Vec::new());
        for (values, layout) in inputs {
            let variable = Var::from_tensor(&layout.memory(values)?.to_device(device)?)?;
            let view = layout.view(&variable, values.dims())?;
            variables.push(variable);
            arguments.push(if copied {
                view.force_contiguous()?
            } else {
                view
            });
        }
        let (results, score) = operator(&arguments.iter().collect::<Vec<_>>())?;
        let store = score.backward()?;
        let gradients = variables.iter().map(|variable| gradient(&store, variable));
        Ok((
            results.iter().map(numbers).collect::<Result<Vec<_>>>()?,
            gradients.collect::<Result<Vec<_>>>()?,
        ))
    };
    let (results, gradients) = run(false)?;
    let (expected, expected_gradients) = run(true)?;
    // On a GPU the alignment may determine the summation order.
    let tolerance = rounding(inputs[0].0.dtype());
    for (actual, expected) in results
        .iter()
        .chain(&gradients)
        .zip(expected.iter().chain(&expected_gradients))
    {
        assert_close(actual, expected, tolerance);
    }
    Ok(())
}

/// Compares an operator with its twin in f64 on every device: the result, and the gradient with
/// respect to every input. Then checks the input layouts with [`check_views`].
///
/// The inputs are on the CPU and share one dtype. The tolerance is `loosened` times [`rounding`].
pub(crate) fn check_against_f64(
    inputs: &[(&Tensor, Layout)],
    loosened: f64,
    fused: impl Fn(&[&Tensor]) -> Result<Tensor>,
    composed: impl Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let sizes = inputs.iter().map(|(values, _)| values.elem_count());
    let smallest = sizes.min().unwrap_or(0);
    for device in devices() {
        if has_no_twin(device, smallest) {
            check_empty(device, inputs, &fused)?;
            continue;
        }
        check_on(device, inputs, loosened, &fused, &composed)?;
        check_views(device, inputs, |views| {
            let result = fused(views)?;
            let score = weighted(&result)?;
            Ok((vec![result], score))
        })?;
    }
    Ok(())
}

/// Returns whether the twin cannot run: Candle has few operations on empty tensors on CUDA.
pub(crate) fn has_no_twin(device: &Device, elements: usize) -> bool {
    device.is_cuda() && elements == 0
}

/// Checks the shape and dtype of an operator's result if it [`has_no_twin`].
fn check_empty(
    device: &Device,
    inputs: &[(&Tensor, Layout)],
    fused: impl Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let run = |device: &Device| -> Result<Tensor> {
        let inputs = inputs
            .iter()
            .map(|(values, layout)| layout.apply(values)?.to_device(device))
            .collect::<Result<Vec<_>>>()?;
        fused(&inputs.iter().collect::<Vec<_>>())
    };
    let (found, expected) = (run(device)?, run(&Device::Cpu)?);
    assert_eq!(found.dims(), expected.dims());
    assert_eq!(found.dtype(), expected.dtype());
    Ok(())
}

/// Returns a random linear combination of all entries.
fn weighted(result: &Tensor) -> Result<Tensor> {
    let wide = arithmetic_dtype(result.dtype());
    // Weights that every dtype represents exactly.
    let weights =
        noise_tensor(result.shape(), 77, DType::BF16, result.device())?.to_dtype(result.dtype())?;
    (result * weights)?.to_dtype(wide)?.sum_all()
}

fn check_on(
    device: &Device,
    inputs: &[(&Tensor, Layout)],
    loosened: f64,
    fused: &dyn Fn(&[&Tensor]) -> Result<Tensor>,
    composed: &dyn Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let run = |dtype: DType, operator: &dyn Fn(&[&Tensor]) -> Result<Tensor>| -> Result<_> {
        let variables = inputs
            .iter()
            .map(|(values, layout)| {
                Var::from_tensor(&layout.apply(values)?.to_dtype(dtype)?.to_device(device)?)
            })
            .collect::<Result<Vec<_>>>()?;
        let result = operator(&variables.iter().map(Var::as_tensor).collect::<Vec<_>>())?;
        assert_eq!(result.dtype(), dtype);
        let gradients = weighted(&result)?.backward()?;
        let gradients = variables
            .iter()
            .map(|variable| {
                let gradient = match gradients.get(variable) {
                    Some(gradient) => gradient.clone(),
                    // For an empty result Candle returns one operand, and the other has no
                    // gradient.
                    None if dtype == DType::F64 && result.elem_count() == 0 => {
                        variable.zeros_like()?
                    }
                    None => panic!("a gradient is missing"),
                };
                assert_eq!(gradient.dtype(), dtype);
                Ok(gradient)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok((result, gradients))
    };
    let (expected, expected_gradients) = run(DType::F64, composed)?;
    let dtype = inputs[0].0.dtype();
    let (actual, actual_gradients) = run(dtype, fused)?;
    assert_eq!(actual.dims(), expected.dims());
    let tolerance = loosened * rounding(dtype);
    assert_close(&numbers(&actual)?, &numbers(&expected)?, tolerance);
    for (input, (actual, expected)) in actual_gradients.iter().zip(&expected_gradients).enumerate()
    {
        println!("gradient of input {input}");
        assert_eq!(actual.dims(), expected.dims());
        assert_close(&numbers(actual)?, &numbers(expected)?, tolerance);
    }
    Ok(())
}

/// Checks that a backward pass without a graph is bit-identical to the graph's, in every float
/// dtype and layout, on every device. `inputs` are on the CPU. `alone` receives the inputs and the
/// result gradient.
pub(crate) fn check_gradient_alone(
    inputs: &[&Tensor],
    operator: impl Fn(&[&Tensor]) -> Result<Tensor>,
    alone: impl Fn(&[&Tensor], &Tensor) -> Result<Vec<Tensor>>,
) -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for layout in Layout::ALL {
                let views = inputs
                    .iter()
                    .map(|input| layout.apply(&input.to_device(device)?.to_dtype(dtype)?))
                    .collect::<Result<Vec<_>>>()?;
                let variables = views
                    .iter()
                    .map(Var::from_tensor)
                    .collect::<Result<Vec<_>>>()?;
                let result = operator(&variables.iter().map(Var::as_tensor).collect::<Vec<_>>())?;
                let gradient = noise_tensor(result.shape(), 99, dtype, device)?;
                let gradient = layout.apply(&gradient)?;
                let store = (&result * &gradient)?.sum_all()?.backward()?;
                let found = alone(&views.iter().collect::<Vec<_>>(), &gradient)?;
                assert_eq!(found.len(), variables.len());
                for (found, variable) in found.iter().zip(&variables) {
                    let expected = store.get(variable).expect("a gradient");
                    assert!(!found.track_op());
                    assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
                    assert_eq!(numbers(found)?, numbers(expected)?);
                }
            }
        }
    }
    Ok(())
}
