//! One case: a safetensors file whose header describes the computation.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Map, Value};

/// The outputs of a case, or the reason why it is skipped.
pub(crate) type Ran = std::result::Result<Outputs, String>;

pub(crate) struct Case {
    pub(crate) op: String,
    pub(crate) variant: String,
    pub(crate) config: Config,
    tensors: HashMap<String, Tensor>,
    /// The device of the tensors.
    pub(crate) device: Device,
    tolerance: Tolerance,
    /// The tolerance of results that are rounded to bf16.
    bf16_tolerance: Option<Tolerance>,
}

/// `|got - expected| <= atol + rtol * |expected|`.
#[derive(Clone, Copy)]
struct Tolerance {
    rtol: f64,
    atol: f64,
}

impl Case {
    pub(crate) fn read(path: &Path, device: &Device) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes)?;
        let metadata = header
            .metadata()
            .as_ref()
            .context("no metadata in the header")?;
        let text = |key: &str| -> Result<&String> {
            metadata
                .get(key)
                .with_context(|| format!("no {key} in the metadata"))
        };
        let tolerance: Value = serde_json::from_str(text("tolerance")?)?;
        let tolerance = |prefix: &str| {
            Some(Tolerance {
                rtol: tolerance[format!("{prefix}rtol")].as_f64()?,
                atol: tolerance[format!("{prefix}atol")].as_f64()?,
            })
        };
        Ok(Self {
            op: text("op")?.clone(),
            variant: text("variant")?.clone(),
            config: Config {
                values: serde_json::from_str(text("config")?)?,
                used: RefCell::default(),
            },
            tolerance: tolerance("").context("no rtol and atol in the tolerance")?,
            bf16_tolerance: tolerance("bf16_"),
            tensors: candle_core::safetensors::load_buffer(&bytes, device)?,
            device: device.clone(),
        })
    }

    /// The input of that name.
    pub(crate) fn input(&self, name: &str) -> Result<Tensor> {
        self.optional(name)
            .with_context(|| format!("no input {name}"))
    }

    pub(crate) fn optional(&self, name: &str) -> Option<Tensor> {
        self.tensors.get(&format!("in.{name}")).cloned()
    }

    /// The input of that name, as a variable.
    pub(crate) fn variable(&self, name: &str) -> Result<Var> {
        Ok(Var::from_tensor(&self.input(name)?)?)
    }

    /// Returns whether an output or gradient of that name (`out.x`, `grad.x`) is expected.
    pub(crate) fn expects(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Fails unless every expected output and gradient is within the tolerance and every option was
    /// read.
    pub(crate) fn compare(&self, outputs: &Outputs) -> Result<()> {
        self.config.check_all_used()?;
        let mut problems = Vec::new();
        let mut names: Vec<&String> = self
            .tensors
            .keys()
            .filter(|n| !n.starts_with("in."))
            .collect();
        names.sort();
        ensure!(!names.is_empty(), "the case expects nothing");
        for name in names {
            match outputs.values.get(name) {
                None => problems.push(format!("{name} was not computed")),
                Some(got) => {
                    if let Err(error) = self.compare_tensor(got, &self.tensors[name]) {
                        problems.push(format!("{name}: {error}"));
                    }
                }
            }
        }
        if !problems.is_empty() {
            bail!("{}", problems.join("; "));
        }
        Ok(())
    }

    fn compare_tensor(&self, got: &Tensor, expected: &Tensor) -> Result<()> {
        ensure!(
            got.dims() == expected.dims(),
            "shape {:?}, expected {:?}",
            got.dims(),
            expected.dims()
        );
        // The gradient of a bf16 tensor is itself rounded to bf16.
        let Tolerance { rtol, atol } = match got.dtype() {
            DType::BF16 => self
                .bf16_tolerance
                .context("a bf16 result without a tolerance")?,
            _ => self.tolerance,
        };
        let numbers = |t: &Tensor| t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let mut worst: Option<(f64, String)> = None;
        for (i, (g, e)) in numbers(got)?
            .into_iter()
            .zip(numbers(expected)?)
            .enumerate()
        {
            let error = (g - e).abs();
            // Equal infinities are equal, and finite numbers are not close to an infinity.
            let within = g == e || (e.is_finite() && error <= atol + rtol * e.abs());
            if !within
                && worst
                    .as_ref()
                    .is_none_or(|(w, _)| error > *w || error.is_nan())
            {
                worst = Some((error, format!("[{i}] is {g}, expected {e}")));
            }
        }
        match worst {
            Some((_, message)) => bail!(message),
            None => Ok(()),
        }
    }
}

/// The options of a case; each of them must be read.
pub(crate) struct Config {
    values: Map<String, Value>,
    used: RefCell<BTreeSet<String>>,
}

impl Config {
    /// Returns the option, or null if there is none.
    pub(crate) fn get(&self, key: &str) -> Value {
        self.used.borrow_mut().insert(key.to_owned());
        self.values.get(key).cloned().unwrap_or(Value::Null)
    }

    /// Marks options as read that do not change the result.
    pub(crate) fn ignore(&self, keys: &[&str]) {
        for key in keys {
            self.get(key);
        }
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64> {
        self.get(key)
            .as_f64()
            .with_context(|| format!("option {key} is not a number"))
    }

    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            Value::Null => Ok(None),
            value => {
                Ok(Some(value.as_f64().with_context(|| {
                    format!("option {key} is not a number")
                })?))
            }
        }
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        let value = self
            .get(key)
            .as_u64()
            .with_context(|| format!("option {key} is not a size"))?;
        Ok(usize::try_from(value)?)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            Value::Null => Ok(false),
            value => value
                .as_bool()
                .with_context(|| format!("option {key} is not true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<String> {
        Ok(self
            .get(key)
            .as_str()
            .with_context(|| format!("option {key} is not a string"))?
            .to_owned())
    }

    pub(crate) fn text_or(&self, key: &str, default: &str) -> Result<String> {
        match self.get(key) {
            Value::Null => Ok(default.to_owned()),
            _ => self.text(key),
        }
    }

    fn check_all_used(&self) -> Result<()> {
        let used = self.used.borrow();
        let unknown: Vec<&String> = self.values.keys().filter(|k| !used.contains(*k)).collect();
        ensure!(unknown.is_empty(), "unknown options {unknown:?}");
        Ok(())
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Value::Object(self.values.clone()))
    }
}

/// The computed tensors, under the names of the case (`out.x`, `grad.x`).
#[derive(Default)]
pub(crate) struct Outputs {
    values: BTreeMap<String, Tensor>,
}

impl Outputs {
    pub(crate) fn out(mut self, name: &str, value: &Tensor) -> Self {
        self.values.insert(format!("out.{name}"), value.clone());
        self
    }

    pub(crate) fn number(self, name: &str, value: f64) -> Result<Self> {
        let value = Tensor::new(value, &Device::Cpu)?;
        Ok(self.out(name, &value))
    }

    /// The gradients of `loss` with respect to the named variables.
    pub(crate) fn gradients(mut self, loss: &Tensor, variables: &[(&str, &Var)]) -> Result<Self> {
        let gradients = loss.backward()?;
        for (name, variable) in variables {
            let gradient = gradients
                .get(variable)
                .with_context(|| format!("{name} received no gradient"))?;
            self = self.gradient(name, gradient);
        }
        Ok(self)
    }

    pub(crate) fn gradient(mut self, name: &str, value: &Tensor) -> Self {
        self.values.insert(format!("grad.{name}"), value.clone());
        self
    }
}
