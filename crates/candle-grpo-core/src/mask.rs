//! Masks over response tokens.

use std::sync::{Arc, OnceLock};

use candle_core::{D, DType, Result, Tensor, bail};

use crate::dtype::statistics_dtype;
use crate::rewards::first_unset;

/// A 0/1 mask over response tokens `[B, T]`. Positions outside the mask never reach a value or a
/// gradient, even if they hold NaN.
///
/// Multiplication by a mask propagates NaN and infinity (`0 * inf`), so entries are selected
/// instead, before any exponentiation.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::Mask;
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], &Device::Cpu)?)?;
/// let x = Tensor::new(&[[1f32, 2., f32::NAN], [3., f32::INFINITY, 0.]], &Device::Cpu)?;
/// assert_eq!(mask.select(&x)?.to_vec2::<f32>()?, [[1., 2., 0.], [3., 0., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mask {
    selected: Tensor,
    /// Counted once, because each metric needs it.
    count: Arc<OnceLock<Tensor>>,
}

impl Mask {
    /// A mask from `[B, T]` of any dtype, with entries of 0 and 1.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is empty or has another rank, and on the CPU if an entry is not 0 or 1.
    /// Entries are not checked on other devices, where that would synchronize: entries other than 0
    /// are selected there.
    pub fn new(response_mask: &Tensor) -> Result<Self> {
        if response_mask.rank() != 2 {
            bail!(
                "response_mask: shape {:?}, must be [B, T]",
                response_mask.dims()
            );
        }
        check_not_empty("response_mask", response_mask)?;
        let response_mask = response_mask.detach();
        if response_mask.device().is_cpu() {
            check_entries(&response_mask)?;
        }
        Ok(Self::of(response_mask.ne(0.)?))
    }

    /// The mask of sampled `responses` (integers, `[B, T]`): each response up to its first stop
    /// token, which is included, since the policy chose it. A response without one is selected as a
    /// whole.
    ///
    /// This is for decoders that fill all T positions. Nothing is copied to the host.
    ///
    /// # Errors
    ///
    /// Fails if `responses` do not have integers of shape `[B, T]`, or are empty.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_core::Mask;
    ///
    /// let end = 2;
    /// let responses = Tensor::new(&[[5u32, end, 7, end], [5, 6, 7, 8]], &Device::Cpu)?;
    /// let mask = Mask::until_stop(&responses, &[end])?;
    /// assert_eq!(mask.selected().to_vec2::<u8>()?, [[1, 1, 0, 0], [1, 1, 1, 1]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn until_stop(responses: &Tensor, stop_token_ids: &[u32]) -> Result<Self> {
        let (&[batch, tokens], true) = (responses.dims(), responses.dtype().is_int()) else {
            bail!(
                "responses: {:?} {:?}, must be integers [B, T]",
                responses.dtype(),
                responses.dims()
            );
        };
        check_not_empty("responses", responses)?;
        let positions = Tensor::arange(0, tokens as u32, responses.device())?
            .unsqueeze(0)?
            .broadcast_as((batch, tokens))?
            .contiguous()?;
        let none = Tensor::full(tokens as u32, (batch, tokens), responses.device())?;
        let mut first = none.clone();
        for &stop in stop_token_ids {
            let at = responses.eq(stop)?.where_cond(&positions, &none)?;
            first = first.minimum(&at)?;
        }
        let first = first.min_keepdim(1)?.broadcast_as((batch, tokens))?;
        Ok(Self::of(positions.le(&first)?))
    }

    fn of(selected: Tensor) -> Self {
        Self {
            selected,
            count: Arc::default(),
        }
    }

    /// Returns the mask: u8 `[B, T]`.
    pub fn selected(&self) -> &Tensor {
        &self.selected
    }

    /// Returns B and T.
    ///
    /// # Errors
    ///
    /// Never fails: a mask is `[B, T]`.
    pub fn dims(&self) -> Result<(usize, usize)> {
        self.selected.dims2()
    }

    /// Checks that `x` has the shape of the mask and is on its device; `name` is for the error.
    ///
    /// # Errors
    ///
    /// Fails with the `name`, the shape or device of `x`, and that of the mask.
    pub fn check(&self, name: &str, x: &Tensor) -> Result<()> {
        if x.dims() != self.selected.dims() {
            bail!(
                "{name}: shape {:?}, must be that of response_mask, {:?}",
                x.dims(),
                self.selected.dims()
            );
        }
        let (device, must) = (x.device(), self.selected.device());
        if !device.same_device(must) {
            let (device, must) = (device.location(), must.location());
            bail!("{name}: on {device:?}, must be on that of response_mask, {must:?}");
        }
        Ok(())
    }

    /// Checks that `x` is `[B]`; `name` is for the error.
    pub(crate) fn check_sequences(&self, name: &str, x: &Tensor) -> Result<()> {
        let (batch, _) = self.dims()?;
        if x.dims() != [batch] {
            bail!(
                "{name}: shape {:?}, must be [{batch}], one for each row of response_mask",
                x.dims()
            );
        }
        Ok(())
    }

    /// Returns `x` inside the mask and 0 outside.
    ///
    /// # Errors
    ///
    /// Fails if `x` is not `[B, T]` or on another device.
    pub fn select(&self, x: &Tensor) -> Result<Tensor> {
        self.selected.where_cond(x, &x.zeros_like()?)
    }

    /// Returns the positions of this mask where `condition` (u8 `[B, T]`) holds.
    ///
    /// # Errors
    ///
    /// Fails if `condition` is not `[B, T]` or on another device.
    pub fn and(&self, condition: &Tensor) -> Result<Self> {
        self.check("condition", condition)?;
        Ok(Self::of((&self.selected * condition.ne(0.)?)?))
    }

    /// Returns the positions of this mask in the sequences where `keep` `[B]`, such as the result
    /// of a [`SampleFilter`](crate::selection::SampleFilter), is not 0.
    ///
    /// # Errors
    ///
    /// Fails if `keep` is not `[B]` or on another device.
    pub fn keep_samples(&self, keep: &Tensor) -> Result<Self> {
        self.check_sequences("keep", keep)?;
        let keep = keep.detach().ne(0.)?.unsqueeze(1)?;
        Ok(Self::of(self.selected.broadcast_mul(&keep)?))
    }

    /// Returns `x` `[B, ..]` in the sequences that have a position in the mask, and 0 in the
    /// others.
    ///
    /// # Errors
    ///
    /// Fails if `x` does not have B rows.
    pub fn select_sequences(&self, x: &Tensor) -> Result<Tensor> {
        self.select_rows("x", x)
    }

    /// [`Self::select_sequences`] of the tensor that errors call `name`.
    pub(crate) fn select_rows(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let (batch, _) = self.dims()?;
        if x.dims().first() != Some(&batch) {
            bail!(
                "{name}: shape {:?}, must be [{batch}] or [{batch}, ..], one for each row of response_mask",
                x.dims()
            );
        }
        let mut shape = vec![1; x.rank()];
        shape[0] = batch;
        let selected = self.selected.max_keepdim(D::Minus1)?.reshape(shape)?;
        selected
            .broadcast_as(x.shape())?
            .where_cond(x, &x.zeros_like()?)
    }

    /// Returns `per_sequence` `[B]` at every position of the mask and 0 outside: `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if `per_sequence` is not `[B]` or on another device.
    pub fn spread(&self, per_sequence: &Tensor) -> Result<Tensor> {
        self.select(&self.every_token(per_sequence)?)
    }

    /// Returns `per_sequence` `[B]` at the last position of each sequence in the mask and 0
    /// elsewhere: `[B, T]`. A sequence without a position in the mask gets 0 everywhere.
    ///
    /// # Errors
    ///
    /// Fails if `per_sequence` is not `[B]` or on another device.
    pub fn place_on_last(&self, per_sequence: &Tensor) -> Result<Tensor> {
        let everywhere = self.every_token(per_sequence)?;
        self.last()?
            .where_cond(&everywhere, &everywhere.zeros_like()?)
    }

    fn every_token(&self, per_sequence: &Tensor) -> Result<Tensor> {
        self.check_sequences("per_sequence", per_sequence)?;
        per_sequence
            .unsqueeze(1)?
            .broadcast_as(self.dims()?)?
            .contiguous()
    }

    /// Returns the mask as 1 and 0 in `dtype`: `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        self.selected.to_dtype(dtype)
    }

    /// Returns the number of tokens of each sequence in the mask: `[B, 1]` in `dtype`.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    pub fn lengths(&self, dtype: DType) -> Result<Tensor> {
        self.selected.to_dtype(dtype)?.sum_keepdim(D::Minus1)
    }

    /// Returns the number of tokens in the mask: a scalar in `dtype`.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    pub fn count(&self, dtype: DType) -> Result<Tensor> {
        let count = match self.count.get() {
            Some(count) => count.clone(),
            None => {
                let exact = statistics_dtype(self.selected.device());
                let count = self.selected.to_dtype(exact)?.sum_all()?;
                self.count.get_or_init(|| count).clone()
            }
        };
        count.to_dtype(dtype)
    }

    /// Returns 1 at the last position of each sequence in the mask: u8 `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if an operation of the device fails.
    pub fn last(&self) -> Result<Tensor> {
        let (_, tokens) = self.dims()?;
        let device = self.selected.device();
        // Positions start at 1, so that 0 means no position.
        let position = Tensor::arange(1u32, tokens as u32 + 1, device)?.to_dtype(DType::F32)?;
        let position = self.to_dtype(DType::F32)?.broadcast_mul(&position)?;
        let last = position.max_keepdim(D::Minus1)?;
        position.broadcast_eq(&last)? * &self.selected
    }
}

fn check_not_empty(name: &str, x: &Tensor) -> Result<()> {
    if x.elem_count() == 0 {
        bail!(
            "{name}: shape {:?} is empty, there must be at least one sequence and one token",
            x.dims()
        );
    }
    Ok(())
}

/// Checks that all entries of a mask `[B, T]` are 0 or 1.
fn check_entries(mask: &Tensor) -> Result<()> {
    let valid = (mask.eq(0.)? + mask.eq(1.)?)?;
    if let Some((index, value)) = first_unset(mask, &valid)? {
        let (_, tokens) = mask.dims2()?;
        bail!(
            "response_mask: row {} has {value} in column {}, must be 0 or 1",
            index / tokens,
            index % tokens
        );
    }
    Ok(())
}
