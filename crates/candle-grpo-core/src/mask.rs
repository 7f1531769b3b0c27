//! Masks over response tokens.

use std::sync::{Arc, OnceLock};

use candle_core::{D, DType, Result, Tensor, bail};

use crate::dtype::statistics_dtype;
use crate::rewards::first_unset;

/// A 0/1 mask over response tokens `[B, T]`.
///
/// Positions outside the mask never reach a value or a gradient, even if they hold NaN. Multiplying
/// by a mask would propagate NaN and infinity (`0 * inf`), so entries are selected instead, before
/// any `exp`.
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
    /// Creates a mask from a tensor `[B, T]` of zeros and ones, in any dtype.
    ///
    /// # Errors
    ///
    /// Fails if the tensor is empty or has another rank and, on the CPU, if an entry is not 0 or 1.
    /// On other devices that check would synchronize, so every nonzero entry is selected there.
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

    /// Creates the mask for sampled `responses` (integers, `[B, T]`). It selects each response up
    /// to its first stop token, which is included because the policy chose it. A response without a
    /// stop token is selected as a whole.
    ///
    /// Use this if your decoder fills all T positions. Nothing is copied to the host.
    ///
    /// # Errors
    ///
    /// Fails if `responses` are not integers `[B, T]`, or are empty.
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

    /// Checks that `x` has the mask's shape and device. Errors refer to `x` as `name`.
    ///
    /// # Errors
    ///
    /// Fails with the `name`, the shape or device of `x`, and the mask's.
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

    /// Checks that `x` is `[B]`. Errors refer to `x` as `name`.
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
    /// Fails if `x` is not `[B, T]` or is on another device.
    pub fn select(&self, x: &Tensor) -> Result<Tensor> {
        self.selected.where_cond(x, &x.zeros_like()?)
    }

    /// Returns a mask with this mask's positions where `condition` (u8 `[B, T]`) holds.
    ///
    /// # Errors
    ///
    /// Fails if `condition` is not `[B, T]` or is on another device.
    pub fn and(&self, condition: &Tensor) -> Result<Self> {
        self.check("condition", condition)?;
        Ok(Self::of((&self.selected * condition.ne(0.)?)?))
    }

    /// Returns a mask with this mask's positions in sequences where `keep` `[B]` is not 0. `keep`
    /// may come from a [`SampleFilter`](crate::selection::SampleFilter).
    ///
    /// # Errors
    ///
    /// Fails if `keep` is not `[B]` or is on another device.
    pub fn keep_samples(&self, keep: &Tensor) -> Result<Self> {
        self.check_sequences("keep", keep)?;
        let keep = keep.detach().ne(0.)?.unsqueeze(1)?;
        Ok(Self::of(self.selected.broadcast_mul(&keep)?))
    }

    /// Returns `x` `[B, ..]` with 0 for sequences that have no position in the mask.
    ///
    /// # Errors
    ///
    /// Fails if `x` does not have B rows.
    pub fn select_sequences(&self, x: &Tensor) -> Result<Tensor> {
        self.select_rows("x", x)
    }

    /// Does the same as [`Self::select_sequences`]. Errors refer to `x` as `name`.
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

    /// Repeats `per_sequence` `[B]` at each masked-in position, with 0 elsewhere: `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if `per_sequence` is not `[B]` or is on another device.
    pub fn spread(&self, per_sequence: &Tensor) -> Result<Tensor> {
        self.select(&self.every_token(per_sequence)?)
    }

    /// Places `per_sequence` `[B]` at each sequence's last masked-in position, with 0 elsewhere:
    /// `[B, T]`. A sequence without a position in the mask gets 0 everywhere.
    ///
    /// # Errors
    ///
    /// Fails if `per_sequence` is not `[B]` or is on another device.
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

    /// Converts the mask to `dtype`, as 1 and 0: `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        self.selected.to_dtype(dtype)
    }

    /// Counts each sequence's tokens in the mask: `[B, 1]` in `dtype`.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    pub fn lengths(&self, dtype: DType) -> Result<Tensor> {
        self.selected.to_dtype(dtype)?.sum_keepdim(D::Minus1)
    }

    /// Counts all tokens in the mask: a scalar in `dtype`.
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

    /// Returns 1 at each sequence's last position in the mask: u8 `[B, T]`.
    ///
    /// # Errors
    ///
    /// Fails if a device operation fails.
    pub fn last(&self) -> Result<Tensor> {
        let (_, tokens) = self.dims()?;
        let device = self.selected.device();
        // Positions start at 1, so 0 means that there is none.
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

/// Checks that a mask `[B, T]` has only zeros and ones.
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
