//! A job's ranks as threads in one process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use candle_core::{DType, Result, Tensor, bail};
use candle_grpo_collective::Collective;

use crate::{WATCHDOG, stay_on_cpu};

/// Runs `work` on `world_size` ranks at the same time. Returns their results, in rank order.
///
/// # Panics
///
/// If `work` panics on a rank.
pub fn on_ranks<T: Send>(
    world_size: usize,
    work: impl Fn(Arc<dyn Collective>) -> T + Sync,
) -> Vec<T> {
    let meeting = Arc::new(Meeting::default());
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let meeting = Arc::clone(&meeting);
                scope.spawn(move || {
                    stay_on_cpu();
                    work(Arc::new(ThreadRank {
                        rank,
                        world_size,
                        meeting,
                        splits: AtomicUsize::new(0),
                    }))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a rank panicked"))
            .collect()
    })
}

/// Where ranks exchange their tensors.
#[derive(Default)]
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
    /// The meetings of groups, by the number of the split and the color.
    groups: Mutex<BTreeMap<(usize, usize), Arc<Meeting>>>,
}

#[derive(Default)]
struct State {
    /// Tensors from the ranks that have arrived at the current operation.
    brought: Vec<(usize, &'static str, Vec<Tensor>)>,
    /// All ranks' tensors, until each rank has taken them.
    all: Vec<Vec<Tensor>>,
    to_take: usize,
}

struct ThreadRank {
    rank: usize,
    world_size: usize,
    meeting: Arc<Meeting>,
    splits: AtomicUsize,
}

impl ThreadRank {
    /// Returns copies of all ranks' tensors.
    fn exchange(&self, operation: &'static str, tensors: &[&Tensor]) -> Result<Vec<Vec<Tensor>>> {
        let copies = tensors
            .iter()
            .map(|tensor| {
                if !tensor.is_contiguous() {
                    bail!("{operation}: a tensor that is not contiguous");
                }
                tensor.flatten_all()?.copy()
            })
            .collect::<Result<Vec<_>>>()?;
        let wait = |state, until: &dyn Fn(&mut State) -> bool| {
            let waited = self
                .meeting
                .changed
                .wait_timeout_while(state, WATCHDOG, |state| !until(state));
            let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                bail!("{operation}: another rank has ended")
            } else {
                Ok(state)
            }
        };
        let state = self.meeting.state.lock();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        let mut state = wait(state, &|state| state.to_take == 0)?;
        state.brought.push((self.rank, operation, copies));
        if state.brought.len() == self.world_size {
            let mut brought = std::mem::take(&mut state.brought);
            brought.sort_by_key(|(rank, ..)| *rank);
            let same = brought.iter().all(|(_, other, _)| *other == operation);
            assert!(same, "{operation} and another operation at the same time");
            state.all = brought.into_iter().map(|(.., copies)| copies).collect();
            state.to_take = self.world_size;
            self.meeting.changed.notify_all();
        }
        let mut state = wait(state, &|state| state.to_take > 0)?;
        state.to_take -= 1;
        let all = state.all.clone();
        self.meeting.changed.notify_all();
        Ok(all)
    }

    /// Replaces this rank's part of `tensor` with the same part of `whole`, or all of it.
    fn sum(&self, operation: &'static str, tensors: &[&Tensor], own_part: bool) -> Result<()> {
        let all = self.exchange(operation, tensors)?;
        for (i, tensor) in tensors.iter().enumerate() {
            let mut sum = all[0][i].zeros_like()?.to_dtype(DType::F64)?;
            for tensors in &all {
                sum = (sum + tensors[i].to_dtype(DType::F64)?)?;
            }
            let sum = sum.to_dtype(tensor.dtype())?;
            if own_part {
                let (start, length) = self.part(tensor, self.rank)?;
                set(tensor, &sum.narrow(0, start, length)?, start)?;
            } else {
                set(tensor, &sum, 0)?
            }
        }
        Ok(())
    }

    fn part(&self, tensor: &Tensor, rank: usize) -> Result<(usize, usize)> {
        let elements = tensor.elem_count();
        if !elements.is_multiple_of(self.world_size) {
            bail!(
                "{elements} elements, must be a multiple of {}",
                self.world_size
            );
        }
        let length = elements / self.world_size;
        Ok((rank * length, length))
    }
}

/// Writes `values` to the elements of `tensor` from `start` on.
fn set(tensor: &Tensor, values: &Tensor, start: usize) -> Result<()> {
    match values.elem_count() {
        0 => Ok(()),
        _ => tensor.flatten_all()?.slice_set(values, 0, start),
    }
}

impl Collective for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        self.sum("all_reduce_sum", tensors, false)
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        self.sum("reduce_scatter_sum", tensors, true)
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
        let all = self.exchange("all_gather", tensors)?;
        for (i, tensor) in tensors.iter().enumerate() {
            for (rank, tensors) in all.iter().enumerate() {
                let (start, length) = self.part(tensor, rank)?;
                set(tensor, &tensors[i].narrow(0, start, length)?, start)?;
            }
        }
        Ok(())
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
        let all = self.exchange("broadcast", tensors)?;
        for (tensor, values) in tensors.iter().zip(&all[root]) {
            set(tensor, values, 0)?;
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.exchange("barrier", &[]).map(drop)
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>> {
        let members = self.ranks_of_color(color)?;
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let groups = self.meeting.groups.lock();
        let mut groups = groups.unwrap_or_else(PoisonError::into_inner);
        let meeting = groups.entry((split, color)).or_default();
        Ok(Arc::new(Self {
            rank: members.iter().filter(|&&other| other < self.rank).count(),
            world_size: members.len(),
            meeting: Arc::clone(meeting),
            splits: AtomicUsize::new(0),
        }))
    }
}
