//! Weights that files may store as one tensor.

use std::collections::HashMap;

use candle_core::{Result, Tensor, bail};

use crate::DecoderConfig;
use crate::config::stack::Part;
use crate::weights::safetensors::TensorHeader;

/// A tensor, or its place in a file.
pub(crate) trait Entry: Sized {
    fn dims(&self) -> &[usize];

    /// The entry for a part.
    fn part(&self, part: &Part) -> Result<Self>;
}

impl Entry for Tensor {
    fn dims(&self) -> &[usize] {
        self.dims()
    }

    fn part(&self, part: &Part) -> Result<Self> {
        let matrix = self.get(part.index)?;
        matrix.narrow(0, part.rows.start, part.rows.len())
    }
}

impl Entry for TensorHeader {
    fn dims(&self) -> &[usize] {
        &self.shape
    }

    fn part(&self, part: &Part) -> Result<Self> {
        let columns = self.shape.last().copied().unwrap_or(0);
        Ok(self.with_shape(vec![part.rows.len(), columns]))
    }
}

/// Replaces stacks for `config` in `entries` with their parts.
///
/// # Errors
///
/// If a stack has a different shape.
pub(crate) fn split<T: Entry>(
    config: &DecoderConfig,
    entries: &mut HashMap<String, T>,
) -> Result<()> {
    for stack in (config.model_type.family().stacks)(config) {
        let Some(whole) = entries.remove(&stack.name) else {
            continue;
        };
        if whole.dims() != stack.shape {
            bail!(
                "tensor {}: shape {:?}, must be {:?}",
                stack.name,
                whole.dims(),
                stack.shape
            );
        }
        for part in &stack.parts {
            entries.insert(part.name.clone(), whole.part(part)?);
        }
    }
    Ok(())
}
