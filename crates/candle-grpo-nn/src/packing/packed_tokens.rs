//! Sequence batches without padding.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor, bail};

use super::divided_rows::{DividedRows, SequenceRanks};

/// Tokens from several sequences, concatenated without padding.
///
/// Sequences with a common prefix can share its tokens, see [`Self::sharing_prefixes`]. A causal
/// model computes the same hidden states for them.
#[derive(Debug, Clone)]
pub struct PackedTokens {
    ids: Tensor,
    lengths: Vec<usize>,
    /// For each token in each sequence, its row in `ids`. `None` if no tokens are shared.
    rows: Option<Vec<u32>>,
    /// Experts to replay for each row, u32 `[N, choices]`.
    experts: Option<Tensor>,
    /// Number of rows in each part.
    parts: Vec<usize>,
    /// The rows of each rank, if ranks divide them.
    division: Option<DividedRows>,
}

impl PackedTokens {
    /// Packs the tokens of `sequences`.
    ///
    /// # Errors
    ///
    /// If there are no sequences, or one is empty.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_grpo_nn::PackedTokens;
    ///
    /// let tokens = PackedTokens::new(&[vec![1, 2, 3], vec![4]], &Device::Cpu)?;
    /// assert_eq!(tokens.ids().to_vec1::<u32>()?, [1, 2, 3, 4]);
    /// assert_eq!(tokens.right_padded()?.to_vec2::<u32>()?, [[1, 2, 3], [4, 0, 0]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn new(sequences: &[Vec<u32>], device: &Device) -> Result<Self> {
        check(sequences)?;
        Ok(Self {
            ids: Tensor::new(sequences.concat(), device)?,
            lengths: sequences.iter().map(Vec::len).collect(),
            rows: None,
            experts: None,
            parts: vec![sequences.iter().map(Vec::len).sum()],
            division: None,
        })
    }

    /// Packs the tokens of `sequences`, and stores tokens with the same prefix only once, such as a
    /// group's shared prompt. Their hidden states are equal in all sequences, and their gradients
    /// are summed.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`].
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_grpo_nn::PackedTokens;
    ///
    /// let tokens = PackedTokens::sharing_prefixes(&[vec![1, 2, 3], vec![1, 2, 4, 3]], &Device::Cpu)?;
    /// assert_eq!(tokens.ids().to_vec1::<u32>()?, [1, 2, 3, 4, 3]);
    /// assert_eq!(tokens.rows(), [0, 1, 2, 0, 1, 3, 4]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn sharing_prefixes(sequences: &[Vec<u32>], device: &Device) -> Result<Self> {
        Self::sharing(sequences, |_, _| &[], device)
    }

    /// Like [`Self::sharing_prefixes`], for a model whose routers replay `experts` instead of
    /// choosing them. These come from another pass over each of the `sequences`, token by token, as
    /// returned by [`Decoder::next_logits_and_experts`](crate::Decoder::next_logits_and_experts).
    /// Tokens are shared only if their experts match, too.
    ///
    /// # Errors
    ///
    /// Same as [`Self::new`]. Also if `experts` does not have the same number for each token.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_grpo_nn::PackedTokens;
    ///
    /// let sequences = [vec![1, 2], vec![1, 2]];
    /// let experts = [vec![0, 3, 1, 2], vec![0, 3, 1, 0]]; // two for each token
    /// let tokens = PackedTokens::replaying(&sequences, &experts, &Device::Cpu)?;
    /// assert_eq!(tokens.rows(), [0, 1, 0, 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn replaying(
        sequences: &[Vec<u32>],
        experts: &[Vec<u16>],
        device: &Device,
    ) -> Result<Self> {
        check(sequences)?;
        let choices = experts
            .first()
            .map_or(0, |first| first.len() / sequences[0].len());
        let fits = |(tokens, experts): (&Vec<u32>, &Vec<u16>)| {
            choices > 0 && experts.len() == choices * tokens.len()
        };
        if experts.len() != sequences.len() || !sequences.iter().zip(experts).all(fits) {
            bail!(
                "experts: must have as many entries for each token of each sequence, at least one"
            );
        }
        let of_token = |sequence: usize, token: usize| {
            &experts[sequence][token * choices..(token + 1) * choices]
        };
        let mut packed = Self::sharing(sequences, of_token, device)?;
        let mut tokens = Vec::new();
        for (sequence, experts) in experts.iter().enumerate() {
            tokens.extend((0..experts.len() / choices).map(|token| (sequence, token)));
        }
        let rows = packed.first_tokens().into_iter();
        let chosen: Vec<u32> = rows
            .flat_map(|token| {
                let (sequence, token) = tokens[token as usize];
                of_token(sequence, token).iter().copied().map(u32::from)
            })
            .collect();
        let shape = (chosen.len() / choices, choices);
        packed.experts = Some(Tensor::from_vec(chosen, shape, device)?);
        Ok(packed)
    }

    /// Packs `sequences`. Tokens are shared if all tokens before them are shared, and they have the
    /// same id and the same `of_token(sequence, token)`.
    fn sharing<'a>(
        sequences: &[Vec<u32>],
        of_token: impl Fn(usize, usize) -> &'a [u16],
        device: &Device,
    ) -> Result<Self> {
        check(sequences)?;
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        let mut row_after = HashMap::new();
        for (number, sequence) in sequences.iter().enumerate() {
            let mut before = None;
            for (token, &id) in sequence.iter().enumerate() {
                let key = (before, id, of_token(number, token));
                let row = *row_after.entry(key).or_insert_with(|| {
                    ids.push(id);
                    ids.len() as u32 - 1
                });
                rows.push(row);
                before = Some(row);
            }
        }
        let shares = ids.len() < rows.len();
        Ok(Self {
            parts: vec![ids.len()],
            ids: Tensor::new(ids, device)?,
            lengths: sequences.iter().map(Vec::len).collect(),
            rows: shares.then_some(rows),
            experts: None,
            division: None,
        })
    }

    /// Concatenates the parts for the decoders in a [joined one](crate::Decoder::joined), in their
    /// order. Tokens are shared within a part only.
    ///
    /// # Errors
    ///
    /// If there are no parts, they are on different devices, or one replays experts or is divided.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_grpo_nn::PackedTokens;
    ///
    /// let first = PackedTokens::sharing_prefixes(&[vec![1, 2], vec![1, 3]], &Device::Cpu)?;
    /// let second = PackedTokens::new(&[vec![1, 2]], &Device::Cpu)?;
    /// let joined = PackedTokens::joined(&[&first, &second])?;
    /// assert_eq!(joined.ids().to_vec1::<u32>()?, [1, 2, 3, 1, 2]);
    /// assert_eq!(joined.rows(), [0, 1, 0, 2, 3, 4]);
    /// assert_eq!(joined.parts(), [3, 2]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn joined(parts: &[&Self]) -> Result<Self> {
        if parts.is_empty() {
            bail!("parts: none, must be at least one");
        }
        if let Some(at) = parts.iter().position(|part| part.experts.is_some()) {
            bail!("parts[{at}]: replays experts, must not");
        }
        if let Some(at) = parts.iter().position(|part| part.division.is_some()) {
            bail!("parts[{at}]: divided between ranks, must be whole");
        }
        let (mut rows, mut first) = (Vec::new(), 0);
        for part in parts {
            rows.extend(part.rows().into_iter().map(|row| first + row));
            first += part.parts.iter().sum::<usize>() as u32;
        }
        let ids: Vec<&Tensor> = parts.iter().map(|part| &part.ids).collect();
        let shares = parts.iter().any(|part| part.rows.is_some());
        Ok(Self {
            ids: Tensor::cat(&ids, 0)?,
            lengths: parts.iter().flat_map(|part| part.lengths.clone()).collect(),
            rows: shares.then_some(rows),
            experts: None,
            parts: parts.iter().flat_map(|part| part.parts.clone()).collect(),
            division: None,
        })
    }

    /// Number of rows in each of the [joined](Self::joined) parts; otherwise, that of all rows.
    pub fn parts(&self) -> &[usize] {
        &self.parts
    }

    /// Divides the pass over these tokens between `ranks`: each of them computes the hidden states
    /// of [`Self::computed_rows`], and all ranks exchange keys and values. With one rank nothing is
    /// divided.
    ///
    /// All ranks must have the same tokens, and run the same passes over them in the same order. A
    /// [`Decoder`](crate::Decoder) without a gated delta rule can divide passes that record no
    /// graph. A forward pass has the bits of an undivided one on the CPU.
    #[must_use]
    pub fn divided(mut self, ranks: &SequenceRanks) -> Self {
        let is_divided = ranks.collective().world_size() > 1;
        self.division = is_divided.then(|| DividedRows::new(&self, ranks));
        self
    }

    /// The rows in [`Self::ids`] whose hidden states this rank computes, in ascending order: all
    /// rows, unless ranks [divide](Self::divided) them. A rank without any computes row 0.
    pub fn computed_rows(&self) -> Vec<u32> {
        match &self.division {
            Some(division) => division.computed(),
            None => (0..self.ids.elem_count() as u32).collect(),
        }
    }

    /// The ranks that divide the rows, if any.
    pub fn ranks(&self) -> Option<&SequenceRanks> {
        self.division.as_ref().map(|division| &division.ranks)
    }

    /// Returns false on a rank without rows, for which the row in [`Self::computed_rows`] does not
    /// count.
    pub fn has_rows(&self) -> bool {
        self.division.as_ref().is_none_or(DividedRows::has_rows)
    }

    /// The rows of each rank.
    pub(crate) fn division(&self) -> Option<&DividedRows> {
        self.division.as_ref()
    }

    /// Experts to replay, u32 `[N, choices]`, if the model does not choose them itself.
    pub fn experts(&self) -> Option<&Tensor> {
        self.experts.as_ref()
    }

    /// All tokens, u32 `[N]`. A shared token occurs once.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// Sequence lengths in tokens.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// For each token in each sequence, in order, its row in [`Self::ids`].
    pub fn rows(&self) -> Vec<u32> {
        match &self.rows {
            Some(rows) => rows.clone(),
            None => (0..self.lengths.iter().sum::<usize>() as u32).collect(),
        }
    }

    /// Same as [`Self::rows`], if sequences share tokens.
    pub(crate) fn shared_rows(&self) -> Option<&[u32]> {
        self.rows.as_deref()
    }

    /// For each row, the index of its first token in [`Self::rows`].
    pub(crate) fn first_tokens(&self) -> Vec<u32> {
        let mut first = Vec::new();
        for (token, row) in self.rows().into_iter().enumerate() {
            // Rows are numbered in order of their first tokens.
            if row as usize == first.len() {
                first.push(token as u32);
            }
        }
        first
    }

    /// The tokens as u32 `[B, S]`, right-padded with 0. A causal model needs no mask for this
    /// padding.
    pub fn right_padded(&self) -> Result<Tensor> {
        let ids = self.ids.to_vec1::<u32>()?;
        let width = self.lengths.iter().copied().max().unwrap_or(0);
        let mut tokens = self.rows().into_iter().map(|row| ids[row as usize]);
        let mut padded = Vec::with_capacity(self.lengths.len() * width);
        for &length in &self.lengths {
            padded.extend(tokens.by_ref().take(length));
            padded.resize(padded.len() + width - length, 0);
        }
        Tensor::from_vec(padded, (self.lengths.len(), width), self.ids.device())
    }

    /// Selects the token rows `[N, H]` from hidden states `[B, S, H]` for [`Self::right_padded`].
    pub fn rows_of(&self, hidden: &Tensor) -> Result<Tensor> {
        let &[batch, width, hidden_size] = hidden.dims() else {
            bail!("hidden: shape {:?}, must be [B, S, H]", hidden.dims());
        };
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        if batch != self.lengths.len() || width != longest {
            bail!(
                "hidden: shape {:?}, must be [{}, {longest}, H]",
                hidden.dims(),
                self.lengths.len()
            );
        }
        let places: Vec<u32> = self
            .lengths
            .iter()
            .enumerate()
            .flat_map(|(row, &length)| (row * width..row * width + length).map(|at| at as u32))
            .collect();
        let first = self.first_tokens().into_iter();
        let places: Vec<u32> = first.map(|token| places[token as usize]).collect();
        hidden
            .reshape((batch * width, hidden_size))?
            .index_select(&Tensor::new(places, hidden.device())?, 0)
    }
}

fn check(sequences: &[Vec<u32>]) -> Result<()> {
    if sequences.is_empty() {
        bail!("sequences: none, must have at least one");
    }
    if let Some(empty) = sequences.iter().position(Vec::is_empty) {
        bail!("sequences[{empty}]: no tokens, must have at least one");
    }
    Ok(())
}
