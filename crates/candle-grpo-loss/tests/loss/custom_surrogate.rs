//! Custom surrogates behave as built-in ones.

use candle_core::{Result, bail};
use candle_grpo_loss::surrogate::{SurrogateInputs, TokenLosses};
use candle_grpo_loss::{ImportanceLevel, PolicyLoss, Surrogate, TokenLoss};
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

    fn reduces_over_sequence(&self) -> bool {
        true
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
