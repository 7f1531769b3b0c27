//! `adamw.cu` against the formula in f64.
#![allow(unsafe_code, missing_docs)]

use candle_grpo_cuda_on_host::{Buffer, Grid, Kernels, ORDERS, noise};
use candle_grpo_test_support::assert_close;
use half::{bf16, f16};

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.99;
const EPSILON: f64 = 1e-6;
const KEEP: f64 = 0.97;
const STEP_SIZE: f64 = 0.3;
const ROOT_CORRECTION: f64 = 0.8;

/// p, m and v after the step.
fn expected(p: &[f64], m: &[f64], v: &[f64], g: &[f64]) -> [Vec<f64>; 3] {
    let m: Vec<f64> = m
        .iter()
        .zip(g)
        .map(|(m, g)| m * BETA1 + g * (1.0 - BETA1))
        .collect();
    let v: Vec<f64> = v
        .iter()
        .zip(g)
        .map(|(v, g)| v * BETA2 + g * g * (1.0 - BETA2))
        .collect();
    let p = p
        .iter()
        .zip(m.iter().zip(&v))
        .map(|(p, (m, v))| p * KEEP - STEP_SIZE * m / (v.sqrt() / ROOT_CORRECTION + EPSILON));
    [p.collect(), m, v]
}

/// `n` elements, in memory with `behind` further ones; with a master or without, a gradient like the parameter or of f32.
fn check<T: Kernels>(n: usize, behind: usize, has_master: bool, like: bool, tolerance: f64) {
    let with_behind = |numbers: &[f64]| -> Vec<f32> {
        let mut numbers: Vec<f32> = numbers.iter().map(|x| *x as f32).collect();
        numbers.resize(n + behind, 7.0);
        numbers
    };
    let rounded = |numbers: &[f32]| -> Vec<T> {
        numbers.iter().map(|x| T::from_f64(f64::from(*x))).collect()
    };
    let wide = |numbers: &[T]| -> Vec<f64> { numbers[..n].iter().map(|x| x.to_f64()).collect() };
    let exact =
        |numbers: &[f32]| -> Vec<f64> { numbers[..n].iter().map(|x| f64::from(*x)).collect() };

    let p = with_behind(&noise(n, 1));
    let m = with_behind(&noise(n, 2));
    let v = with_behind(&noise(n, 3).iter().map(|x| x * x).collect::<Vec<_>>());
    let g = with_behind(&noise(n, 4));
    let (p_like, g_like) = (rounded(&p), rounded(&g));
    let start = if has_master { exact(&p) } else { wide(&p_like) };
    let gradient = if like { wide(&g_like) } else { exact(&g) };
    let [p_expected, m_expected, v_expected] = expected(&start, &exact(&m), &exact(&v), &gradient);

    for order in ORDERS {
        let mut parameter = Buffer::of(&p_like);
        // One further element: the master lies otherwise to addresses of 16 bytes.
        let further: Vec<f32> = p.iter().copied().chain([7.0]).collect();
        let (mut master, mut average, mut square) =
            (Buffer::of(&further), Buffer::of(&m), Buffer::of(&v));
        let (g, g_like) = (Buffer::of(&g), Buffer::of(&g_like));
        let master_or_null = if has_master {
            master.as_mut_ptr()
        } else {
            std::ptr::null_mut()
        };
        let grid = Grid::new(n.div_ceil(4 * 256) as u32, 256);
        // SAFETY: the buffers have n elements.
        unsafe {
            macro_rules! step {
                ($kernel:ident, $gradient:expr) => {
                    T::$kernel(
                        grid,
                        order,
                        parameter.as_mut_ptr(),
                        master_or_null,
                        average.as_mut_ptr(),
                        square.as_mut_ptr(),
                        $gradient,
                        n as u64,
                        BETA1 as f32,
                        (1.0 - BETA1) as f32,
                        BETA2 as f32,
                        (1.0 - BETA2) as f32,
                        EPSILON as f32,
                        KEEP as f32,
                        STEP_SIZE as f32,
                        (1.0 / ROOT_CORRECTION) as f32,
                    )
                    .unwrap()
                };
            }
            if like {
                step!(adamw_like, g_like.as_ptr());
            } else {
                step!(adamw, g.as_ptr());
            }
        }
        assert_close(&wide(&parameter), &p_expected, tolerance);
        assert_close(&exact(&average), &m_expected, 1e-6);
        assert_close(&exact(&square), &v_expected, 1e-6);
        let master_expected = if has_master {
            p_expected.clone()
        } else {
            exact(&p)
        };
        assert_close(&exact(&master), &master_expected, 1e-5);
        assert!(parameter[n..].iter().all(|x| x.to_f64() == 7.0));
        for state in [&master, &average, &square] {
            assert!(state[n..].iter().all(|x| *x == 7.0));
        }
    }
}

fn check_all<T: Kernels>(tolerance: f64) {
    for n in [1, 4, 1023, 2048] {
        for (behind, has_master, like) in [
            (0, false, false),
            (1, true, false),
            (0, true, true),
            (2, false, true),
        ] {
            check::<T>(n, behind, has_master, like, tolerance);
        }
    }
}

#[test]
fn f32_is_the_formula() {
    check_all::<f32>(1e-5);
}

#[test]
fn bf16_is_the_formula() {
    check_all::<bf16>(4e-3);
}

#[test]
fn f16_is_the_formula() {
    check_all::<f16>(6e-4);
}
