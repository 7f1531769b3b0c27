//! Tests of `linear_rows.cu` against the products in f64.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS};
use candle_grpo_kernels::{BLOCK_TYPES, composed, quantize};
use candle_grpo_test_support::{assert_close, noise};

/// Threads per block, weight rows of a block, depth of a segment, and the rows in shared memory.
const THREADS: u32 = 128;
const COLUMNS: usize = 64;
const SEGMENT: usize = 256;
const SHARED_ROWS: usize = 2 * 4 * 32;
const THREADS_OF_SUM: usize = 256;

/// Checks one launch with up to four weights. `count` blocks divide the depth.
fn check<T: Kernels>(
    (rows, inputs): (usize, usize),
    weights: &[(GgmlDType, usize)],
    count: usize,
    tolerance: f64,
) -> Result<()> {
    let x: Vec<T> = noise(rows * inputs, 1)
        .iter()
        .map(|x| T::from_f64(1.7 * x))
        .collect();
    let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
    let wide = Tensor::from_vec(wide, (rows, inputs), &Device::Cpu)?;
    let x = Buffer::new(&x);
    let scale = (3.0 / inputs as f64).sqrt();
    let mut expected = Vec::new();
    let mut blocks = Vec::new();
    for (&(block_type, outputs), seed) in weights.iter().zip(2..) {
        let noise = noise(outputs * inputs, seed);
        let numbers: Vec<f32> = noise.iter().map(|x| (scale * x) as f32).collect();
        let numbers = Tensor::from_vec(numbers, (outputs, inputs), &Device::Cpu)?;
        let quantized = quantize(&numbers, block_type)?;
        // The kernel rounds to its dtype, and the tolerance includes that.
        let numbers = composed::dequantize(&quantized, DType::F64)?;
        let products = wide.matmul(&numbers.t()?)?;
        expected.extend(products.flatten_all()?.to_vec1::<f64>()?);
        let mut bytes = quantized.flatten_all()?.to_vec1::<u8>()?;
        // The buffer must start at a multiple of 16, and ends at inaccessible memory.
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        blocks.push(Buffer::new(&bytes));
    }
    let pointer = |index: usize| blocks.get(index).map_or(std::ptr::null(), |b| b.as_ptr());
    let outputs = |index: usize| weights.get(index).map_or(0, |(_, outputs)| *outputs as u32);
    let bytes = |index: usize| weights.get(index).map_or(0, |(t, _)| t.type_size() as u32);
    let row_bytes = weights.iter().map(|(block_type, _)| {
        let segment = SEGMENT / block_type.block_size() * block_type.type_size();
        16 * ((segment + 14).div_ceil(16) | 1)
    });
    let of_columns: usize = weights.iter().map(|(_, rows)| rows.div_ceil(COLUMNS)).sum();
    let grid = Grid {
        grid: [of_columns as u32, count as u32, 1],
        block: [THREADS, 1, 1],
        shared_bytes: SHARED_ROWS * row_bytes.max().unwrap_or(0),
    };
    let kernels = [
        (16, T::linear_rows_16 as KernelOf<T>),
        (64, T::linear_rows_64),
    ];
    for (_, kernel) in kernels.into_iter().filter(|(most, _)| rows <= *most) {
        for order in ORDERS {
            let len = expected.len();
            let mut y = Buffer::filled(T::from_f64(f64::NAN), len);
            let mut parts = Buffer::filled(f32::NAN, count * len);
            // SAFETY: the buffers have these sizes.
            unsafe {
                kernel(
                    grid,
                    order,
                    x.as_ptr(),
                    pointer(0),
                    pointer(1),
                    pointer(2),
                    pointer(3),
                    y.as_mut_ptr(),
                    parts.as_mut_ptr(),
                    rows as u32,
                    inputs as u32,
                    outputs(0),
                    outputs(1),
                    outputs(2),
                    outputs(3),
                    bytes(0),
                    bytes(1),
                    bytes(2),
                    bytes(3),
                )
                .unwrap();
                if count > 1 {
                    T::linear_rows_sum(
                        Grid::new(len.div_ceil(THREADS_OF_SUM) as u32, THREADS_OF_SUM as u32),
                        order,
                        parts.as_ptr(),
                        y.as_mut_ptr(),
                        len as u64,
                        count as u32,
                    )
                    .unwrap();
                }
            }
            let found: Vec<f64> = y.iter().map(|y| y.to_f64()).collect();
            assert_close(&found, &expected, tolerance);
        }
    }
    Ok(())
}

/// A kernel of `linear_rows`.
type KernelOf<T> = unsafe fn(
    Grid,
    u32,
    *const T,
    *const u8,
    *const u8,
    *const u8,
    *const u8,
    *mut T,
    *mut f32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
) -> std::result::Result<(), String>;

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for block_type in BLOCK_TYPES {
        // Several segments for each warp, the last of which is short where the format has that.
        let inputs = 1280 + 5 * block_type.block_size();
        check::<T>((3, inputs), &[(block_type, 37)], 1, tolerance)?;
    }
    let mixed = [
        (GgmlDType::Q4K, 65),
        (GgmlDType::Q8_0, 0),
        (GgmlDType::Q6K, 7),
        (GgmlDType::Q4_1, 64),
    ];
    check::<T>((9, 512), &mixed, 1, tolerance)?;
    check::<T>((35, 1792), &mixed, 3, tolerance)?;
    // More blocks than segments.
    check::<T>((1, 256), &mixed[2..], 2, tolerance)
}

each_dtype!(equals_the_products: f32 4e-6, bf16 2e-2, f16 3e-3);
