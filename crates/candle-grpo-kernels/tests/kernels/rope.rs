//! Tests `rope` against its composed twin in f64.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_grpo_kernels::{arithmetic_dtype, composed, rope, rope_angles, rope_gradient};
use candle_grpo_test_support::{assert_close, cases, devices, message, numbers};
use proptest::prelude::*;

use crate::layout::layouts;
use crate::strategies::dtypes;
use crate::twin::{check_against_f64, check_gradient_alone, noisy};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(18, 192)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        // More heads than a kernel block has.
        rows in prop_oneof![0usize..5, Just(90)],
        heads in 1usize..4,
        // More pairs than a head's threads load at a time.
        pairs in prop_oneof![1usize..20, Just(32), Just(64), Just(264)],
        dtype in dtypes(),
        layouts in [layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let angles = (noisy(&[rows, pairs], seed ^ 1, DType::F32)? * 4.0)?;
        let operator = |rope: fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>| {
            let angles = &angles;
            move |inputs: &[&Tensor]| {
                let x = inputs[0];
                let angles = angles.to_dtype(arithmetic_dtype(x.dtype()))?.to_device(x.device())?;
                rope(x, &layouts[1].apply(&angles.cos()?)?, &layouts[1].apply(&angles.sin()?)?)
            }
        };
        let x = noisy(&[rows, heads * 2 * pairs], seed, dtype)?;
        check_against_f64(&[(&x, layouts[0])], 1.0, operator(rope), operator(composed::rope))?;
    }
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    let angles =
        |x: &Tensor, seed| noisy(&[3, 4], seed, arithmetic_dtype(x.dtype()))?.to_device(x.device());
    check_gradient_alone(
        &[&noisy(&[3, 16], 1, DType::F32)?],
        |x| rope(x[0], &angles(x[0], 2)?, &angles(x[0], 3)?),
        |x, gradient| {
            Ok(vec![rope_gradient(
                &angles(x[0], 2)?,
                &angles(x[0], 3)?,
                gradient,
            )?])
        },
    )
}

#[test]
fn scores_depend_only_on_the_distance_of_positions() -> Result<()> {
    let (query, key) = (
        noisy(&[1, 8], 1, DType::F32)?,
        noisy(&[1, 8], 2, DType::F32)?,
    );
    let frequencies = Tensor::new(&[[1f32, 0.3, 0.1, 0.03]], &Device::Cpu)?;
    let at = |x: &Tensor, position: f64| {
        let angles = (&frequencies * position)?;
        rope(x, &angles.cos()?, &angles.sin()?)
    };
    let score = |i, j| numbers(&(at(&query, i)? * at(&key, j)?)?.sum(D::Minus1)?);
    assert_close(&score(3.0, 1.0)?, &score(12.0, 10.0)?, 1e-5);
    assert!((score(3.0, 1.0)?[0] - score(3.0, 2.0)?[0]).abs() > 1e-2);
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (x, angles) = (zeros(&[3, 8])?, zeros(&[3, 2])?);
    assert!(message(rope(&x, &zeros(&[2, 2])?, &angles)).contains("cos: shape [2, 2]"));
    assert!(message(rope(&x, &zeros(&[3, 3])?, &angles)).contains("cos: shape [3, 3]"));
    assert!(message(rope(&x, &zeros(&[3, 0])?, &angles)).contains("cos: shape [3, 0]"));
    assert!(message(rope(&x, &angles, &zeros(&[3, 1])?)).contains("sin: shape [3, 1]"));
    let half = angles.to_dtype(DType::BF16)?;
    assert!(message(rope(&x, &half, &angles)).contains("cos: BF16, must be F32"));
    assert!(message(rope(&x.to_dtype(DType::I64)?, &angles, &angles)).contains("x: I64"));
    Ok(())
}

#[test]
fn angles_are_positions_times_frequencies() -> Result<()> {
    for device in devices() {
        // More angles than a kernel block has.
        let values: Vec<u32> = (0..100).map(|i| 41 * i).collect();
        let positions = Tensor::new(values.as_slice(), device)?;
        let frequencies = Tensor::new(&[[1f64, 0.1, 1e-4]], device)?;
        for dtype in [DType::F32, DType::F64] {
            let (cos, sin) = rope_angles(&positions, &frequencies.to_dtype(dtype)?, 1.5)?;
            assert_eq!(
                (cos.dims(), cos.dtype(), sin.dtype()),
                (&[100, 3][..], dtype, dtype)
            );
            let angles: Vec<f64> = values
                .iter()
                .flat_map(|p| [1.0, 0.1, 1e-4].map(|f| f64::from(*p) * f))
                .collect();
            let expected =
                |f: fn(f64) -> f64| -> Vec<f64> { angles.iter().map(|x| 1.5 * f(*x)).collect() };
            // A product near 4,095 has a rounding of 2e-4 in f32.
            let tolerance = if dtype == DType::F32 { 4e-4 } else { 1e-12 };
            assert_close(&numbers(&cos)?, &expected(f64::cos), tolerance);
            assert_close(&numbers(&sin)?, &expected(f64::sin), tolerance);
        }
    }
    let ids = Tensor::new(&[1u32], &Device::Cpu)?;
    assert!(
        message(rope_angles(&ids, &ids, 1.0))
            .contains("inverse_frequencies: [1] of U32, must be [1, pairs]")
    );
    Ok(())
}
