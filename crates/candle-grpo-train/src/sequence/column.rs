//! Values that belong to the response tokens of a batch.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, WithDType};
use serde::{Deserialize, Serialize};

/// Values for the response tokens of a batch, in their dtype: one or several per token, without
/// padding.
///
/// ```
/// use candle_core::Device;
/// use candle_grpo_train::sequence::Column;
///
/// let column = Column::per_token(vec![vec![-1f32, -2.], vec![-3.]]);
/// let tensor = column.padded(3, &Device::Cpu)?;
/// assert_eq!(tensor.to_vec2::<f32>()?, [[-1., -2., 0.], [-3., 0., 0.]]);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Column {
    /// Number of values per token, if there are several.
    entries: Option<usize>,
    /// Each sequence's number of values.
    lengths: Vec<usize>,
    /// All sequences' values, one after another.
    values: Values,
}

/// Numbers in one dtype.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Values {
    /// Real numbers.
    F32(Vec<f32>),
    /// Tokens.
    U32(Vec<u32>),
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<u32>> for Values {
    fn from(values: Vec<u32>) -> Self {
        Self::U32(values)
    }
}

impl Column {
    /// Creates a column with one value per response token.
    pub fn per_token<T: Clone>(rows: Vec<Vec<T>>) -> Self
    where
        Values: From<Vec<T>>,
    {
        Self {
            entries: None,
            lengths: rows.iter().map(Vec::len).collect(),
            values: rows.concat().into(),
        }
    }

    /// Creates a column like [`Self::per_token`] with `entries` consecutive values per token.
    pub fn entries_per_token<T: Clone>(rows: Vec<Vec<T>>, entries: usize) -> Self
    where
        Values: From<Vec<T>>,
    {
        Self {
            entries: Some(entries),
            ..Self::per_token(rows)
        }
    }

    /// Copies `tensor` `[B, T]` or `[B, T, K]` to the host, without padding after the
    /// responses, which have `tokens` tokens. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the shape is different, or if a response has more than T tokens.
    pub fn from_tensor(tensor: &Tensor, tokens: &[usize]) -> Result<Self> {
        let (entries, row) = match *tensor.dims() {
            [_, t] => (None, t),
            [_, t, k] => (Some(k), t * k),
            _ => anyhow::bail!("tensor: shape {:?}, must be [B, T, ..]", tensor.dims()),
        };
        let each = entries.unwrap_or(1);
        let lengths: Vec<usize> = tokens.iter().map(|tokens| tokens * each).collect();
        ensure!(
            tensor.dim(0)? == tokens.len() && lengths.iter().all(|&length| length <= row),
            "tensor: shape {:?}, must have the values of {tokens:?} tokens",
            tensor.dims()
        );
        let flat = tensor.flatten_all()?;
        let values = match tensor.dtype() {
            DType::U32 => Values::U32(cut(&flat.to_vec1()?, row, &lengths)),
            _ => {
                let all = flat.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                Values::F32(cut(&all, row, &lengths))
            }
        };
        Ok(Self {
            entries,
            lengths,
            values,
        })
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Returns true if there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Returns the values on `device`: `[B, width]` or `[B, width, K]`, padded with 0 to responses
    /// with `width` tokens.
    ///
    /// # Errors
    ///
    /// Fails if a response has more tokens.
    pub fn padded(&self, width: usize, device: &Device) -> Result<Tensor> {
        let mut shape = vec![self.len(), width];
        shape.extend(self.entries);
        let width = shape[1..].iter().product();
        match &self.values {
            Values::F32(values) => pad(values, &self.lengths, width, (&shape, device)),
            Values::U32(values) => pad(values, &self.lengths, width, (&shape, device)),
        }
    }

    /// Selects the sequences with these indices, in this order.
    ///
    /// # Errors
    ///
    /// Fails if one is out of range.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        let lengths = sequences.iter().map(|&at| self.lengths.get(at).copied());
        let lengths: Option<Vec<usize>> = lengths.collect();
        let lengths = lengths
            .with_context(|| format!("sequences: {sequences:?}, must be below {}", self.len()))?;
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let places = sequences
            .iter()
            .map(|&at| ends[at] - self.lengths[at]..ends[at]);
        let values = match &self.values {
            Values::F32(values) => Values::F32(places.flat_map(|at| values[at].to_vec()).collect()),
            Values::U32(values) => Values::U32(places.flat_map(|at| values[at].to_vec()).collect()),
        };
        Ok(Self {
            entries: self.entries,
            lengths,
            values,
        })
    }

    /// Concatenates columns with the same kind of values.
    ///
    /// # Errors
    ///
    /// Fails if there are none, or if their kinds differ.
    pub fn concat(columns: impl IntoIterator<Item = Self>) -> Result<Self> {
        let mut columns = columns.into_iter();
        let mut all = columns
            .next()
            .context("columns: none, must be at least one")?;
        for more in columns {
            match (&mut all.values, more.values) {
                (Values::F32(all), Values::F32(more)) => all.extend(more),
                (Values::U32(all), Values::U32(more)) => all.extend(more),
                _ => anyhow::bail!("columns: have several dtypes, must have one"),
            }
            ensure!(
                all.entries == more.entries,
                "columns: {} values per token after {}, must be as many",
                more.entries.unwrap_or(1),
                all.entries.unwrap_or(1)
            );
            all.lengths.extend(more.lengths);
        }
        Ok(all)
    }
}

/// Returns the first values in each row of `width`.
fn cut<T: Copy>(values: &[T], width: usize, lengths: &[usize]) -> Vec<T> {
    let rows = values.chunks(width.max(1)).zip(lengths);
    rows.flat_map(|(row, &length)| row[..length].to_vec())
        .collect()
}

/// Pads rows with `lengths` values to `width`.
fn pad<T: WithDType>(
    values: &[T],
    lengths: &[usize],
    width: usize,
    (shape, device): (&[usize], &Device),
) -> Result<Tensor> {
    let mut cells = vec![T::zero(); lengths.len() * width];
    let mut start = 0;
    for (sequence, (&length, row)) in lengths
        .iter()
        .zip(cells.chunks_mut(width.max(1)))
        .enumerate()
    {
        ensure!(
            length <= width,
            "sequence {sequence}: {length} values, must be at most {width}"
        );
        row[..length].copy_from_slice(&values[start..start + length]);
        start += length;
    }
    Ok(Tensor::from_vec(cells, shape, device)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::message;

    #[test]
    fn a_column_survives_the_way_to_the_device_and_back_in_its_dtype() {
        // f32 cannot represent this number.
        let ids = vec![vec![16_777_217u32, 2, 3, 4], vec![5, 6]];
        let column = Column::entries_per_token(ids, 2);
        let tensor = column.padded(3, &Device::Cpu).unwrap();
        assert_eq!(
            tensor.to_vec3::<u32>().unwrap(),
            [[[16_777_217, 2], [3, 4], [0, 0]], [[5, 6], [0, 0], [0, 0]]]
        );
        assert_eq!(Column::from_tensor(&tensor, &[2, 1]).unwrap(), column);
    }

    #[test]
    fn columns_are_selected_and_concatenated() {
        let column = |rows: &[&[f32]]| {
            Column::per_token(rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>())
        };
        let all = column(&[&[1., 2.], &[], &[3.]]);
        assert_eq!(
            all.select(&[2, 0, 2]).unwrap(),
            column(&[&[3.], &[1., 2.], &[3.]])
        );
        assert_eq!(message(all.select(&[3])), "sequences: [3], must be below 3");
        let parts = [column(&[&[1., 2.], &[]]), column(&[&[3.]])];
        assert_eq!(Column::concat(parts).unwrap(), all);
        let others = [column(&[&[1.]]), Column::per_token(vec![vec![1u32]])];
        assert_eq!(
            message(Column::concat(others)),
            "columns: have several dtypes, must have one"
        );
        assert_eq!(
            message(all.padded(1, &Device::Cpu)),
            "sequence 0: 2 values, must be at most 1"
        );
    }
}
