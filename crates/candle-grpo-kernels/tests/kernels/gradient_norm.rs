//! Tests gradient norms and scaling against their composed twins in f64.

use candle_core::{DType, Result, Tensor};
use candle_grpo_kernels::{composed, scale_gradients, squared_gradient_norms};
use candle_grpo_test_support::{cases, devices, message, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::layout::layouts;
use crate::strategies::{dtypes, lengths};
use crate::twin::noisy;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn the_fused_path_equals_the_composed_twin_in_f64(
        lengths in lengths(),
        dtype in dtypes(),
        factor in -2.0f64..2.0,
        seed in 0u64..1000,
    ) {
        for device in devices() {
            let (mut fused, mut exact) = (Vec::new(), Vec::new());
            for (at, &len) in lengths.iter().enumerate() {
                let gradient = noisy(&[len], seed + at as u64, dtype)?;
                fused.push(gradient.to_device(device)?);
                exact.push(gradient.to_dtype(DType::F64)?.to_device(device)?);
            }
            let (fused, exact): (Vec<&Tensor>, Vec<&Tensor>) = (fused.iter().collect(), exact.iter().collect());

            let norms = squared_gradient_norms(&fused)?.to_vec1::<f64>()?;
            let expected = composed::squared_gradient_norms(&exact)?.to_vec1::<f64>()?;
            prop_assert_eq!(norms.len(), expected.len());
            for (norm, expected) in norms.iter().zip(&expected) {
                prop_assert!((norm - expected).abs() <= 1e-12 * (1.0 + expected), "{} is not {}", norm, expected);
            }

            scale_gradients(&fused, factor)?;
            composed::scale_gradients(&exact, factor)?;
            let rounding = match dtype { DType::F32 => 2e-7, DType::BF16 => 4e-3, _ => 6e-4 };
            for (fused, exact) in fused.iter().zip(&exact) {
                for (a, e) in numbers(fused)?.iter().zip(numbers(exact)?) {
                    prop_assert!((a - e).abs() <= rounding * (1e-3 + e.abs()), "{} is not {}", a, e);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]
    #[test]
    fn a_gradient_may_have_any_layout_and_size(
        shapes in prop::collection::vec(([0usize..4, 0usize..40], layouts()), 0..4),
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        for device in devices() {
            let mut gradients = vec![Tensor::new(3f32, device)?];
            for (shape, layout) in &shapes {
                gradients.push(layout.apply(&noisy(shape, seed, dtype)?)?.to_device(device)?);
            }
            let norms = squared_gradient_norms(&gradients.iter().collect::<Vec<_>>())?.to_vec1::<f64>()?;
            prop_assert_eq!(norms.len(), gradients.len());
            for (gradient, norm) in gradients.iter().zip(norms) {
                let expected: f64 = numbers(gradient)?.iter().map(|x| x * x).sum();
                prop_assert!((norm - expected).abs() < 1e-12 * (1.0 + expected));
            }
        }
    }
}

#[test]
fn squares_beyond_f32_do_not_overflow() -> Result<()> {
    for device in devices() {
        let squares = |gradient: [f32; 2]| -> Result<f64> {
            Ok(numbers(&squared_gradient_norms(&[&Tensor::new(
                &gradient, device,
            )?])?)?[0])
        };
        let large = squares([1e30, -1e30])?;
        assert!((large / 2e60 - 1.0).abs() < 1e-6, "{large}");
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!squares([1., bad])?.is_finite());
        }
    }
    Ok(())
}

#[rstest]
#[case::fused(scale_gradients)]
#[case::composed(composed::scale_gradients)]
fn scaling_changes_only_the_view_in_place(
    #[case] scale: fn(&[&Tensor], f64) -> Result<()>,
) -> Result<()> {
    for device in devices() {
        let whole = Tensor::new(&[1f32, 2., 3., 4.], device)?;
        let scalar = Tensor::new(6f32, device)?;
        scale(&[&whole.narrow(0, 1, 2)?, &scalar], 0.5)?;
        assert_eq!(whole.to_vec1::<f32>()?, [1., 1., 1.5, 4.]);
        assert_eq!(scalar.to_scalar::<f32>()?, 3.);
        for (gradients, factor, expected) in [
            (vec![&whole, &whole], 0.5, "shares its memory"),
            (vec![&scalar, &whole], f64::NAN, "factor: NaN"),
            (
                vec![&scalar, &whole.reshape((2, 2))?.t()?],
                0.5,
                "must be contiguous",
            ),
            (
                vec![&scalar, &whole.to_dtype(DType::U8)?],
                0.5,
                "gradients: U8",
            ),
        ] {
            let message = message(scale(&gradients, factor));
            assert!(message.contains(expected), "{message}");
            assert_eq!(scalar.to_scalar::<f32>()?, 3.);
        }
    }
    Ok(())
}

#[test]
fn empty_gradients_are_valid() -> Result<()> {
    for device in devices() {
        let none = noisy(&[2, 0], 1, DType::F32)?.to_device(device)?;
        let some = Tensor::ones(3, DType::F32, device)?;
        scale_gradients(&[&none, &some], 0.5)?;
        assert_eq!(numbers(&some)?, [0.5; 3]);
    }
    Ok(())
}
