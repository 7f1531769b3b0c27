//! What the tests of the operators share.

#![allow(dead_code)] // Every test file takes what it needs.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::TokenLogProbs;
use candle_grpo_test_support::{assert_close, devices, numbers};
use proptest::prelude::*;

/// Numbers without a pattern, in [-1, 1).
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

pub(crate) fn tensor(
    values: Vec<f64>,
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    Tensor::from_vec(values, shape, device)?.to_dtype(dtype)
}

/// A tensor of [`noise`] on the CPU.
pub(crate) fn noisy(shape: &[usize], seed: u64, dtype: DType) -> Result<Tensor> {
    tensor(
        noise(shape.iter().product(), seed),
        shape,
        dtype,
        &Device::Cpu,
    )
}

/// Those that the fused paths take.
pub(crate) fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)]
}

/// Lengths of a few tensors, some of which are shared out to several cores.
pub(crate) fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![
        0usize..40,
        1000usize..1100,
        Just(1 << 15),
        (1usize << 15)..(1 << 15) + 2000
    ];
    prop::collection::vec(len, 0..4)
}

/// The entries of a float tensor, to be compared exactly.
pub(crate) fn bits(x: &Tensor) -> Result<Vec<u32>> {
    let values = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// How far a result of this dtype may be from f64 on the same inputs, relative to numbers near 1.
pub(crate) fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 4e-6,
        DType::BF16 => 8e-3,
        _ => 1e-3,
    }
}

/// Runs an operator and its twin forward and backward, the twin in f64 on the same inputs, and compares the result and
/// the gradient of every input, on every device. All have the dtype of the inputs. `loosened` is how many times [`rounding`] is allowed.
pub(crate) fn check_against_f64(
    inputs: &[&Tensor],
    loosened: f64,
    fused: impl Fn(&[&Tensor]) -> Result<Tensor>,
    composed: impl Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    for device in devices() {
        check_on(device, inputs, loosened, &fused, &composed)?;
    }
    Ok(())
}

fn check_on(
    device: &Device,
    inputs: &[&Tensor],
    loosened: f64,
    fused: &dyn Fn(&[&Tensor]) -> Result<Tensor>,
    composed: &dyn Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let run = |dtype: DType, operator: &dyn Fn(&[&Tensor]) -> Result<Tensor>| -> Result<_> {
        let variables = inputs
            .iter()
            .map(|input| Var::from_tensor(&input.to_dtype(dtype)?.to_device(device)?))
            .collect::<Result<Vec<_>>>()?;
        // As they were given: strides, offsets and broadcasts remain.
        let laid_out = variables
            .iter()
            .zip(inputs)
            .map(|(variable, input)| like(variable, input))
            .collect::<Result<Vec<_>>>()?;
        let result = operator(&laid_out.iter().collect::<Vec<_>>())?;
        assert_eq!(result.dtype(), dtype);
        let weights = noisy(result.dims(), 77, inputs[0].dtype())?
            .to_dtype(dtype)?
            .to_device(device)?;
        let wide = if dtype == DType::F64 {
            dtype
        } else {
            DType::F32
        };
        let gradients = (&result * weights)?.to_dtype(wide)?.sum_all()?.backward()?;
        let gradients = variables
            .iter()
            .map(|variable| {
                let gradient = match gradients.get(variable) {
                    Some(gradient) => gradient.clone(),
                    // Candle gives an operand back where there is nothing to compute, and forgets the other.
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
    let dtype = inputs[0].dtype();
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

/// Checks that a backward pass alone gives what the graph of an operator gives, to the bit, in f32, bf16 and f64, on every device.
/// `inputs` are on the CPU; `alone` takes them and the gradient of the result.
pub(crate) fn check_gradient_alone(
    inputs: &[&Tensor],
    operator: impl Fn(&[&Tensor]) -> Result<Tensor>,
    alone: impl Fn(&[&Tensor], &Tensor) -> Result<Vec<Tensor>>,
) -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let variables = inputs
                .iter()
                .map(|input| Var::from_tensor(&input.to_device(device)?.to_dtype(dtype)?))
                .collect::<Result<Vec<_>>>()?;
            let references: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
            let result = operator(&references)?;
            let gradient = noisy(result.dims(), 99, dtype)?.to_device(device)?;
            let store = (&result * &gradient)?.sum_all()?.backward()?;
            let found = alone(&references, &gradient)?;
            assert_eq!(found.len(), variables.len());
            for (found, variable) in found.iter().zip(&variables) {
                let expected = store.get(variable).expect("a gradient");
                assert!(!found.track_op());
                assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
                assert_eq!(numbers(found)?, numbers(expected)?);
            }
        }
    }
    Ok(())
}

/// `variable` between other rows, so with an offset, and with strides if `given` is not contiguous.
fn like(variable: &Var, given: &Tensor) -> Result<Tensor> {
    if given.elem_count() == 0 {
        return Ok(variable.as_tensor().clone());
    }
    let rank = variable.rank();
    let other = variable.as_detached_tensor().neg()?;
    let around = Tensor::cat(&[&other, variable.as_tensor(), &other], 0)?;
    let middle = around.narrow(0, variable.dim(0)?, variable.dim(0)?)?;
    if rank < 2 || given.is_contiguous() {
        return Ok(middle);
    }
    middle
        .transpose(rank - 2, rank - 1)?
        .contiguous()?
        .transpose(rank - 2, rank - 1)
}

/// A scalar to which all three results contribute, with another weight at each position.
pub(crate) fn score(tokens: &TokenLogProbs) -> Result<Tensor> {
    let weights = |seed| {
        tensor(
            noise(tokens.log_probs.elem_count(), seed),
            tokens.log_probs.dims(),
            DType::F64,
            tokens.log_probs.device(),
        )?
        .to_dtype(tokens.log_probs.dtype())
    };
    let log_probs = (&tokens.log_probs * weights(1)?)?.sum_all()?;
    let entropy = (&tokens.entropy * weights(2)?)?.sum_all()?;
    log_probs + entropy + (&tokens.log_sum_exp * weights(3)?)?.sum_all()?
}
