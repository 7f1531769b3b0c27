//! Tests `linear_rows` with quantized weights against the dequantized numbers.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{BLOCK_TYPES, composed, dequantize, linear_rows, quantize};
use candle_grpo_test_support::{CudaCalls, assert_close, cases, device, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::dequantize::block_types;
use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{bits, noisy, rounding};

/// Blocks `[outputs, .., ..]` whose products with noise are near 1.
fn blocks(block_type: GgmlDType, outputs: usize, inputs: usize, seed: u64) -> Result<Tensor> {
    let scale = (3.0 / inputs as f64).sqrt();
    quantize(
        &(noisy(&[outputs, inputs], seed, DType::F32)? * scale)?,
        block_type,
    )
}

/// Returns the products in f64 with the numbers in the dtype of `x`, on the CPU.
fn expected(x: &Tensor, weights: &[Tensor]) -> Result<Vec<Tensor>> {
    let wide = weights.iter().map(|weight| {
        let weight = match weight.dtype() {
            DType::U8 => dequantize(weight, x.dtype())?,
            _ => weight.clone(),
        };
        weight.to_dtype(DType::F64)
    });
    let wide = wide.collect::<Result<Vec<_>>>()?;
    composed::linear_rows(&x.to_dtype(DType::F64)?, &wide.iter().collect::<Vec<_>>())
}

fn on(device: &Device, x: &Tensor, weights: &[Tensor]) -> Result<Vec<Tensor>> {
    let weights = weights.iter().map(|weight| weight.to_device(device));
    let weights = weights.collect::<Result<Vec<_>>>()?;
    linear_rows(&x.to_device(device)?, &weights.iter().collect::<Vec<_>>())
}

/// Checks that every device has the products of the numbers, with sums in f32.
fn check(x: &Tensor, weights: &[Tensor]) -> Result<()> {
    let expected = expected(x, weights)?;
    for device in devices() {
        let found = on(device, x, weights)?;
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((found.dims(), found.dtype()), (expected.dims(), x.dtype()));
            let tolerance = 2.0 * rounding(x.dtype());
            assert_close(&numbers(found)?, &numbers(expected)?, tolerance);
        }
    }
    Ok(())
}

/// The rows fill one fragment, several, and more than the kernel takes. The outputs are odd, and
/// the depth ends within a segment.
#[rstest]
fn products_are_those_of_the_numbers(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(1, 2, 7, 8, 9, 16, 33, 64, 65)] rows: usize,
) -> Result<()> {
    for (seed, block_type) in BLOCK_TYPES.into_iter().enumerate() {
        let inputs = 9 * block_type.block_size();
        let weight = blocks(block_type, 71, inputs, seed as u64)?;
        check(&noisy(&[rows, inputs], 9, dtype)?, &[weight])?;
    }
    Ok(())
}

/// Blocks divide this depth, and a launch takes four weights.
#[rstest]
#[case(DType::F32, 5)]
#[case(DType::BF16, 3)]
#[case(DType::F16, 20)]
fn weights_of_all_formats_share_a_deep_input(
    #[case] dtype: DType,
    #[case] rows: usize,
) -> Result<()> {
    let inputs = 11 * 256;
    let weights = BLOCK_TYPES
        .into_iter()
        .zip([1, 64, 0, 65, 7, 130, 16, 3])
        .map(|(block_type, outputs)| blocks(block_type, outputs, inputs, outputs as u64));
    check(
        &noisy(&[rows, inputs], 9, dtype)?,
        &weights.collect::<Result<Vec<_>>>()?,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]

    #[test]
    fn dense_and_quantized_weights_keep_their_order(
        rows in 0usize..40,
        of_each in proptest::collection::vec((block_types(), 0usize..140, any::<bool>()), 0..7),
        of_256 in 1usize..5,
        dtype in dtypes(),
        layout in layouts(),
        seed in any::<u64>(),
    ) {
        let inputs = 256 * of_256;
        let weights = of_each.iter().zip(1..).map(|(&(block_type, outputs, is_dense), i)| {
            let blocks = blocks(block_type, outputs, inputs, seed ^ i)?;
            if is_dense { dequantize(&blocks, dtype) } else { Ok(blocks) }
        });
        let weights = weights.collect::<Result<Vec<_>>>()?;
        check(&layout.apply(&noisy(&[rows, inputs], seed, dtype)?)?, &weights)?;
    }

    #[test]
    fn a_row_is_bit_identical_with_any_other_rows(
        rows in 1usize..65,
        block_type in block_types(),
        outputs in 1usize..100,
        blocks_of_row in 1usize..20,
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let inputs = blocks_of_row * block_type.block_size();
        let x = noisy(&[rows, inputs], seed, dtype)?;
        let weights = [blocks(block_type, outputs, inputs, seed ^ 1)?];
        for device in devices() {
            let together = &on(device, &x, &weights)?[0];
            for row in [0, rows / 2, rows - 1] {
                let alone = &on(device, &x.narrow(0, row, 1)?, &weights)?[0];
                prop_assert_eq!(bits(alone)?, bits(&together.narrow(0, row, 1)?)?);
            }
        }
    }
}

/// On the CPU, and for more rows than the GPU's kernel takes, the products are also the same.
#[rstest]
fn the_cpu_has_the_bits_of_the_dequantized_numbers(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(3, 65)] rows: usize,
) -> Result<()> {
    for device in devices().filter(|device| device.is_cpu() || rows > 64) {
        for block_type in BLOCK_TYPES {
            let x = noisy(&[rows, 512], 1, dtype)?;
            let blocks = blocks(block_type, 37, 512, 2)?;
            let plain = dequantize(&blocks, dtype)?;
            let found = on(device, &x, &[blocks])?;
            assert_eq!(bits(&found[0])?, bits(&on(device, &x, &[plain])?[0])?);
        }
    }
    Ok(())
}

/// Rows and weights that start at odd places in memory.
#[test]
fn views_have_the_products_of_copies() -> Result<()> {
    for device in devices() {
        for (block_type, inputs) in [(GgmlDType::Q4_0, 32), (GgmlDType::Q6K, 256)] {
            let all = blocks(block_type, 80, inputs, 1)?.to_device(device)?;
            for layout in Layout::ALL {
                let x = layout.apply(&noisy(&[4, inputs], 2, DType::BF16)?.to_device(device)?)?;
                for start in 0..9 {
                    let view = all.narrow(0, start, 70)?;
                    let found = linear_rows(&x, &[&view])?;
                    let copy = linear_rows(&x.force_contiguous()?, &[&view.force_contiguous()?])?;
                    assert_eq!(bits(&found[0])?, bits(&copy[0])?);
                }
            }
        }
    }
    Ok(())
}

#[rstest]
fn rows_that_are_not_finite_change_no_others(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(4, 20)] rows: usize,
) -> Result<()> {
    let weights = [blocks(GgmlDType::Q4K, 70, 256, 1)?];
    for device in devices() {
        for bad in [f32::NAN, f32::INFINITY] {
            let x = noisy(&[rows, 256], 2, DType::F32)?;
            let finite = on(device, &x.to_dtype(dtype)?, &weights)?;
            let mut values = x.to_vec2::<f32>()?;
            values[1][255] = bad;
            let found = on(
                device,
                &Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?,
                &weights,
            )?;
            for row in 0..rows {
                let [found, finite] = [&found, &finite].map(|y| bits(&y[0].narrow(0, row, 1)?));
                let (found, finite) = (found?, finite?);
                let are_finite = found.iter().all(|x| f32::from_bits(*x).is_finite());
                assert!(if row == 1 {
                    !are_finite
                } else {
                    found == finite
                });
            }
        }
    }
    Ok(())
}

#[test]
fn few_rows_take_one_launch_and_no_copy_of_the_numbers() -> Result<()> {
    let calls = |rows: usize, inputs: usize| -> Result<_> {
        let x = noisy(&[rows, inputs], 1, DType::BF16)?.to_device(device())?;
        let weights = [GgmlDType::Q4K, GgmlDType::Q8_0, GgmlDType::Q6K];
        let weights = weights.map(|t| blocks(t, 48, inputs, 2)?.to_device(device()));
        let [q, k, v] = weights;
        let (q, k, v) = (q?, k?, v?);
        let before = CudaCalls::now();
        linear_rows(&x, &[&q, &k, &v])?;
        Ok(CudaCalls::now()
            .zip(before)
            .map(|(after, before)| after - before))
    };
    let (Some(one), Some(two), Some(many)) = (calls(8, 1792)?, calls(8, 2048)?, calls(65, 2048)?)
    else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    // Blocks divide the depth of 8 segments, and a second launch adds their sums.
    assert_eq!((one.launches, one.products, one.allocations), (1, 0, 1));
    assert_eq!((two.launches, two.products, two.allocations), (2, 0, 2));
    assert!(many.launches == 3 && many.products > 0, "{many:?}");
    for calls in [one, two] {
        assert_eq!((calls.copies_to_device, calls.waits), (0, 0), "{calls:?}");
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    for device in devices() {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device);
        let weight = blocks(GgmlDType::Q8_0, 3, 64, 1)?.to_device(device)?;
        let error = message(linear_rows(&zeros(&[1, 96], DType::F32)?, &[&weight]));
        assert!(
            error.contains("weights[0]: blocks of 64 numbers per row, must be of 96"),
            "{error}"
        );
        let error = message(linear_rows(
            &zeros(&[1, 64], DType::F32)?,
            &[&weight, &zeros(&[3, 2, 35], DType::U8)?],
        ));
        assert!(error.contains("weights[1]: [3, 2, 35] of U8"), "{error}");
        let y = linear_rows(&zeros(&[0, 64], DType::F32)?, &[&weight])?;
        assert_eq!(y[0].dims(), [0, 3]);
    }
    Ok(())
}
