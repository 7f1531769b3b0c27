//! Gated delta rule states between decoding passes.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::fmt::Display;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::cpu::with_element;
#[cfg(feature = "cuda")]
use crate::cuda::mapped::MappedPair;
use crate::ops::causal_conv;
use crate::ops::gated_delta_rule::{GatedDeltaRule, check, is_fused};
use crate::precision::arithmetic_dtype;
use crate::{DeltaHeads, PrefixTree, check, path};

/// Sequence states between decoding passes, for one layer: the last rows before
/// [`causal_conv`](crate::causal_conv()) and the matrices in
/// [`gated_delta_rule`](crate::gated_delta_rule()).
///
/// Each sequence has a slot. Its state has a fixed size and cannot return to an earlier row, so a
/// fork needs a copy in another slot. States are f32 (f64 for f64).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::{DeltaHeads, DeltaStates, SlotRows, StateBatch};
///
/// let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
/// let states = DeltaStates::new(2, heads, 4, DType::F32, &Device::Cpu)?;
/// let (zero, half) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[0.5f32]], &Device::Cpu)?);
/// let row = Tensor::new(&[[2f32, 1., 3.]], &Device::Cpu)?;
/// let batch = [SlotRows { slot: 0, rows: 1 }];
/// let batch = StateBatch::new(&batch, &Device::Cpu)?;
/// let first = states.gated_delta_rule([&row, &zero, &half], &batch)?;
/// assert!((first.to_vec2::<f32>()?[0][0] - 1.5).abs() < 1e-5);
/// states.copy(0, 1)?;
/// let fork = [SlotRows { slot: 1, rows: 1 }];
/// let fork = StateBatch::new(&fork, &Device::Cpu)?;
/// let second = states.gated_delta_rule([&row, &zero, &half], &fork)?;
/// assert!((second.to_vec2::<f32>()?[0][0] - 2.25).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct DeltaStates {
    heads: DeltaHeads,
    /// Row dtype.
    dtype: DType,
    /// `[slots, value_heads, key_dim, value_dim]`
    states: Tensor,
    /// `[slots, taps - 1, width]`
    windows: Tensor,
    /// Number of slots, at most those of the tensors.
    len: usize,
    /// The memory of `states` and `windows`, if slots grow in place.
    #[cfg(feature = "cuda")]
    mapped: Option<Box<MappedPair>>,
}

/// A sequence's next rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRows {
    /// Slot index.
    pub slot: usize,
    /// Number of rows, at least 1.
    pub rows: usize,
}

/// The next rows of several sequences.
///
/// All layers in a pass share a batch. On CUDA its table is copied to the device once.
#[derive(Debug, Clone)]
pub struct StateBatch<'a> {
    sequences: &'a [SlotRows],
    /// Number of rows after those of the sequences, each of a sequence without a state.
    padding: usize,
    /// u32 `[sequences + padding, 3]`: the slot, the first row and the number of rows.
    #[cfg(feature = "cuda")]
    table: Option<Tensor>,
}

impl<'a> StateBatch<'a> {
    /// Returns a batch for states on `device`.
    ///
    /// # Errors
    ///
    /// Fails if a number does not fit in 32 bits on CUDA.
    pub fn new(sequences: &'a [SlotRows], device: &Device) -> Result<Self> {
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Ok(Self {
            sequences,
            padding: 0,
            #[cfg(feature = "cuda")]
            table: (device.is_cuda() && !sequences.is_empty())
                .then(|| Tensor::new(cuda::numbers(sequences, sequences.len())?, device))
                .transpose()?,
        })
    }

    /// Like [`Self::new`], with an existing table, which has `padding` more rows.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_table(sequences: &'a [SlotRows], padding: usize, table: Tensor) -> Self {
        Self {
            sequences,
            padding,
            table: Some(table),
        }
    }
}

impl DeltaStates {
    /// Creates zeroed slots, the state before a sequence, for rows in `dtype` and a convolution
    /// with `taps` taps.
    ///
    /// On GPUs with virtual memory management, slots grow in place. Their memory is mapped to
    /// addresses that are reserved for it, so growth copies nothing.
    ///
    /// # Errors
    ///
    /// Fails if a size other than `slots` is 0 or `dtype` is not a float dtype.
    pub fn new(
        slots: usize,
        heads: DeltaHeads,
        taps: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        heads.check()?;
        if taps == 0 {
            bail!("taps: 0, must be at least 1");
        }
        if !dtype.is_float() {
            bail!("dtype: {dtype:?}, must be a float dtype");
        }
        check::one_stream(device)?;
        #[cfg(feature = "cuda")]
        if device.is_cuda()
            && path::fuses(dtype, device)
            && taps > 1
            && let Some(mapped) = cuda::reserve(heads, taps, device)?
        {
            let [states, windows] = mapped.tensors();
            let mut new = Self {
                heads,
                dtype,
                states,
                windows,
                len: 0,
                mapped: Some(Box::new(mapped)),
            };
            new.grow(slots)?;
            return Ok(new);
        }
        Self::allocate(slots, heads, taps, dtype, device)
    }

    fn allocate(
        slots: usize,
        heads: DeltaHeads,
        taps: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let wide = arithmetic_dtype(dtype);
        let state = (slots, heads.value_heads, heads.key_dim, heads.value_dim);
        Ok(Self {
            heads,
            dtype,
            states: Tensor::zeros(state, wide, device)?,
            windows: Tensor::zeros((slots, taps - 1, heads.width()), wide, device)?,
            len: slots,
            #[cfg(feature = "cuda")]
            mapped: None,
        })
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether slots grow in place.
    pub fn grow_in_place(&self) -> bool {
        #[cfg(feature = "cuda")]
        if self.mapped.is_some() {
            return true;
        }
        false
    }

    /// Returns the bytes of memory for this many slots.
    pub fn bytes(&self, slots: usize) -> usize {
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &self.mapped {
            return mapped.bytes(slots);
        }
        let elements = |tensor: &Tensor| tensor.dims()[1..].iter().product::<usize>();
        let of_slot: usize = self.tensors().map(elements).iter().sum();
        slots * of_slot * self.states.dtype().size_in_bytes()
    }

    /// Appends zeroed slots until there are `slots`.
    ///
    /// # Errors
    ///
    /// Fails if there are already more slots, or if there is not enough memory. Then there are as
    /// many as before, with the same content.
    pub fn grow(&mut self, slots: usize) -> Result<()> {
        if slots < self.len {
            bail!(
                "slots: {slots}, must be at least the current number, {}",
                self.len
            );
        }
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &mut self.mapped {
            mapped.grow(self.len, slots)?;
            self.len = slots;
            return Ok(());
        }
        let taps = self.windows.dim(1)? + 1;
        let grown = Self::allocate(slots, self.heads, taps, self.dtype, self.states.device())?;
        for (to, from) in grown.tensors().into_iter().zip(self.tensors()) {
            if from.elem_count() > 0 {
                to.slice_set(from, 0, 0)?;
            }
        }
        *self = grown;
        Ok(())
    }

    /// Removes the slots from `slots` on, if slots grow in place. Their memory returns to the
    /// device, after the work on it.
    ///
    /// # Errors
    ///
    /// Fails if there are fewer slots, if they do not grow in place, or if work on the device has
    /// failed.
    pub fn shrink(&mut self, slots: usize) -> Result<()> {
        if slots > self.len {
            bail!(
                "slots: {slots}, must be at most the current number, {}",
                self.len
            );
        }
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &mut self.mapped {
            self.len = slots;
            return mapped.shrink(slots);
        }
        bail!("slots: do not grow in place, must do so to be removed")
    }

    /// Copies the state in slot `from` to slot `to`.
    ///
    /// # Errors
    ///
    /// Fails if a slot does not exist.
    pub fn copy(&self, from: usize, to: usize) -> Result<()> {
        self.check_slot("from", from)?;
        self.check_slot("to", to)?;
        for tensor in self.tensors() {
            if tensor.elem_count() == 0 || from == to {
                continue;
            }
            #[cfg(feature = "cuda")]
            if tensor.device().is_cuda() && tensor.dtype() == DType::F32 {
                cuda::copy(tensor, from, to)?;
                continue;
            }
            tensor.slice_set(&tensor.narrow(0, from, 1)?.copy()?, 0, to)?;
        }
        Ok(())
    }

    /// Zeroes slot `slot`, the state before a sequence.
    ///
    /// # Errors
    ///
    /// Fails if the slot does not exist.
    pub fn clear(&self, slot: usize) -> Result<()> {
        self.check_slot("slot", slot)?;
        for tensor in self.tensors() {
            if tensor.elem_count() == 0 {
                continue;
            }
            #[cfg(feature = "cuda")]
            if tensor.device().is_cuda() && tensor.dtype() == DType::F32 {
                cuda::clear(tensor, slot)?;
                continue;
            }
            tensor.slice_set(&tensor.narrow(0, slot, 1)?.zeros_like()?, 0, slot)?;
        }
        Ok(())
    }

    /// Computes [`causal_conv`](crate::causal_conv()) on the next rows of several sequences, `x`
    /// `[N, width]`, and advances their states. `batch` has the number of rows of each sequence, in
    /// the order of `x`.
    ///
    /// A row's bits depend only on the rows in its sequence.
    ///
    /// # Errors
    ///
    /// Fails if an argument is in a graph, if shapes or dtypes do not match, or if a slot does not
    /// exist or occurs twice.
    pub fn causal_conv(&self, x: &Tensor, weight: &Tensor, batch: &StateBatch) -> Result<Tensor> {
        let rows = causal_conv::check_weight(x, weight)?;
        let shape = [self.heads.width(), self.windows.dim(1)? + 1];
        if weight.dims() != shape {
            bail!(
                "weight: shape {:?}, must be {shape:?}, the width of the heads and the taps",
                weight.dims()
            );
        }
        self.check("x", x, rows, batch)?;
        check::constant("weight", weight)?;
        if !path::is_fused(x) {
            return composed::causal_conv(&self.windows, x, weight, batch.sequences);
        }
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            let (x, weight) = (x.contiguous()?, weight.contiguous()?);
            return cuda::causal_conv(&self.windows, &x, &weight, batch);
        }
        let y = with_element!(x.dtype(), "x", T => {
            let (x, weight) = (x.contiguous()?, weight.contiguous()?);
            let y = cpu::causal_conv::<T>(&self.windows, &x, &weight, batch.sequences)?;
            Tensor::from_vec(y, x.shape(), &Device::Cpu)?
        });
        Ok(y)
    }

    /// Computes [`gated_delta_rule`](crate::gated_delta_rule()) on the next rows of several
    /// sequences, and advances their states. `batch` says how many rows each sequence has, in the
    /// order of `qkv`.
    ///
    /// The result is computed row by row, so a row's bits depend only on the rows in its sequence.
    ///
    /// # Errors
    ///
    /// Same as [`Self::causal_conv`].
    pub fn gated_delta_rule(
        &self,
        [qkv, g, beta]: [&Tensor; 3],
        batch: &StateBatch,
    ) -> Result<Tensor> {
        check(qkv, g, beta, self.heads)?;
        self.check("qkv", qkv, qkv.dim(0)?, batch)?;
        for (name, gate) in [("g", g), ("beta", beta)] {
            check::constant(name, gate)?;
        }
        let inputs = [&qkv.contiguous()?, &g.contiguous()?, &beta.contiguous()?];
        if !is_fused(qkv, self.heads) {
            return composed::gated_delta_rule(&self.states, inputs, self.heads, batch.sequences);
        }
        #[cfg(feature = "cuda")]
        if qkv.device().is_cuda() {
            return cuda::gated_delta_rule(&self.states, inputs, &self.heads, batch);
        }
        let lengths: Vec<usize> = batch.sequences.iter().map(|rows| rows.rows).collect();
        let op = GatedDeltaRule {
            heads: self.heads,
            tree: PrefixTree::new(&lengths)?,
        };
        let o = with_element!(qkv.dtype(), "qkv", T => {
            let o = cpu::gated_delta_rule::<T>(&self.states, inputs, &op, batch.sequences)?;
            Tensor::from_vec(o, (qkv.dim(0)?, self.heads.values()), &Device::Cpu)?
        });
        Ok(o)
    }

    fn tensors(&self) -> [&Tensor; 2] {
        [&self.states, &self.windows]
    }

    fn check_slot(&self, name: impl Display, slot: usize) -> Result<()> {
        if slot >= self.len() {
            bail!(
                "{name}: {slot}, must be below the number of slots, {}",
                self.len()
            );
        }
        Ok(())
    }

    fn check(&self, name: &str, x: &Tensor, rows: usize, batch: &StateBatch) -> Result<()> {
        check::constant(name, x)?;
        if x.dtype() != self.dtype {
            bail!(
                "{name}: {:?}, must be of the dtype of the states, {:?}",
                x.dtype(),
                self.dtype
            );
        }
        check::same_device(&[("the states", &self.states), (name, x)])?;
        if batch.sequences.is_empty() {
            bail!("batch: no sequences, must have at least one");
        }
        let (mut seen, mut sum) = (vec![false; self.len()], batch.padding);
        for (index, sequence) in batch.sequences.iter().enumerate() {
            self.check_slot(format_args!("batch[{index}].slot"), sequence.slot)?;
            if std::mem::replace(&mut seen[sequence.slot], true) {
                bail!(
                    "batch[{index}].slot: {} twice, must occur once",
                    sequence.slot
                );
            }
            if sequence.rows == 0 {
                bail!("batch[{index}].rows: 0, must be at least 1");
            }
            sum = sum.saturating_add(sequence.rows);
        }
        if sum != rows {
            bail!("{name}: {rows} rows, must be the sum of those of batch, {sum}");
        }
        Ok(())
    }
}
