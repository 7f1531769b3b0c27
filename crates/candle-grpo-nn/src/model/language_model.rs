//! The interface between a model and its training.

use candle_core::{Result, Tensor, bail};

use crate::decoding::full_pass;
use crate::model::routes::ExpertBalance;
use crate::{
    Decoding, DividedModel, Gradients, Lora, PackedTokens, PagedCache, Parameters, SequenceStates,
};

/// A causal language model: it computes hidden states, and exposes its output layer's weight.
///
/// Any model made of Candle operations can implement this trait. Build it from variables, for
/// example from a [`VarMap`](candle_nn::VarMap) passed to [`Parameters::from_variables`], and keep
/// the provided [`Self::record`]. [`Decoder`](crate::Decoder) records less memory and computes its
/// own backward pass. With a [`ModelConfig`](crate::ModelConfig), a trainer can build the model
/// itself.
pub trait LanguageModel {
    /// Computes the hidden states `[N, H]`, from which the output layer computes the next-token
    /// logits. If ranks [divide](PackedTokens::divided) the tokens, a model returns those of
    /// [`PackedTokens::computed_rows`], or an error.
    fn hidden_states(&self, tokens: &PackedTokens) -> Result<Tensor>;

    /// The output layer's weight, `[V, H]`. It has values only while it is held, if ranks
    /// [divide](Self::divided) it.
    fn output_weight(&self) -> &Tensor;

    /// The variable name for [`Self::output_weight`].
    fn output_name(&self) -> &str;

    /// The logit soft cap, if any: a logit x becomes `cap * tanh(x / cap)`.
    fn logit_cap(&self) -> Option<f64> {
        None
    }

    /// The weights, if ranks divide them. All ranks must then make as many passes.
    fn divided(&self) -> Option<&DividedModel> {
        None
    }

    /// Gathers the weights in each pass if ranks divide `parameters`, from which the model was
    /// built.
    ///
    /// # Errors
    ///
    /// If they do, and the model is not a [`Decoder`](crate::Decoder).
    fn gathering(self, parameters: &Parameters) -> Result<Self>
    where
        Self: Sized,
    {
        if parameters.is_full() {
            bail!("weights: divided between ranks, must be whole for a custom model");
        }
        Ok(self)
    }

    /// Computes the hidden states `[N, H]` without a graph, and returns the backward pass, which
    /// starts from their gradient.
    ///
    /// The provided implementation records Candle's graph.
    fn record<'a>(&'a self, tokens: &PackedTokens) -> Result<(Tensor, Box<dyn Backward + 'a>)> {
        let hidden = self.hidden_states(tokens)?;
        Ok((hidden.detach(), Box::new(GraphBackward { hidden })))
    }

    /// Starts a set of sequences to sample from.
    ///
    /// The provided implementation has no cache: each step is a pass over all tokens in all
    /// sequences. A model with a cache should return [`SequenceStates`], whose step computes only
    /// the new tokens. The step must apply [`Self::logit_cap`], if any, to its logits.
    ///
    /// # Errors
    ///
    /// If there is not enough memory.
    fn decoding(&self) -> Result<Box<dyn Decoding + '_>>
    where
        Self: Sized + Sync,
    {
        let step = move |new: &mut [(Vec<u32>, &[u32])]| full_pass(self, new);
        Ok(Box::new(SequenceStates::new(step)))
    }

    /// Like [`Self::decoding`], with a cache from [`Decoding::into_empty_cache`] of an earlier one.
    /// The provided implementation has no use for it. A model whose `decoding` is that of another
    /// model passes this on as well.
    ///
    /// # Errors
    ///
    /// Same as [`Self::decoding`].
    fn decoding_with(&self, cache: PagedCache) -> Result<Box<dyn Decoding + '_>>
    where
        Self: Sized + Sync,
    {
        drop(cache);
        self.decoding()
    }
}

/// The backward pass for one [`LanguageModel::record`].
pub trait Backward {
    /// Computes the load-balancing loss over all routers in the pass, and adds `coef` times its
    /// gradient to [`Self::backward`]. `None` if the model has no experts, or no token counts.
    ///
    /// `weights` says how often each of the N rows counts. If ranks divide the tokens, these are
    /// the rows that this rank computes, and the result is that of all ranks. The loss is `E *
    /// sum_e f_e * P_e`, over all tokens and all mixtures of experts together. `f_e` is how
    /// often expert e was chosen per token, out of E experts, and `P_e` is its mean probability
    /// (Switch Transformer, <https://arxiv.org/abs/2101.03961>, as in transformers). The choice itself has no gradient.
    ///
    /// # Errors
    ///
    /// If `weights` does not have N entries.
    fn balance_experts(&mut self, weights: &[f32], coef: f64) -> Result<Option<ExpertBalance>> {
        let _ = (weights, coef);
        Ok(None)
    }

    /// Adds gradients for the variables in `trained` that the hidden states depend on.
    /// `hidden_gradient` is the gradient with respect to the hidden states, in their shape and
    /// dtype.
    ///
    /// The output weight's own gradient is not included, because the hidden states do not depend on
    /// it. [`Gradients::ensure_complete`] lists variables that received none.
    ///
    /// # Errors
    ///
    /// If `hidden_gradient` has a different shape or dtype. After an error, all `gradients` are
    /// cleared, since some may already have been added.
    fn backward(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        trained: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<()>;

    /// Like [`Self::backward`] for a [joined decoder](crate::Decoder::joined): adds the gradients
    /// for each of its adapters, in their order. By default, this is an error.
    ///
    /// On the CPU, f32 gradients are bit-identical to those from the separate decoders if each part
    /// has at least two rows.
    ///
    /// # Errors
    ///
    /// Same as [`Self::backward`]. Also if there are not as many adapters as decoders.
    fn backward_joined(
        self: Box<Self>,
        hidden_gradient: &Tensor,
        adapters: Vec<(&Lora, &mut Gradients)>,
    ) -> Result<()> {
        let _ = hidden_gradient;
        for (_, gradients) in adapters {
            gradients.clear();
        }
        bail!("model: not a joined decoder, must be one")
    }
}

/// The backward pass through Candle's graph.
struct GraphBackward {
    /// The hidden states with their graph.
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

/// Checks that `gradient` has the same shape and dtype as the hidden states.
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
