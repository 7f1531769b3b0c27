//! Tests `delta_gates` against its formulas in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{arithmetic_dtype, delta_gates, delta_gates_gradient};
use candle_grpo_test_support::{assert_close, devices, gradient, message, numbers};

use crate::twin::{noisy, rounding};

fn inputs(dtype: DType, device: &Device) -> Result<Vec<Var>> {
    let noise = |shape: &[usize], scale: f64, seed| {
        Var::from_tensor(&(noisy(shape, seed, dtype)? * scale)?.to_device(device)?)
    };
    Ok(vec![
        noise(&[9, 3], 30.0, 1)?,
        noise(&[9, 3], 30.0, 2)?,
        noise(&[3], 2.0, 3)?,
        noise(&[3], 1.0, 4)?,
    ])
}

#[test]
fn results_and_gradients_equal_the_formulas() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            let variables = inputs(dtype, device)?;
            let [a, b, a_log, dt_bias] = &variables[..] else {
                unreachable!()
            };
            let (g, beta) = delta_gates(a, b, a_log, dt_bias)?;
            let wide = arithmetic_dtype(dtype);
            assert_eq!((g.dtype(), beta.dtype()), (wide, wide));
            let of_g = noisy(&[9, 3], 5, wide)?.to_device(device)?;
            let of_beta = noisy(&[9, 3], 6, wide)?.to_device(device)?;

            let numbers_of = |x: &Tensor| numbers(x);
            let (a, b) = (numbers_of(a)?, numbers_of(b)?);
            let (a_log, dt_bias) = (numbers_of(a_log)?, numbers_of(dt_bias)?);
            let (dg, dbeta) = (numbers_of(&of_g)?, numbers_of(&of_beta)?);
            let mut expected = [(); 2].map(|()| vec![0.0; 27]);
            let mut gradients = [27, 27, 3, 3].map(|len| vec![0.0; len]);
            for at in 0..27 {
                let (x, rate) = (a[at] + dt_bias[at % 3], a_log[at % 3].exp());
                let softplus = x.exp().ln_1p();
                let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
                expected[0][at] = -rate * softplus;
                expected[1][at] = sigmoid(b[at]);
                gradients[0][at] = -dg[at] * rate * sigmoid(x);
                gradients[1][at] = dbeta[at] * sigmoid(b[at]) * sigmoid(-b[at]);
                gradients[2][at % 3] -= dg[at] * rate * softplus;
                gradients[3][at % 3] -= dg[at] * rate * sigmoid(x);
            }
            let tolerance = if dtype == DType::F64 {
                1e-12
            } else {
                4.0 * rounding(dtype)
            };
            // Without a graph, a GPU takes one launch.
            let constants: Vec<Tensor> = variables.iter().map(|x| x.as_detached_tensor()).collect();
            let [a, b, a_log, dt_bias] = &constants[..] else {
                unreachable!()
            };
            let alone = delta_gates(a, b, a_log, dt_bias)?;
            for (g, beta) in [(&g, &beta), (&alone.0, &alone.1)] {
                assert_close(&numbers(g)?, &expected[0], tolerance);
                assert_close(&numbers(beta)?, &expected[1], tolerance);
            }
            let score = ((&g * &of_g)? + (&beta * &of_beta)?)?;
            let store = score.sum_all()?.backward()?;
            let all: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
            let alone = delta_gates_gradient([all[0], all[1], all[2], all[3]], [&of_g, &of_beta])?;
            for ((variable, expected), alone) in variables.iter().zip(&gradients).zip(&alone) {
                assert_close(&gradient(&store, variable)?, expected, tolerance);
                assert_eq!((alone.dims(), alone.dtype()), (variable.dims(), dtype));
                assert!(!alone.track_op());
                assert_close(&numbers(alone)?, expected, tolerance);
            }
        }
    }
    Ok(())
}

#[test]
fn large_inputs_do_not_overflow() -> Result<()> {
    let x = Tensor::new(&[[1e4f32, -1e4]], &Device::Cpu)?;
    let zero = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let (g, beta) = delta_gates(&x, &x, &zero, &zero)?;
    assert_eq!(g.to_vec2::<f32>()?, [[-1e4, 0.]]);
    assert_eq!(beta.to_vec2::<f32>()?, [[1., 0.]]);
    let ones = x.ones_like()?;
    for gradient in delta_gates_gradient([&x, &x, &zero, &zero], [&ones, &ones])? {
        assert!(numbers(&gradient)?.iter().all(|x| x.is_finite()));
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (a, bias) = (zeros(&[2, 3])?, zeros(&[3])?);
    let call = |a: &Tensor, b: &Tensor, a_log: &Tensor, dt_bias: &Tensor| {
        message(delta_gates(a, b, a_log, dt_bias))
    };
    assert!(call(&bias, &a, &bias, &bias).contains("a: shape [3], must be [N, value_heads]"));
    assert!(call(&a, &bias, &bias, &bias).contains("b: shape [3], must be that of a, [2, 3]"));
    assert!(call(&a, &a, &a, &bias).contains("a_log: shape [2, 3], must be [3]"));
    assert!(call(&a, &a, &bias, &a).contains("dt_bias: shape [2, 3], must be [3]"));
    let error = message(delta_gates_gradient([&a, &a, &bias, &bias], [&a, &bias]));
    assert!(error.contains("gradients[1]: shape [3]"), "{error}");
    Ok(())
}
