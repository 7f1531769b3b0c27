//! Linear maps, with an optional bias and low-rank adapter.

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_kernels::{add_bias, add_matmul, linear_rows, matmul};
use candle_nn::VarBuilder;

use crate::config::architecture::{MapPlan, MapsPlan};
use crate::decoding::PackedWeights;
use crate::model::frozen_linear::{linear, tiles};
use crate::model::named_weight::NamedWeight;
use crate::model::pass::Pass;
use crate::optim::grad_sink::GradSink;

/// `y = x w^T + bias + scaling * x a^T b^T` for flat rows.
///
/// Rows are flat because a matmul with a batch dimension broadcasts the weight and its gradient
/// once per batch row.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    weight: NamedWeight,
    bias: Option<NamedWeight>,
    /// One entry, or one for each decoder in a joined one.
    adapters: Vec<Option<Adapter>>,
}

/// A low-rank adapter.
#[derive(Debug, Clone)]
struct Adapter {
    /// `[rank, inputs]`
    a: NamedWeight,
    /// `[outputs, rank]`
    b: NamedWeight,
    scaling: f64,
}

/// Name of an adapter's first matrix in a builder, next to `weight`.
pub(crate) const LORA_A: &str = "lora_A.weight";
/// Name of its second matrix.
pub(crate) const LORA_B: &str = "lora_B.weight";
/// Name of its scalar factor.
pub(crate) const LORA_SCALING: &str = "lora_scaling";

/// The purpose of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Products<'a> {
    /// With a gradient.
    Training,
    /// Without a gradient, for several weights in one call. Weight copies may be available.
    Decoding(Option<&'a PackedWeights>),
}

impl Products<'_> {
    /// `x w^T` for each of `weights`.
    pub(crate) fn compute(self, x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
        match self {
            Self::Training => weights.iter().map(|weight| linear(x, weight)).collect(),
            Self::Decoding(Some(packed)) => packed.linear_rows(&x.detach(), weights),
            Self::Decoding(None) => {
                let weights: Vec<_> = weights.iter().map(|weight| weight.detach()).collect();
                linear_rows(&x.detach(), &weights.iter().collect::<Vec<_>>())
            }
        }
    }

    pub(crate) fn have_gradients(self) -> bool {
        matches!(self, Self::Training)
    }
}

impl Linear {
    /// Reads the weight, the optional bias and the optional adapter from `vb`, the block's builder.
    pub(crate) fn new(plan: &MapPlan, vb: &VarBuilder) -> Result<Self> {
        let &MapPlan {
            inputs,
            outputs,
            bias,
            ..
        } = plan;
        let vb = vb.pp(&plan.name);
        Ok(Self {
            weight: NamedWeight::map(&vb, (outputs, inputs))?,
            bias: bias
                .then(|| NamedWeight::get(&vb, outputs, "bias"))
                .transpose()?,
            adapters: vec![
                vb.contains_tensor(LORA_A)
                    .then(|| Adapter::new(inputs, outputs, &vb))
                    .transpose()?,
            ],
        })
    }

    /// The weight without a graph, if the map has no bias and no adapters, and the weight is
    /// contiguous and not quantized.
    pub(crate) fn plain_weight(&self) -> Option<Tensor> {
        let weight = &self.weight.tensor;
        let is_plain = self.bias.is_none()
            && self.adapters.iter().all(Option::is_none)
            && weight.dtype().is_float()
            && weight.is_contiguous();
        is_plain.then(|| weight.detach())
    }

    /// Adds the adapters of a map with the same weight.
    pub(crate) fn join(&mut self, other: Self) -> Result<()> {
        let name = &self.weight.name;
        if !shares_memory(&self.weight.tensor, &other.weight.tensor) {
            bail!("{name}: another tensor, must be that of the first decoder");
        }
        self.adapters.extend(other.adapters);
        Ok(())
    }

    /// Maps `[N, inputs]` to `[N, outputs]`.
    pub(crate) fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let [y] = Self::forward_all([self], x, pass)?;
        Ok(y)
    }

    /// Like [`Self::forward`], for several maps with the same input rows.
    fn forward_all<const M: usize>(
        maps: [&Self; M],
        x: &Tensor,
        pass: &Pass,
    ) -> Result<[Tensor; M]> {
        let products = pass.products();
        let mut results = products.compute(x, &maps.map(|map| &map.weight.tensor))?;
        Self::add_biases(maps, &mut results, products)?;
        for (map, y) in maps.iter().zip(&mut results) {
            if let Some(adapted) = map.adapted(x, y, pass)? {
                *y = adapted;
            }
            if !products.have_gradients() {
                *y = y.detach();
            }
        }
        array(results)
    }

    /// Returns `y` with the change by the adapters to each row. `None` without adapters.
    fn adapted(&self, x: &Tensor, y: &Tensor, pass: &Pass) -> Result<Option<Tensor>> {
        if self.adapters.iter().all(Option::is_none) {
            return Ok(None);
        }
        let adapted = |at: usize, x: &Tensor, y: Tensor| match self.adapters.get(at) {
            Some(Some(adapter)) => adapter.add(x, y, pass.products()),
            Some(None) => Ok(y),
            None => bail!("adapters: {at}, must be below {}", self.adapters.len()),
        };
        if pass.adapters.is_empty() {
            return adapted(0, x, y.clone()).map(Some);
        }
        let parts = pass.adapters.iter();
        let parts = parts.map(|part| adapted(part.adapter, &part.of(x)?, part.of(y)?));
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0).map(Some)
    }

    /// Adds each map's bias, if any, to its output.
    fn add_biases<const M: usize>(
        maps: [&Self; M],
        results: &mut [Tensor],
        products: Products,
    ) -> Result<()> {
        let biases = maps.iter().zip(&mut *results);
        let (biased, biases): (Vec<_>, Vec<_>) = biases
            .filter_map(|(map, y)| {
                let bias = &map.bias.as_ref()?.tensor;
                Some(match products {
                    Products::Training => (y, bias.clone()),
                    Products::Decoding(_) => (y, bias.detach()),
                })
            })
            .unzip();
        let pairs: Vec<_> = biased.iter().map(|y| &**y).zip(&biases).collect();
        let sums = add_bias(&pairs)?;
        for (y, sum) in biased.into_iter().zip(sums) {
            *y = sum;
        }
        Ok(())
    }

    /// Returns the gradient with respect to `x`, plus `sum`, the part from other maps, given the
    /// output `gradient`. May reuse the memory of `sum`.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sum: Option<Tensor>,
        (pass, sink): (&Pass, &mut GradSink),
    ) -> Result<Tensor> {
        sink.add_product(&self.weight, &gradient.t()?, x)?;
        if let Some(bias) = &self.bias {
            sink.add_bias(bias, gradient)?;
        }
        let mut x_gradient = sum;
        for (rows, weight) in tiles(&self.weight.tensor, x.dtype()) {
            let gradient = gradient.narrow(1, rows.start, rows.len())?;
            x_gradient = Some(plus_product(x_gradient, &gradient, &weight?)?);
        }
        let x_gradient = x_gradient.map_or_else(|| x.zeros_like(), Ok)?;
        if self.adapters.iter().all(Option::is_none) {
            return Ok(x_gradient);
        }
        let mut backward =
            |at: usize, x: &Tensor, gradient: &Tensor, sum: Tensor| match self.adapters.get(at) {
                Some(Some(adapter)) => adapter.backward(x, gradient, sum, sink.of_adapter(at)?),
                _ => Ok(sum),
            };
        if pass.adapters.is_empty() {
            return backward(0, x, gradient, x_gradient);
        }
        let parts = pass.adapters.iter().map(|part| {
            let [x, gradient, sum] = [x, gradient, &x_gradient].map(|all| part.of(all));
            backward(part.adapter, &x?, &gradient?, sum?)
        });
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
    }
}

/// Several linear maps with the same input.
#[derive(Debug, Clone)]
pub(crate) enum Maps<const M: usize> {
    /// Each map has its own weight.
    Apart([Linear; M]),
    /// One stacked weight.
    Joined {
        map: Linear,
        /// Rows per map.
        widths: [usize; M],
    },
}

impl<const M: usize> Maps<M> {
    /// Reads the weights from `vb`, the block's builder.
    pub(crate) fn new(plan: &MapsPlan<M>, vb: &VarBuilder) -> Result<Self> {
        if let Some(joined) = plan.joined_map() {
            return Ok(Self::Joined {
                map: Linear::new(&joined, vb)?,
                widths: plan.maps.each_ref().map(|map| map.outputs),
            });
        }
        let maps = plan.maps.iter().map(|map| Linear::new(map, vb));
        Ok(Self::Apart(array(maps.collect::<Result<Vec<_>>>()?)?))
    }

    /// Maps `[N, inputs]` to one `[N, outputs]` per map.
    pub(crate) fn forward(&self, x: &Tensor, pass: &Pass) -> Result<[Tensor; M]> {
        let (map, widths) = match self {
            Self::Apart(maps) => return Linear::forward_all(maps.each_ref(), x, pass),
            Self::Joined { map, widths } => (map, widths),
        };
        let all = map.forward(x, pass)?;
        let mut first = 0;
        let parts = widths.iter().map(|&width| {
            let part = all.narrow(1, first, width)?.contiguous();
            first += width;
            part
        });
        array(parts.collect::<Result<Vec<_>>>()?)
    }

    /// The linear maps.
    pub(crate) fn linear(&mut self) -> &mut [Linear] {
        match self {
            Self::Apart(maps) => maps,
            Self::Joined { map, .. } => std::slice::from_mut(map),
        }
    }

    /// Returns the gradient with respect to `x`, given the output gradients.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        gradients: &[Tensor; M],
        (pass, sink): (&Pass, &mut GradSink),
    ) -> Result<Tensor> {
        match self {
            Self::Apart(maps) => {
                let mut sum = None;
                for (map, gradient) in maps.iter().zip(gradients) {
                    sum = Some(map.backward(x, gradient, sum, (pass, &mut *sink))?);
                }
                sum.map_or_else(|| x.zeros_like(), Ok)
            }
            Self::Joined { map, .. } => {
                map.backward(x, &Tensor::cat(gradients, 1)?, None, (pass, sink))
            }
        }
    }
}

fn array<T, const M: usize>(items: Vec<T>) -> Result<[T; M]> {
    match items.try_into() {
        Ok(items) => Ok(items),
        Err(items) => bail!("{} results of {M} maps", items.len()),
    }
}

impl Adapter {
    fn new(inputs: usize, outputs: usize, vb: &VarBuilder) -> Result<Self> {
        let weight =
            |name| Ok::<_, candle_core::Error>(NamedWeight::new(vb, vb.get_unchecked(name)?, name));
        let (a, b) = (weight(LORA_A)?, weight(LORA_B)?);
        match (a.tensor.dims(), b.tensor.dims()) {
            (&[rank, i], &[o, r]) if rank == r && (i, o) == (inputs, outputs) => {}
            _ => bail!(
                "{LORA_A} and {LORA_B}: shapes {:?} and {:?}, must be [rank, {inputs}] and [{outputs}, rank]",
                a.tensor.dims(),
                b.tensor.dims()
            ),
        }
        let scaling = vb.get_unchecked_dtype(LORA_SCALING, DType::F64)?;
        Ok(Self {
            a,
            b,
            scaling: scaling.to_scalar::<f64>()?,
        })
    }

    /// Returns `y` with the adapter's change to the rows.
    fn add(&self, x: &Tensor, y: Tensor, products: Products) -> Result<Tensor> {
        let inner = products.compute(x, &[&self.a.tensor])?;
        let change = products.compute(&inner[0], &[&self.b.tensor])?;
        y + (&change[0] * self.scaling)?
    }

    /// See [`Linear::backward`].
    fn backward(
        &self,
        x: &Tensor,
        gradient: &Tensor,
        sum: Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let gradient = (gradient * self.scaling)?;
        let inner = linear(x, &self.a.tensor)?;
        sink.add_product(&self.b, &gradient.t()?, &inner)?;
        let inner_gradient = matmul(&gradient, &self.b.tensor)?;
        sink.add_product(&self.a, &inner_gradient.t()?, x)?;
        plus_product(Some(sum), &inner_gradient, &self.a.tensor)
    }
}

/// Returns whether two tensors are the same numbers in memory.
pub(crate) fn shares_memory(a: &Tensor, b: &Tensor) -> bool {
    let place = |x: &Tensor| {
        let (storage, layout) = x.storage_and_layout();
        (std::ptr::from_ref(&*storage) as usize, layout.clone())
    };
    a.dtype() == b.dtype() && place(a) == place(b)
}

/// Computes `sum + a b`, in place.
fn plus_product(sum: Option<Tensor>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let Some(sum) = sum else {
        return matmul(a, b);
    };
    add_matmul(&sum, a, b)?;
    Ok(sum)
}
