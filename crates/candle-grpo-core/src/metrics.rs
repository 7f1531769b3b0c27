//! Metrics as sums and counts, so that they merge without bias over micro-batches and workers.

use std::collections::{BTreeMap, HashMap, hash_map};

use candle_core::{DType, Device, Result, Tensor, TensorId, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::statistics_dtype;
use crate::mask::Mask;

/// Reduction of a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Mean.
    Mean,
    /// Maximum.
    Max,
    /// Minimum.
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
    kind: MetricKind,
    value: Value,
}

#[derive(Debug, Clone)]
enum Value {
    /// A mean's sum, or a maximum or minimum, and the count.
    Reduced([Number; 2]),
    /// Values `[B, T]`, counted where the mask is 1.
    Masked(Tensor, Mask),
}

/// A number in a tensor `[n]`, and its index there.
type Number = (Tensor, usize);

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
            kind: MetricKind::Mean,
            value: Value::Reduced([(scalar(sum)?, 0), (scalar(count)?, 0)]),
        });
        Ok(())
    }

    /// Adds metrics from `numbers` `[n]`, which an operator has already reduced. Each metric has a
    /// name, a kind and an index: there is a mean's sum, or a maximum or minimum. The number of
    /// values is at the index `count`.
    ///
    /// # Errors
    ///
    /// Fails if `numbers` has another rank, or if an index is out of range.
    pub fn push_reduced(
        &mut self,
        numbers: &Tensor,
        count: usize,
        metrics: &[(&str, MetricKind, usize)],
    ) -> Result<()> {
        let numbers = numbers.detach();
        let numbers = numbers.to_dtype(statistics_dtype(numbers.device()))?;
        let n = numbers.dims1()?;
        for &(name, kind, index) in metrics {
            if index >= n || count >= n {
                bail!("metric {name}: indices {index} and {count}, must be below {n}");
            }
            self.entries.push(Entry {
                name: name.to_owned(),
                kind,
                value: Value::Reduced([index, count].map(|index| (numbers.clone(), index))),
            });
        }
        Ok(())
    }

    /// Adds the mean of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_mean(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, MetricKind::Mean, values, mask)
    }

    /// Adds the maximum of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_max(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, MetricKind::Max, values, mask)
    }

    /// Adds the minimum of `values` `[B, T]` over the mask.
    ///
    /// # Errors
    ///
    /// Fails if the values' shape or device differs from the mask's.
    pub fn push_masked_min(&mut self, name: &str, values: &Tensor, mask: &Mask) -> Result<()> {
        self.push_masked(name, MetricKind::Min, values, mask)
    }

    fn push_masked(
        &mut self,
        name: &str,
        kind: MetricKind,
        values: &Tensor,
        mask: &Mask,
    ) -> Result<()> {
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
        let (numbers, places) = self.reduced()?;
        // Widened on the host: not every device has f64.
        let numbers = Tensor::cat(&numbers, 0)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        for (entry, [value, count]) in self.entries.iter().zip(places) {
            let (value, count) = (numbers[value], numbers[count]);
            let value = match entry.kind {
                MetricKind::Mean => MetricValue::Mean { sum: value, count },
                MetricKind::Max => MetricValue::Max(value),
                MetricKind::Min => MetricValue::Min(value),
            };
            values.add(&entry.name, value)?;
        }
        Ok(values)
    }

    /// Returns tensors `[n]`, and the place of each entry's value and count in all of them, one
    /// after the other. Entries with the same kind and mask are reduced together, because a GPU
    /// needs the same time for one small tensor as for twenty.
    fn reduced(&self) -> Result<(Vec<Tensor>, Vec<[usize; 2]>)> {
        let mut numbers = Numbers::default();
        let mut groups: Vec<Group> = Vec::new();
        let mut places = vec![[0; 2]; self.entries.len()];
        for (index, entry) in self.entries.iter().enumerate() {
            match &entry.value {
                Value::Reduced(pair) => {
                    places[index] = pair.each_ref().map(|(tensor, at)| numbers.add(tensor) + at);
                }
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
        let mut counts: HashMap<TensorId, usize> = HashMap::new();
        for group in groups {
            let selected = group.mask.selected();
            let count = match counts.entry(selected.id()) {
                hash_map::Entry::Occupied(place) => *place.get(),
                hash_map::Entry::Vacant(place) => {
                    let count = group.mask.count(statistics_dtype(selected.device()))?;
                    *place.insert(numbers.add(&count.reshape(1)?))
                }
            };
            let first = numbers.add(&group.reduce()?);
            for (at, index) in group.indices.into_iter().enumerate() {
                places[index] = [first + at, count];
            }
        }
        Ok((numbers.tensors, places))
    }
}

/// Tensors `[n]`, one after the other.
#[derive(Default)]
struct Numbers {
    tensors: Vec<Tensor>,
    /// The first place of each tensor.
    first: HashMap<TensorId, usize>,
    len: usize,
}

impl Numbers {
    /// Adds a tensor unless it is there. Returns its first place.
    fn add(&mut self, tensor: &Tensor) -> usize {
        *self.first.entry(tensor.id()).or_insert_with(|| {
            let first = self.len;
            self.len += tensor.elem_count();
            self.tensors.push(tensor.clone());
            first
        })
    }
}

/// Entries that are reduced together.
struct Group<'a> {
    kind: MetricKind,
    mask: &'a Mask,
    /// The entries' places.
    indices: Vec<usize>,
    /// `[B, T]` each, all with the same dtype.
    values: Vec<&'a Tensor>,
}

impl Group<'_> {
    fn takes(&self, kind: MetricKind, values: &Tensor, mask: &Mask) -> bool {
        self.kind == kind
            && self.mask.selected().id() == mask.selected().id()
            && self.values.iter().all(|x| x.dtype() == values.dtype())
    }

    /// Returns each entry's sum, maximum or minimum over the mask, in the statistics dtype:
    /// `[entries]`.
    fn reduce(&self) -> Result<Tensor> {
        let stacked = Tensor::stack(&self.values, 0)?;
        let outside = match self.kind {
            MetricKind::Mean => 0.,
            MetricKind::Max => f64::NEG_INFINITY,
            MetricKind::Min => f64::INFINITY,
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
            MetricKind::Mean => inside.to_dtype(dtype)?.sum(1),
            MetricKind::Max => inside.max(1)?.to_dtype(dtype),
            MetricKind::Min => inside.min(1)?.to_dtype(dtype),
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
