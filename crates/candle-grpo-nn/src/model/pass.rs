//! The context of one forward pass: positions, and which tokens each token attends to.

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{
    PageSlot, PagedRow, Sequences, attention, attention_gradient, paged_attention,
};

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
        sequences: Sequences<'a>,
        /// The rows that sequences share, if they do.
        shared: Option<&'a SharedRows>,
    },
    /// The tokens of its sequence in a cache, which the tokens of the pass join.
    Cache {
        cache: &'a PagedCache,
        /// The place of the key and the value of each token.
        slots: &'a [PageSlot],
        /// The positions that each token sees.
        rows: &'a [PagedRow<'a>],
    },
}

/// Queries, keys and values of one block, `[N, heads * head_dim]`.
pub(crate) type QueryKeyValue = [Tensor; 3];

impl Pass<'_> {
    pub(crate) fn products(&self) -> Products {
        match self.context {
            Context::Sequences { .. } => Products::Joint,
            Context::Cache { .. } => Products::RowByRow,
        }
    }

    /// Attention of block `layer`, `[N, heads * head_dim]`.
    pub(crate) fn attend(
        &self,
        layer: usize,
        x: &QueryKeyValue,
        head_dim: usize,
        scale: f64,
    ) -> Result<Tensor> {
        let within = |[query, key, value]: &QueryKeyValue, sequences| {
            attention(query, key, value, sequences, head_dim, scale)
        };
        match self.context {
            Context::Sequences {
                sequences,
                shared: None,
            } => within(x, sequences),
            Context::Sequences {
                sequences,
                shared: Some(shared),
            } => shared.to_rows(&within(&shared.to_tokens(x)?, sequences)?),
            Context::Cache { cache, slots, rows } => {
                // A head norm may have a variable.
                let [query, key, value] = x.each_ref().map(Tensor::detach);
                let pages = cache.layer(layer);
                pages.write(&key, &value, slots)?;
                paged_attention(&query, pages, rows, scale)
            }
        }
    }

    /// The gradients of `x` from that of the result of [`Self::attend`].
    pub(crate) fn attend_backward(
        &self,
        x: &QueryKeyValue,
        head_dim: usize,
        scale: f64,
        gradient: &Tensor,
    ) -> Result<QueryKeyValue> {
        let Context::Sequences { sequences, shared } = self.context else {
            bail!("a pass with a cache has no backward pass");
        };
        let within = |[query, key, value]: &QueryKeyValue, gradient: &Tensor| {
            attention_gradient(query, key, value, sequences, head_dim, scale, gradient)
        };
        let Some(shared) = shared else {
            return within(x, gradient);
        };
        let gradient = shared.to_rows_gradient(gradient)?;
        shared.to_tokens_gradient(within(&shared.to_tokens(x)?, &gradient)?)
    }
}
