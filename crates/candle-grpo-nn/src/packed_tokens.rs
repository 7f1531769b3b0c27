//! Tokens without padding.

use candle_core::{Device, Result, Tensor, bail};

/// Tokens of sequences, one after another, without padding.
#[derive(Debug, Clone)]
pub struct PackedTokens {
    ids: Tensor,
    lengths: Vec<usize>,
}

impl PackedTokens {
    /// `sequences` has the tokens of each.
    ///
    /// Errs if there are none, or one is empty.
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
        if sequences.is_empty() {
            bail!("sequences: none, there must be at least one");
        }
        if let Some(empty) = sequences.iter().position(Vec::is_empty) {
            bail!("sequences[{empty}]: no tokens, must have at least one");
        }
        Ok(Self {
            ids: Tensor::new(sequences.concat(), device)?,
            lengths: sequences.iter().map(Vec::len).collect(),
        })
    }

    /// The tokens of all sequences, u32 `[N]`.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// The number of tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The tokens as u32 `[B, S]`, padded on the right with 0. A causal model needs no mask for that, as no token sees what follows it.
    pub fn right_padded(&self) -> Result<Tensor> {
        let ids = self.ids.to_vec1::<u32>()?;
        let width = self.lengths.iter().copied().max().unwrap_or(0);
        let mut rows = ids.as_slice();
        let mut padded = Vec::with_capacity(self.lengths.len() * width);
        for &length in &self.lengths {
            let (row, rest) = rows.split_at(length);
            rows = rest;
            padded.extend_from_slice(row);
            padded.resize(padded.len() + width - length, 0);
        }
        Tensor::from_vec(padded, (self.lengths.len(), width), self.ids.device())
    }

    /// The rows `[N, H]` of the tokens among hidden states `[B, S, H]` of [`Self::right_padded`].
    pub fn rows_of(&self, hidden: &Tensor) -> Result<Tensor> {
        let &[batch, width, hidden_size] = hidden.dims() else {
            bail!("hidden has shape {:?}, it must be [B, S, H]", hidden.dims());
        };
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        if batch != self.lengths.len() || width != longest {
            bail!(
                "hidden has shape {:?}, it must be [{}, {longest}, H]",
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
        hidden
            .reshape((batch * width, hidden_size))?
            .index_select(&Tensor::new(places, hidden.device())?, 0)
    }
}
