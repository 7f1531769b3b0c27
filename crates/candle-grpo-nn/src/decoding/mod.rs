//! Sampling token by token: the logits of the next token, and the cache of keys and values.

mod kv_cache;
mod paged_cache;

pub use kv_cache::KvCache;
pub use paged_cache::{PagedCache, SequenceId};

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{PageSlot, PagedRow, embedding, linear_rows, paged_attention, swiglu};

use crate::model::Decoder;
use crate::model::attention::Attention;
use crate::model::linear::Linear;
use crate::model::mlp::Mlp;
use crate::model::rope::RopeAngles;

/// What every block of one pass shares: N new tokens, each a row.
struct Pass<'a> {
    angles: RopeAngles,
    /// Where the key and the value of each go.
    slots: Vec<PageSlot>,
    /// What each sees.
    rows: Vec<PagedRow<'a>>,
    cache: &'a PagedCache,
}

impl Decoder {
    /// The logits `[S, V]` after the last of the new tokens of each of S sequences, which become part of their sequences.
    ///
    /// `new` has each sequence with at least one token: the whole prompt in the first pass, then one token at a time; passes may
    /// mix both. There is no padding. On the CPU the bits of a result depend on the tokens of its sequence, where it was forked,
    /// and on the weights, and on nothing else: not on the other sequences, nor on how its tokens were shared out to passes.
    /// The result has no gradient.
    ///
    /// Errs, before the cache has changed, if there are no sequences, one has no tokens, occurs twice or is not in `cache`, a
    /// token is not below `vocab_size`, a sequence gets more positions than `max_position_embeddings`, or the cache is for another
    /// shape. After an error of another kind the sequences are no longer of use.
    ///
    /// ```
    /// use candle_core::{Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let config: DecoderConfig = serde_json::from_str(r#"{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16,
    /// #     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8}"#)
    /// #     .map_err(candle_core::Error::wrap)?;
    /// # let parameters = Parameters::init(&config, 7, &Device::Cpu)?;
    /// let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    /// let mut cache = PagedCache::new(&config, candle_core::DType::F32, &Device::Cpu)?;
    ///
    /// let prompt = cache.add();
    /// let first = decoder.next_logits(&[(prompt, &[5, 6, 7])], &mut cache)?;
    /// assert_eq!(first.dims(), [1, 11]);
    ///
    /// // Two completions of the one prompt, each with its own next token.
    /// let (a, b) = (cache.fork(prompt)?, cache.fork(prompt)?);
    /// let second = decoder.next_logits(&[(a, &[8]), (b, &[9])], &mut cache)?;
    /// assert_eq!(second.dims(), [2, 11]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn next_logits(
        &self,
        new: &[(SequenceId, &[u32])],
        cache: &mut PagedCache,
    ) -> Result<Tensor> {
        self.check_new(new, cache)?;
        let device = self.output_weight().device();
        let mut slots = Vec::new();
        let (mut positions, mut tokens, mut last) = (Vec::new(), Vec::new(), Vec::new());
        for &(id, of_sequence) in new {
            let past = cache.len(id)?;
            positions.extend(past..past + of_sequence.len());
            tokens.extend_from_slice(of_sequence);
            last.push(tokens.len() as u32 - 1);
            slots.extend(cache.extend(id, of_sequence.len())?);
        }
        let cache = &*cache;
        let mut rows = Vec::with_capacity(tokens.len());
        for &(id, of_sequence) in new {
            let (spans, total) = (cache.spans(id)?, cache.len(id)?);
            let past = total - of_sequence.len();
            rows.extend((past + 1..=total).map(|visible| PagedRow { spans, visible }));
        }
        let n = tokens.len();
        let positions: Vec<f64> = positions.into_iter().map(|p| p as f64).collect();
        let pass = Pass {
            angles: self
                .rope
                .angles(&Tensor::from_vec(positions, (n, 1), device)?)?,
            slots,
            rows,
            cache,
        };

        let mut x = embedding(
            &Tensor::from_vec(tokens, n, device)?,
            &self.embedding.tensor,
        )?
        .detach();
        for (layer, block) in self.blocks.iter().enumerate() {
            let mixed = block
                .attention
                .decode(&block.attention_norm.forward(&x)?, &pass, layer)?;
            x = (x + mixed)?;
            let inner = block.mlp.decode(&block.mlp_norm.forward(&x)?)?;
            x = (x + inner)?;
        }
        if n > last.len() {
            x = x.index_select(&Tensor::new(last, device)?, 0)?;
        }
        let hidden = self.norm.forward(&x)?.detach();
        Ok(linear_rows(&hidden, &[&self.output_weight().detach()])?.swap_remove(0))
    }

    fn check_new(&self, new: &[(SequenceId, &[u32])], cache: &PagedCache) -> Result<()> {
        if new.is_empty() {
            bail!("new: no sequences, there must be at least one");
        }
        if cache.num_layers() != self.blocks.len() {
            bail!(
                "cache is for {} layers, it must be for {}",
                cache.num_layers(),
                self.blocks.len()
            );
        }
        let config = self.config();
        let mut ids: Vec<SequenceId> = new.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("new: {:?} occurs twice", pair[0]);
        }
        for (index, (id, tokens)) in new.iter().enumerate() {
            if tokens.is_empty() {
                bail!("new[{index}]: no tokens, must have at least one");
            }
            let total = cache.len(*id)? + tokens.len();
            if total > config.max_position_embeddings {
                bail!(
                    "new[{index}]: {} tokens make {total} positions, must be at most max_position_embeddings, which is {}",
                    tokens.len(),
                    config.max_position_embeddings
                );
            }
            if let Some(at) = tokens.iter().position(|&t| t as usize >= config.vocab_size) {
                bail!(
                    "new[{index}]: token {at} is {}, must be below vocab_size, which is {}",
                    tokens[at],
                    config.vocab_size
                );
            }
        }
        Ok(())
    }
}

impl Attention {
    /// `[N, hidden]` to `[N, hidden]`.
    fn decode(&self, x: &Tensor, pass: &Pass, layer: usize) -> Result<Tensor> {
        let [mut query, mut key, value] =
            Linear::forward_rows([&self.query, &self.key, &self.value], x)?;
        if let Some((of_query, of_key)) = &self.head_norms {
            query = self.normalise_heads(of_query, &query)?;
            key = self.normalise_heads(of_key, &key)?;
        }
        if self.rotates {
            query = pass.angles.rotate(&query)?;
            key = pass.angles.rotate(&key)?;
        }
        // The norms of heads may have variables.
        let [query, key, value] = [query, key, value].map(|x| x.detach());
        let pages = pass.cache.layer(layer);
        pages.write(&key, &value, &pass.slots)?;
        let scale = (self.head_dim as f64).powf(-0.5);
        let mixed = paged_attention(&query, pages, &pass.rows, scale)?;
        let [y] = Linear::forward_rows([&self.output], &mixed)?;
        Ok(y)
    }
}

impl Mlp {
    /// `[N, hidden]` to `[N, hidden]`.
    fn decode(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = Linear::forward_rows([&self.gate, &self.up], x)?;
        let [y] = Linear::forward_rows([&self.down], &swiglu(&gate, &up)?)?;
        Ok(y)
    }
}
