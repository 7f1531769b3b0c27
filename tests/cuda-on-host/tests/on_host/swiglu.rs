//! Tests of `swiglu.cu` against the formula in f64 and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{Buffer, Expected, Grid, Kernels, ORDERS, forward_and_backward};
use candle_grpo_kernels::swiglu;
use candle_grpo_test_support::noise;

/// Checks `n` elements, followed by `behind` others in memory.
fn check<T: Kernels>(n: usize, behind: usize, tolerance: f64) -> Result<()> {
    let buffer = |seed, scale: f64| -> Buffer<T> {
        let mut numbers: Vec<T> = noise(n, seed)
            .iter()
            .map(|x| T::from_f64(scale * x))
            .collect();
        // Far enough for a sigmoid of 0 or 1.
        for (x, far) in numbers.iter_mut().zip([-200.0, 200.0, 0.0]) {
            *x = T::from_f64(far * scale / 12.0);
        }
        numbers.resize(n + behind, T::from_f64(f64::NAN));
        Buffer::new(&numbers)
    };
    let (gate, up, gradient) = (buffer(1, 12.0), buffer(2, 2.0), buffer(3, 2.0));
    let wide = |x: &[T]| -> Vec<f64> { x[..n].iter().map(|x| x.to_f64()).collect() };
    let (mut y_expected, mut dgate_expected, mut dup_expected) = (vec![], vec![], vec![]);
    for ((gate, up), gradient) in wide(&gate).into_iter().zip(wide(&up)).zip(wide(&gradient)) {
        let s = 1.0 / (1.0 + (-gate).exp());
        y_expected.push(gate * s * up);
        dgate_expected.push(gradient * up * s * (1.0 + gate * (1.0 - s)));
        dup_expected.push(gradient * gate * s);
    }
    let row = |x: &[T]| Tensor::from_slice(&x[..n], n, &Device::Cpu);
    let expected = Expected::all(
        [y_expected, dgate_expected, dup_expected],
        forward_and_backward(&[row(&gate)?, row(&up)?], &row(&gradient)?, |inputs| {
            swiglu(&inputs[0], &inputs[1])
        })?,
    );
    let per_block = 256 * 2 * 16 / size_of::<T>();
    let grid = Grid::new(n.div_ceil(per_block) as u32, 256);
    for order in ORDERS {
        let seven = T::from_f64(7.0);
        let [mut y, mut dgate, mut dup] = [(); 3].map(|()| Buffer::filled(seven, n + behind));
        // SAFETY: the buffers have n elements.
        unsafe {
            T::swiglu_forward(
                grid,
                order,
                gate.as_ptr(),
                up.as_ptr(),
                y.as_mut_ptr(),
                n as u64,
            )
            .unwrap();
            T::swiglu_backward(
                grid,
                order,
                gate.as_ptr(),
                up.as_ptr(),
                gradient.as_ptr(),
                dgate.as_mut_ptr(),
                dup.as_mut_ptr(),
                n as u64,
            )
            .unwrap();
        }
        for (found, expected) in [&y, &dgate, &dup].into_iter().zip(&expected) {
            expected.assert_close(&wide(found), tolerance);
            assert!(found[n..].iter().all(|x| *x == seven));
        }
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    for n in [1, 4, 8, 513, 4096, 8192, 20_003] {
        check::<T>(n, 0, tolerance)?;
        check::<T>(n, 1, tolerance)?;
    }
    Ok(())
}

each_dtype!(equals_the_formula_and_the_cpu_path: f32 2e-6, bf16 4e-3, f16 6e-4);
