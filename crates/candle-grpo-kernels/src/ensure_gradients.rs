//! Checks that a backward pass has reached every variable.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var, bail};

/// Checks that every named variable has received a gradient. The error lists the names without one.
///
/// An operator without a backward pass, such as `candle_nn::ops::rms_norm` or
/// `candle_nn::rotary_emb::rope`, cuts the graph without an error: variables before it keep their
/// values, and only those after it train. Call this after the backward pass in the first step, or
/// in every step, since it only looks up one entry per variable.
///
/// # Errors
///
/// Fails if a variable has no gradient, because an operator breaks the graph, the log-probs were
/// detached, or the variable is not used.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_grpo_kernels::ensure_gradients;
///
/// let norm = Var::new(&[1f32, 1.], &Device::Cpu)?;
/// let output = Var::new(&[2f32, 3.], &Device::Cpu)?;
/// // Like an operator without a backward pass.
/// let hidden = norm.sqr()?.detach();
/// let gradients = (hidden * output.as_tensor())?.sum_all()?.backward()?;
/// let variables = [("norm.weight", &norm), ("output.weight", &output)];
/// let error = ensure_gradients(&gradients, variables).unwrap_err().to_string();
/// assert!(error.starts_with("1 of 2 variables received no gradient from the loss: norm.weight"));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn ensure_gradients<'a, N: AsRef<str>>(
    gradients: &GradStore,
    variables: impl IntoIterator<Item = (N, &'a Var)>,
) -> Result<()> {
    let variables = variables.into_iter();
    ensure_reached(variables.map(|(name, variable)| (name, gradients.get(variable).is_some())))
}

/// Like [`ensure_gradients`], given each name and whether it has a gradient.
#[doc(hidden)]
pub fn ensure_reached<N: AsRef<str>>(variables: impl Iterator<Item = (N, bool)>) -> Result<()> {
    let (mut of, mut missing) = (0, Vec::new());
    for (name, reached) in variables {
        of += 1;
        if !reached {
            missing.push(name.as_ref().to_owned());
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    missing.sort();
    bail!(
        "{} of {of} variables received no gradient from the loss: {}",
        missing.len(),
        missing.join(", ")
    );
}
