//! Tests `rms_norm` against its composed twin in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{RmsNormOptions, add_rms_norm, composed, rms_norm, rms_norm_gradient};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::{Layout, layouts};
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, check_gradient_alone, noisy, rounding};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        (rows, width) in prop_oneof![
            4 => (
                prop_oneof![0usize..5, Just(130)],
                prop_oneof![1usize..40, Just(576), 1000usize..1100],
            ),
            // More than a block keeps in registers.
            1 => (1usize..4, Just(8200)),
            // Many head rows.
            1 => (1025usize..1060, 1usize..140),
        ],
        epsilon in prop_oneof![Just(1e-5), Just(0.1)],
        is_offset in any::<bool>(),
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let options = RmsNormOptions { epsilon, is_offset };
        let x = noisy(&[rows, width], seed, dtype)?;
        // Not near 0, where the derivative is huge.
        let x = ((&x * 3.0)? + (x.sign()? * 0.5)?)?;
        check_against_f64(
            &[(&x, layouts[0]), (&noisy(&[width], seed ^ 1, dtype)?, layouts[1])],
            3.0,
            |inputs| rms_norm(inputs[0], inputs[1], options),
            |inputs| composed::rms_norm(inputs[0], inputs[1], options),
        )?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]

    #[test]
    fn a_sum_and_its_norm_are_those_of_two_operations(
        rows in 0usize..9,
        width in prop_oneof![1usize..300, Just(1024), Just(2056), Just(9000)],
        is_variable in any::<bool>(),
        is_offset in any::<bool>(),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        for device in devices() {
            let input = |layout: Layout, shape: &[usize], salt| {
                layout.apply(&noisy(shape, seed ^ salt, dtype)?)?.to_device(device)
            };
            let x = input(layouts[0], &[rows, width], 0)?;
            let x = if is_variable { Var::from_tensor(&x)?.into_inner() } else { x };
            let change = input(layouts[1], &[rows, width], 1)?;
            let weight = input(layouts[2], &[width], 2)?;
            let options = RmsNormOptions { epsilon: 1e-5, is_offset };
            let (sum, y) = add_rms_norm(&x, &change, &weight, options)?;
            prop_assert_eq!((sum.track_op(), y.track_op()), (is_variable, is_variable));
            prop_assert_eq!(numbers(&sum)?, numbers(&(&x + &change)?)?);
            let expected = rms_norm(&sum, &weight, options)?;
            prop_assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
            assert_close(&numbers(&y)?, &numbers(&expected)?, rounding(dtype));
        }
    }
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    check_gradient_alone(
        &[
            &noisy(&[3, 37], 1, DType::F32)?,
            &noisy(&[37], 2, DType::F32)?,
        ],
        |x| rms_norm(x[0], x[1], 1e-5),
        |x, gradient| {
            let (x_gradient, weight_gradient) = rms_norm_gradient(x[0], x[1], 1e-5, gradient)?;
            Ok(vec![x_gradient, weight_gradient])
        },
    )
}

#[rstest]
fn half_types_round_where_the_composed_twin_does(
    #[values(DType::BF16, DType::F16)] dtype: DType,
    #[values(false, true)] is_offset: bool,
) -> Result<()> {
    let options = RmsNormOptions {
        epsilon: 1e-5,
        is_offset,
    };
    for device in devices() {
        let x = noisy(&[50, 96], 3, dtype)?.to_device(device)?;
        let weight = noisy(&[96], 4, dtype)?.to_device(device)?;
        let fused = numbers(&rms_norm(&x, &weight, options)?)?;
        let composed = numbers(&composed::rms_norm(&x, &weight, options)?)?;
        // f32 sums may differ in their last bit, which may change how an entry is rounded.
        let different = fused.iter().zip(&composed).filter(|(a, b)| a != b).count();
        assert!(different < fused.len() / 100, "{different} entries differ");
    }
    Ok(())
}

#[test]
fn nan_stays_in_its_row() -> Result<()> {
    for device in devices() {
        let x = Tensor::new(&[[1f32, 2.], [f32::NAN, 0.], [3., 4.]], device)?;
        let y = rms_norm(&x, &Tensor::ones(2, DType::F32, device)?, 1e-5)?.to_vec2::<f32>()?;
        assert!(y[1].iter().all(|y| y.is_nan()));
        assert!([&y[0], &y[2]].into_iter().flatten().all(|y| y.is_finite()));
    }
    Ok(())
}

/// More rows than one task, each shorter than a vector.
#[test]
fn nan_stays_in_its_row_of_the_gradient() -> Result<()> {
    let mut values = vec![0.5f32; 130 * 5];
    values[2] = f32::NAN;
    for device in devices() {
        let x = Var::from_slice(&values, (130, 5), device)?;
        let y = rms_norm(&x, &Tensor::ones(5, DType::F32, device)?, 1e-5)?;
        let gradients = y.sum_all()?.backward()?;
        let gradient = numbers(gradients.get(&x).expect("a gradient of x"))?;
        assert!(gradient[0].is_nan());
        assert!(gradient[5..].iter().all(|g| g.is_finite()));
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let (x, weight) = (zeros(&[2, 3], DType::F32)?, zeros(&[3], DType::F32)?);
    let call = |x: &Tensor, weight: &Tensor, epsilon| message(rms_norm(x, weight, epsilon));
    assert!(call(&x, &weight, 0.0).contains("epsilon: 0, must be positive"));
    assert!(call(&x, &x, 1e-5).contains("weight: shape [2, 3], must be [3]"));
    assert!(call(&x, &weight.to_dtype(DType::BF16)?, 1e-5).contains("weight: BF16"));
    assert!(call(&zeros(&[2, 0], DType::F32)?, &weight, 1e-5).contains("x: shape [2, 0]"));
    assert!(call(&x.to_dtype(DType::U32)?, &weight, 1e-5).contains("x: U32"));
    let error = message(add_rms_norm(&x, &weight, &weight, 1e-5));
    assert!(
        error.contains("change: shape [3], must be that of x, [2, 3]"),
        "{error}"
    );
    Ok(())
}
