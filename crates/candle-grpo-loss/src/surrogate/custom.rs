//! A surrogate from outside this crate.

use std::sync::Arc;

use candle_core::Result;
use candle_grpo_core::inputs::Inputs;

use super::{LossLevel, SurrogateInputs, TokenLoss, TokenLosses};

/// A shared custom surrogate. Two are equal if they are the same object.
#[derive(Debug, Clone)]
pub struct CustomSurrogate(Arc<dyn TokenLoss>);

impl CustomSurrogate {
    pub(super) fn new(surrogate: impl TokenLoss + 'static) -> Self {
        Self(Arc::new(surrogate))
    }
}

impl PartialEq for CustomSurrogate {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl TokenLoss for CustomSurrogate {
    fn validate(&self) -> Result<()> {
        self.0.validate()
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        self.0.per_token(inputs)
    }

    fn level(&self) -> LossLevel {
        self.0.level()
    }

    fn needs(&self) -> Inputs {
        self.0.needs()
    }
}
