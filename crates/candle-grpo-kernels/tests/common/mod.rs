//! What the tests of the operators share.

#![allow(dead_code)] // Every test file takes what it needs.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{TokenLogProbs, arithmetic_dtype};
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

/// How an argument of an operator lies in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Layout {
    Contiguous,
    /// Between zeros.
    Offset,
    /// A zero follows each entry.
    Strided,
    /// The last two dimensions, if there are two, are swapped.
    Transposed,
    /// What the first dimension begins with stands for all of it.
    BroadcastFirst,
    /// What the last dimension begins with stands for all of it.
    BroadcastLast,
}

impl Layout {
    const ALL: [Self; 6] = [
        Self::Contiguous,
        Self::Offset,
        Self::Strided,
        Self::Transposed,
        Self::BroadcastFirst,
        Self::BroadcastLast,
    ];

    /// `values` in this layout; one that broadcasts loses most of them.
    pub(crate) fn of(self, values: &Tensor) -> Result<Tensor> {
        self.view(&self.memory(values)?, values.dims())
    }

    /// The contiguous tensor of which `values` in this layout are a [`view`](Self::view).
    pub(crate) fn memory(self, values: &Tensor) -> Result<Tensor> {
        let rank = values.rank();
        let first = |dim| values.narrow(dim, 0, values.dim(dim)?.min(1));
        match self {
            Self::Contiguous => Ok(values.clone()),
            Self::Offset => values.pad_with_zeros(0, 2, 1),
            Self::Strided => Tensor::stack(&[values, &values.zeros_like()?], rank),
            Self::Transposed => values
                .transpose(rank.saturating_sub(2), rank - 1)?
                .contiguous(),
            Self::BroadcastFirst => first(0),
            Self::BroadcastLast => first(rank - 1),
        }
    }

    /// What lies so in a [`memory`](Self::memory), of the shape `dims`.
    pub(crate) fn view(self, memory: &Tensor, dims: &[usize]) -> Result<Tensor> {
        let rank = dims.len();
        match self {
            Self::Contiguous => Ok(memory.clone()),
            Self::Offset => memory.narrow(0, 2, dims[0]),
            Self::Strided => memory.narrow(rank, 0, 1)?.squeeze(rank),
            Self::Transposed => memory.transpose(rank.saturating_sub(2), rank - 1),
            Self::BroadcastFirst | Self::BroadcastLast => memory.broadcast_as(dims),
        }
    }
}

pub(crate) fn layouts() -> impl Strategy<Value = Layout> {
    prop::sample::select(&Layout::ALL)
}

/// Checks that an operator takes views as it takes copies of them, and that the gradients go on to what they are views of.
/// `operator` returns its results, and a scalar that goes backward.
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
        let gradient = |variable: &Var| numbers(store.get(variable).expect("a gradient"));
        Ok((
            results.iter().map(numbers).collect::<Result<Vec<_>>>()?,
            variables.iter().map(gradient).collect::<Result<Vec<_>>>()?,
        ))
    };
    let (results, gradients) = run(false)?;
    let (expected, expected_gradients) = run(true)?;
    // On a GPU another alignment may be another order of a sum.
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

/// Runs an operator and its twin forward and backward, the twin in f64 on the same inputs, and compares the result and
/// the gradient of every input, on every device; then the operator on the inputs as they are laid out, by [`check_views`].
/// All have the dtype of the inputs. `loosened` is how many times [`rounding`] is allowed.
pub(crate) fn check_against_f64(
    inputs: &[(&Tensor, Layout)],
    loosened: f64,
    fused: impl Fn(&[&Tensor]) -> Result<Tensor>,
    composed: impl Fn(&[&Tensor]) -> Result<Tensor>,
) -> Result<()> {
    for device in devices() {
        check_on(device, inputs, loosened, &fused, &composed)?;
        check_views(device, inputs, |views| {
            let result = fused(views)?;
            let score = weighted(&result)?;
            Ok((vec![result], score))
        })?;
    }
    Ok(())
}

/// A scalar to which every entry contributes.
fn weighted(result: &Tensor) -> Result<Tensor> {
    let wide = arithmetic_dtype(result.dtype());
    let weights = noisy(result.dims(), 77, DType::BF16)?
        .to_dtype(result.dtype())?
        .to_device(result.device())?;
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
                Var::from_tensor(&layout.of(values)?.to_dtype(dtype)?.to_device(device)?)
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

/// Checks that a backward pass alone gives what the graph of an operator gives, to the bit, in every float dtype and layout, on
/// every device. `inputs` are on the CPU; `alone` takes them and the gradient of the result.
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
                    .map(|input| layout.of(&input.to_device(device)?.to_dtype(dtype)?))
                    .collect::<Result<Vec<_>>>()?;
                let variables = views
                    .iter()
                    .map(Var::from_tensor)
                    .collect::<Result<Vec<_>>>()?;
                let result = operator(&variables.iter().map(Var::as_tensor).collect::<Vec<_>>())?;
                let gradient = noisy(result.dims(), 99, dtype)?.to_device(device)?;
                let gradient = layout.of(&gradient)?;
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

/// Ids below `vocab`.
pub(crate) fn targets(rows: usize, vocab: usize, seed: u64, device: &Device) -> Result<Tensor> {
    let ids = (0..rows as u64).map(|row| (seed.wrapping_add(row * 7919) % vocab as u64) as u32);
    Tensor::from_vec(ids.collect(), rows, device)
}

pub(crate) fn results(tokens: &TokenLogProbs) -> [Tensor; 3] {
    let TokenLogProbs {
        log_probs,
        entropy,
        log_sum_exp,
    } = tokens.clone();
    [log_probs, entropy, log_sum_exp]
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
