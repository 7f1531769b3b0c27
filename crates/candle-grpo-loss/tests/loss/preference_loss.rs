//! The pair loss against its formula.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_loss::PreferenceLoss;
use proptest::prelude::*;

fn loss(chosen: &[f64], rejected: &[f64], margin: f64) -> f64 {
    let pairs = chosen.iter().zip(rejected);
    let each = pairs.map(|(a, b)| (b - a + margin).exp().ln_1p());
    each.sum::<f64>() / chosen.len() as f64
}

proptest! {
    #[test]
    fn the_loss_and_its_gradient_are_those_of_the_formula(
        pairs in proptest::collection::vec((-20f64..20., -20f64..20.), 1..8),
        margin in 0f64..2.,
    ) {
        let (chosen, rejected): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
        let var = |x: &[f64]| Var::from_slice(x, x.len(), &Device::Cpu);
        let (a, b) = (var(&chosen)?, var(&rejected)?);
        let found = PreferenceLoss { margin }.compute(&a, &b)?;
        let expected = loss(&chosen, &rejected, margin);
        prop_assert!((found.to_scalar::<f64>()? - expected).abs() < 1e-9);
        let store = found.backward()?;
        let gradient = store.get(&a).expect("a gradient").to_vec1::<f64>()?;
        let opposite = store.get(&b).expect("a gradient").to_vec1::<f64>()?;
        for (i, (&own, &other)) in gradient.iter().zip(&opposite).enumerate() {
            prop_assert!((own + other).abs() < 1e-12);
            let moved = |step: f64| {
                let mut chosen = chosen.clone();
                chosen[i] += step;
                loss(&chosen, &rejected, margin)
            };
            let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            prop_assert!((own - expected).abs() < 1e-6, "{} {}", own, expected);
        }
    }
}

#[test]
fn differences_of_any_size_have_a_finite_loss() -> Result<()> {
    let chosen = Var::new(&[-1e30f32, 1e30, 0.], &Device::Cpu)?;
    let rejected = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    let loss = PreferenceLoss::default().compute(&chosen, &rejected)?;
    assert!(loss.to_scalar::<f32>()?.is_finite());
    let store = loss.backward()?;
    let gradient = store.get(&chosen).expect("a gradient").to_vec1::<f32>()?;
    let expected = [-1. / 3., 0., -1. / 6.];
    for (found, expected) in gradient.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{gradient:?}");
    }
    Ok(())
}

#[test]
fn an_error_names_the_argument() -> Result<()> {
    let zeros = |n: usize| Tensor::zeros(n, DType::F32, &Device::Cpu);
    let error = |loss: PreferenceLoss, a: usize, b: usize| -> Result<String> {
        Ok(loss
            .compute(&zeros(a)?, &zeros(b)?)
            .unwrap_err()
            .to_string())
    };
    let plain = PreferenceLoss::default();
    assert!(error(plain, 0, 0)?.contains("chosen: shape [0], must be [N]"));
    assert!(error(plain, 2, 3)?.contains("rejected: shape [3], must be that of chosen, [2]"));
    let negative = PreferenceLoss { margin: -1. };
    assert!(error(negative, 1, 1)?.contains("margin: -1"));
    Ok(())
}
