//! Tests of `gradient_norm.cu`: sums of squares, and scaling in place, against the formula in f64
//! and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, gradient_sum_parts};
use candle_grpo_kernels::{scale_gradients, squared_gradient_norms};
use candle_grpo_test_support::{noise, numbers};
use half::{bf16, f16};

const PARTS: usize = 256;

fn check<T: Kernels>(lengths: &[usize], behind: usize, size: f64, tolerance: f64) -> Result<()> {
    for order in ORDERS {
        let mut parts = Buffer::filled(0f64, PARTS * lengths.len());
        let mut sums = Buffer::filled(f64::NAN, lengths.len());
        let (mut exact, mut gradients) = (vec![], vec![]);
        for (i, &n) in lengths.iter().enumerate() {
            let mut numbers: Vec<T> = noise(n, 1).iter().map(|x| T::from_f64(size * x)).collect();
            exact.push(numbers.iter().map(|x| x.to_f64().powi(2)).sum::<f64>());
            gradients.push(Tensor::from_slice(&numbers, n, &Device::Cpu)?);
            numbers.resize(n + behind, T::from_f64(f64::NAN));
            let gradient = Buffer::new(&numbers);
            // A small gradient has few blocks.
            let blocks = n.div_ceil(1024).clamp(1, 5);
            // SAFETY: the gradient has n elements; there are at most PARTS blocks.
            unsafe {
                T::gradient_squares(
                    Grid::new(blocks as u32, 256),
                    order,
                    gradient.as_ptr(),
                    parts.as_mut_ptr().add(i * PARTS),
                    n as u64,
                )
            }
            .unwrap();
        }
        let grid = Grid::new(lengths.len() as u32, 256);
        // SAFETY: there are PARTS parts for each sum.
        unsafe { gradient_sum_parts(grid, order, parts.as_ptr(), sums.as_mut_ptr()) }.unwrap();
        let scale = size * size;
        let relative = |sums: &[f64]| -> Vec<f64> { sums.iter().map(|x| x / scale).collect() };
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        let expected = Expected {
            exact: relative(&exact),
            on_cpu: relative(&numbers(&squared_gradient_norms(&gradients)?)?),
        };
        expected.assert_close(&relative(&sums), 1e-12);

        for &n in lengths {
            let start: Vec<T> = noise(n + behind, 2)
                .iter()
                .map(|x| T::from_f64(*x))
                .collect();
            let mut gradient = Buffer::new(&start);
            let grid = Grid::new((n * size_of::<T>()).div_ceil(16 * 256) as u32, 256);
            // SAFETY: the gradient has n elements.
            unsafe { T::gradient_scale(grid, order, gradient.as_mut_ptr(), n as u64, 0.3) }
                .unwrap();
            let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
            let on_cpu = Tensor::from_slice(&start[..n], n, &Device::Cpu)?;
            scale_gradients(&[&on_cpu], 0.3)?;
            let expected = Expected {
                exact: wide(&start[..n]).iter().map(|x| 0.3 * x).collect(),
                on_cpu: numbers(&on_cpu)?,
            };
            expected.assert_close(&wide(&gradient[..n]), tolerance);
            assert!(gradient[n..] == start[n..]);
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
