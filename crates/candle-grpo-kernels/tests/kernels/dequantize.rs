//! Tests `dequantize` against Candle's arithmetic.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{BLOCK_TYPES, composed, dequantize, quantize};
use candle_grpo_test_support::{cases, devices, message};
use proptest::prelude::*;
use rstest::rstest;

use crate::strategies::dtypes;
use crate::twin::{bits, noisy};

/// Blocks filled with random bytes, which cover all values except factors that are not finite.
fn random_blocks(block_type: GgmlDType, rows: usize, blocks: usize, seed: u64) -> Result<Tensor> {
    let size = block_type.type_size();
    let noise = noisy(&[rows * blocks * size], seed, DType::F32)?.to_vec1::<f32>()?;
    let mut bytes: Vec<u8> = noise.iter().map(|x| (x * 1e4) as i32 as u8).collect();
    for block in bytes.chunks_exact_mut(size) {
        for place in match block_type {
            GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => &[1, 3][..],
            GgmlDType::Q6K => &[209],
            _ => &[1],
        } {
            // Subnormal numbers, too.
            block[*place] &= 0xbf;
        }
    }
    Tensor::from_vec(bytes, (rows, blocks, size), &Device::Cpu)
}

pub(crate) fn block_types() -> impl Strategy<Value = GgmlDType> {
    proptest::sample::select(BLOCK_TYPES.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]

    #[test]
    fn all_paths_equal_candle_bit_by_bit(
        block_type in block_types(),
        rows in 0usize..40,
        blocks in 1usize..30,
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let random = random_blocks(block_type, rows, blocks, seed)?;
        let expected = composed::dequantize(&random, dtype)?;
        prop_assert_eq!(expected.dims(), [rows, blocks * block_type.block_size()]);
        for device in devices() {
            let found = dequantize(&random.to_device(device)?, dtype)?;
            prop_assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
            prop_assert_eq!(bits(&found)?, bits(&expected)?);
        }
    }
}

#[rstest]
#[case(GgmlDType::Q4_0, 0.15)]
#[case(GgmlDType::Q4_1, 0.15)]
#[case(GgmlDType::Q5_0, 0.08)]
#[case(GgmlDType::Q5_1, 0.08)]
#[case(GgmlDType::Q8_0, 0.01)]
#[case(GgmlDType::Q4K, 0.12)]
#[case(GgmlDType::Q5K, 0.06)]
#[case(GgmlDType::Q6K, 0.04)]
fn quantized_numbers_are_close(#[case] block_type: GgmlDType, #[case] share: f64) -> Result<()> {
    let x = noisy(&[7, 512], 3, DType::F32)?;
    let largest = f64::from(x.abs()?.max_all()?.to_scalar::<f32>()?);
    let blocks = quantize(&x, block_type)?;
    let difference = (dequantize(&blocks, DType::F32)? - &x)?.abs()?.max_all()?;
    let difference = f64::from(difference.to_scalar::<f32>()?);
    assert!(
        difference > 0.0 && difference < share * largest,
        "{difference} of {largest}"
    );
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let x = zeros(&[3, 64], DType::F32)?;
    let error = message(quantize(&x, GgmlDType::Q4K));
    assert!(
        error.contains("x: rows of 64 numbers, must be a multiple of 256 for Q4K"),
        "{error}"
    );
    let error = message(quantize(&x, GgmlDType::F16));
    assert!(error.contains("dtype: F16, must be one of"), "{error}");
    let error = message(quantize(&zeros(&[64], DType::F32)?, GgmlDType::Q8_0));
    assert!(error.contains("x: shape [64]"), "{error}");
    let error = message(dequantize(&zeros(&[3, 2, 35], DType::U8)?, DType::F32));
    assert!(error.contains("blocks: [3, 2, 35] of U8"), "{error}");
    let error = message(dequantize(&x, DType::F32));
    assert!(error.contains("blocks: [3, 64] of F32"), "{error}");
    let blocks = quantize(&x, GgmlDType::Q8_0)?;
    let error = message(dequantize(&blocks, DType::U32));
    assert!(error.contains("dtype: U32"), "{error}");
    Ok(())
}
