//! `linear_policy_loss` against the same loss in a graph, and against the composed twins in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::composed;
use candle_grpo_loss::{
    ImportanceLevel, LinearLogProb, LogProbOptions, PolicyBatch, PolicyLoss, StepTotals,
    linear_log_prob, linear_policy_loss,
};
use candle_grpo_test_support::{assert_close, cases, devices, message, noise_tensor, numbers};
use proptest::prelude::*;
use rstest::rstest;

use crate::fixture::{
    B, Fixture, LEVELS, T, aggregations, all_losses, assert_same_output, is_of_tokens_only, kls,
    surrogates,
};

const H: usize = 4;
const V: usize = 7;

/// An output layer over the tokens in a [`Fixture`].
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
        let variable =
            |shape: &[usize], seed| Var::from_tensor(&noise_tensor(shape, seed, dtype, device)?);
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

/// A batch's tensors, without log-probs and entropy.
struct Tensors {
    old: Tensor,
    reference: Tensor,
    importance_weights: Tensor,
    sample_weights: Tensor,
    scores: Tensor,
    advantages: Tensor,
    selected: Tensor,
    prompt_tokens: Tensor,
    teacher: Tensor,
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
            teacher: tokens(&fixture.teacher_log_probs)?,
        })
    }

    fn fill(&self, batch: PolicyBatch) -> PolicyBatch {
        batch
            .old_log_probs(&self.old)
            .ref_log_probs(&self.reference)
            .importance_weights(&self.importance_weights)
            .sample_weights(&self.sample_weights)
            .scores(&self.scores)
            .selected_tokens(&self.selected)
            .prompt_tokens(&self.prompt_tokens)
            .teacher_log_probs(&self.teacher)
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

/// Layout in which the hidden states lie in their variable.
#[derive(Debug, Clone, Copy)]
enum View {
    Dense,
    Strided,
    Broadcast,
}

impl View {
    /// Returns `[batch, tokens, H]` from `[tokens + 1, batch + 1, H]`.
    fn apply(self, x: &Tensor, batch: usize, tokens: usize) -> Result<Tensor> {
        let rows = match self {
            Self::Broadcast => 1,
            _ => batch,
        };
        let strided = x
            .narrow(0, 1, tokens)?
            .narrow(1, 1, rows)?
            .transpose(0, 1)?;
        match self {
            Self::Dense => strided.contiguous(),
            Self::Strided => Ok(strided),
            Self::Broadcast => strided.broadcast_as((batch, tokens, x.dim(2)?)),
        }
    }
}

/// An output layer with any size and random numbers.
#[derive(Debug, Clone, Copy)]
struct Random {
    batch: usize,
    tokens: usize,
    width: usize,
    vocab: usize,
    bias: bool,
    view: View,
    dtype: DType,
    seed: u32,
}

impl Random {
    /// Another `salt` gives other numbers, in [-1, 1).
    fn noise(&self, shape: &[usize], salt: u64, device: &Device) -> Result<Tensor> {
        let seed = 10 * u64::from(self.seed) + salt;
        noise_tensor(shape, seed, DType::F64, device)
    }

    /// Compares `linear_policy_loss` with the loss in a graph over the composed twins, in f64 on
    /// the same numbers.
    fn check(&self, loss: &PolicyLoss, device: &Device) -> Result<()> {
        let &Self {
            batch,
            tokens,
            width,
            vocab,
            ..
        } = self;
        // The gradients have the arguments' dtype.
        let close = match self.dtype {
            DType::F32 => 1e-4,
            // Logit gradients are rounded too, on CUDA and on some processors.
            DType::BF16 => 1.2e-2,
            _ => 1e-3,
        };
        let variable = |shape: &[usize], salt| {
            Var::from_tensor(&self.noise(shape, salt, device)?.to_dtype(self.dtype)?)
        };
        let states = variable(&[tokens + 1, batch + 1, width], 1)?;
        let hidden = self.view.apply(&states, batch, tokens)?;
        let weight = variable(&[vocab, width], 2)?;
        let bias = self.bias.then(|| variable(&[vocab], 3)).transpose()?;
        let exact = |x: &Tensor| Var::from_tensor(&x.detach().to_dtype(DType::F64)?);
        let (exact_hidden, exact_weight) = (exact(&hidden)?, exact(&weight)?);
        let exact_bias = bias.as_deref().map(exact).transpose()?;

        let shape = [batch, tokens];
        let ids = (0..batch * tokens).map(|i| ((i * 7919 + self.seed as usize) % vocab) as u32);
        let targets = Tensor::from_iter(ids, device)?.reshape(&shape)?;
        let mask = self.noise(&shape, 4, device)?.gt(-0.5)?;
        let options = LogProbOptions {
            mask: Some(&mask),
            ..Default::default()
        };
        let expected_tokens = composed::linear_log_prob(
            &exact_hidden,
            &exact_weight,
            exact_bias.as_deref(),
            &targets,
            0.8,
            options,
        )?;

        let current = expected_tokens.log_probs.detach();
        let near =
            |salt| (&current + (self.noise(&shape, salt, device)? * 0.5)?)?.to_dtype(DType::F32);
        let (old, reference) = (near(5)?, near(6)?);
        let advantages = self.noise(&[batch], 7, device)?.to_dtype(DType::F32)?;
        let selected = self.noise(&shape, 8, device)?.gt(0.)?;
        let prompt_tokens = Tensor::from_iter((1..=batch).map(|n| n as f64), device)?;
        let totals = StepTotals {
            tokens: (batch * tokens) as f64,
            sequences: batch as f64,
            rows: batch as f64,
            prompts: Some(2.),
            entropy_tokens: None,
            observations: None,
        };
        let batch = PolicyBatch::without_log_probs(&advantages, &mask)
            .old_log_probs(&old)
            .ref_log_probs(&reference)
            .scores(&advantages)
            .selected_tokens(&selected)
            .prompt_tokens(&prompt_tokens)
            .teacher_log_probs(&reference);
        let in_graph = batch
            .clone()
            .log_probs(&expected_tokens.log_probs)
            .entropy(&expected_tokens.entropy);
        let expected = loss.compute(&in_graph, &totals)?;
        let store = expected.loss.backward()?;

        let layer = LinearLogProb::new(&hidden, &weight, bias.as_deref(), &targets, 0.8, options)?;
        let found = linear_policy_loss(loss, &layer, &batch, &totals)?;
        // A log-prob is exact to about 4e-6 relative to its size, and a sequence ratio adds up its
        // tokens' errors.
        assert_same_output(&found.output, &expected, 1e-4)?;
        let gradients = found.gradients;
        assert_eq!(gradients.bias.is_some(), self.bias);
        for (found, exact, dtype) in [
            (gradients.hidden, Some(exact_hidden), self.dtype),
            (gradients.weight, Some(exact_weight), DType::F32),
            (gradients.bias, exact_bias, self.dtype),
        ] {
            let (Some(found), Some(exact)) = (found, exact) else {
                continue;
            };
            assert_eq!((found.dims(), found.dtype()), (exact.dims(), dtype));
            let expected = store.get(&exact).expect("a gradient of the twin");
            assert_close(&numbers(&found)?, &numbers(expected)?, close);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(75, 800)))]
    #[test]
    fn one_call_equals_the_composed_twins_in_f64(
        sizes in (
            1usize..5,
            1usize..6,
            prop_oneof![Just(1usize), 2usize..30],
            prop_oneof![Just(1usize), 2usize..40, 1000usize..1100],
        ),
        bias in any::<bool>(),
        view in prop::sample::select(vec![View::Dense, View::Strided, View::Broadcast]),
        dtype in prop::sample::select(vec![DType::F32, DType::BF16, DType::F16]),
        seed in 0u32..1000,
        surrogate in prop::sample::select(surrogates()),
        level in prop::sample::select(LEVELS.to_vec()),
        kl in prop::sample::select(kls()),
        aggregation in prop::sample::select(aggregations()),
        entropy_coef in prop_oneof![Just(0.), Just(0.05)],
    ) {
        let (batch, tokens, width, vocab) = sizes;
        let own_level = is_of_tokens_only(&surrogate);
        let loss = PolicyLoss {
            importance_level: if own_level { ImportanceLevel::Token } else { level },
            surrogate,
            kl,
            aggregation,
            entropy_coef,
            allow_length_weighting: true,
            ..Default::default()
        };
        let layer = Random { batch, tokens, width, vocab, bias, view, dtype, seed };
        for device in devices() {
            layer.check(&loss, device)?;
        }
    }
}

/// More logits than a tile has, and more rows.
#[rstest]
fn many_tiles_make_one_loss(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(PolicyLoss::grpo(), PolicyLoss::gspo())] loss: PolicyLoss,
) -> Result<()> {
    for device in devices() {
        // A GPU has one tile for each of these sizes, and the emulated one is slow.
        let (batch, vocab) = if device.is_cpu() {
            (11, 4000)
        } else {
            (3, 300)
        };
        let layer = Random {
            batch,
            tokens: 100,
            width: 8,
            vocab,
            bias: true,
            view: View::Strided,
            dtype,
            seed: 1,
        };
        layer.check(&loss, device)?;
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
fn linear_policy_loss_refuses_given_log_probs_and_entropy() -> Result<()> {
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
    Ok(())
}
