//! The context of one forward pass: positions, and which tokens each token attends to.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{CausalAttention, HeadTransform, PagedBatch, Scores, paged_attention};

use crate::decoding::PagedCache;
use crate::model::linear::Products;
use crate::model::rope::RopeAngles;
use crate::packing::shared_rows::SharedRows;

/// The part of a forward pass that all blocks share.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    /// One for each rotation of the decoder.
    pub(crate) angles: &'a [RopeAngles],
    pub(crate) context: Context<'a>,
}

/// The tokens that a token attends to.
#[derive(Clone, Copy)]
pub(crate) enum Context<'a> {
    /// The tokens before it in its sequence, all of which are in the pass.
    Sequences {
        attention: &'a CausalAttention,
        /// The rows that sequences share, if they do.
        shared: Option<&'a SharedRows>,
    },
    /// The tokens of its sequence in a cache, which the tokens of the pass join.
    Cache {
        cache: &'a PagedCache,
        /// The place of each token, and the positions that it sees.
        batch: &'a PagedBatch<'a>,
    },
    /// The tokens before it in its sequence, all of which are in the pass and join a cache.
    Prompts {
        cache: &'a PagedCache,
        /// The place of each token.
        batch: &'a PagedBatch<'a>,
        attention: &'a CausalAttention,
    },
}

/// Queries, keys and values of one block, `[N, heads * head_dim]`.
pub(crate) type QueryKeyValue = [Tensor; 3];

impl Pass<'_> {
    pub(crate) fn products(&self) -> Products {
        match self.context {
            Context::Sequences { .. } => Products::Joint,
            Context::Cache { .. } | Context::Prompts { .. } => Products::RowByRow,
        }
    }

    /// Attention of block `layer`, from heads before `transform`. Returns the heads that
    /// [`Self::attend_backward`] needs, the result `[N, heads * head_dim]`, and its log-sums, which
    /// the backward pass needs on CUDA only.
    pub(crate) fn attend(
        &self,
        layer: usize,
        x: QueryKeyValue,
        transform: &HeadTransform,
        scores: Scores,
    ) -> Result<(QueryKeyValue, Tensor, Option<Tensor>)> {
        match self.context {
            Context::Sequences { attention, shared } => {
                let x = transformed(x, transform)?;
                let attention = attention.with_scores(scores);
                let (y, log_sums) = match shared {
                    None => attention.forward(x.each_ref())?,
                    Some(shared) => {
                        let (y, log_sums) =
                            attention.forward(shared.all_to_tokens(&x)?.each_ref())?;
                        (shared.to_rows(&y)?, log_sums)
                    }
                };
                Ok((x, y, log_sums))
            }
            Context::Cache { cache, batch } => {
                let pages = cache.layer(layer);
                let query = pages.write_transformed(x.each_ref(), batch, transform)?;
                let y = paged_attention(&query, pages, batch, scores)?;
                Ok((x, y, None))
            }
            Context::Prompts {
                cache,
                batch,
                attention,
            } => {
                // A head norm may have a variable.
                let x = transformed(x, transform)?.map(|heads| heads.detach());
                cache.layer(layer).write(&x[1], &x[2], batch)?;
                let attention = attention.with_scores(scores);
                let (y, _) = attention.forward(x.each_ref())?;
                Ok((x, y, None))
            }
        }
    }

    /// The gradients of `x`, the heads of [`Self::attend`], from its other results and the gradient
    /// of `mixed`.
    pub(crate) fn attend_backward(
        &self,
        x: &QueryKeyValue,
        (mixed, log_sums): (&Tensor, Option<&Tensor>),
        gradient: &Tensor,
        scores: Scores,
    ) -> Result<QueryKeyValue> {
        let Context::Sequences { attention, shared } = self.context else {
            bail!("a pass with a cache has no backward pass");
        };
        let attention = attention.with_scores(scores);
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

/// Transforms the heads of query and key.
fn transformed(
    [query, key, value]: QueryKeyValue,
    transform: &HeadTransform,
) -> Result<QueryKeyValue> {
    let [query, key] = transform.apply([&query, &key])?;
    Ok([query, key, value])
}
