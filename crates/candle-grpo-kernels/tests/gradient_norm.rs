//! Norms and scaling of gradients against their composed twins in f64.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{composed, scale_gradients, squared_gradient_norms};
use candle_grpo_test_support::{message, numbers};
use proptest::prelude::*;
use rstest::rstest;

mod common;
use common::{dtypes, lengths, noisy};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn fused_equals_composed_in_f64(
        lengths in lengths(),
        dtype in dtypes(),
        factor in -2.0f64..2.0,
        seed in 0u64..1000,
    ) {
        let fused = lengths.iter().enumerate()
            .map(|(at, &len)| noisy(&[len], seed + at as u64, dtype))
            .collect::<Result<Vec<_>>>()?;
        let exact = fused.iter().map(|x| x.to_dtype(DType::F64)).collect::<Result<Vec<_>>>()?;
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

#[test]
fn norms_of_any_layout_and_size() -> Result<()> {
    let wide = noisy(&[4, 6], 3, DType::F32)?;
    let views = [
        wide.t()?,
        wide.narrow(0, 1, 2)?.narrow(1, 2, 3)?,
        wide.narrow(0, 1, 2)?,
        wide.narrow(0, 0, 1)?.broadcast_as((5, 6))?,
        Tensor::new(3f32, &Device::Cpu)?,
    ];
    let norms = squared_gradient_norms(&views.iter().collect::<Vec<_>>())?.to_vec1::<f64>()?;
    for (view, norm) in views.iter().zip(norms) {
        let expected: f64 = numbers(view)?.iter().map(|x| x * x).sum();
        assert!((norm - expected).abs() < 1e-12 * (1.0 + expected));
    }
    Ok(())
}

#[test]
fn squares_beyond_f32_do_not_overflow() -> Result<()> {
    let gradient = Tensor::new(&[1e30f32, -1e30], &Device::Cpu)?;
    let squares = squared_gradient_norms(&[&gradient])?.to_vec1::<f64>()?[0];
    assert!((squares / 2e60 - 1.0).abs() < 1e-6, "{squares}");
    for bad in [f32::NAN, f32::INFINITY] {
        let gradient = Tensor::new(&[1f32, bad], &Device::Cpu)?;
        assert!(!squared_gradient_norms(&[&gradient])?.to_vec1::<f64>()?[0].is_finite());
    }
    Ok(())
}

#[rstest]
#[case::fused(scale_gradients)]
#[case::composed(composed::scale_gradients)]
fn scaling_is_in_place_and_keeps_to_its_part_of_a_memory(
    #[case] scale: fn(&[&Tensor], f64) -> Result<()>,
) -> Result<()> {
    let whole = Tensor::new(&[1f32, 2., 3., 4.], &Device::Cpu)?;
    let scalar = Tensor::new(6f32, &Device::Cpu)?;
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
    Ok(())
}
