//! `linear_policy_loss` against the same loss in a graph.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_loss::{
    KlLoss, LinearLogProb, LogProbOptions, PolicyBatch, PolicyLoss, StepTotals, linear_log_prob,
    linear_policy_loss,
};
use candle_grpo_test_support::{assert_close, devices, message, numbers};

use crate::fixture::{B, Fixture, T, all_losses};

const H: usize = 4;
const V: usize = 7;

/// An output layer over the tokens of a [`Fixture`].
struct Layer {
    hidden: Var,
    weight: Var,
    bias: Var,
    targets: Tensor,
    mask: Tensor,
}

impl Layer {
    fn new(fixture: &Fixture, dtype: DType) -> Result<Self> {
        let device = &fixture.device;
        let variable = |shape: &[usize], seed: usize| {
            let values = (0..shape.iter().product()).map(|i| ((i * 37 + seed) as f64).sin());
            Var::from_tensor(
                &Tensor::from_iter(values, device)?
                    .reshape(shape)?
                    .to_dtype(dtype)?,
            )
        };
        let ids = (0..B * T).map(|i| (i * 5 % V) as u32);
        Ok(Self {
            hidden: variable(&[B, T, H], 1)?,
            weight: variable(&[V, H], 2)?,
            bias: variable(&[V], 3)?,
            targets: Tensor::from_iter(ids, device)?.reshape((B, T))?,
            mask: Tensor::from_slice(&fixture.mask, (B, T), device)?,
        })
    }

    fn options(&self) -> LogProbOptions<'_> {
        LogProbOptions {
            mask: Some(&self.mask),
            ..Default::default()
        }
    }

    fn prepared(&self, hidden: &Tensor, weight: &Tensor) -> Result<LinearLogProb> {
        LinearLogProb::new(
            hidden,
            weight,
            Some(&self.bias),
            &self.targets,
            0.8,
            self.options(),
        )
    }
}

/// The tensors of a batch besides log-probs and entropy.
struct Tensors {
    old: Tensor,
    reference: Tensor,
    importance_weights: Tensor,
    sample_weights: Tensor,
    scores: Tensor,
    advantages: Tensor,
    selected: Tensor,
    prompt_tokens: Tensor,
}

impl Tensors {
    fn new(fixture: &Fixture, dtype: DType) -> Result<Self> {
        let device = &fixture.device;
        let tokens = |x: &[f64]| Tensor::from_slice(x, (B, T), device)?.to_dtype(dtype);
        let rows = |x: &[f64]| Tensor::from_slice(x, B, device)?.to_dtype(dtype);
        Ok(Self {
            old: tokens(&fixture.old_log_probs)?,
            reference: tokens(&fixture.ref_log_probs)?,
            importance_weights: tokens(&fixture.importance_weights)?,
            sample_weights: rows(&fixture.sample_weights)?,
            scores: rows(&fixture.scores)?,
            advantages: rows(&fixture.advantages)?,
            selected: Tensor::from_slice(&fixture.selected, (B, T), device)?,
            prompt_tokens: Tensor::new(&[9f64, 9., 5., 5., 5.], device)?,
        })
    }

    fn fill<'a>(&'a self, batch: PolicyBatch<'a>) -> PolicyBatch<'a> {
        batch
            .old_log_probs(&self.old)
            .ref_log_probs(&self.reference)
            .importance_weights(&self.importance_weights)
            .sample_weights(&self.sample_weights)
            .scores(&self.scores)
            .selected_tokens(&self.selected)
            .prompt_tokens(&self.prompt_tokens)
    }
}

#[test]
fn every_loss_has_the_gradients_of_its_graph() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F64] {
            let fixture = Fixture::new(device);
            let layer = Layer::new(&fixture, dtype)?;
            let tensors = Tensors::new(&fixture, dtype)?;
            let totals = fixture.totals()?;
            let prepared = layer.prepared(&layer.hidden, &layer.weight)?;
            for loss in all_losses() {
                let tokens = linear_log_prob(
                    &layer.hidden,
                    &layer.weight,
                    Some(&layer.bias),
                    &layer.targets,
                    0.8,
                    layer.options(),
                )?;
                let batch = PolicyBatch::new(&tokens.log_probs, &tensors.advantages, &layer.mask);
                let batch = tensors.fill(batch).entropy(&tokens.entropy);
                let expected = loss.compute(&batch, &totals)?;
                let store = expected.loss.backward()?;

                let batch = PolicyBatch::without_log_probs(&tensors.advantages, &layer.mask);
                let found = linear_policy_loss(&loss, &prepared, &tensors.fill(batch), &totals)?;
                assert!(!found.output.loss.track_op());
                assert_eq!(numbers(&found.output.loss)?, numbers(&expected.loss)?);
                assert_eq!(
                    format!("{:?}", found.output.metrics.to_host()?),
                    format!("{:?}", expected.metrics.to_host()?)
                );
                let gradients = found.gradients;
                for (variable, found) in [
                    (&layer.hidden, gradients.hidden),
                    (&layer.weight, gradients.weight),
                    (&layer.bias, gradients.bias),
                ] {
                    let found = found.expect("a gradient");
                    assert_eq!((found.dims(), found.dtype()), (variable.dims(), dtype));
                    assert!(!found.track_op());
                    let expected = numbers(store.get(variable).expect("a gradient"))?;
                    assert!(expected.iter().any(|g| *g != 0.), "{loss:?}");
                    assert_close(&numbers(&found)?, &expected, 1e-6);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn masked_hidden_states_may_be_nan_and_what_is_frozen_has_no_gradient() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let layer = Layer::new(&fixture, DType::F32)?;
        let tensors = Tensors::new(&fixture, DType::F32)?;
        let totals = fixture.totals()?;
        let batch = PolicyBatch::without_log_probs(&tensors.advantages, &layer.mask);
        let run = |hidden: &Tensor, weight: &Tensor| {
            linear_policy_loss(
                &PolicyLoss::dapo(),
                &layer.prepared(hidden, weight)?,
                &batch,
                &totals,
            )
        };
        let clean = run(&layer.hidden, &layer.weight)?;
        let mask = layer.mask.unsqueeze(2)?.broadcast_as((B, T, H))?;
        let nan = Tensor::full(f32::NAN, (B, T, H), device)?;
        let spoiled = mask.where_cond(layer.hidden.as_tensor(), &nan)?;
        let frozen = run(&spoiled, &layer.weight.detach())?;
        assert!(frozen.gradients.weight.is_none());
        assert_eq!(numbers(&frozen.output.loss)?, numbers(&clean.output.loss)?);
        for (found, expected) in [
            (frozen.gradients.hidden, clean.gradients.hidden),
            (frozen.gradients.bias, clean.gradients.bias),
        ] {
            let (found, expected) = (found.expect("a gradient"), expected.expect("a gradient"));
            assert_close(&numbers(&found)?, &numbers(&expected)?, 1e-6);
        }
    }
    Ok(())
}

#[test]
fn log_probs_are_given_once() -> Result<()> {
    let fixture = Fixture::new(&Device::Cpu);
    let layer = Layer::new(&fixture, DType::F32)?;
    let tensors = Tensors::new(&fixture, DType::F32)?;
    let totals: StepTotals = fixture.totals()?;
    let prepared = layer.prepared(&layer.hidden, &layer.weight)?;
    let loss = PolicyLoss::grpo();
    let with = PolicyBatch::new(&tensors.old, &tensors.advantages, &layer.mask);
    let error = message(linear_policy_loss(&loss, &prepared, &with, &totals));
    assert!(
        error.starts_with("batch: has log_probs or entropy"),
        "{error}"
    );
    let without = PolicyBatch::without_log_probs(&tensors.advantages, &layer.mask);
    assert_eq!(
        message(loss.compute(&without, &totals)),
        "log_probs: absent, a batch without them is for linear_policy_loss"
    );
    let kl_values = Var::from_tensor(&tensors.old)?;
    let given = PolicyLoss {
        kl: Some(KlLoss::given(0.1)),
        ..PolicyLoss::dapo()
    };
    let error = message(linear_policy_loss(
        &given,
        &prepared,
        &without.kl_values(&kl_values),
        &totals,
    ));
    assert!(
        error.starts_with("kl_values: computed from a variable"),
        "{error}"
    );
    Ok(())
}
