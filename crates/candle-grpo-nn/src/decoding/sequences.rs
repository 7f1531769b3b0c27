//! Sequences that any model can extend token by token.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor, bail};
use candle_grpo_kernels::{linear_rows, soft_cap};

use crate::{Decoder, LanguageModel, PackedTokens, PagedCache, SequenceId};

/// Sequences that a model continues, see [`LanguageModel::decoding`]. The weights must not change
/// while they are in use.
///
/// For a custom model, use [`SequenceStates`].
pub trait Decoding: Send {
    /// Adds an empty sequence.
    fn add(&mut self) -> SequenceId;

    /// Adds an empty sequence with the adapters of a decoder in a [joined
    /// one](Decoder::joined), by its index. Its forks have the same. The default has no adapters.
    ///
    /// # Errors
    ///
    /// If the model has no such adapters.
    fn add_with_adapter(&mut self, adapter: usize) -> Result<SequenceId> {
        if adapter > 0 {
            bail!("adapter: {adapter}, must be 0: this model is not a joined decoder");
        }
        Ok(self.add())
    }

    /// Adds a sequence that starts with all tokens in `id`.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    fn fork(&mut self, id: SequenceId) -> Result<SequenceId>;

    /// Removes a sequence. Its forks remain.
    ///
    /// # Errors
    ///
    /// If there is no such sequence.
    fn remove(&mut self, id: SequenceId) -> Result<()>;

    /// Adds at least one new token to each of S sequences, and computes the logits `[S, V]` after
    /// them without a graph.
    ///
    /// # Errors
    ///
    /// If a sequence or token is invalid. The sequences in `new` are then invalid.
    fn next_logits(&mut self, new: &[(SequenceId, &[u32])]) -> Result<Tensor>;

    /// Like [`Self::next_logits`], and also returns the new tokens' experts, as
    /// [`Decoder::next_logits_and_experts`] does. The default returns none.
    ///
    /// # Errors
    ///
    /// Same as [`Self::next_logits`].
    fn next_logits_and_experts(
        &mut self,
        new: &[(SequenceId, &[u32])],
    ) -> Result<(Tensor, Option<Tensor>)> {
        Ok((self.next_logits(new)?, None))
    }

    /// Sets the maximum number of bytes for the sequences, see [`PagedCache::limit_memory`].
    ///
    /// # Errors
    ///
    /// If the sequences have no limit. This is the default.
    fn limit_memory(&mut self, bytes: usize) -> Result<()> {
        bail!("memory limit: {bytes} bytes, must be absent: this model's sequences have no limit")
    }

    /// Reserves memory for more tokens. Each entry has a sequence, or `None` for one that will be
    /// added or forked, and a number of tokens. Returns false if the limit leaves no room for all
    /// of them. The default reserves nothing.
    ///
    /// # Errors
    ///
    /// If there is not enough memory. The sequences remain valid.
    fn reserve(&mut self, tokens: &[(Option<SequenceId>, usize)]) -> Result<bool> {
        let _ = tokens;
        Ok(true)
    }

    /// Prepares for many more steps, see [`PagedCache::pack_weights`]. The default does nothing.
    fn pack_weights(&mut self) {}

    /// Records steps on a GPU, see [`PagedCache::with_recorded_steps`]. The default does nothing.
    fn record_steps(&mut self) {}

    /// Removes all sequences. Returns what [`LanguageModel::decoding_with`] can use again for other
    /// sequences of the same model, such as recorded steps, but no memory for keys and values. Its
    /// weights may change in place until then. The default returns nothing.
    fn into_empty_cache(self: Box<Self>) -> Option<PagedCache> {
        None
    }
}

/// A [`Decoding`] that keeps one state `S` per sequence, such as the keys and values for its
/// tokens.
///
/// A fork clones the state. Cloned tensors share memory, so a step must not change a state's
/// tensors in place.
pub struct SequenceStates<S, F> {
    states: BTreeMap<usize, S>,
    next_id: usize,
    step: F,
}

impl<S, F> SequenceStates<S, F>
where
    S: Clone + Default + Send,
    F: FnMut(&mut [(S, &[u32])]) -> Result<Tensor> + Send,
{
    /// Creates it without sequences.
    ///
    /// `step` receives S sequences, each as its state and at least one new token: first the whole
    /// prompt, then one token per call. It updates the states, and returns the logits `[S, V]`
    /// after the new tokens. A new sequence has the default state.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_nn::{Decoding, SequenceStates};
    ///
    /// // The next of 10 tokens is the sum of those before it.
    /// let mut decoding = SequenceStates::new(|new: &mut [(u32, &[u32])]| {
    ///     for (sum, tokens) in new.iter_mut() {
    ///         *sum += tokens.iter().sum::<u32>();
    ///     }
    ///     let next: Vec<u32> = new.iter().map(|(sum, _)| *sum).collect();
    ///     candle_nn::encoding::one_hot(Tensor::new(next, &Device::Cpu)?, 10, 100f32, 0f32)
    /// });
    /// let prompt = decoding.add();
    /// decoding.next_logits(&[(prompt, &[1, 2])])?;
    /// let (a, b) = (decoding.fork(prompt)?, decoding.fork(prompt)?);
    /// let logits = decoding.next_logits(&[(a, &[4]), (b, &[6])])?;
    /// assert_eq!(logits.argmax(1)?.to_vec1::<u32>()?, [7, 9]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn new(step: F) -> Self {
        Self {
            states: BTreeMap::new(),
            next_id: 0,
            step,
        }
    }

    fn insert(&mut self, state: S) -> SequenceId {
        let id = self.next_id;
        self.next_id += 1;
        self.states.insert(id, state);
        SequenceId(id)
    }

    fn take(&mut self, id: SequenceId) -> Result<S> {
        match self.states.remove(&id.0) {
            Some(state) => Ok(state),
            None => bail!("{id:?}: there is no such sequence, or it occurs twice"),
        }
    }
}

impl<S, F> Decoding for SequenceStates<S, F>
where
    S: Clone + Default + Send,
    F: FnMut(&mut [(S, &[u32])]) -> Result<Tensor> + Send,
{
    fn add(&mut self) -> SequenceId {
        self.insert(S::default())
    }

    fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let Some(state) = self.states.get(&id.0).cloned() else {
            bail!("{id:?}: there is no such sequence");
        };
        Ok(self.insert(state))
    }

    fn remove(&mut self, id: SequenceId) -> Result<()> {
        self.take(id).map(drop)
    }

    fn next_logits(&mut self, new: &[(SequenceId, &[u32])]) -> Result<Tensor> {
        let mut states = Vec::with_capacity(new.len());
        for &(id, tokens) in new {
            states.push((self.take(id)?, tokens));
        }
        let logits = (self.step)(&mut states)?.detach();
        if logits.rank() != 2 || logits.dim(0)? != new.len() {
            bail!(
                "logits: shape {:?}, must be [{}, V]: a row for each sequence",
                logits.dims(),
                new.len()
            );
        }
        let states = states.into_iter().map(|(state, _)| state);
        let ids = new.iter().map(|(id, _)| id.0);
        self.states.extend(ids.zip(states));
        Ok(logits)
    }
}

/// Computes the logits `[S, V]` after each sequence's old and new tokens, in one pass over all of
/// them.
pub(crate) fn full_pass(
    model: &dyn LanguageModel,
    new: &mut [(Vec<u32>, &[u32])],
) -> Result<Tensor> {
    for (tokens, new) in new.iter_mut() {
        tokens.extend_from_slice(new);
    }
    let sequences: Vec<Vec<u32>> = new.iter().map(|(tokens, _)| tokens.clone()).collect();
    let weight = model.output_weight().detach();
    let tokens = PackedTokens::new(&sequences, weight.device())?;
    let last = sequences.iter().scan(0, |end, tokens| {
        *end += tokens.len() as u32;
        Some(*end - 1)
    });
    let last = Tensor::new(last.collect::<Vec<u32>>(), weight.device())?;
    let hidden = model.hidden_states(&tokens)?.detach();
    let mut logits = linear_rows(&hidden.index_select(&last, 0)?, &[&weight])?;
    soft_cap(&logits.swap_remove(0), model.logit_cap())
}

/// A decoder's [`Decoding`].
pub(crate) struct PagedDecoding<'a> {
    pub(crate) decoder: &'a Decoder,
    pub(crate) cache: PagedCache,
}

impl Decoding for PagedDecoding<'_> {
    fn add(&mut self) -> SequenceId {
        self.cache.add()
    }

    fn add_with_adapter(&mut self, adapter: usize) -> Result<SequenceId> {
        let adapters = self.decoder.num_adapters();
        if adapter >= adapters {
            bail!("adapter: {adapter}, must be below {adapters}, the joined decoders");
        }
        Ok(self.cache.add_with_adapter(adapter))
    }

    fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        self.cache.fork(id)
    }

    fn remove(&mut self, id: SequenceId) -> Result<()> {
        self.cache.remove(id)
    }

    fn next_logits(&mut self, new: &[(SequenceId, &[u32])]) -> Result<Tensor> {
        self.decoder.next_logits(new, &mut self.cache)
    }

    fn next_logits_and_experts(
        &mut self,
        new: &[(SequenceId, &[u32])],
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.decoder.next_logits_and_experts(new, &mut self.cache)
    }

    fn limit_memory(&mut self, bytes: usize) -> Result<()> {
        self.cache.limit_memory(bytes);
        Ok(())
    }

    fn reserve(&mut self, tokens: &[(Option<SequenceId>, usize)]) -> Result<bool> {
        self.cache.reserve(tokens)
    }

    fn pack_weights(&mut self) {
        self.cache.pack_weights();
    }

    fn record_steps(&mut self) {
        self.cache.record_steps();
    }

    fn into_empty_cache(self: Box<Self>) -> Option<PagedCache> {
        let Self { decoder, mut cache } = *self;
        // Weights that ranks divide have other addresses each time they are gathered.
        let stays = !decoder.is_divided() && cache.empty().unwrap_or_default();
        stays.then_some(cache)
    }
}
