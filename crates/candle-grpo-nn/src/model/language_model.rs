//! The interface between a model and its training.

use candle_core::{Result, Tensor, bail};

use crate::decoding::full_pass;
use crate::model::routes::ExpertBalance;
use crate::{Decoding, Gradients, PackedTokens, Parameters, SequenceStates};

/// A causal language model: its hidden states, and the weight of its output layer.
///
/// Any model of Candle operations can implement this trait: build it from variables, for example of
/// a [`VarMap`](candle_nn::VarMap) that [`Parameters::from_variables`] takes, and keep the provided
/// [`Self::record`]. [`Decoder`](crate::Decoder) records less memory and computes its own backward
/// pass. With a [`ModelConfig`](crate::ModelConfig) a trainer can build the model itself.
pub trait LanguageModel {
    /// Computes the hidden states `[N, H]`, from which the output layer computes the logits of the
    /// next token.
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor>;

    /// The weight of the output layer, `[V, H]`.
    fn output_weight(&self) -> &Tensor;

    /// The name of [`Self::output_weight`] among the variables.
    fn output_name(&self) -> &str;

    /// The soft cap of the logits, if there is one: a logit x becomes `cap * tanh(x / cap)`.
    fn logit_cap(&self) -> Option<f64> {
        None
    }

    /// Computes the hidden states `[N, H]` without a graph, and returns the backward pass from
    /// their gradient.
    ///
    /// The provided implementation records Candle's graph.
    fn record<'a>(&'a self, tokens: &PackedTokens) -> Result<(Tensor, Box<dyn Backward + 'a>)> {
        let hidden = self.hidden_states(tokens)?;
        Ok((hidden.detach(), Box::new(GraphBackward { hidden })))
    }

    /// Begins to continue sequences, for sampling.
    ///
    /// The provided implementation has no cache: a step is a pass over all tokens of all
    /// sequences. A model with a cache returns [`SequenceStates`], whose step computes the new
    /// tokens only. The step applies [`Self::logit_cap`] to its logits, if there is one.
    ///
    /// # Errors
    ///
    /// If the memory is too small.
    fn decoding(&self) -> Result<Box<dyn Decoding + '_>>
    where
        Self: Sized + Sync,
    {
        let step = move |new: &mut [(Vec<u32>, &[u32])]| full_pass(self, new);
        Ok(Box::new(SequenceStates::new(step)))
    }
}

/// The backward pass of one [`LanguageModel::record`].
pub trait Backward {
    /// Computes the load-balancing loss of the routers of the pass, and adds `coef` times its
    /// gradient to that of [`Self::backward`]. `None` if the model has no experts, or no token
    /// counts.
    ///
    /// `weights` has the number of times that each of the N rows counts. The loss is
    /// `E * sum_e f_e * P_e`, over all tokens and all mixtures of experts together: `f_e` is the
    /// number of times that expert e of E was chosen for a token, and `P_e` its mean probability
    /// (Switch Transformer, <https://arxiv.org/abs/2101.03961>, as in transformers). The choice
    /// has no gradient.
    ///
    /// # Errors
    ///
    /// If `weights` does not have N entries.
    fn balance_experts(&mut self, weights: &[f32], coef: f64) -> Result<Option<ExpertBalance>> {
        let _ = (weights, coef);
        Ok(None)
    }

    /// Adds the gradients of the variables of `trained` that the hidden states depend on, from
    /// `hidden_gradient`, the gradient of the hidden states in their shape and dtype.
    ///
    /// The gradient of the output weight as such is not among them: the hidden states do not depend
    /// on it. [`Gradients::ensure_complete`] lists the variables that received none.
    ///
    /// # Errors
    ///
    /// If `hidden_gradient` has another shape or dtype. After an error all of `gradients` are
    /// cleared, as some may have been added and others not.
    fn backward(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()>;
}

/// The backward pass through Candle's graph.
struct GraphBackward {
    /// With the graph.
    hidden: Tensor,
}

impl Backward for GraphBackward {
    fn backward(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()> {
        check_hidden_gradient(hidden_gradient, &self.hidden)
            .and_then(|()| (self.hidden * hidden_gradient.detach())?.sum_all())
            .and_then(|loss| gradients.add_reached(&loss, trained))
            .map(drop)
            .inspect_err(|_| gradients.clear())
    }
}

/// Checks that `gradient` has the shape and the dtype of the hidden states.
pub(crate) fn check_hidden_gradient(gradient: &Tensor, hidden: &Tensor) -> Result<()> {
    if gradient.dims() != hidden.dims() || gradient.dtype() != hidden.dtype() {
        bail!(
            "hidden_gradient: {:?} of {:?}, must be {:?} of {:?}, as the hidden states",
            gradient.dims(),
            gradient.dtype(),
            hidden.dims(),
            hidden.dtype()
        );
    }
    Ok(())
}
