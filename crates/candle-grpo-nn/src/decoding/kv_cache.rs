//! Keys and values of past positions.

use candle_core::{DType, Result, Tensor, bail};

/// The keys and values of the positions that a decoder has already seen, for sampling token by token.
///
/// What is kept is detached: no gradient passes through a cache.
///
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_grpo_nn::{Decoder, DecoderConfig, KvCache, Parameters};
/// # use candle_grpo_nn::{ModelType, RopeScaling};
///
/// # fn main() -> Result<()> {
/// # let config = DecoderConfig {
/// #     model_type: ModelType::Llama, rope_scaling: RopeScaling::Default, no_rope_layers: vec![],
/// #     vocab_size: 11, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4,
/// #     num_key_value_heads: 2, head_dim: None, rms_norm_eps: 1e-6, rope_theta: 1e4,
/// #     max_position_embeddings: 32, tie_word_embeddings: true,
/// # };
/// # let parameters = Parameters::init(&config, 7, &Device::Cpu)?;
/// let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
/// let mut cache = KvCache::new(config.num_hidden_layers);
///
/// let prompt = Tensor::new(&[[5u32, 6, 7]], &Device::Cpu)?;
/// let mask = Tensor::ones((1, 3), DType::U32, &Device::Cpu)?;
/// decoder.hidden_states(&prompt, &mask, Some(&mut cache))?;
///
/// // Two samples of the one prompt, each with its own next token; the mask covers past and new positions.
/// cache.select_rows(&Tensor::new(&[0u32, 0], &Device::Cpu)?)?;
/// let next = Tensor::new(&[[8u32], [9]], &Device::Cpu)?;
/// let mask = Tensor::ones((2, 4), DType::U32, &Device::Cpu)?;
/// decoder.hidden_states(&next, &mask, Some(&mut cache))?;
/// assert_eq!(cache.len(), 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
}

impl KvCache {
    /// An empty cache for a decoder of `num_layers` blocks.
    pub fn new(num_layers: usize) -> Self {
        Self {
            layers: vec![None; num_layers],
        }
    }

    /// Number of past positions, padding included.
    pub fn len(&self) -> usize {
        self.first().map_or(0, |keys| keys.dims()[1])
    }

    /// Whether there is no past position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the rows of the batch that `rows` lists, in its order, repetition allowed: to drop rows that have
    /// ended, or to repeat one prompt for the samples of its group.
    ///
    /// `rows` is `[R]` with R at least 1, of u32 or i64, each below the batch size. It is read on the host. A cache
    /// that has seen nothing has no rows to select, which is an error.
    pub fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        let Some(keys) = self.first() else {
            bail!("select_rows on an empty cache: it has no rows yet");
        };
        let batch = keys.dims()[0];
        let device = keys.device().clone();
        if rows.rank() != 1
            || rows.elem_count() == 0
            || !matches!(rows.dtype(), DType::U32 | DType::I64)
        {
            bail!(
                "rows has shape {:?} and dtype {:?}, it must be [R] with R >= 1, of u32 or i64",
                rows.dims(),
                rows.dtype()
            );
        }
        // On a GPU an index out of range would break the device, not give an error.
        for row in rows.to_dtype(DType::I64)?.to_vec1::<i64>()? {
            if usize::try_from(row).map_or(true, |row| row >= batch) {
                bail!("rows contains {row}, it must be below the batch size of the cache, {batch}");
            }
        }
        let rows = rows.to_device(&device)?;
        let selected = self
            .layers
            .iter()
            .map(|layer| match layer {
                None => Ok(None),
                Some((keys, values)) => Ok(Some((
                    keys.index_select(&rows, 0)?,
                    values.index_select(&rows, 0)?,
                ))),
            })
            .collect::<Result<Vec<_>>>()?;
        self.layers = selected;
        Ok(())
    }

    /// Number of blocks it was made for.
    pub(crate) fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of rows, once there are any.
    pub(crate) fn batch_size(&self) -> Option<usize> {
        self.first().map(|keys| keys.dims()[0])
    }

    /// Appends keys and values [B, S, kv_heads * head_dim] of one block and returns all that it has.
    pub(crate) fn append(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (keys, values) = (keys.detach(), values.detach());
        let all = match &self.layers[layer] {
            None => (keys, values),
            Some((past_keys, past_values)) => (
                Tensor::cat(&[past_keys, &keys], 1)?,
                Tensor::cat(&[past_values, &values], 1)?,
            ),
        };
        self.layers[layer] = Some(all.clone());
        Ok(all)
    }

    fn first(&self) -> Option<&Tensor> {
        self.layers
            .first()
            .and_then(Option::as_ref)
            .map(|(keys, _)| keys)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn what_is_kept_holds_no_graph() -> Result<()> {
        let variable = Var::ones((1, 2, 2), DType::F32, &Device::Cpu)?;
        let tracked = (variable.as_tensor() * 2.0)?;
        let mut cache = KvCache::new(1);
        for _ in 0..2 {
            let (keys, values) = cache.append(0, &tracked, &tracked)?;
            assert!(!keys.track_op() && !values.track_op());
        }
        assert_eq!(cache.len(), 4);
        Ok(())
    }
}
