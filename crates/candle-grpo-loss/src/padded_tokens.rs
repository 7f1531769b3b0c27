//! Prompts and responses with different lengths, as tensors.

use candle_core::{Device, Result, Tensor, bail};

/// Padding token. Masks make its value irrelevant.
const PADDING: u32 = 0;

/// Tokens for B sequences: prompts padded on the left to P, responses padded on the right to T.
///
/// A response's last token is never an input, so the inputs are P + T - 1 wide. The model's outputs
/// at the last T inputs predict the response: [`Self::predicting`] selects them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_loss::{LogProbOptions, PaddedTokens, log_prob};
///
/// let end = 2;
/// let pairs: [(&[u32], &[u32]); 2] = [(&[5, 6], &[7, end]), (&[8], &[end])];
/// let tokens = PaddedTokens::new(&pairs, &Device::Cpu)?;
/// assert_eq!(tokens.input_ids.to_vec2::<u32>()?, [[5, 6, 7], [0, 8, 2]]);
/// assert_eq!(tokens.attention_mask.to_vec2::<u32>()?, [[1, 1, 1], [0, 1, 1]]);
/// assert_eq!(tokens.targets.to_vec2::<u32>()?, [[7, end], [end, 0]]);
/// assert_eq!(tokens.response_mask.to_vec2::<u32>()?, [[1, 1], [1, 0]]);
///
/// // A model reads `input_ids` and returns logits [B, P + T - 1, V].
/// let logits = Tensor::zeros((2, 3, 16), DType::F32, &Device::Cpu)?;
/// let options = LogProbOptions { mask: Some(&tokens.response_mask), ..Default::default() };
/// let log_probs = log_prob(&tokens.predicting(&logits)?, &tokens.targets, 1.0, options)?.log_probs;
/// assert_eq!(log_probs.dims(), [2, 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PaddedTokens {
    /// Model inputs, u32 `[B, P + T - 1]`.
    pub input_ids: Tensor,
    /// 1 at tokens in `input_ids` and 0 at padding, u32 `[B, P + T - 1]`.
    pub attention_mask: Tensor,
    /// Response tokens, u32 `[B, T]`.
    pub targets: Tensor,
    /// 1 at tokens in `targets` and 0 at padding, u32 `[B, T]`.
    pub response_mask: Tensor,
}

impl PaddedTokens {
    /// Pads pairs of prompt and response. A response ends with its stop token, if it has one.
    ///
    /// # Errors
    ///
    /// Fails if there are no pairs, or if a prompt or a response has no tokens.
    pub fn new(sequences: &[(&[u32], &[u32])], device: &Device) -> Result<Self> {
        if sequences.is_empty() {
            bail!("sequences: none, a batch must have at least one");
        }
        for (i, (prompt, response)) in sequences.iter().enumerate() {
            if prompt.is_empty() || response.is_empty() {
                bail!(
                    "sequence {i}: {} prompt tokens and {} response tokens, must have at least one of each",
                    prompt.len(),
                    response.len()
                );
            }
        }
        let longest = |lengths: &mut dyn Iterator<Item = usize>| lengths.max().unwrap_or(0);
        let p = longest(&mut sequences.iter().map(|(prompt, _)| prompt.len()));
        let t = longest(&mut sequences.iter().map(|(_, response)| response.len()));
        let width = p + t - 1;

        let (mut input_ids, mut attention_mask) = (Vec::new(), Vec::<u32>::new());
        let (mut targets, mut response_mask) = (Vec::new(), Vec::<u32>::new());
        for (row, (prompt, response)) in sequences.iter().enumerate() {
            targets.extend_from_slice(response);
            targets.resize((row + 1) * t, PADDING);
            response_mask.resize(row * t + response.len(), 1);
            response_mask.resize((row + 1) * t, 0);

            // The full response is cut to the width, because its last token is not an input.
            let left = p - prompt.len();
            input_ids.resize(row * width + left, PADDING);
            input_ids.extend_from_slice(prompt);
            input_ids.extend_from_slice(&targets[row * t..][..t - 1]);
            attention_mask.resize(row * width + left, 0);
            attention_mask.resize(row * width + p, 1);
            attention_mask.extend_from_slice(&response_mask[row * t..][..t - 1]);
        }
        let b = sequences.len();
        Ok(Self {
            input_ids: Tensor::from_vec(input_ids, (b, width), device)?,
            attention_mask: Tensor::from_vec(attention_mask, (b, width), device)?,
            targets: Tensor::from_vec(targets, (b, t), device)?,
            response_mask: Tensor::from_vec(response_mask, (b, t), device)?,
        })
    }

    /// Returns `len` sequences, starting at `start`: a micro-batch.
    ///
    /// # Errors
    ///
    /// Fails if there are fewer than `start + len` sequences.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.narrow(0, start, len)?,
            attention_mask: self.attention_mask.narrow(0, start, len)?,
            targets: self.targets.narrow(0, start, len)?,
            response_mask: self.response_mask.narrow(0, start, len)?,
        })
    }

    /// Selects the outputs that predict the response: `[B, P + T - 1, ..]` to `[B, T, ..]`. Call it
    /// on logits, or on the hidden states for [`linear_log_prob`](crate::linear_log_prob).
    ///
    /// # Errors
    ///
    /// Fails unless `outputs` has one entry for each of `input_ids`.
    pub fn predicting(&self, outputs: &Tensor) -> Result<Tensor> {
        let (b, width) = self.input_ids.dims2()?;
        let (_, t) = self.targets.dims2()?;
        if outputs.rank() < 2 || outputs.dims()[..2] != [b, width] {
            bail!(
                "outputs: shape {:?}, must be [{b}, {width}, ..], one for each of input_ids",
                outputs.dims()
            );
        }
        outputs.narrow(1, width - t, t)
    }
}
