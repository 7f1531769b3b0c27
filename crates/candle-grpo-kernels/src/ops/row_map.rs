//! Row selection and its transpose.

use candle_core::{Device, Result, Tensor, bail};

use crate::{add_embedding_gradient, arithmetic_dtype, embedding};

/// Maps each of M rows to one of N rows.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::RowMap;
///
/// // The first and the last row of three are row 1.
/// let map = RowMap::new(vec![1, 0, 1], 2, &Device::Cpu)?;
/// let x = Tensor::new(&[[1f32], [2.]], &Device::Cpu)?;
/// let selected = map.select(&x)?;
/// assert_eq!(selected.to_vec2::<f32>()?, [[2.], [1.], [2.]]);
/// assert_eq!(map.sum(&selected)?.to_vec2::<f32>()?, [[1.], [4.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RowMap {
    /// u32 `[M]`
    rows: Tensor,
    count: usize,
    /// Positions grouped by row, and where each row's group starts: u32 `[M]` and `[N + 1]`.
    #[cfg(feature = "cuda")]
    positions: Option<(Tensor, Tensor)>,
}

impl RowMap {
    /// Creates a map to `count` rows, with M = `rows.len()`.
    ///
    /// # Errors
    ///
    /// Fails if an entry in `rows` is not below `count`.
    pub fn new(rows: Vec<u32>, count: usize, device: &Device) -> Result<Self> {
        if let Some(at) = rows.iter().position(|&row| row as usize >= count) {
            bail!("rows[{at}]: {}, must be below {count}", rows[at]);
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            positions: (device.is_cuda() && !rows.is_empty())
                .then(|| positions(&rows, count, device))
                .transpose()?,
            rows: Tensor::new(rows, device)?,
            count,
        })
    }

    /// Selects `[M, H]` from `x` `[N, H]`, in any float dtype.
    ///
    /// # Errors
    ///
    /// Fails if shapes or dtypes do not match.
    pub fn select(&self, x: &Tensor) -> Result<Tensor> {
        self.check(x, self.count)?;
        embedding(&self.rows, x)
    }

    /// Computes the gradient with respect to `x` in [`Self::select`]. It adds each row in
    /// `gradient` `[M, H]` to its row in a zero tensor `[N, H]`, in order. Sums are f32 (f64 for
    /// f64).
    ///
    /// # Errors
    ///
    /// Fails if shapes or dtypes do not match.
    pub fn sum(&self, gradient: &Tensor) -> Result<Tensor> {
        self.check(gradient, self.rows.elem_count())?;
        #[cfg(feature = "cuda")]
        if let Some((positions, starts)) = &self.positions
            && crate::path::is_fused(gradient)
        {
            return crate::ops::embedding::cuda::sum(&gradient.contiguous()?, positions, starts);
        }
        let shape = (self.count, gradient.dim(1)?);
        let sum = Tensor::zeros(shape, arithmetic_dtype(gradient.dtype()), gradient.device())?;
        add_embedding_gradient(&sum, &self.rows, gradient)?;
        sum.to_dtype(gradient.dtype())
    }

    fn check(&self, x: &Tensor, rows: usize) -> Result<()> {
        match x.dims() {
            [first, _] if *first == rows => Ok(()),
            dims => bail!("x: shape {dims:?}, must be [{rows}, H]"),
        }
    }
}

/// Sorts positions in `rows` by their row.
#[cfg(feature = "cuda")]
fn positions(rows: &[u32], count: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let mut starts = vec![0u32; count + 1];
    for &row in rows {
        starts[row as usize + 1] += 1;
    }
    for row in 0..count {
        starts[row + 1] += starts[row];
    }
    let mut positions: Vec<u32> = (0..rows.len() as u32).collect();
    // Stable, so that a row's positions keep their order.
    positions.sort_by_key(|&position| rows[position as usize]);
    Ok((
        Tensor::new(positions, device)?,
        Tensor::new(starts, device)?,
    ))
}
