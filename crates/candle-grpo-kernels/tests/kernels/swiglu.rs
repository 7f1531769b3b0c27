//! Tests `swiglu` and `geglu` against their composed twins in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{composed, geglu, geglu_gradient, swiglu, swiglu_gradient};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, check_gradient_alone, noisy};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        rows in 0usize..4,
        width in prop_oneof![1usize..40, 1000usize..1100],
        scale in prop_oneof![Just(0.0), Just(1.0), Just(20.0)],
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let gate = (noisy(&[rows, width], seed, dtype)? * scale)?;
        let up = noisy(&[rows, width], seed ^ 1, dtype)?;
        check_against_f64(
            &[(&gate, layouts[0]), (&up, layouts[1])],
            1.0,
            |inputs| swiglu(inputs[0], inputs[1]),
            |inputs| composed::swiglu(inputs[0], inputs[1]),
        )?;
        check_against_f64(
            &[(&gate, layouts[0]), (&up, layouts[1])],
            1.0,
            |inputs| geglu(inputs[0], inputs[1]),
            |inputs| composed::geglu(inputs[0], inputs[1]),
        )?;
    }
}

/// Values from the `gelu_pytorch_tanh` formula in double precision.
#[test]
fn geglu_has_the_values_of_its_formula() -> Result<()> {
    let formula = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    let gates = [-3.0, -1.0, -0.1, 0.0, 0.5, 1.0, 2.5];
    for device in devices() {
        for dtype in [DType::F32, DType::F64] {
            let gate = Tensor::new(&gates, device)?.to_dtype(dtype)?;
            let y = geglu(&gate, &(gate.ones_like()? * 2.0)?)?;
            let expected = gates.map(|x| 2.0 * formula(x));
            assert_close(&numbers(&y)?, &expected, 1e-6);
            // The derivative of 2 gelu, by central differences.
            let (slope, _) =
                geglu_gradient(&gate, &(gate.ones_like()? * 2.0)?, &gate.ones_like()?)?;
            let expected = gates.map(|x| (formula(x + 1e-5) - formula(x - 1e-5)) / 1e-5);
            assert_close(&numbers(&slope)?, &expected, 1e-6);
        }
    }
    Ok(())
}

/// On CUDA a block has 2,048 f32 elements, or 4,096 in bf16 and f16.
#[test]
fn tensors_of_several_blocks_equal_the_composed_twin() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for n in [4097, 9000] {
            let (gate, up) = (noisy(&[n], 1, dtype)?, noisy(&[n], 2, dtype)?);
            check_against_f64(
                &[(&gate, Layout::Contiguous), (&up, Layout::Contiguous)],
                1.0,
                |inputs| swiglu(inputs[0], inputs[1]),
                |inputs| composed::swiglu(inputs[0], inputs[1]),
            )?;
        }
    }
    Ok(())
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    check_gradient_alone(
        &[
            &noisy(&[3, 37], 1, DType::F32)?,
            &noisy(&[3, 37], 2, DType::F32)?,
        ],
        |x| swiglu(x[0], x[1]),
        |x, gradient| {
            let (gate_gradient, up_gradient) = swiglu_gradient(x[0], x[1], gradient)?;
            Ok(vec![gate_gradient, up_gradient])
        },
    )?;
    check_gradient_alone(
        &[
            &noisy(&[3, 37], 1, DType::F32)?,
            &noisy(&[3, 37], 2, DType::F32)?,
        ],
        |x| geglu(x[0], x[1]),
        |x, gradient| {
            let (gate_gradient, up_gradient) = geglu_gradient(x[0], x[1], gradient)?;
            Ok(vec![gate_gradient, up_gradient])
        },
    )
}

#[test]
fn large_gates_neither_overflow_nor_lose_nan() -> Result<()> {
    for device in devices() {
        let gate = Var::new(&[1e4f32, -1e4, 90., -90., f32::NAN], device)?;
        let up = Var::new(&[1f32; 5], device)?;
        for gated in [swiglu, geglu] {
            let y = gated(&gate, &up)?;
            let gradients = y.sum_all()?.backward()?;
            let gate_gradient = gradients.get(&gate).expect("a gradient").to_vec1::<f32>()?;
            for (got, expected) in [
                (y.to_vec1::<f32>()?, [1e4, 0., 90., 0.]),
                (gate_gradient, [1., 0., 1., 0.]),
            ] {
                for (got, expected) in got.iter().zip(expected) {
                    assert!((got - expected).abs() < 1e-5, "{got}, expected {expected}");
                }
                assert!(got[4].is_nan());
            }
        }
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let gate = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    assert!(message(swiglu(&gate, &gate.t()?)).contains("up: shape [3, 2], must be that of gate"));
    assert!(message(swiglu(&gate, &gate.to_dtype(DType::F16)?)).contains("up: F16"));
    let integers = gate.to_dtype(DType::U8)?;
    assert!(message(swiglu(&integers, &integers)).contains("gate: U8"));
    Ok(())
}
