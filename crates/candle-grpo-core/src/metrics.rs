//! Metrics as sums and counts, so that they merge without bias over micro-batches and workers.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::statistics_dtype;
use crate::mask::Mask;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mean,
    Max,
    Min,
}

/// Metrics on the device. [`Metrics::to_host`] reduces and transfers them in one go, so a step
/// synchronizes once.
///
/// Until then, masked metrics hold their values `[B, T]`. Do not change those in place.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    name: String,
    kind: Kind,
    value: Value,
    /// `[1]`.
    count: Tensor,
}

#[derive(Debug, Clone)]
enum Value {
    /// A mean's sum, or a maximum or minimum: `[1]`.
    Scalar(Tensor),
    /// Values `[B, T]`, counted where the mask is 1.
    Masked(Tensor, Mask),
}

impl Metrics {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a mean: the scalar `sum` over the scalar `count`.
    ///
    /// # Errors
    ///
    /// Fails if `sum` or `count` is not a scalar.
    pub fn push_mean(&mut self, name: &str, sum: &Tensor, count: &Tensor) -> Result<()> {
        if sum.elem_count() != 1 || count.elem_count() != 1 {
            bail!(
                "metric {name}: shapes {:?} and {:?}, must be scalars",
                sum.dims(),
                count.dims()
            );
        }
        let dtype = statistics_dtype(sum.device());
        let scalar = |x: &Tensor| x.detach().to_dtype(dtype)?.reshape(1);
        self.entries.push(Entry {
            name: name.to_owned(),
            kind: Kind::Mean,
            value: Value::Scalar(scalar(sum)?),
            count: scalar(count)?,
        });
        Ok(())
    }

    /// Adds the mean of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_mean(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, Kind::Mean, values, mask)
    }

    /// Adds the maximum of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_max(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, Kind::Max, values, mask)
    }

    /// Adds the minimum of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_min(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, Kind::Min, values, mask)
    }

    fn push_masked(&mut self, name: &str, kind: Kind, values: &Tensor, mask: &Mask) -> Result<()> {
        mask.check(&format!("metric {name}"), values)?;
        // A variable may change before the reduction.
        let values = if values.is_variable() {
            values.copy()?.detach()
        } else {
            values.detach()
        };
        self.entries.push(Entry {
            name: name.to_owned(),
            kind,
            value: Value::Masked(values, mask.clone()),
            count: mask
                .count(statistics_dtype(mask.selected().device()))?
                .reshape(1)?,
        });
        Ok(())
    }

    /// Adds the metrics in `other`, for example from another micro-batch. [`Metrics::to_host`]
    /// merges metrics with the same name.
    pub fn extend(&mut self, other: Metrics) {
        self.entries.extend(other.entries);
    }

    /// Appends `/` and `suffix` to all names.
    #[must_use]
    pub fn with_suffix(mut self, suffix: &str) -> Self {
        for entry in &mut self.entries {
            entry.name += &format!("/{suffix}");
        }
        self
    }

    /// Copies all metrics to the host in one transfer. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if two metrics with the same name have different kinds.
    pub fn to_host(&self) -> Result<MetricValues> {
        let mut values = MetricValues::default();
        if self.entries.is_empty() {
            return Ok(values);
        }
        let reduced = self.reduced()?;
        let scalars: Vec<&Tensor> = reduced
            .iter()
            .zip(&self.entries)
            .flat_map(|(value, entry)| [value, &entry.count])
            .collect();
        // Widened on the host: not every device has f64.
        let numbers = Tensor::cat(&scalars, 0)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        for (entry, pair) in self.entries.iter().zip(numbers.chunks_exact(2)) {
            let (value, count) = (pair[0], pair[1]);
            let value = match entry.kind {
                Kind::Mean => MetricValue::Mean { sum: value, count },
                Kind::Max => MetricValue::Max(value),
                Kind::Min => MetricValue::Min(value),
            };
            values.add(&entry.name, value)?;
        }
        Ok(values)
    }

    /// Returns each entry's value as `[1]`. Entries with the same kind and mask are reduced
    /// together, because a GPU needs the same time for one small tensor as for twenty.
    fn reduced(&self) -> Result<Vec<Tensor>> {
        let mut groups: Vec<Group> = Vec::new();
        let mut reduced = vec![None; self.entries.len()];
        for (index, entry) in self.entries.iter().enumerate() {
            match &entry.value {
                Value::Scalar(value) => reduced[index] = Some(value.clone()),
                Value::Masked(values, mask) => {
                    let found = groups
                        .iter_mut()
                        .find(|group| group.takes(entry.kind, values, mask));
                    match found {
                        Some(group) => {
                            group.indices.push(index);
                            group.values.push(values);
                        }
                        None => groups.push(Group {
                            kind: entry.kind,
                            mask,
                            indices: vec![index],
                            values: vec![values],
                        }),
                    }
                }
            }
        }
        for group in groups {
            let all = group.reduce()?;
            for (at, index) in group.indices.into_iter().enumerate() {
                reduced[index] = Some(all.narrow(0, at, 1)?);
            }
        }
        let reduced: Option<Vec<Tensor>> = reduced.into_iter().collect();
        reduced.ok_or_else(|| candle_core::Error::Msg("a metric was not reduced".to_owned()))
    }
}

/// Entries that are reduced together.
struct Group<'a> {
    kind: Kind,
    mask: &'a Mask,
    /// The entries' places.
    indices: Vec<usize>,
    /// `[B, T]` each, all with the same dtype.
    values: Vec<&'a Tensor>,
}

impl Group<'_> {
    fn takes(&self, kind: Kind, values: &Tensor, mask: &Mask) -> bool {
        self.kind == kind
            && self.mask.selected().id() == mask.selected().id()
            && self.values.iter().all(|x| x.dtype() == values.dtype())
    }

    /// Returns each entry's sum, maximum or minimum over the mask, in the statistics dtype:
    /// `[entries]`.
    fn reduce(&self) -> Result<Tensor> {
        let stacked = Tensor::stack(&self.values, 0)?;
        let outside = match self.kind {
            Kind::Mean => 0.,
            Kind::Max => f64::NEG_INFINITY,
            Kind::Min => f64::INFINITY,
        };
        let outside = (stacked.zeros_like()? + outside)?;
        let inside = self
            .mask
            .selected()
            .broadcast_as(stacked.shape())?
            .where_cond(&stacked, &outside)?
            .flatten_from(1)?;
        let dtype = statistics_dtype(stacked.device());
        match self.kind {
            Kind::Mean => inside.to_dtype(dtype)?.sum(1),
            Kind::Max => inside.max(1)?.to_dtype(dtype),
            Kind::Min => inside.min(1)?.to_dtype(dtype),
        }
    }
}

/// One metric on the host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MetricValue {
    /// A mean, as its sum and count.
    Mean {
        /// Sum.
        sum: f64,
        /// Count.
        count: f64,
    },
    /// A maximum.
    Max(f64),
    /// A minimum.
    Min(f64),
}

impl MetricValue {
    /// Returns the value, or `None` if there were no entries.
    pub fn value(&self) -> Option<f64> {
        match *self {
            Self::Mean { sum, count } => (count != 0.).then(|| sum / count),
            Self::Max(x) => (x != f64::NEG_INFINITY).then_some(x),
            Self::Min(x) => (x != f64::INFINITY).then_some(x),
        }
    }

    fn merged(self, other: Self) -> Option<Self> {
        Some(match (self, other) {
            (Self::Mean { sum: a, count: n }, Self::Mean { sum: b, count: m }) => Self::Mean {
                sum: a + b,
                count: n + m,
            },
            (Self::Max(a), Self::Max(b)) => Self::Max(a.max(b)),
            (Self::Min(a), Self::Min(b)) => Self::Min(a.min(b)),
            _ => return None,
        })
    }
}

/// Metrics on the host, by name. When you merge them over micro-batches, steps or workers, they
/// equal one batch's metrics.
///
/// ```
/// use candle_grpo_core::{MetricValue, MetricValues};
///
/// let mut a = MetricValues::default();
/// a.insert("entropy", MetricValue::Mean { sum: 3., count: 2. });
/// let mut b = MetricValues::default();
/// b.insert("entropy", MetricValue::Mean { sum: 1., count: 6. });
/// a.merge(&b)?;
/// assert_eq!(a.get("entropy"), Some(0.5)); // not the mean of the means
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MetricValues(BTreeMap<String, MetricValue>);

impl MetricValues {
    /// Sets a metric.
    pub fn insert(&mut self, name: &str, value: MetricValue) {
        self.0.insert(name.to_owned(), value);
    }

    /// Returns the value of a metric, or `None` if there is no such metric or it has no entries.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(MetricValue::value)
    }

    /// Merges metrics from another micro-batch or worker.
    ///
    /// # Errors
    ///
    /// Fails if two metrics with the same name have different kinds.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        for (name, &value) in &other.0 {
            self.add(name, value)?;
        }
        Ok(())
    }

    /// Merges one metric with the existing one, if there is one.
    fn add(&mut self, name: &str, value: MetricValue) -> Result<()> {
        let merged = match self.0.get(name) {
            None => value,
            Some(&mine) => match mine.merged(value) {
                Some(merged) => merged,
                None => bail!("metric {name}: {mine:?} and {value:?} are of different kinds"),
            },
        };
        self.0.insert(name.to_owned(), merged);
        Ok(())
    }

    /// Iterates over names and values, sorted by name. Skips metrics that have no entries.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0
            .iter()
            .filter_map(|(name, value)| Some((name.as_str(), value.value()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;
    use candle_grpo_test_support::devices;

    #[test]
    fn micro_batches_collected_on_the_device_add_up() -> Result<()> {
        for device in devices() {
            let scalar = |x: f64| Tensor::new(x, device);
            let mut all = Metrics::new();
            for (sum, count, largest) in [(3., 2., 5.), (1., 6., 4.)] {
                let mut metrics = Metrics::new();
                metrics.push_mean("entropy", &scalar(sum)?, &scalar(count)?)?;
                let mask = Mask::new(&Tensor::new(&[[1u8]], device)?)?;
                let ratio = Tensor::new(&[[largest]], device)?;
                metrics.push_masked_max("ratio_max", &ratio, &mask)?;
                all.extend(metrics);
            }
            let values = all.to_host()?;
            assert_eq!(values.get("entropy"), Some(0.5));
            assert_eq!(values.get("ratio_max"), Some(5.));
        }
        Ok(())
    }

    #[test]
    fn each_metric_has_its_own_mask_kind_and_dtype() -> Result<()> {
        for device in devices() {
            let mask = |x: [u8; 4]| Mask::new(&Tensor::new(&[x], device)?);
            let (first, last) = (mask([1, 1, 0, 0])?, mask([0, 0, 1, 1])?);
            let values = Tensor::new(&[[1f32, 2., f32::NAN, 6.]], device)?;
            let flags = Tensor::new(&[[1u8, 0, 1, 1]], device)?;
            let mut metrics = Metrics::new();
            metrics.push_masked_mean("mean", &values, &first)?;
            metrics.push_masked_max("max", &values, &first)?;
            metrics.push_masked_min("min", &values, &first)?;
            metrics.push_masked_mean("flags", &flags, &first)?;
            metrics.push_masked_mean("flags_of_last", &flags, &last)?;
            metrics.push_masked_mean("double", &(&values * 2.)?, &first)?;
            let values = metrics.to_host()?;
            for (name, expected) in [
                ("mean", 1.5),
                ("max", 2.),
                ("min", 1.),
                ("flags", 0.5),
                ("flags_of_last", 1.),
                ("double", 3.),
            ] {
                assert_eq!(values.get(name), Some(expected), "{name}");
            }
        }
        Ok(())
    }

    #[test]
    fn a_variable_may_change_after_it_is_added() -> Result<()> {
        for device in devices() {
            let variable = Var::new(&[[1f32, 3.]], device)?;
            let mask = Mask::new(&Tensor::new(&[[1u8, 1]], device)?)?;
            let mut metrics = Metrics::new();
            metrics.push_masked_mean("mean", &variable, &mask)?;
            variable.set(&Tensor::new(&[[5f32, 7.]], device)?)?;
            assert_eq!(metrics.to_host()?.get("mean"), Some(2.));
        }
        Ok(())
    }
}
