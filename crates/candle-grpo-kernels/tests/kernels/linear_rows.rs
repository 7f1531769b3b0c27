//! Tests `linear_rows` against its composed twin in f64, and checks that rows are independent.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{PackedWeight, composed, linear_rows, packed_linear_rows, quantize};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::{bits, noisy, rounding};

fn check(x: &Tensor, weights: &[Tensor]) -> Result<()> {
    let wide = |x: &Tensor| x.to_dtype(DType::F64);
    let wide_weights = weights.iter().map(wide).collect::<Result<Vec<_>>>()?;
    let expected = composed::linear_rows(&wide(x)?, &wide_weights.iter().collect::<Vec<_>>())?;
    for device in devices() {
        let weights = weights
            .iter()
            .map(|w| w.to_device(device))
            .collect::<Result<Vec<_>>>()?;
        let actual = linear_rows(&x.to_device(device)?, &weights.iter().collect::<Vec<_>>())?;
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            assert_eq!(
                (actual.dims(), actual.dtype()),
                (expected.dims(), x.dtype())
            );
            // Sums over at most a hundred products.
            let tolerance = 20.0 * rounding(x.dtype());
            assert_close(&numbers(actual)?, &numbers(expected)?, tolerance);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]

    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        rows in 0usize..21,
        inputs in 1usize..100,
        // Includes weights with equal shapes, which take one product on CUDA.
        outputs in proptest::collection::vec(prop_oneof![0usize..80, Just(9)], 0..4),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let weights = outputs
            .iter()
            .zip(1..)
            .map(|(&outputs, i)| layouts[i].apply(&noisy(&[outputs, inputs], seed ^ i as u64, dtype)?))
            .collect::<Result<Vec<_>>>()?;
        check(&layouts[0].apply(&noisy(&[rows, inputs], seed, dtype)?)?, &weights)?;
    }

    #[test]
    fn a_row_is_bit_identical_with_any_other_rows(
        rows in 1usize..80,
        // Products are split along the inner dimension. Multiples of 32 bf16 values fill tile rows,
        // which few rows of `x` then read in place.
        inputs in prop_oneof![
            1usize..200,
            1000usize..1200,
            (1usize..40).prop_map(|steps| 32 * steps),
        ],
        outputs in 1usize..70,
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let x = noisy(&[rows, inputs], seed, dtype)?;
        let weight = noisy(&[outputs, inputs], seed ^ 1, dtype)?;
        let other = noisy(&[5, inputs], seed ^ 2, dtype)?;
        let together = &linear_rows(&x, &[&other, &weight])?[1];
        let packed = [&other, &weight].map(PackedWeight::new);
        let [other, packed] = packed.each_ref().map(|packed| packed.as_ref().unwrap());
        let by_packed = packed_linear_rows(&x, &[other, packed])?;
        prop_assert_eq!(bits(&by_packed[1])?, bits(together)?);
        for row in 0..rows {
            let alone = &linear_rows(&x.narrow(0, row, 1)?, &[&weight])?[0];
            prop_assert_eq!(bits(alone)?, bits(&together.narrow(0, row, 1)?)?);
            let by_packed = packed_linear_rows(&x.narrow(0, row, 1)?, &[packed])?;
            prop_assert_eq!(bits(alone)?, bits(&by_packed[0])?);
        }
    }
}

#[test]
fn weights_of_f32_on_the_cpu_are_packed() -> Result<()> {
    for device in devices() {
        let weight = noisy(&[50, 64], 1, DType::F32)?.to_device(device)?;
        assert_eq!(PackedWeight::new(&weight)?.is_packed(), device.is_cpu());
        // Others are read in place.
        let blocks = quantize(&weight, GgmlDType::Q8_0)?;
        let halves = weight.to_dtype(DType::F16)?;
        let doubles = weight.to_dtype(DType::F64)?;
        for weight in [&blocks, &halves, &doubles] {
            let packed = PackedWeight::new(weight)?;
            assert!(!packed.is_packed());
            let dtype = match weight.dtype() {
                DType::U8 => DType::F32,
                dtype => dtype,
            };
            let x = noisy(&[3, 64], 2, dtype)?.to_device(device)?;
            let plain = linear_rows(&x, &[weight])?;
            assert_eq!(
                bits(&packed_linear_rows(&x, &[&packed])?[0])?,
                bits(&plain[0])?
            );
        }
        // A later change is not seen.
        let x = noisy(&[3, 64], 2, DType::F32)?.to_device(device)?;
        let packed = PackedWeight::new(&weight)?;
        let before = bits(&packed_linear_rows(&x, &[&packed])?[0])?;
        weight.slice_set(&weight.zeros_like()?, 0, 0)?;
        let after = bits(&packed_linear_rows(&x, &[&packed])?[0])?;
        assert_eq!(before == after, device.is_cpu());
    }
    Ok(())
}

#[test]
fn nan_stays_in_its_row() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // The rows are odd, and bf16 may be read in pairs. The NaN follows the second row.
            let x = Tensor::new(&[[1f32, 2., 4.], [2., 3., 1.], [f32::NAN, 1., 1.]], device)?;
            let weight = Tensor::new(&[[1f32, 1., 1.]], device)?.to_dtype(dtype)?;
            let y = linear_rows(&x.to_dtype(dtype)?, &[&weight])?[0].to_dtype(DType::F32)?;
            let y = y.to_vec2::<f32>()?;
            assert!(y[0][0] == 7. && y[1][0] == 6. && y[2][0].is_nan(), "{y:?}");
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (x, weight) = (zeros(&[3, 8])?, zeros(&[2, 8])?);
    let short = zeros(&[2, 7])?;
    assert!(
        message(linear_rows(&x, &[&weight, &short]))
            .contains("weights[1]: shape [2, 7], must be [outputs, 8]")
    );
    assert!(
        message(linear_rows(&zeros(&[8])?, &[&weight]))
            .contains("x: shape [8], must be [N, inputs]")
    );
    assert!(message(linear_rows(&zeros(&[3, 0])?, &[])).contains("x: shape [3, 0]"));
    let packed = PackedWeight::new(&short)?;
    assert!(
        message(packed_linear_rows(&x, &[&packed]))
            .contains("weights[0]: shape [2, 7], must be [outputs, 8]")
    );
    let variable = Var::from_tensor(&weight)?;
    assert!(message(PackedWeight::new(&variable)).contains("weight: a variable"));
    let half = weight.to_dtype(DType::BF16)?;
    assert!(message(linear_rows(&x, &[&half])).contains("weights[0]: BF16"));
    assert!(message(linear_rows(&x.to_dtype(DType::I64)?, &[&weight])).contains("x: I64"));
    Ok(())
}
