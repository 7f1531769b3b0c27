//! Custom surrogates behave like built-in ones.

use candle_core::{Device, Result, Tensor, Var, bail};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::surrogate::{LossLevel, SurrogateInputs, TokenLosses};
use candle_grpo_loss::{
    ImportanceLevel, KlLoss, PolicyBatch, PolicyLoss, RolloutCorrection, StepTotals, Surrogate,
    TeacherTerm, TokenLoss,
};
use candle_grpo_test_support::{assert_close, devices, message};

use crate::fixture::Fixture;

/// The policy gradient, written outside the crate.
#[derive(Debug)]
struct Reinforce {
    scale: f64,
}

impl TokenLoss for Reinforce {
    fn validate(&self) -> Result<()> {
        if self.scale.is_nan() {
            bail!("reinforce.scale: NaN, must be a number");
        }
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let gain = (inputs.advantages * inputs.log_probs)?;
        Ok(TokenLosses {
            loss: (gain * -self.scale)?,
            flags: vec![("positive_fraction", inputs.advantages.gt(0.)?)],
        })
    }
}

#[test]
fn a_custom_surrogate_gives_the_loss_and_gradient_of_its_built_in_twin() -> Result<()> {
    for device in devices() {
        let fixture = Fixture::new(device);
        let custom = PolicyLoss {
            surrogate: Surrogate::custom(Reinforce { scale: 1. }),
            ..PolicyLoss::gpg()
        };
        let (got, expected) = (
            fixture.compute(&custom)?,
            fixture.compute(&PolicyLoss::gpg())?,
        );
        assert_close(&[got.loss], &[expected.loss], 1e-12);
        assert_close(&got.log_probs, &expected.log_probs, 1e-12);
        let metrics = got.output.metrics.to_host()?;
        assert!(
            metrics
                .get("positive_fraction")
                .is_some_and(|x| x > 0. && x < 1.)
        );
    }
    Ok(())
}

#[test]
fn a_custom_surrogate_is_validated() {
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(Reinforce { scale: f64::NAN }),
        ..PolicyLoss::gpg()
    };
    assert_eq!(
        message(loss.validate()),
        "reinforce.scale: NaN, must be a number"
    );
}

/// A surrogate that reduces over the sequence.
#[derive(Debug)]
struct PerSequence;

impl TokenLoss for PerSequence {
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        Ok(TokenLosses::new(inputs.advantages.neg()?))
    }

    fn level(&self) -> LossLevel {
        LossLevel::Sequence
    }
}

#[test]
fn a_custom_surrogate_over_sequences_requires_the_token_level() -> Result<()> {
    let surrogate = Surrogate::custom(PerSequence);
    assert_eq!(surrogate, surrogate.clone());
    assert_ne!(surrogate, Surrogate::custom(PerSequence));
    let loss = PolicyLoss {
        surrogate,
        ..PolicyLoss::grpo()
    };
    loss.validate()?;
    let refused = PolicyLoss {
        importance_level: ImportanceLevel::Sequence,
        ..loss
    };
    let error = message(refused.validate());
    assert!(
        error.starts_with("importance_level: sequence, must be token"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_custom_surrogate_cannot_be_written_to_a_configuration_file() {
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(PerSequence),
        ..PolicyLoss::grpo()
    };
    assert!(serde_json::to_string(&loss).is_err());
}

/// Returns minus the declared input as each token's loss.
#[derive(Debug)]
struct Declares(Inputs, Input);

impl TokenLoss for Declares {
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let ratio = inputs.log_ratio.exp()?;
        Ok(TokenLosses::new(
            (ratio * inputs.get(self.1)?.detach())?.neg()?,
        ))
    }

    fn needs(&self) -> Inputs {
        self.0
    }
}

/// One sequence with two tokens, whose optional inputs are all 3.
fn compute_on_threes(surrogate: Declares) -> Result<f32> {
    let device = &Device::Cpu;
    let tokens = (Tensor::ones((1, 2), candle_core::DType::F32, device)? * 3.)?;
    let sequences = tokens.narrow(1, 0, 1)?.squeeze(1)?;
    let mask = Tensor::ones((1, 2), candle_core::DType::U8, device)?;
    let log_probs = Var::new(&[[-1f32, -2.]], device)?;
    let batch = PolicyBatch::new(&log_probs, &sequences, &mask)
        .rollout_log_probs(&tokens)
        .ref_log_probs(&tokens)
        .teacher_log_probs(&tokens)
        .values(&tokens)
        .entropy(&tokens)
        .scores(&sequences);
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(surrogate),
        ..PolicyLoss::gpg()
    };
    let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
    output.loss.to_scalar()
}

#[test]
fn a_custom_surrogate_reads_the_inputs_that_it_declares() -> Result<()> {
    for input in [
        Input::RolloutLogProbs,
        Input::RefLogProbs,
        Input::TeacherLogProbs,
        Input::Values,
        Input::Entropy,
        Input::Scores,
    ] {
        // The ratio is 1.
        assert_eq!(compute_on_threes(Declares(input.into(), input))?, -3.);
        let error = message(compute_on_threes(Declares(Inputs::NONE, input)));
        assert!(error.starts_with(&format!("{input}: absent")), "{error}");
    }
    Ok(())
}

#[test]
fn a_loss_needs_what_its_surrogate_and_its_terms_read() {
    let surrogate = Declares([Input::Values, Input::Scores].into(), Input::Values);
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(surrogate),
        kl: Some(KlLoss::k3(0.1)),
        distillation: Some(TeacherTerm::new(1.)),
        entropy_coef: 0.1,
        ..PolicyLoss::grpo()
    };
    let expected = [
        Input::RefLogProbs,
        Input::TeacherLogProbs,
        Input::Values,
        Input::Entropy,
        Input::Scores,
    ];
    assert_eq!(loss.needs(), expected.into());
    assert!(PolicyLoss::grpo().needs().is_empty());
}

#[test]
fn a_surrogate_cannot_declare_an_input_that_no_batch_has() {
    let surrogate = Declares(Input::RewardBaselines.into(), Input::RewardBaselines);
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(surrogate),
        ..PolicyLoss::grpo()
    };
    assert_eq!(
        message(loss.validate()),
        "surrogate.needs: reward_baselines, must be an input of a PolicyBatch"
    );
}

/// Token weights have no meaning after a surrogate has combined the tokens.
#[test]
fn a_surrogate_over_sequences_that_does_not_declare_weights_rejects_them() -> Result<()> {
    let loss = PolicyLoss {
        surrogate: Surrogate::custom(PerSequence),
        ..PolicyLoss::grpo()
    };
    let device = &Device::Cpu;
    let mask = Tensor::ones((1, 2), candle_core::DType::U8, device)?;
    let log_probs = Var::new(&[[-1f32, -2.]], device)?;
    let batch = PolicyBatch::new(&log_probs, &Tensor::new(&[1f32], device)?, &mask)
        .importance_weights(&log_probs.ones_like()?);
    let error = message(loss.compute(&batch, &StepTotals::count(&mask)?));
    assert!(error.starts_with("importance_weights: given"), "{error}");

    let corrected = PolicyLoss {
        rollout_correction: Some(RolloutCorrection {
            weight: Some(ImportanceWeight::truncated(2.)),
            ..RolloutCorrection::default()
        }),
        ..loss
    };
    let error = message(corrected.validate());
    assert!(
        error.starts_with("rollout_correction.weight: given, must be absent"),
        "{error}"
    );
    Ok(())
}
