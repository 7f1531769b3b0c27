//! Tests of `gradient_norm.cu`: sums of squares, and scaling in place, against the formula in f64
//! and the CPU path.

use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_grpo_cuda_on_host::{
    Buffer, Expected, Grid, ORDERS, gradient_scale, gradient_squares, gradient_sum_parts,
};
use candle_grpo_kernels::{scale_gradients, squared_gradient_norms};
use candle_grpo_test_support::{noise, numbers};
use half::{bf16, f16};

/// Returns the list of `gradients`, of which the first `n` elements count, and the blocks of the
/// launch.
fn list<T: WithDType>(
    gradients: &[(Buffer<T>, usize)],
    blocks_of: impl Fn(usize) -> usize,
) -> (Buffer<u64>, u32) {
    let dtype = [DType::F32, DType::BF16, DType::F16]
        .iter()
        .position(|dtype| *dtype == T::DTYPE)
        .expect("a dtype of the kernels");
    let (mut words, mut blocks) = (vec![], 0);
    for (gradient, n) in gradients {
        let own = blocks_of(*n) as u64;
        let address = gradient.as_ptr().addr() as u64;
        words.extend([address, *n as u64, blocks | own << 32, dtype as u64]);
        blocks += own;
    }
    (Buffer::new(&words), blocks as u32)
}

fn check<T: WithDType>(lengths: &[usize], behind: usize, size: f64, tolerance: f64) -> Result<()> {
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
    let count = lengths.len() as u32;
    for order in ORDERS {
        let (mut exact, mut on_cpu, mut gradients) = (vec![], vec![], vec![]);
        for &n in lengths {
            let mut numbers: Vec<T> = noise(n, 1).iter().map(|x| T::from_f64(size * x)).collect();
            exact.push(numbers.iter().map(|x| x.to_f64().powi(2)).sum::<f64>());
            on_cpu.push(Tensor::from_slice(&numbers, n, &Device::Cpu)?);
            numbers.resize(n + behind, T::from_f64(f64::NAN));
            gradients.push((Buffer::new(&numbers), n));
        }
        // A small gradient has few blocks.
        let (words, blocks) = list(&gradients, |n| n.div_ceil(1024).clamp(1, 5));
        let mut parts = Buffer::filled(f64::NAN, blocks as usize);
        let mut sums = Buffer::filled(f64::NAN, lengths.len());
        // SAFETY: the list has gradients of n elements, and each block has a part.
        unsafe {
            let grid = Grid::new(blocks, 256);
            gradient_squares(grid, order, words.as_ptr(), count, parts.as_mut_ptr()).unwrap();
            let grid = Grid::new(count, 256);
            let (parts, sums) = (parts.as_ptr(), sums.as_mut_ptr());
            gradient_sum_parts(grid, order, words.as_ptr(), parts, sums).unwrap();
        }
        let scale = size * size;
        let relative = |sums: &[f64]| -> Vec<f64> { sums.iter().map(|x| x / scale).collect() };
        let on_cpu: Vec<&Tensor> = on_cpu.iter().collect();
        let expected = Expected {
            exact: relative(&exact),
            on_cpu: relative(&numbers(&squared_gradient_norms(&on_cpu)?)?),
        };
        expected.assert_close(&relative(&sums), 1e-12);

        let (mut starts, mut gradients) = (vec![], vec![]);
        for &n in lengths {
            let start = noise(n + behind, 2).into_iter().map(T::from_f64);
            starts.push(start.collect::<Vec<T>>());
            gradients.push((Buffer::new(&starts[starts.len() - 1]), n));
        }
        let (words, blocks) = list(&gradients, |n| (n * size_of::<T>()).div_ceil(16 * 256));
        // SAFETY: the list has gradients of n elements, and the blocks cover them.
        unsafe { gradient_scale(Grid::new(blocks, 256), order, words.as_ptr(), count, 0.3) }
            .unwrap();
        for ((gradient, n), start) in gradients.iter().zip(&starts) {
            let on_cpu = Tensor::from_slice(&start[..*n], *n, &Device::Cpu)?;
            scale_gradients(&[&on_cpu], 0.3)?;
            let expected = Expected {
                exact: wide(&start[..*n]).iter().map(|x| 0.3 * x).collect(),
                on_cpu: numbers(&on_cpu)?,
            };
            expected.assert_close(&wide(&gradient[..*n]), tolerance);
            assert!(gradient[*n..] == start[*n..]);
        }
    }
    Ok(())
}

#[test]
fn f32_does_not_overflow() -> Result<()> {
    check::<f32>(&[1, 4, 1000, 20_003], 0, 1e30, 1e-6)?;
    check::<f32>(&[1, 4, 1000, 20_003], 1, 1e30, 1e-6)
}

#[test]
fn bf16_is_summed_in_f64() -> Result<()> {
    check::<bf16>(&[1, 8, 1000, 20_003], 0, 1e30, 4e-3)?;
    check::<bf16>(&[1, 8, 1000, 20_003], 3, 1e30, 4e-3)
}

#[test]
fn f16_is_summed_in_f64() -> Result<()> {
    check::<f16>(&[1, 8, 1000, 20_003], 0, 1e4, 6e-4)?;
    check::<f16>(&[1, 8, 1000, 20_003], 3, 1e4, 6e-4)
}
