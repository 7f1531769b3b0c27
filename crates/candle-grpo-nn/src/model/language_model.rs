//! What a model must be able to do to be trained.

use candle_core::{Result, Tensor, bail};

use crate::{Gradients, PackedTokens, Parameters};

/// A causal language model: its hidden states, and the weight of its output layer.
///
/// Any model of Candle operations can be one: build it from variables (of a [`VarMap`](candle_nn::VarMap), for example, which
/// [`Parameters::of_variables`] takes), so that it records Candle's graph, and leave [`Self::forward_backward`] as it is. It names the
/// variables that received no gradient, because an operation on the way has cut the graph. [`Decoder`](crate::Decoder) is one that
/// does better.
pub trait LanguageModel {
    /// The hidden states `[N, H]` from which the output layer computes the logits of the next token.
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor>;

    /// The weight of the output layer, `[V, H]`.
    fn output_weight(&self) -> &Tensor;

    /// The name of [`Self::output_weight`] among the variables.
    fn output_name(&self) -> &str;

    /// Computes the hidden states, hands them without a graph to `loss`, which gives back the gradient of its loss by them, and adds the
    /// gradients of all of `variables`. What `loss` adds itself, such as the gradient of the output weight, comes on top.
    ///
    /// Errs with their names if variables have no gradient then. After an error the gradients are of no use.
    fn forward_backward(
        &self,
        tokens: &PackedTokens,
        variables: &Parameters,
        loss: &mut dyn FnMut(&Tensor, &mut Gradients) -> Result<Tensor>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let hidden = self.hidden_states(tokens)?;
        let of_hidden = loss(&hidden.detach(), gradients)?;
        if of_hidden.dims() != hidden.dims() {
            bail!(
                "the gradient of the hidden states has shape {:?}, it must be {:?}",
                of_hidden.dims(),
                hidden.dims()
            );
        }
        gradients.add_reached(&(hidden * of_hidden.detach())?.sum_all()?, variables)?;
        gradients.ensure_complete(variables)
    }
}
