//! Weights that ranks divide, and gather to compute with them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, InplaceOp1, Layout, MetalStorage, Result,
    Tensor, Var, bail,
};
use candle_grpo_collective::Ticket;

use crate::weights::shard::Shard;

/// The weights that models compute with, of which each rank keeps its part
/// ([`Sharding::Full`](crate::optim::Sharding::Full)).
///
/// A weight has memory for all elements only while it is held. Models share the tensor itself, so
/// they compute with the gathered numbers without a change.
pub(crate) struct DividedWeights {
    shard: Shard,
    weights: Mutex<BTreeMap<String, Weight>>,
    /// True on rank 0 while the other ranks [answer](Self::answer) what it asks for.
    asks: AtomicBool,
    /// Number of times that weights got memory.
    gathers: AtomicU64,
}

/// A weight that ranks divide.
struct Weight {
    /// The weight in a model. Without memory while nobody holds it.
    whole: Tensor,
    /// This rank's part, as [`Shard::keep`] lays it out.
    own: Var,
    /// The number of [`Held`] that name it.
    holders: usize,
    /// The last operation that gathered it.
    gather: Ticket,
}

impl DividedWeights {
    pub(crate) fn new(shard: Shard) -> Self {
        Self {
            shard,
            weights: Mutex::default(),
            asks: AtomicBool::new(false),
            gathers: AtomicU64::new(0),
        }
    }

    /// Adds a weight of which this rank keeps `own`, and frees `whole`.
    pub(crate) fn insert(&self, name: &str, whole: &Var, own: Var) -> Result<()> {
        let whole = whole.as_detached_tensor();
        free(&whole)?;
        let weight = Weight {
            whole,
            own,
            holders: 0,
            gather: Ticket::default(),
        };
        self.lock().insert(name.to_owned(), weight);
        Ok(())
    }

    /// This rank's part of the weight of this name.
    pub(crate) fn own(&self, name: &str) -> Option<Var> {
        self.lock().get(name).map(|weight| weight.own.clone())
    }

    /// The names of all weights, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The bytes of this rank's parts.
    pub(crate) fn num_bytes(&self) -> usize {
        let weights = self.lock();
        let bytes = weights
            .values()
            .map(|Weight { own, .. }| own.elem_count() * own.dtype().size_in_bytes());
        bytes.sum()
    }

    /// Gathers those of these weights that nobody holds. All ranks must call it together, with the
    /// same names.
    ///
    /// # Errors
    ///
    /// If there is no memory, or another rank has ended.
    pub(crate) fn hold(self: &Arc<Self>, names: &Arc<[String]>) -> Result<Held> {
        self.start(names)?.finish()
    }

    /// Starts [`Self::hold`].
    pub(crate) fn start(self: &Arc<Self>, names: &Arc<[String]>) -> Result<Gathering> {
        let mut weights = self.lock();
        let mut to_gather = Vec::new();
        for name in &**names {
            match weights.get(name) {
                Some(weight) if weight.holders == 0 => to_gather.push(name),
                Some(_) => {}
                None => bail!("weights: no {name}, must have it"),
            }
        }
        if self.asks() && !to_gather.is_empty() {
            let index = |name: &&String| weights.keys().position(|other| other == *name);
            let indices = to_gather.iter().filter_map(index);
            self.ask_to_gather(indices.map(|index| index as i64).collect())?;
        }
        let gather = self.gather(to_gather.iter().filter_map(|name| weights.get(*name)))?;
        let mut last = gather;
        for name in &**names {
            if let Some(weight) = weights.get_mut(name) {
                if weight.holders == 0 {
                    weight.gather = gather;
                }
                weight.holders += 1;
                last = last.max(weight.gather);
            }
        }
        Ok(Gathering {
            held: Held {
                weights: Arc::clone(self),
                names: Arc::clone(names),
            },
            last,
        })
    }

    /// Gives these weights memory, and starts to gather them.
    fn gather<'w>(&self, weights: impl Iterator<Item = &'w Weight>) -> Result<Ticket> {
        let parts = weights.map(|weight| (weight.own.as_detached_tensor(), weight.whole.clone()));
        let parts: Vec<_> = parts.collect();
        if !parts.is_empty() {
            self.gathers.fetch_add(1, Ordering::Relaxed);
        }
        let gather = || {
            for (_, whole) in &parts {
                resize(whole, whole.elem_count())?;
            }
            self.shard.start_gather_all(&parts)
        };
        gather().or_else(|error| {
            parts.iter().try_for_each(|(_, whole)| free(whole))?;
            Err(error)
        })
    }

    /// Returns whether weights are gathered by the device, while this thread goes on.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.shard.collective.is_asynchronous()
    }

    /// Returns whether this is rank 0, and the other ranks answer what it asks for.
    pub(crate) fn asks(&self) -> bool {
        self.asks.load(Ordering::SeqCst)
    }

    pub(crate) fn set_asks(&self, asks: bool) {
        self.asks.store(asks, Ordering::SeqCst);
    }

    /// Asks the other ranks to gather the weights with these indices.
    fn ask_to_gather(&self, indices: Vec<i64>) -> Result<()> {
        Request::Gather(indices.len()).exchange(&self.shard)?;
        let count = indices.len();
        let indices = Tensor::from_vec(indices, count, &Device::Cpu)?;
        self.shard.collective.broadcast(&[&indices], 0)
    }

    /// Takes part in [`Self::hold`] on rank 0, which asks for this number of weights.
    pub(crate) fn answer(&self, count: usize) -> Result<()> {
        let indices = Tensor::zeros(count, DType::I64, &Device::Cpu)?;
        self.shard.collective.broadcast(&[&indices], 0)?;
        let weights = self.lock();
        let asked = indices.to_vec1::<i64>()?.into_iter().map(|index| {
            let weight = usize::try_from(index).ok();
            let weight = weight.and_then(|index| weights.values().nth(index));
            weight.ok_or_else(|| {
                Error::msg(format!(
                    "weights: rank 0 gathers number {index}, must be one of them"
                ))
            })
        });
        let asked = asked.collect::<Result<Vec<_>>>()?;
        let gather = self.gather(asked.iter().copied())?;
        self.shard.collective.finish(gather)?;
        asked.iter().try_for_each(|weight| free(&weight.whole))
    }

    /// Returns whether the weight of this name is held, or not divided.
    pub(crate) fn is_held(&self, name: &str) -> bool {
        let weights = self.lock();
        weights.get(name).is_none_or(|weight| weight.holders > 0)
    }

    /// Returns whether all weights are held.
    pub(crate) fn are_held(&self) -> bool {
        self.lock().values().all(|weight| weight.holders > 0)
    }

    /// Returns a number that changes with the addresses of the weights.
    #[cfg(feature = "cuda")]
    pub(crate) fn gathers(&self) -> u64 {
        self.gathers.load(Ordering::Relaxed)
    }

    /// Checks that nobody holds a weight, so that the parts may change.
    pub(crate) fn ensure_free(&self) -> Result<()> {
        let weights = self.lock();
        let mut held = weights.iter().filter(|(_, weight)| weight.holders > 0);
        match held.next() {
            Some((name, _)) => {
                bail!("{name}: gathered from all ranks, must be freed before it changes")
            }
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Weight>> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for DividedWeights {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "DividedWeights({} of {:?})",
            self.lock().len(),
            self.shard
        )
    }
}

/// A request of rank 0 to the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// The weight with this index, to export it.
    Export(usize),
    /// To gather this number of weights, whose indices follow.
    Gather(usize),
    /// Nothing more.
    End,
}

impl Request {
    /// Sends rank 0's request to all ranks, and returns it.
    pub(crate) fn exchange(self, shard: &Shard) -> Result<Self> {
        let (kind, number) = match self {
            Self::Export(index) => (0, index),
            Self::Gather(count) => (1, count),
            Self::End => (2, 0),
        };
        let message = Tensor::new(&[kind, number as i64], &Device::Cpu)?;
        shard.collective.broadcast(&[&message], 0)?;
        let message = message.to_vec1::<i64>()?;
        let number = usize::try_from(message[1]).unwrap_or(usize::MAX);
        Ok(match message[0] {
            0 => Self::Export(number),
            1 => Self::Gather(number),
            _ => Self::End,
        })
    }
}

/// Weights that are being gathered from all ranks.
pub(crate) struct Gathering {
    held: Held,
    /// The last operation that gathers one of them.
    last: Ticket,
}

impl Gathering {
    /// Makes the weights visible to later operations on tensors.
    pub(crate) fn finish(self) -> Result<Held> {
        self.held.weights.shard.collective.finish(self.last)?;
        Ok(self.held)
    }
}

/// Weights that are gathered from all ranks until this is dropped.
#[derive(Debug)]
#[must_use = "the weights are freed when this is dropped"]
pub struct Held {
    weights: Arc<DividedWeights>,
    names: Arc<[String]>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut weights = self.weights.lock();
        for name in &*self.names {
            let Some(weight) = weights.get_mut(name) else {
                continue;
            };
            weight.holders -= 1;
            if weight.holders > 0 {
                continue;
            }
            // After an error, nobody has waited for the gather that writes this memory.
            let finished = self.weights.shard.collective.finish(weight.gather);
            // At worst the memory stays until the next pass.
            let _ = finished.and_then(|()| free(&weight.whole));
        }
    }
}

/// Frees the memory of a contiguous tensor, which keeps its shape. A view of it must not be used
/// before it is [resized](resize).
fn free(tensor: &Tensor) -> Result<()> {
    // Not every device allocates 0 elements.
    resize(tensor, 1)
}

/// Gives a tensor new memory for this number of elements, whatever its shape. They are zero.
fn resize(tensor: &Tensor, elements: usize) -> Result<()> {
    tensor.inplace_op1(&Resize(elements))
}

struct Resize(usize);

impl Resize {
    fn apply<S: BackendStorage>(&self, storage: &mut S) -> Result<()>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        *storage = (storage.device()).zeros_impl(&self.0.into(), storage.dtype())?;
        Ok(())
    }
}

impl InplaceOp1 for Resize {
    fn name(&self) -> &'static str {
        "resize"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.apply(storage)
    }
}
