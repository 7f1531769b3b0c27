//! Causal attention.

pub(crate) mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod scores;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{
    CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, WithDType, bail,
};

use crate::cpu::{slice, with_element, with_floats};
use crate::{Scores, check, graph, path};

/// Causal grouped-query attention (<https://arxiv.org/abs/2305.13245>):
/// `softmax(scale * query key^T) value` for each head, with the options in [`Scores`].
///
/// A query attends to positions up to its own, or to a window of them, except padding. The result
/// has the shape and dtype of `query`, and is 0 at padding. Values at padding, even NaN, do not
/// influence results or gradients. `query`, `key` and `value` get gradients. The fused paths never
/// store the score matrix.
///
/// Arithmetic is in f32. On CUDA, bf16 and f16 are multiplied in their dtype and summed in f32, and
/// the softmax weights are rounded to that dtype. The CUDA kernels support heads up to 256 wide.
///
/// # Shapes
///
/// B sequences with T positions each, of which the last S are new. The heads are side by side, as a
/// linear layer returns them.
///
/// - `query`: `[B, S, heads * head_dim]` or `[B * S, heads * head_dim]`, any float dtype, for the
///   last S positions
/// - `key`, `value`: `[B, T, kv_heads * head_dim]` or `[B * T, kv_heads * head_dim]`, with the same
///   dtype. `heads` is a multiple of `kv_heads`; adjacent query heads share a key head.
/// - `sequences`: a mask `[B, T]` in any dtype, 0 at padding, or the lengths of packed sequences
///   ([`Sequences::Packed`]). For packed sequences S = T, and the tensors are flat. The queries of
///   [`Sequences::Continued`] are the last positions of sequences that are concatenated as well.
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, if a scale or cap is not positive and finite, or if the
/// window is 0.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::attention;
///
/// // One sequence of two positions, the first of them padding; one head of two elements.
/// let x = Tensor::new(&[[[1f32, 2.], [3., 4.]]], &Device::Cpu)?;
/// let mask = Tensor::new(&[[0u8, 1]], &Device::Cpu)?;
/// let y = attention(&x, &x, &x, &mask, 2, 0.5)?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[0., 0.], [3., 4.]]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention<'a>(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: impl Into<Sequences<'a>>,
    head_dim: usize,
    scores: impl Into<Scores>,
) -> Result<Tensor> {
    let attention = CausalAttention::new(sequences, head_dim, scores);
    Ok(attention.forward([query, key, value])?.0)
}

/// Computes the backward pass for [`attention`], without a graph. On CUDA it repeats the forward
/// pass. To avoid that, use [`CausalAttention`], which keeps what it needs.
///
/// `gradient` is the gradient with respect to the result. Returns the gradients with respect to
/// `query`, `key` and `value`, in their shapes and dtype.
///
/// # Errors
///
/// Same as [`attention`]. Also fails if `gradient` does not have the shape and dtype of `query`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{Sequences, attention_gradient};
///
/// // Two sequences of one position each: the result is the value.
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let [_, _, value_gradient] = attention_gradient(&x, &x, &x, Sequences::Packed(&[1, 1]), 2, 0.5, &x)?;
/// assert_eq!(value_gradient.to_vec2::<f32>()?, [[1., 2.], [3., 4.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention_gradient<'a>(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: impl Into<Sequences<'a>>,
    head_dim: usize,
    scores: impl Into<Scores>,
    gradient: &Tensor,
) -> Result<[Tensor; 3]> {
    CausalAttention::new(sequences, head_dim, scores).backward([query, key, value], None, gradient)
}

/// [`attention`] for all layers in a model. Layers share the sequence table, even with different
/// scores ([`Self::with_scores`]), and the backward pass does not repeat the forward pass.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{CausalAttention, Sequences};
///
/// // Two sequences of one position each: the result is the value.
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let attention = CausalAttention::new(Sequences::Packed(&[1, 1]), 2, 0.5);
/// let (y, log_sums) = attention.forward([&x, &x, &x])?;
/// let forward = log_sums.as_ref().map(|log_sums| (&y, log_sums));
/// let [_, _, value_gradient] = attention.backward([&x, &x, &x], forward, &x)?;
/// assert_eq!(value_gradient.to_vec2::<f32>()?, [[1., 2.], [3., 4.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CausalAttention {
    sequences: Arc<OwnedSequences>,
    head_dim: usize,
    scores: Scores,
    /// The table from the latest call.
    table: Arc<Mutex<Option<Table>>>,
}

impl CausalAttention {
    /// Stores the arguments for [`attention`]. The first pass checks them.
    pub fn new<'a>(
        sequences: impl Into<Sequences<'a>>,
        head_dim: usize,
        scores: impl Into<Scores>,
    ) -> Self {
        Self {
            sequences: Arc::new(match sequences.into() {
                Sequences::Padded(mask) => OwnedSequences::Padded(mask.clone()),
                Sequences::Packed(lengths) => OwnedSequences::Packed(lengths.to_vec()),
                Sequences::Continued(ends) => OwnedSequences::Continued(ends.to_vec()),
            }),
            head_dim,
            scores: scores.into(),
            table: Arc::default(),
        }
    }

    /// Returns attention within the same sequences, with other scores. Both share the table.
    #[must_use]
    pub fn with_scores(&self, scores: impl Into<Scores>) -> Self {
        Self {
            scores: scores.into(),
            ..self.clone()
        }
    }

    /// Computes [`attention`] on query, key and value.
    ///
    /// On CUDA this also returns each query head's log weight sum, f32 `[B * S * heads]`, for
    /// [`Self::backward`]. Other paths do not need it.
    ///
    /// # Errors
    ///
    /// Same as [`attention`].
    pub fn forward(&self, inputs: [&Tensor; 3]) -> Result<(Tensor, Option<Tensor>)> {
        let sizes = self.sizes(inputs)?;
        let [query, key, value] = inputs;
        if !self.is_fused(query) {
            return Ok((self.composed(inputs, &sizes)?, None));
        }
        let op = self.op(sizes, query.device())?;
        let log_sums = op.log_sums.clone();
        let y = query
            .contiguous()?
            .apply_op3(&key.contiguous()?, &value.contiguous()?, op)?;
        let log_sums = lock(&log_sums).clone();
        Ok((y, log_sums))
    }

    /// Returns the gradients with respect to query, key and value, in their shapes and dtype,
    /// without a graph.
    ///
    /// `forward` is the result from [`Self::forward`], if it contains log-sums. `gradient` is the
    /// gradient with respect to the result.
    ///
    /// # Errors
    ///
    /// Same as [`attention_gradient`]. Also fails if the shapes or dtypes in `forward` do not
    /// match.
    pub fn backward(
        &self,
        inputs: [&Tensor; 3],
        forward: Option<(&Tensor, &Tensor)>,
        gradient: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let sizes = self.sizes(inputs)?;
        let [query, key, value] = inputs;
        check::gradient(gradient, "query", query)?;
        if let Some((y, log_sums)) = forward {
            check_forward(y, log_sums, query, self.head_dim)?;
        }
        if !self.is_fused(query) {
            return graph::gradients(inputs, gradient, |inputs| self.composed(inputs, &sizes));
        }
        self.op(sizes, query.device())?.gradients(
            &query.contiguous()?,
            &key.contiguous()?,
            &value.contiguous()?,
            forward,
            gradient,
        )
    }

    fn sequences(&self) -> Sequences<'_> {
        match &*self.sequences {
            OwnedSequences::Padded(mask) => Sequences::Padded(mask),
            OwnedSequences::Packed(lengths) => Sequences::Packed(lengths),
            OwnedSequences::Continued(ends) => Sequences::Continued(ends),
        }
    }

    /// Checks the arguments.
    fn sizes(&self, [query, key, value]: [&Tensor; 3]) -> Result<Sizes> {
        let sequences = self.sequences();
        Sizes::new(query, key, value, sequences, self.head_dim, &self.scores)
    }

    fn composed(&self, [query, key, value]: [&Tensor; 3], sizes: &Sizes) -> Result<Tensor> {
        let sequences = self.sequences();
        composed::unchecked(query, key, value, sequences, sizes, &self.scores)
    }

    /// Returns whether a fused path exists. The CUDA kernels support heads up to 256 wide.
    fn is_fused(&self, query: &Tensor) -> bool {
        #[cfg(feature = "cuda")]
        if query.device().is_cuda() && self.head_dim > cuda::MAX_HEAD_DIM {
            return false;
        }
        path::is_fused(query)
    }

    fn op(&self, sizes: Sizes, device: &Device) -> Result<Attention> {
        let mut kept = lock(&self.table);
        let table = match kept.take() {
            Some(table) if table.fits(&sizes, device) => table,
            _ => Table::new(self.sequences(), &sizes, device)?,
        };
        *kept = Some(table.clone());
        Ok(Attention {
            table,
            scores: self.scores,
            sizes,
            log_sums: Arc::default(),
        })
    }
}

/// [`Sequences`] without a lifetime.
#[derive(Debug)]
enum OwnedSequences {
    Padded(Tensor),
    Packed(Vec<usize>),
    Continued(Vec<(usize, usize)>),
}

/// Fails unless `y` and `log_sums` have the shapes and dtypes that a forward pass returns.
fn check_forward(y: &Tensor, log_sums: &Tensor, query: &Tensor, head_dim: usize) -> Result<()> {
    if y.dims() != query.dims() || y.dtype() != query.dtype() || !y.is_contiguous() {
        bail!(
            "y: {:?} of {:?}, must be contiguous {:?} of {:?}, as query",
            y.dims(),
            y.dtype(),
            query.dims(),
            query.dtype()
        );
    }
    let heads = query.elem_count() / head_dim;
    if log_sums.dims() != [heads] || log_sums.dtype() != DType::F32 {
        bail!(
            "log_sums: {:?} of {:?}, must be [{heads}] of f32",
            log_sums.dims(),
            log_sums.dtype()
        );
    }
    check::same_device(&[("query", query), ("y", y), ("log_sums", log_sums)])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Arrangement of sequences in a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Sequences<'a> {
    /// Sequences padded to a common width, with a mask `[B, T]` in any dtype, 0 at padding.
    Padded(&'a Tensor),
    /// Concatenated sequences, with their lengths, each at least 1.
    Packed(&'a [usize]),
    /// The ends of concatenated sequences: for each, the number of queries, at least 1, and that of
    /// keys. The queries are those of the last keys.
    Continued(&'a [(usize, usize)]),
}

impl<'a> From<&'a Tensor> for Sequences<'a> {
    fn from(mask: &'a Tensor) -> Self {
        Self::Padded(mask)
    }
}

/// Sizes derived from the arguments to [`attention`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Number of sequences (B).
    pub(crate) batch: usize,
    /// New positions per sequence (S), or in the longest packed one.
    pub(crate) new: usize,
    /// All positions per sequence (T), or in the longest packed one.
    pub(crate) total: usize,
    pub(crate) kv_heads: usize,
    /// Query heads that share a key head.
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
}

impl Sizes {
    /// Checks the arguments.
    pub(crate) fn new(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        sequences: Sequences,
        head_dim: usize,
        scores: &Scores,
    ) -> Result<Self> {
        scores.check()?;
        check::float("query", query)?;
        let heads = |name, x: &Tensor| {
            let width = check::width(name, x)?;
            if head_dim == 0 || width % head_dim != 0 {
                bail!(
                    "{name}: shape {:?}, its last dimension must be a multiple of head_dim, {head_dim}",
                    x.dims()
                );
            }
            Ok((width / head_dim, x.elem_count() / width))
        };
        let (query_heads, queries) = heads("query", query)?;
        let (kv_heads, keys) = heads("key", key)?;
        if query_heads % kv_heads != 0 {
            bail!("query: {query_heads} heads, must be a multiple of those of key, {kv_heads}");
        }
        let (batch, new, total) = match sequences {
            Sequences::Padded(mask) => padded(mask, queries, keys)?,
            Sequences::Packed(lengths) => packed(lengths, queries, keys)?,
            Sequences::Continued(ends) => continued(ends, queries, keys)?,
        };
        if value.dims() != key.dims() {
            bail!(
                "value: shape {:?}, must be that of key, {:?}",
                value.dims(),
                key.dims()
            );
        }
        check::same_dtype("key", key, "query", query)?;
        check::same_dtype("value", value, "query", query)?;
        check::same_device(&[("query", query), ("key", key), ("value", value)])?;
        if let Sequences::Padded(mask) = sequences {
            check::same_device(&[("query", query), ("mask", mask)])?;
        }
        Ok(Self {
            batch,
            new,
            total,
            kv_heads,
            group: query_heads / kv_heads,
            head_dim,
        })
    }
}

/// Returns B, S and T for a mask `[B, T]`.
fn padded(mask: &Tensor, queries: usize, keys: usize) -> Result<(usize, usize, usize)> {
    let &[batch, total] = mask.dims() else {
        bail!("mask: shape {:?}, must be [B, T]", mask.dims());
    };
    if total == 0 {
        bail!("mask: shape {:?}, T must be at least 1", mask.dims());
    }
    let new = queries.checked_div(batch).unwrap_or(0);
    if queries != batch * new || new > total {
        bail!(
            "query: {queries} positions, must be B * S with B = {batch} and S at most {total}, from mask"
        );
    }
    if keys != batch * total {
        bail!("key: {keys} positions, must be B * T = {batch} * {total}, from mask");
    }
    Ok((batch, new, total))
}

/// Returns B, and twice the largest of `lengths`.
fn packed(lengths: &[usize], queries: usize, keys: usize) -> Result<(usize, usize, usize)> {
    let Some(&longest) = lengths.iter().max() else {
        bail!("lengths: none, must be at least one");
    };
    if let Some(index) = lengths.iter().position(|&length| length == 0) {
        bail!("lengths[{index}]: 0, must be at least 1");
    }
    let sum = lengths
        .iter()
        .try_fold(0usize, |sum, &length| sum.checked_add(length));
    for (name, positions) in [("query", queries), ("key", keys)] {
        if sum != Some(positions) {
            bail!("{name}: {positions} positions, must be the sum of lengths, {lengths:?}");
        }
    }
    Ok((lengths.len(), longest, longest))
}

/// Returns B, and the largest number of queries and of keys in `ends`.
fn continued(
    ends: &[(usize, usize)],
    queries: usize,
    keys: usize,
) -> Result<(usize, usize, usize)> {
    if let Some(index) = ends
        .iter()
        .position(|&(new, total)| new == 0 || new > total)
    {
        bail!(
            "ends[{index}]: {:?}, must be at least one query, and at least as many keys",
            ends[index]
        );
    }
    let (new, total): (Vec<usize>, Vec<usize>) = ends.iter().copied().unzip();
    for (name, positions, counts) in [("query", queries, &new), ("key", keys, &total)] {
        let sum = counts
            .iter()
            .try_fold(0usize, |sum, &count| sum.checked_add(count));
        if sum != Some(positions) {
            bail!("{name}: {positions} positions, must be the sum of those in ends, {counts:?}");
        }
    }
    match (new.iter().max(), total.iter().max()) {
        (Some(&new), Some(&total)) => Ok((ends.len(), new, total)),
        _ => bail!("ends: none, must be at least one"),
    }
}

/// Attention on contiguous `query` `[B * S, kv_heads * group * head_dim]`, `key` and `value`
/// `[B * T, kv_heads * head_dim]`.
pub(crate) struct Attention {
    pub(crate) table: Table,
    pub(crate) scores: Scores,
    pub(crate) sizes: Sizes,
    /// Log-sums from a forward pass on CUDA, for the backward pass.
    log_sums: Arc<Mutex<Option<Tensor>>>,
}

/// The rows in all sequences.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    /// u8, one entry per key.
    pub(crate) mask: Tensor,
    /// Each sequence's rows.
    pub(crate) sequences: Arc<[Sequence]>,
    /// The same numbers in GPU memory, u32 `[B * 4]`.
    #[cfg(feature = "cuda")]
    pub(crate) on_gpu: Option<Tensor>,
    /// Sequences are packed, so the mask has no 0.
    #[cfg(feature = "cuda")]
    pub(crate) is_packed: bool,
    /// New positions per sequence.
    new: usize,
}

/// A sequence's rows in `query` and `key`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    pub(crate) first_query: usize,
    pub(crate) new: usize,
    pub(crate) first_key: usize,
    pub(crate) total: usize,
}

impl Sequence {
    /// Positions before the new ones.
    pub(crate) fn past(&self) -> usize {
        self.total - self.new
    }
}

impl Table {
    fn new(sequences: Sequences, sizes: &Sizes, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let is_packed = !matches!(sequences, Sequences::Padded(_));
        let (mask, sequences): (_, Arc<[_]>) = match sequences {
            Sequences::Padded(mask) => {
                let sequence = |index| Sequence {
                    first_query: index * sizes.new,
                    new: sizes.new,
                    first_key: index * sizes.total,
                    total: sizes.total,
                };
                (
                    check::mask(mask, mask.dims())?,
                    (0..sizes.batch).map(sequence).collect(),
                )
            }
            Sequences::Packed(lengths) => {
                concatenated(lengths.iter().map(|&length| (length, length)), device)?
            }
            Sequences::Continued(ends) => concatenated(ends.iter().copied(), device)?,
        };
        Ok(Self {
            #[cfg(feature = "cuda")]
            on_gpu: (device.is_cuda() && !sequences.is_empty())
                .then(|| cuda::table(&sequences, device))
                .transpose()?,
            #[cfg(feature = "cuda")]
            is_packed,
            mask,
            sequences,
            new: sizes.new,
        })
    }

    /// Returns whether the table is for these sizes and this device.
    fn fits(&self, sizes: &Sizes, device: &Device) -> bool {
        self.new == sizes.new && self.mask.device().same_device(device)
    }
}

/// Returns the mask and the rows of concatenated sequences, from their numbers of queries and keys.
fn concatenated(
    counts: impl Iterator<Item = (usize, usize)>,
    device: &Device,
) -> Result<(Tensor, Arc<[Sequence]>)> {
    let (mut first_query, mut first_key) = (0, 0);
    let sequence = |(new, total)| {
        let sequence = Sequence {
            first_query,
            new,
            first_key,
            total,
        };
        first_query += new;
        first_key += total;
        sequence
    };
    let sequences = counts.map(sequence).collect();
    Ok((Tensor::ones(first_key, DType::U8, device)?, sequences))
}

impl Attention {
    /// Returns the gradients for contiguous inputs. `forward` has the result and the log-sums, if
    /// known.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    fn gradients(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        forward: Option<(&Tensor, &Tensor)>,
        gradient: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if query.device().is_cuda() {
            let inputs = [query, key, value];
            let (y, log_sums) = match forward {
                Some((y, log_sums)) => (y.clone(), log_sums.clone()),
                None => cuda::forward_of(inputs, self)?,
            };
            return cuda::backward(inputs, &y, &log_sums, &gradient, self);
        }
        with_element!(query.dtype(), "query", T => {
            cpu::backward::<T>([query, key, value], &gradient, self)
        })
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let query_range = slice::range(query_layout)?;
        let (key_range, value_range) = (slice::range(key_layout)?, slice::range(value_layout)?);
        let y = with_floats!(query, "query", query => {
            let inputs = cpu::Inputs {
                query: &query[query_range],
                key: &key.as_slice()?[key_range],
                value: &value.as_slice()?[value_range],
            };
            WithDType::to_cpu_storage_owned(cpu::forward(&inputs, self)?)
        });
        Ok((y, query_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        query: &candle_core::CudaStorage,
        query_layout: &Layout,
        key: &candle_core::CudaStorage,
        key_layout: &Layout,
        value: &candle_core::CudaStorage,
        value_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (y, log_sums) = cuda::forward(
            (query, query_layout),
            (key, key_layout),
            (value, value_layout),
            self,
        )?;
        *lock(&self.log_sums) = Some(log_sums);
        Ok((y, query_layout.shape().clone()))
    }

    fn bwd(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let log_sums = lock(&self.log_sums).clone();
        let forward = log_sums.as_ref().map(|log_sums| (y, log_sums));
        let [query_gradient, key_gradient, value_gradient] =
            self.gradients(query, key, value, forward, gradient)?;
        Ok((
            Some(query_gradient),
            Some(key_gradient),
            Some(value_gradient),
        ))
    }
}
