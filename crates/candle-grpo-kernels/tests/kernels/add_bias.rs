//! Tests `add_bias` against its composed twin and the formula in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{add_bias, add_bias_gradient, arithmetic_dtype, composed};
use candle_grpo_test_support::{CudaCalls, assert_close, cases, device, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, noisy, rounding};

/// Widths with and without whole 16-byte packs, and with several slices per row.
fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..40, Just(128), 1020usize..1030, Just(2560)]
}

/// Returns the pairs on a device.
fn on(pairs: &[(Tensor, Tensor)], device: &Device) -> Result<Vec<(Tensor, Tensor)>> {
    let pairs = pairs.iter();
    pairs
        .map(|(x, bias)| Ok((x.to_device(device)?, bias.to_device(device)?)))
        .collect()
}

fn borrowed(pairs: &[(Tensor, Tensor)]) -> Vec<(&Tensor, &Tensor)> {
    pairs.iter().map(|(x, bias)| (x, bias)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn each_row_has_its_bias(
        rows in 0usize..20,
        columns in prop::collection::vec((widths(), layouts(), layouts()), 0..6),
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        seed in any::<u64>(),
    ) {
        let pairs = columns.iter().enumerate().map(|(index, &(columns, x_layout, bias_layout))| {
            let seed = seed ^ index as u64;
            let x = x_layout.apply(&noisy(&[rows, columns], seed, dtype)?)?;
            Ok((x, bias_layout.apply(&noisy(&[columns], !seed, dtype)?)?))
        }).collect::<Result<Vec<_>>>()?;
        for device in devices() {
            let results = add_bias(&borrowed(&on(&pairs, device)?))?;
            assert_eq!(results.len(), pairs.len());
            for ((x, bias), y) in pairs.iter().zip(&results) {
                assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
                let (x, bias) = (numbers(x)?, numbers(bias)?);
                let expected: Vec<f64> =
                    x.chunks(bias.len()).flat_map(|row| row.iter().zip(&bias).map(|(x, b)| x + b)).collect();
                assert_close(&numbers(y)?, &expected, rounding(dtype));
            }
        }
    }

    #[test]
    fn gradients_are_added_to_a_sum(
        rows in 0usize..100,
        columns in widths(),
        dtype in prop_oneof![dtypes(), Just(DType::F64)],
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let gradient = layout.apply(&noisy(&[rows, columns], seed, dtype)?)?;
        let start = noisy(&[columns], seed ^ 1, arithmetic_dtype(dtype))?;
        let mut expected = numbers(&start)?;
        for row in numbers(&gradient)?.chunks(columns) {
            expected.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        for device in devices() {
            let sum = start.copy()?.to_device(device)?;
            add_bias_gradient(&sum, &gradient.to_device(device)?)?;
            assert_close(&numbers(&sum)?, &expected, 1e-5);
        }
    }
}

#[test]
fn both_arguments_have_gradients() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        check_against_f64(
            &[
                (&noisy(&[5, 12], 1, dtype)?, Layout::Contiguous),
                (&noisy(&[12], 2, dtype)?, Layout::Contiguous),
            ],
            5.0,
            |x| Ok(add_bias(&[(x[0], x[1])])?.remove(0)),
            |x| Ok(composed::add_bias(&[(x[0], x[1])])?.remove(0)),
        )?;
    }
    Ok(())
}

/// 1024 gradients with value 1/256 for one column. A bf16 sum would stop at 1.
#[test]
fn the_gradient_is_summed_in_f32() -> Result<()> {
    for device in devices() {
        let gradient = (Tensor::ones((1024, 2), DType::BF16, device)? * (1.0 / 256.0))?;
        let sum = Tensor::zeros(2, DType::F32, device)?;
        add_bias_gradient(&sum, &gradient)?;
        assert_eq!(sum.to_vec1::<f32>()?, [4., 4.]);
    }
    Ok(())
}

#[test]
fn three_biases_are_one_launch() -> Result<()> {
    let pairs = [8, 4, 4].map(|columns| -> Result<_> {
        Ok((
            Tensor::ones((3, columns), DType::BF16, device())?,
            Tensor::ones(columns, DType::BF16, device())?,
        ))
    });
    let pairs = pairs.into_iter().collect::<Result<Vec<_>>>()?;
    let before = CudaCalls::now();
    add_bias(&borrowed(&pairs))?;
    let Some((after, before)) = CudaCalls::now().zip(before).filter(|_| device().is_cuda()) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let calls = after - before;
    assert_eq!(
        (calls.launches, calls.copies_to_device),
        (1, 0),
        "{calls:?}"
    );
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (x, bias) = (zeros(&[2, 3])?, zeros(&[3])?);
    let call = |pair: (&Tensor, &Tensor)| message(add_bias(&[(&x, &bias), pair]));
    assert!(call((&bias, &bias)).contains("x[1]: shape [3], must be [N, C]"));
    assert!(
        call((&zeros(&[4, 3])?, &bias)).contains("x[1]: 4 rows, must be as many as of x[0], 2")
    );
    assert!(call((&x, &zeros(&[2])?)).contains("bias[1]: shape [2], must be [3]"));
    let half = bias.to_dtype(DType::F16)?;
    assert!(call((&x, &half)).contains("bias[1]: F16, must be of the dtype of x[0], F32"));
    let sum = |sum: &Tensor, gradient: &Tensor| message(add_bias_gradient(sum, gradient));
    assert!(sum(&bias, &zeros(&[2, 4])?).contains("shapes [3] and [2, 4], must be [C] and [N, C]"));
    assert!(sum(&half, &x.to_dtype(DType::F16)?).contains("sum: F16, must be F32 to add F16"));
    let shared = zeros(&[1, 3])?;
    assert!(sum(&shared.squeeze(0)?, &shared).contains("shares its memory"));
    Ok(())
}
