//! Weight copies in another dtype.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, TensorId, Var, bail};

/// Copies of f32 or f64 variables in another dtype, for a model that computes in it.
///
/// On a GPU, bf16 is faster and needs half the memory, but it would lose small updates, which the
/// variables keep. [`Self::refresh`] writes updates into the existing copies, so models built from
/// them see the change.
///
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};
///
/// # fn main() -> Result<()> {
/// # let model = DecoderConfig { vocab_size: 11, hidden_size: 8, intermediate_size: 16,
/// #     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
/// #     max_position_embeddings: 8, tie_word_embeddings: true, ..DecoderConfig::default() };
/// let parameters = Parameters::init(&model, 7, &Device::Cpu)?;
/// let (vb, copies) = parameters.copied_var_builder(DType::BF16)?;
/// let decoder = Decoder::new(&model, vb)?;
/// assert_eq!(decoder.output_weight().dtype(), DType::BF16);
///
/// let embedding = parameters.get("model.embed_tokens.weight").expect("every model has one");
/// embedding.set(&embedding.ones_like()?)?; // an update
/// copies.refresh()?;
/// assert_eq!(decoder.output_weight().to_dtype(DType::F32)?.min_all()?.to_scalar::<f32>()?, 1.);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct ComputeCopies {
    /// Variables and their copies, keyed by variable id.
    pairs: HashMap<TensorId, (Var, Var)>,
}

impl ComputeCopies {
    /// Returns `variable` in `dtype`. [`Self::refresh`] updates copies; see [`value_in`] for what
    /// is shared instead.
    pub(crate) fn add(&mut self, variable: &Var, dtype: DType) -> Result<Tensor> {
        let value = value_in(variable, dtype)?;
        if !trains(variable) {
            return Ok(value);
        }
        let copy = Var::from_tensor(&value)?;
        let tensor = copy.as_detached_tensor();
        self.pairs.insert(variable.id(), (variable.clone(), copy));
        Ok(tensor)
    }

    /// Copies the variables' current values.
    pub fn refresh(&self) -> Result<()> {
        self.pairs
            .values()
            .try_for_each(|(variable, copy)| refresh(variable, copy))
    }

    /// Like [`Self::refresh`], for the copies that [`Self::rounded`] does not return.
    pub(crate) fn refresh_others(&self) -> Result<()> {
        self.pairs
            .values()
            .filter(|(variable, copy)| !is_rounded(variable, copy))
            .try_for_each(|(variable, copy)| refresh(variable, copy))
    }

    /// Returns the bf16 or f16 copy of `variable`, if it is f32 and has one.
    pub(crate) fn rounded(&self, variable: &Var) -> Option<&Var> {
        let (_, copy) = self.pairs.get(&variable.id())?;
        is_rounded(variable, copy).then_some(copy)
    }
}

/// Returns whether `variable` may be updated. Otherwise it is frozen.
fn trains(variable: &Var) -> bool {
    matches!(variable.dtype(), DType::F32 | DType::F64)
}

/// Returns whether an optimizer step writes `copy` along with `variable`, its f32 master.
fn is_rounded(variable: &Var, copy: &Var) -> bool {
    variable.dtype() == DType::F32 && copy.dtype() != DType::F32
}

fn refresh(variable: &Var, copy: &Var) -> Result<()> {
    if variable.elem_count() == 0 {
        return Ok(());
    }
    let now = variable.as_detached_tensor().to_dtype(copy.dtype())?;
    let flat = copy.as_detached_tensor().flatten_all()?;
    flat.slice_set(&now.flatten_all()?, 0, 0)
}

/// Checks that weights can have copies in `dtype`.
pub(crate) fn ensure_copy_dtype(dtype: DType) -> Result<()> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        bail!("dtype: {dtype:?}, must be F32, BF16 or F16");
    }
    Ok(())
}

/// The detached value in `dtype`. If a frozen variable already has this dtype, the memory is
/// shared.
pub(crate) fn value_in(variable: &Var, dtype: DType) -> Result<Tensor> {
    ensure_copy_dtype(dtype)?;
    let value = variable.as_detached_tensor();
    match variable.dtype() {
        // Quantized blocks.
        DType::U8 => Ok(value),
        DType::F32 if dtype == DType::F32 => value.copy(),
        own if own == dtype => Ok(value),
        _ => value.to_dtype(dtype),
    }
}
