//! The context of one forward pass: positions, and which tokens each token attends to.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{CausalAttention, HeadTransform, PagedBatch, paged_attention};

use crate::decoding::PagedCache;
use crate::model::linear::Products;
use crate::model::rope::RopeAngles;
use crate::packing::shared_rows::SharedRows;

/// The part of a forward pass that all blocks share.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) angles: &'a RopeAngles,
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

    /// Attention of block `layer`, `[N, heads * head_dim]`, and its log-sums for
    /// [`Self::attend_backward`], which needs them on CUDA only.
    pub(crate) fn attend(
        &self,
        layer: usize,
        x: &QueryKeyValue,
    ) -> Result<(Tensor, Option<Tensor>)> {
        match self.context {
            Context::Sequences {
                attention,
                shared: None,
            } => attention.forward(x.each_ref()),
            Context::Sequences {
                attention,
                shared: Some(shared),
            } => {
                let (y, log_sums) = attention.forward(shared.all_to_tokens(x)?.each_ref())?;
                Ok((shared.to_rows(&y)?, log_sums))
            }
            Context::Cache { .. } => bail!("a pass with a cache transforms the heads too"),
            Context::Prompts {
                cache,
                batch,
                attention,
            } => {
                // A head norm may have a variable.
                let x = x.each_ref().map(Tensor::detach);
                cache.layer(layer).write(&x[1], &x[2], batch)?;
                Ok((attention.forward(x.each_ref())?.0, None))
            }
        }
    }

    /// Attention of block `layer` to a cache, from heads before `transform`. `None` without a
    /// cache.
    pub(crate) fn attend_to_cache(
        &self,
        layer: usize,
        [query, key, value]: &QueryKeyValue,
        transform: &HeadTransform,
        scale: f64,
    ) -> Result<Option<Tensor>> {
        let Context::Cache { cache, batch } = self.context else {
            return Ok(None);
        };
        let pages = cache.layer(layer);
        let query = pages.write_transformed([query, key, value], batch, transform)?;
        paged_attention(&query, pages, batch, scale).map(Some)
    }

    /// The gradients of `x` from the results of [`Self::attend`] and the gradient of the first.
    pub(crate) fn attend_backward(
        &self,
        x: &QueryKeyValue,
        mixed: &Tensor,
        log_sums: Option<&Tensor>,
        gradient: &Tensor,
    ) -> Result<QueryKeyValue> {
        let Context::Sequences { attention, shared } = self.context else {
            bail!("a pass with a cache has no backward pass");
        };
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
