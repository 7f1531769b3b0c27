//! Forward-pass context: positions, and which tokens each token attends to.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{
    CausalAttention, DeltaHeads, HeadTransform, PagedBatch, PrefixTree, Scores, StateBatch,
    causal_conv, causal_conv_gradient, gated_delta_rule, gated_delta_rule_gradient,
    paged_attention,
};

use crate::decoding::PagedCache;
use crate::model::adapter_rows::AdapterRows;
use crate::model::linear::Products;
use crate::model::rope::RopeAngles;
use crate::model::routes::Routes;
use crate::packing::divided_rows::KeyExchange;
use crate::packing::shared_rows::SharedRows;

/// Forward-pass state that all blocks share.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    /// One per rotation in the decoder.
    pub(crate) angles: &'a [RopeAngles],
    pub(crate) context: Context<'a>,
    pub(crate) routes: Routes<'a>,
    /// In a joined decoder, the rows for each of its adapters. Empty: all rows have the same.
    pub(crate) adapters: &'a [AdapterRows],
}

/// The tokens that a token attends to.
#[derive(Clone, Copy)]
pub(crate) enum Context<'a> {
    /// Earlier tokens in its sequence, all within this pass.
    Sequences {
        attention: &'a CausalAttention,
        /// Rows that sequences share, if any.
        shared: Option<&'a SharedRows>,
        /// Exchanges keys and values, if ranks divide the pass. Then no rows are shared.
        exchange: Option<&'a KeyExchange>,
        /// For blocks with a state.
        states: Option<&'a StateRows>,
    },
    /// Its sequence's tokens in a cache, which this pass extends.
    Cache {
        cache: &'a PagedCache,
        /// Each token's cache slot and the positions visible to it.
        batch: &'a PagedBatch<'a>,
        /// Sequence states, for blocks that have them.
        states: &'a StateBatch<'a>,
    },
    /// Earlier tokens in its sequence, all within this pass, which adds them to a cache.
    Prompts {
        cache: &'a PagedCache,
        /// Each token's cache slot.
        batch: &'a PagedBatch<'a>,
        attention: &'a CausalAttention,
        /// Sequence states, for blocks that have them.
        states: &'a StateBatch<'a>,
    },
}

/// Rows in a pass over whole sequences, for blocks with a recurrent state.
#[derive(Debug, Clone)]
pub(crate) struct StateRows {
    pub(crate) tree: PrefixTree,
    /// u8 `[N, 1]`, 0 at padding, if there is any.
    pub(crate) real: Option<Tensor>,
}

/// One block's queries, keys and values, `[N, heads * head_dim]`.
pub(crate) type QueryKeyValue = [Tensor; 3];

impl<'a> Pass<'a> {
    pub(crate) fn products(&self) -> Products<'a> {
        match self.context {
            Context::Sequences { .. } => Products::Training,
            Context::Cache { cache, .. } | Context::Prompts { cache, .. } => {
                Products::Decoding(cache.packed_weights.as_ref())
            }
        }
    }

    /// Zeroes `x` `[N, H]` at padding. A zero row adds nothing to a state, so padding before a
    /// sequence leaves its state at 0.
    pub(crate) fn without_padding(&self, x: &Tensor) -> Result<Tensor> {
        let Context::Sequences {
            states: Some(StateRows {
                real: Some(real), ..
            }),
            ..
        } = self.context
        else {
            return Ok(x.clone());
        };
        real.broadcast_as(x.shape())?
            .where_cond(x, &x.zeros_like()?)
    }

    /// Runs the convolution and the gated delta rule in block `layer`, from `qkv` before the
    /// convolution, its weight, `g` and `beta`. Returns both results.
    pub(crate) fn delta_rule(
        &self,
        layer: usize,
        [qkv, weight, g, beta]: [&Tensor; 4],
        heads: DeltaHeads,
    ) -> Result<(Tensor, Tensor)> {
        match self.context {
            Context::Sequences { states, .. } => {
                let tree = tree(states)?;
                let qkv = causal_conv(qkv, weight, tree)?;
                let o = gated_delta_rule(&qkv, g, beta, heads, tree)?;
                Ok((qkv, o))
            }
            Context::Cache {
                cache,
                states: batch,
                ..
            }
            | Context::Prompts {
                cache,
                states: batch,
                ..
            } => {
                let states = cache.states(layer)?;
                // The weight and the gates may have variables.
                let [weight, g, beta] = [weight, g, beta].map(Tensor::detach);
                let qkv = states.causal_conv(qkv, &weight, batch)?;
                let o = states.gated_delta_rule([&qkv, &g, &beta], batch)?;
                Ok((qkv, o))
            }
        }
    }

    /// Computes the gradients for the arguments to [`Self::delta_rule`]. It needs `qkv` before the
    /// convolution and its weight, the rule's inputs, and its output gradient.
    pub(crate) fn delta_rule_backward(
        &self,
        [qkv, weight]: [&Tensor; 2],
        inputs: [&Tensor; 3],
        heads: DeltaHeads,
        gradient: &Tensor,
    ) -> Result<[Tensor; 4]> {
        let Context::Sequences { states, .. } = self.context else {
            bail!("{NO_BACKWARD}");
        };
        let tree = tree(states)?;
        let [of_convolved, of_g, of_beta] =
            gated_delta_rule_gradient(inputs, heads, tree, gradient)?;
        let (of_qkv, of_weight) = causal_conv_gradient(qkv, weight, tree, &of_convolved)?;
        Ok([of_qkv, of_weight, of_g, of_beta])
    }

    /// Runs attention in block `layer`, on heads before `transform`. Returns the heads that
    /// [`Self::attend_backward`] needs, the output `[N, heads * head_dim]`, and log-sums, which the
    /// backward pass needs only on CUDA.
    pub(crate) fn attend(
        &self,
        layer: usize,
        x: QueryKeyValue,
        transform: &HeadTransform,
        scores: Scores,
    ) -> Result<(QueryKeyValue, Tensor, Option<Tensor>)> {
        match self.context {
            Context::Sequences {
                attention,
                shared,
                exchange,
                ..
            } => {
                let x = transformed(x, transform)?;
                let attention = attention.with_scores(scores);
                let (y, log_sums) = match (exchange, shared) {
                    (None, None) => attention.forward(x.each_ref())?,
                    (Some(exchange), _) => {
                        let [keys, values] = exchange.gather([&x[1], &x[2]])?;
                        attention.forward([&x[0], &keys, &values])?
                    }
                    (None, Some(shared)) => {
                        let (y, log_sums) =
                            attention.forward(shared.all_to_tokens(&x)?.each_ref())?;
                        (shared.to_rows(&y)?, log_sums)
                    }
                };
                Ok((x, y, log_sums))
            }
            Context::Cache { cache, batch, .. } => {
                let pages = cache.pages(layer)?;
                let query = pages.write_transformed(x.each_ref(), batch, transform)?;
                let y = paged_attention(&query, pages, batch, scores)?;
                Ok((x, y, None))
            }
            Context::Prompts {
                cache,
                batch,
                attention,
                ..
            } => {
                // A head norm may have a variable.
                let x = transformed(x, transform)?.map(|heads| heads.detach());
                cache.pages(layer)?.write(&x[1], &x[2], batch)?;
                let attention = attention.with_scores(scores);
                let (y, _) = attention.forward(x.each_ref())?;
                Ok((x, y, None))
            }
        }
    }

    /// Computes the gradients with respect to `x`, the heads passed to [`Self::attend`], given its
    /// other results and the gradient of `mixed`.
    pub(crate) fn attend_backward(
        &self,
        x: &QueryKeyValue,
        (mixed, log_sums): (&Tensor, Option<&Tensor>),
        gradient: &Tensor,
        scores: Scores,
    ) -> Result<QueryKeyValue> {
        let Context::Sequences {
            attention,
            shared,
            exchange,
            ..
        } = self.context
        else {
            bail!("{NO_BACKWARD}");
        };
        let attention = attention.with_scores(scores);
        if let Some(exchange) = exchange {
            let [keys, values] = exchange.gather([&x[1], &x[2]])?;
            let forward = log_sums.map(|log_sums| (mixed, log_sums));
            let [query, keys, values] =
                attention.backward([&x[0], &keys, &values], forward, gradient)?;
            let [key, value] = exchange.gather_gradient([keys, values])?;
            return Ok([query, key, value]);
        }
        let Some(shared) = shared else {
            let forward = log_sums.map(|log_sums| (mixed, log_sums));
            return attention.backward(x.each_ref(), forward, gradient);
        };
        let mixed = log_sums.map(|_| shared.to_tokens(mixed)).transpose()?;
        shared.to_tokens_gradient(attention.backward(
            shared.all_to_tokens(x)?.each_ref(),
            mixed.as_ref().zip(log_sums),
            &shared.to_rows_gradient(gradient)?,
        )?)
    }
}

/// The error of a backward pass after one in decoding.
pub(crate) const NO_BACKWARD: &str = "a pass with a cache has no backward pass";

/// Applies the head transform to query and key.
fn transformed(
    [query, key, value]: QueryKeyValue,
    transform: &HeadTransform,
) -> Result<QueryKeyValue> {
    let [query, key] = transform.apply([&query, &key])?;
    Ok([query, key, value])
}

fn tree(states: Option<&StateRows>) -> Result<&PrefixTree> {
    match states {
        Some(states) => Ok(&states.tree),
        None => bail!("the pass has no rows for blocks with a state"),
    }
}
