//! Gradient sums over all ranks, computed while the backward pass still runs or in turn with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use candle_core::{Error, Result, Shape, Tensor, bail};
use candle_grpo_collective::{Collective, Ticket};

use crate::weights::shard::Shard;

/// Minimum bytes of the f32 gradients that ranks sum together: 25 MiB, as in PyTorch's
/// `DistributedDataParallel`. Fewer calls spend less time on latency, while more calls overlap
/// better with the backward pass.
pub const BUCKET_BYTES: usize = 25 << 20;

/// [`BUCKET_BYTES`] in elements.
pub(super) const BUCKET: usize = BUCKET_BYTES / size_of::<f32>();

/// The sums that a rank receives.
#[derive(Clone)]
pub(super) enum Sums {
    /// Every rank receives all sums, in place.
    Whole(Arc<dyn Collective>),
    /// Each rank receives the sums for its own part, in place.
    Parts(Shard),
    /// Each rank receives the sums for its own part apart, and frees the gradients.
    Divided(Shard),
}

impl Sums {
    fn collective(&self) -> &dyn Collective {
        match self {
            Self::Whole(collective) => &**collective,
            Self::Parts(shard) | Self::Divided(shard) => &*shard.collective,
        }
    }
}

/// The sums for this rank's part of each gradient, as [`Shard::keep`] lays them out, with the shape
/// of the whole.
pub(super) type Kept = BTreeMap<String, (Tensor, Shape)>;

/// A gradient with its name.
type Named = (String, Tensor);

/// The next task of the thread.
enum Task {
    /// Sums these gradients. The thread reports when it begins.
    Sum(Vec<Named>, SyncSender<()>),
    /// Calls other operations of all ranks.
    Call(Box<dyn FnOnce() + Send>),
}

/// The result of an operation that may still run.
#[derive(Debug)]
pub(crate) struct Pending<T>(Receiver<Result<T>>);

impl<T> Pending<T> {
    /// A result, and the function that sends it.
    fn new(operation: impl FnOnce() -> Result<T>) -> (Self, impl FnOnce()) {
        let (result, received) = sync_channel(1);
        let call = move || {
            // Nobody waits for it after an error.
            let _ = result.send(operation());
        };
        (Self(received), call)
    }

    /// The result of an operation that is called at once.
    pub(crate) fn of(operation: impl FnOnce() -> Result<T>) -> Self {
        let (pending, call) = Self::new(operation);
        call();
        pending
    }

    /// Waits for the result. `None` if the thread of the operation has ended.
    pub(crate) fn wait(self) -> Option<Result<T>> {
        self.0.recv().ok()
    }
}

/// Sums gradient buckets over all ranks, in order.
///
/// Buckets depend only on names and shapes, so they are the same on all ranks.
#[derive(Debug)]
pub(crate) struct Reduction {
    worker: Worker,
    /// The next bucket, how many elements it has, and with how many it is summed.
    bucket: Vec<Named>,
    elements: usize,
    least: usize,
    added: BTreeSet<String>,
    frees: bool,
}

/// Where the sums are started.
enum Worker {
    /// On a thread, while the backward pass computes more gradients.
    Thread {
        tasks: Sender<Task>,
        thread: JoinHandle<Result<Kept>>,
    },
    /// On the thread of the backward pass: between its own operations, or on the device beside
    /// them, if they are [asynchronous](Collective::is_asynchronous).
    InTurn(Reducer),
    /// The reduction has ended.
    Ended,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Thread { .. } => "Thread",
            Self::InTurn(_) => "InTurn",
            Self::Ended => "Ended",
        })
    }
}

impl Reduction {
    /// Starts to sum, and adds sums that are apart to those of earlier passes, `kept`. A bucket has
    /// at least `least` elements, as [`BUCKET`], or is the last one. Sums are `in_turn` with the
    /// backward pass, or on a thread. Asynchronous ones need no thread.
    pub(super) fn start(sums: Sums, kept: Kept, least: usize, in_turn: bool) -> Result<Self> {
        let frees = matches!(sums, Sums::Divided(_));
        let in_turn = in_turn || sums.collective().is_asynchronous();
        let mut reducer = Reducer {
            sums,
            kept,
            started: Vec::new(),
            ticket: Ticket::default(),
        };
        let worker = if in_turn {
            Worker::InTurn(reducer)
        } else {
            let (tasks, received) = channel();
            let thread = Builder::new()
                .name("gradients".to_owned())
                .spawn(move || {
                    while let Ok(task) = received.recv() {
                        match task {
                            Task::Sum(bucket, begins) => {
                                // Only a rank that frees gradients waits for it.
                                let _ = begins.send(());
                                reducer.add(bucket)?;
                            }
                            Task::Call(call) => call(),
                        }
                    }
                    reducer.finish()
                })
                .map_err(Error::wrap)?;
            Worker::Thread { tasks, thread }
        };
        Ok(Self {
            worker,
            bucket: Vec::new(),
            elements: 0,
            least,
            added: BTreeSet::new(),
            frees,
        })
    }

    /// Returns whether the sums are apart, so that added gradients must be freed.
    pub(super) fn frees(&self) -> bool {
        self.frees
    }

    /// Returns whether the gradient of this name was added.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.added.contains(name)
    }

    /// Adds a gradient to the next bucket, unless already added. Do not use the gradient until
    /// [`Self::finish`]. If gradients are freed, the bucket grows until [`Self::send_full`].
    ///
    /// # Errors
    ///
    /// If another one of this name was added and freed.
    pub(super) fn add(&mut self, name: &str, gradient: Tensor) -> Result<()> {
        if !self.added.insert(name.to_owned()) {
            if self.frees {
                bail!(
                    "gradient of {name}: two in a backward pass, must be one when it is complete"
                );
            }
            return Ok(());
        }
        self.elements += gradient.elem_count();
        self.bucket.push((name.to_owned(), gradient));
        if self.frees {
            return Ok(());
        }
        self.send_full()
    }

    /// Starts to sum the next bucket, if it is large enough. Call it once for each block if
    /// gradients are freed: the backward pass then waits for the bucket before, which should have
    /// been summed beside a block.
    pub(super) fn send_full(&mut self) -> Result<()> {
        if self.elements >= self.least {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        self.elements = 0;
        let bucket = std::mem::take(&mut self.bucket);
        match &mut self.worker {
            Worker::InTurn(reducer) => reducer.add(bucket),
            Worker::Thread { .. } => {
                let (begins, has_begun) = sync_channel(1);
                self.send_task(Task::Sum(bucket, begins))?;
                // Gradients that are freed afterwards must not pile up.
                if self.frees && has_begun.recv().is_err() {
                    return self.join().map(drop);
                }
                Ok(())
            }
            Worker::Ended => self.join().map(drop),
        }
    }

    fn send_task(&mut self, task: Task) -> Result<()> {
        match &self.worker {
            Worker::Thread { tasks, .. } if tasks.send(task).is_ok() => Ok(()),
            _ => self.join().map(drop),
        }
    }

    /// Starts `operation` where sums are computed, after those of all gradients that are on their
    /// way. Operations of all ranks must not overlap, and have the same order on all of them.
    ///
    /// # Errors
    ///
    /// If a sum before it failed.
    pub(crate) fn start_call<T: Send + 'static>(
        &mut self,
        operation: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Pending<T>> {
        let (pending, call) = Pending::new(operation);
        match &self.worker {
            Worker::InTurn(_) => call(),
            _ => self.send_task(Task::Call(Box::new(call)))?,
        }
        Ok(pending)
    }

    /// Waits for the result of an operation that [`Self::start_call`] started.
    ///
    /// # Errors
    ///
    /// If it failed, or a sum before it.
    pub(crate) fn wait<T>(&mut self, pending: Pending<T>) -> Result<T> {
        match pending.wait() {
            Some(result) => result,
            None => {
                self.join()?;
                bail!("gradients: the thread that sums them has ended")
            }
        }
    }

    /// Waits until all buckets are summed. Returns the sums that are apart.
    pub(super) fn finish(mut self) -> Result<Kept> {
        if !self.bucket.is_empty() {
            self.send()?;
        }
        self.join()
    }

    fn join(&mut self) -> Result<Kept> {
        match std::mem::replace(&mut self.worker, Worker::Ended) {
            Worker::InTurn(reducer) => reducer.finish(),
            Worker::Thread { tasks, thread } => {
                drop(tasks);
                match thread.join() {
                    Ok(result) => result,
                    Err(_) => bail!("gradients: the thread that sums them panicked"),
                }
            }
            Worker::Ended => bail!("gradients: the thread that sums them has ended"),
        }
    }
}

/// Waits for the bucket that is being summed.
impl Drop for Reduction {
    fn drop(&mut self) {
        if let Worker::Thread { .. } = self.worker {
            let _ = self.join();
        }
    }
}

/// Sums buckets.
struct Reducer {
    sums: Sums,
    kept: Kept,
    /// The bucket that is being summed, if sums are apart.
    started: Vec<Named>,
    /// The last sums that have started.
    ticket: Ticket,
}

impl Reducer {
    fn add(&mut self, bucket: Vec<Named>) -> Result<()> {
        let tensors: Vec<Tensor> = bucket.iter().map(|(_, tensor)| tensor.clone()).collect();
        let ticket = match &self.sums {
            Sums::Whole(collective) => {
                collective.start_all_reduce_sum(&tensors.iter().collect::<Vec<_>>())?
            }
            Sums::Parts(shard) => shard.start_reduce_scatter_sum(&tensors)?,
            Sums::Divided(shard) => {
                // The bucket before is summed while the backward pass computes this one.
                shard.collective.finish(self.ticket)?;
                keep(shard, std::mem::take(&mut self.started), &mut self.kept)?;
                let ticket = shard.start_reduce_scatter_sum(&tensors)?;
                self.started = bucket;
                ticket
            }
        };
        // Sums that ended at once have the lowest ticket, whatever still runs.
        self.ticket = self.ticket.max(ticket);
        Ok(())
    }

    fn finish(mut self) -> Result<Kept> {
        self.sums.collective().finish(self.ticket)?;
        if let Sums::Divided(shard) = &self.sums {
            keep(shard, std::mem::take(&mut self.started), &mut self.kept)?;
        }
        Ok(std::mem::take(&mut self.kept))
    }
}

/// After an error, nobody has waited for the sums that use the gradients.
impl Drop for Reducer {
    fn drop(&mut self) {
        let _ = self.sums.collective().finish(self.ticket);
    }
}

/// Keeps this rank's part of the sums in a bucket, and frees the rest.
fn keep(shard: &Shard, bucket: Vec<Named>, kept: &mut Kept) -> Result<()> {
    for (name, gradient) in bucket {
        let own = shard.keep(&gradient, gradient.elem_count())?;
        let sum = match kept.remove(&name) {
            None => own,
            Some((sum, _)) => (sum + own)?,
        };
        kept.insert(name, (sum, gradient.shape().clone()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use candle_core::{DType, Device};
    use candle_grpo_collective::Alone;
    use candle_grpo_test_support::on_ranks;

    use super::*;

    /// The elements of each gradient. Some are larger than the smallest bucket.
    const SIZES: [usize; 9] = [700, 1, 999, 1000, 1001, 2500, 30, 4, 2];

    /// A rank's gradients of a backward pass.
    fn gradients(pass: usize, rank: usize) -> Result<Vec<(String, Tensor)>> {
        let tensor = |(index, &size): (usize, &usize)| {
            let numbers = Tensor::arange(0f32, size as f32, &Device::Cpu)?;
            let step = 0.37 + 0.11 * pass as f64 + 1.3 * rank as f64 + 0.7 * index as f64;
            Ok((format!("{index}"), numbers.affine(step, 0.2)?.sin()?))
        };
        SIZES.iter().enumerate().map(tensor).collect()
    }

    fn added(mut reduction: Reduction, gradients: &[(String, Tensor)]) -> Result<Kept> {
        for (name, gradient) in gradients {
            reduction.add(name, gradient.clone())?;
            reduction.send_full()?;
        }
        reduction.finish()
    }

    /// The sums of two passes for this rank's part: apart, and of the sums in place.
    fn sums(shard: &Shard, least: usize) -> Result<[Vec<Vec<f32>>; 2]> {
        let rank = shard.collective.rank();
        let (mut kept, mut in_place) = (Kept::new(), Vec::new());
        for pass in 0..2 {
            let in_turn = pass == 1;
            let divided = Reduction::start(Sums::Divided(shard.clone()), kept, least, in_turn)?;
            kept = added(divided, &gradients(pass, rank)?)?;
            let whole = gradients(pass, rank)?;
            let parts = Reduction::start(Sums::Parts(shard.clone()), Kept::new(), BUCKET, in_turn)?;
            added(parts, &whole)?;
            in_place.push(whole);
        }
        let apart = kept.values().map(|(sum, _)| sum.to_vec1());
        let both = in_place[0].iter().zip(&in_place[1]);
        let expected = both.map(|((_, first), (_, second))| {
            let elements = first.elem_count();
            let [first, second] = [first, second].map(|sum| shard.keep(sum, elements));
            (first? + second?)?.to_vec1()
        });
        Ok([
            apart.collect::<Result<_>>()?,
            expected.collect::<Result<_>>()?,
        ])
    }

    /// With all gradients in one bucket, and in several.
    #[test]
    fn sums_apart_have_the_bits_of_sums_in_place() {
        for world_size in [2, 3, 5] {
            for (unit, least) in [(1, BUCKET), (1, 1000), (8, 1000), (256, 1000), (1, 1)] {
                on_ranks(world_size, |collective| {
                    let shard = Shard::new(collective, unit);
                    let [apart, in_place] = sums(&shard, least).unwrap();
                    assert_eq!(apart.len(), SIZES.len());
                    assert!(apart == in_place, "{world_size} ranks, {unit}, {least}");
                });
            }
        }
    }

    /// One of two ranks, which counts the sums of parts that have started, and those that must be
    /// finished. Other sums end at once.
    #[derive(Default)]
    struct Counting {
        started: AtomicU64,
        finished: AtomicU64,
    }

    impl Collective for Counting {
        fn rank(&self) -> usize {
            0
        }

        fn world_size(&self) -> usize {
            2
        }

        fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
            Alone.all_reduce_sum(tensors)
        }

        fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
            Alone.reduce_scatter_sum(tensors)
        }

        fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
            Alone.all_gather(tensors)
        }

        fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
            Alone.broadcast(tensors, root)
        }

        fn barrier(&self) -> Result<()> {
            Alone.barrier()
        }

        fn is_asynchronous(&self) -> bool {
            true
        }

        fn start_reduce_scatter_sum(&self, _: &[&Tensor]) -> Result<Ticket> {
            Ok(Ticket(self.started.fetch_add(1, Ordering::SeqCst) + 1))
        }

        fn finish(&self, ticket: Ticket) -> Result<()> {
            self.finished.fetch_max(ticket.0, Ordering::SeqCst);
            Ok(())
        }
    }

    /// A reduction ends, or is dropped as after an error. One element is a remainder, whose sum
    /// ends at once, before or after sums that still run.
    #[test]
    fn sums_that_have_started_are_finished() -> Result<()> {
        for (frees, is_dropped) in [(false, false), (false, true), (true, false), (true, true)] {
            for sizes in [[4, 1], [1, 4], [5, 5]] {
                let ranks = Arc::new(Counting::default());
                let shard = Shard::new(Arc::clone(&ranks) as Arc<dyn Collective>, 1);
                let sums = if frees {
                    Sums::Divided(shard)
                } else {
                    Sums::Parts(shard)
                };
                let mut reduction = Reduction::start(sums, Kept::new(), 1, false)?;
                for (index, size) in sizes.into_iter().enumerate() {
                    let gradient = Tensor::ones(size, DType::F32, &Device::Cpu)?;
                    reduction.add(&format!("{index}"), gradient)?;
                    reduction.send_full()?;
                }
                if is_dropped {
                    drop(reduction);
                } else {
                    reduction.finish()?;
                }
                let [started, finished] =
                    [&ranks.started, &ranks.finished].map(|count| count.load(Ordering::SeqCst));
                assert!(started > 0);
                assert_eq!(started, finished, "{frees} {is_dropped} {sizes:?}");
            }
        }
        Ok(())
    }

    /// The backward pass waits for a bucket when the next one starts, so the gradients of a block
    /// must be one bucket.
    #[test]
    fn gradients_that_are_freed_are_summed_together() -> Result<()> {
        let ranks = Arc::new(Counting::default());
        let shard = Shard::new(Arc::clone(&ranks) as Arc<dyn Collective>, 1);
        let mut reduction = Reduction::start(Sums::Divided(shard), Kept::new(), 10, false)?;
        for block in 0..4 {
            for gradient in 0..3 {
                let name = format!("{block}.{gradient}");
                reduction.add(&name, Tensor::ones(20, DType::F32, &Device::Cpu)?)?;
            }
            reduction.send_full()?;
            assert_eq!(ranks.started.load(Ordering::SeqCst), block + 1);
            assert_eq!(ranks.finished.load(Ordering::SeqCst), block);
        }
        assert_eq!(reduction.finish()?.len(), 12);
        Ok(())
    }
}
