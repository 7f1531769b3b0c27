//! Tests of `dequantize.cu` against Candle's arithmetic.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{BLOCK_TYPES, composed};
use candle_grpo_test_support::noise;

/// Checks `n` blocks of each type, followed by others in memory.
fn check<T: Kernels>(n: usize, tolerance: f64) -> Result<()> {
    for block_type in BLOCK_TYPES {
        let (size, bytes) = (block_type.block_size(), block_type.type_size());
        let noise = noise(n * bytes, 1);
        let mut blocks: Vec<u8> = noise.iter().map(|x| (x * 1e4) as i32 as u8).collect();
        // The factors, whose high byte is odd in memory, are finite.
        for block in blocks.chunks_exact_mut(bytes) {
            for place in [1, 3, bytes - 1] {
                block[place] &= 0x3f;
            }
        }
        let expected = Tensor::from_slice(&blocks, (1, n, bytes), &Device::Cpu)?;
        let expected = composed::dequantize(&expected, DType::F64)?;
        let expected = expected.flatten_all()?.to_vec1::<f64>()?;
        let blocks = Buffer::new(&blocks);
        let grid = Grid::new((n * size).div_ceil(4 * 256) as u32, 256);
        for order in ORDERS {
            let seven = T::from_f64(7.0);
            let mut y = Buffer::filled(seven, n * size + 8);
            // SAFETY: the buffers have n blocks.
            unsafe {
                T::dequantize(
                    grid,
                    order,
                    blocks.as_ptr(),
                    y.as_mut_ptr(),
                    n as u64,
                    bytes as u32,
                )
                .unwrap();
            }
            for (found, expected) in y.iter().zip(&expected) {
                let difference = (found.to_f64() - expected).abs();
                assert!(
                    difference <= tolerance * expected.abs().max(1e-4),
                    "{block_type:?}: {} for {expected}",
                    found.to_f64()
                );
            }
            assert!(y[n * size..].iter().all(|x| *x == seven));
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for n in [1, 8, 21] {
        check::<T>(n, tolerance)?;
    }
    Ok(())
}

each_dtype!(numbers: f32 1e-6, bf16 4e-3, f16 1e-3);
