//! Next-token logits.

use candle_core::{Result, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_grpo_kernels::PageSlot;
use candle_grpo_kernels::{PagedBatch, PagedRow, Sequences, SlotRows, StateBatch};

#[cfg(feature = "cuda")]
use crate::decoding::recorded_steps::NewTokens;
use crate::model::adapter_rows::adapter_rows;
use crate::model::input::attention;
use crate::model::linear::Products;
use crate::model::pass::{Context, Pass};
use crate::model::routes::Routes;
use crate::{Decoder, PagedCache, SequenceId};

impl Decoder {
    /// Adds new tokens to S sequences in `cache` and computes the logits `[S, V]` after the last
    /// new token in each.
    ///
    /// `new` lists each sequence with at least one token: the whole prompt in the first pass, then
    /// one token at a time. One pass may mix both. There is no padding, and the result has no
    /// gradient.
    ///
    /// On the CPU a row's bits depend only on the weights and the tokens in its sequence. They do
    /// not depend on other sequences, or on how the tokens were divided into passes.
    ///
    /// On the CPU a call runs on a thread from rayon's global pool. No other thread may update the
    /// weights in place during a call, because the two can deadlock. If you need that, decode from
    /// a copy of the weights.
    ///
    /// # Errors
    ///
    /// Leaves the cache unchanged if `new` is empty, a sequence has no tokens, appears twice or is
    /// not in `cache`, a token is not below `vocab_size`, a sequence exceeds
    /// `max_position_embeddings`, a sequence has adapters that the decoder does not have, or the
    /// cache has a different number of layers. After any other
    /// error, the sequences in `new` are invalid.
    ///
    /// ```
    /// use candle_core::{Device, Result};
    /// use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache, Parameters};
    ///
    /// # fn main() -> Result<()> {
    /// # let config = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
    /// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
    /// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
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
        Ok(self.checked_step(new, cache, false)?.0)
    }

    /// Like [`Self::next_logits`], and also returns which experts the routers chose for each new
    /// token, u32 `[N, expert_choices]`: `top_k` from the first router, then those from the next.
    /// `None` without experts.
    ///
    /// # Errors
    ///
    /// Same as [`Self::next_logits`].
    pub fn next_logits_and_experts(
        &self,
        new: &[(SequenceId, &[u32])],
        cache: &mut PagedCache,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.checked_step(new, cache, true)
    }

    fn checked_step(
        &self,
        new: &[(SequenceId, &[u32])],
        cache: &mut PagedCache,
        with_experts: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.check_new(new, cache)?;
        self.ensure_held()?;
        // Without routers there are no experts to return.
        let with_experts = with_experts && self.expert_choices() > 0;
        if self.output_weight().device().is_cpu() {
            // On a pool thread, an operator starts without waking one.
            rayon::scope(|_| self.step(new, cache, with_experts))
        } else {
            self.step(new, cache, with_experts)
        }
    }

    fn step(
        &self,
        new: &[(SequenceId, &[u32])],
        cache: &mut PagedCache,
        with_experts: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let device = self.output_weight().device();
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        let (mut ids, mut last) = (Vec::new(), Vec::new());
        let mut is_new = true;
        for &(id, tokens) in new {
            let past = cache.len(id)?;
            is_new &= past == 0;
            positions.extend((past..past + tokens.len()).map(|position| position as u32));
            ids.extend_from_slice(tokens);
            last.push(ids.len() as u32 - 1);
            slots.extend(cache.extend(id, tokens.len())?);
        }
        #[cfg(feature = "cuda")]
        {
            let tokens = (&*ids, &*positions, &*slots);
            if let Some((hidden, experts)) = self.recorded_step(new, tokens, cache, with_experts)? {
                return Ok((self.output(&hidden, cache)?, experts));
            }
        }
        let cache = &*cache;
        let n = ids.len();
        // Training's fused attention is faster for whole prompts.
        let prompts = is_new.then(|| {
            let lengths: Vec<usize> = new.iter().map(|(_, tokens)| tokens.len()).collect();
            attention(self, Sequences::Packed(&lengths))
        });
        let rows = match &prompts {
            None => rows(new, cache)?,
            Some(_) => Vec::new(),
        };
        let batch = &PagedBatch::new(&slots, &rows, self.shares_reads(), device)?;
        let states = state_rows(new, cache)?;
        let states = &StateBatch::new(&states, device)?;
        let adapters = match self.num_adapters() {
            1 => Vec::new(),
            _ => {
                let rows = new
                    .iter()
                    .map(|(id, rows)| Ok((cache.adapter(*id)?, rows.len())));
                adapter_rows(rows.collect::<Result<Vec<_>>>()?)
            }
        };
        ids.extend(positions);
        let ids_and_positions = Tensor::from_vec(ids, (2, n), device)?;
        let pass = Pass {
            angles: &self.angles(&ids_and_positions.get(1)?)?,
            context: match &prompts {
                None => Context::Cache {
                    cache,
                    batch,
                    states,
                },
                Some(attention) => Context::Prompts {
                    cache,
                    batch,
                    attention,
                    states,
                },
            },
            routes: Routes::default(),
            adapters: &adapters,
        };
        let x = self.embed(&ids_and_positions.get(0)?)?.detach();
        let (mut x, mut change, routers) = self.run_blocks(x, &pass)?;
        let experts = with_experts.then(|| {
            let chosen: Vec<_> = routers.iter().map(|router| &router.chosen).collect();
            Tensor::cat(&chosen, 1)
        });
        let experts = experts.transpose()?;
        if n > last.len() {
            let last = Tensor::new(last, device)?;
            x = x.index_select(&last, 0)?;
            change = change
                .map(|change| change.index_select(&last, 0))
                .transpose()?;
        }
        let hidden = self.norm(&x, change.as_ref())?.detach();
        Ok((self.output(&hidden, cache)?, experts))
    }

    /// Computes logits from hidden states, row by row.
    fn output(&self, hidden: &Tensor, cache: &PagedCache) -> Result<Tensor> {
        let products = Products::Decoding(cache.packed_weights.as_ref());
        let mut logits = products.compute(hidden, &[self.output_weight()])?;
        self.capped(logits.swap_remove(0))
    }

    /// Hidden states for a step with one token per sequence, if the cache records steps; and the
    /// experts, if `with_experts`.
    #[cfg(feature = "cuda")]
    fn recorded_step(
        &self,
        new: &[(SequenceId, &[u32])],
        (tokens, positions, slots): (&[u32], &[u32], &[PageSlot]),
        cache: &mut PagedCache,
        with_experts: bool,
    ) -> Result<Option<(Tensor, Option<Tensor>)>> {
        let is_step = tokens.len() == new.len() && !positions.contains(&0);
        if !is_step || !self.output_weight().device().is_cuda() {
            return Ok(None);
        }
        let Some(mut recorded) = cache.recorded.take() else {
            return Ok(None);
        };
        let result = rows(new, cache).and_then(|rows| {
            let states = state_rows(new, cache)?;
            let new_tokens = NewTokens {
                tokens,
                positions,
                slots,
                rows: &rows,
                states: &states,
            };
            recorded.run(self, cache, &new_tokens, with_experts)
        });
        cache.recorded = Some(recorded);
        result
    }

    fn check_new(&self, new: &[(SequenceId, &[u32])], cache: &PagedCache) -> Result<()> {
        if new.is_empty() {
            bail!("new: no sequences, must have at least one");
        }
        let config = self.config();
        if cache.num_layers() != config.num_hidden_layers {
            bail!(
                "cache: {} layers, must have {}",
                cache.num_layers(),
                config.num_hidden_layers
            );
        }
        let mut ids: Vec<SequenceId> = new.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("new: {:?} twice, must occur once", pair[0]);
        }
        for (index, (id, tokens)) in new.iter().enumerate() {
            if tokens.is_empty() {
                bail!("new[{index}]: no tokens, must have at least one");
            }
            let (adapter, adapters) = (cache.adapter(*id)?, self.num_adapters());
            if adapter >= adapters {
                bail!("new[{index}]: adapter {adapter}, must be below {adapters}");
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
                    "new[{index}]: token {at}: {}, must be below vocab_size, which is {}",
                    tokens[at],
                    config.vocab_size
                );
            }
        }
        Ok(())
    }
}

/// Returns the cached rows that each new token attends to.
fn rows<'a>(new: &[(SequenceId, &[u32])], cache: &'a PagedCache) -> Result<Vec<PagedRow<'a>>> {
    let mut rows = Vec::with_capacity(new.len());
    for &(id, tokens) in new {
        let (spans, total) = (cache.spans(id)?, cache.len(id)?);
        let past = total - tokens.len();
        rows.extend((past + 1..=total).map(|visible| PagedRow { spans, visible }));
    }
    Ok(rows)
}

/// Returns the new rows of each sequence's states, if some layers have states.
fn state_rows(new: &[(SequenceId, &[u32])], cache: &PagedCache) -> Result<Vec<SlotRows>> {
    let mut states = Vec::new();
    for &(id, tokens) in new {
        let rows = tokens.len();
        states.extend(cache.slot(id)?.map(|slot| SlotRows { slot, rows }));
    }
    Ok(states)
}
