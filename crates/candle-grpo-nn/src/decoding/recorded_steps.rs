//! Decoding steps that a GPU runs with one driver call.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_kernels::{
    PageSlot, PagedRow, Recording, SlotRows, StepInputs, StepSize, StepTables, release_cuda_memory,
    with_room,
};

use crate::decoding::MORE_ROWS;
use crate::model::pass::{Context, Pass};
use crate::model::routes::{RouterChoice, Routes};
use crate::{Decoder, DividedModel, LanguageModel, PagedCache};

/// Number of sizes whose recordings remain in an empty cache.
const KEPT_SIZES: usize = 64;

/// A cache's recordings.
#[derive(Debug, Default)]
pub(super) struct RecordedSteps {
    /// By size, and whether they return the experts.
    steps: HashMap<(StepSize, bool), Step>,
    /// The decoder for all steps, and the number of its gathers if ranks divide the weights. The
    /// recordings use the weights at their addresses.
    decoder: Option<(Decoder, Option<u64>)>,
    /// Hidden states of the step with the most rows. The recordings share them.
    hidden: Option<Tensor>,
    /// Like [`Self::hidden`], the experts of steps that return them.
    experts: Option<Tensor>,
    /// Number of recorded steps that have run.
    runs: u64,
}

#[derive(Debug)]
enum Step {
    /// Seen once. The first step of each size runs unrecorded and loads its kernels.
    Seen,
    /// Cannot be recorded.
    Refused,
    Recorded(Box<RecordedStep>),
}

#[derive(Debug)]
struct RecordedStep {
    inputs: StepInputs,
    results: StepResults,
    recording: Recording,
    /// Number of the latest run.
    latest: u64,
}

/// The tensors that a recording writes.
#[derive(Debug, Clone)]
struct StepResults {
    /// Hidden states `[rows, H]`.
    hidden: Tensor,
    /// Experts, u32 `[rows, expert_choices]`, if the step returns them.
    experts: Option<Tensor>,
}

/// A step with one new token per sequence.
pub(super) struct NewTokens<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) positions: &'a [u32],
    pub(super) slots: &'a [PageSlot],
    pub(super) rows: &'a [PagedRow<'a>],
    /// Slots of the states, if there are any.
    pub(super) states: &'a [SlotRows],
}

impl RecordedSteps {
    /// Discards all recordings, because they use the cache's previous pages. Those that grow in
    /// place stay.
    pub(super) fn discard(&mut self) {
        for step in self.steps.values_mut() {
            *step = Step::Seen;
        }
    }

    /// Keeps the recordings of the latest sizes, without the memory that they take when they run.
    pub(super) fn keep_latest(&mut self) -> Result<()> {
        let latest = |step: &Step| match step {
            Step::Recorded(step) => Some(step.latest),
            Step::Seen | Step::Refused => None,
        };
        let runs = self.steps.values().filter_map(latest).collect();
        let (Some(oldest), Some(hidden)) = (oldest_of_latest(runs, KEPT_SIZES), &self.hidden)
        else {
            return Ok(());
        };
        self.steps
            .retain(|_, step| latest(step).is_some_and(|run| run >= oldest));
        Recording::release_memory(hidden.device())
    }

    /// Computes a step's hidden states `[N, H]` after the final norm, and the experts
    /// `[N, expert_choices]` if `with_experts`. `None` if the step must run unrecorded.
    pub(super) fn run(
        &mut self,
        decoder: &Decoder,
        cache: &PagedCache,
        new: &NewTokens,
        with_experts: bool,
    ) -> Result<Option<(Tensor, Option<Tensor>)>> {
        let n = new.rows.len();
        // Extra rows repeat the last one, so that fewer sizes occur. They write nothing.
        let more = with_room(n, MORE_ROWS) - n;
        if !decoder.is_recordable(n + more) {
            return Ok(None);
        }
        let gathers = decoder.divided().map(DividedModel::gathers);
        if !self
            .decoder
            .as_ref()
            .is_some_and(|(own, of_own)| own.is_clone_of(decoder) && *of_own == gathers)
        {
            drop(std::mem::take(self));
            self.decoder = Some((decoder.clone(), gathers));
        }
        let tokens = repeat_last(new.tokens, more);
        let positions = repeat_last(new.positions, more);
        let rows = repeat_last(new.rows, more);

        let tables = StepTables::new(
            &tokens,
            &positions,
            new.slots,
            &rows,
            new.states,
            decoder.shares_reads(),
        )?;
        let size = tables.size();
        let key = (size, with_experts);
        let step = match self.steps.entry(key) {
            Entry::Vacant(place) => {
                place.insert(Step::Seen);
                return Ok(None);
            }
            Entry::Occupied(place) => place.into_mut(),
        };
        if let Step::Seen = step {
            let shared = (&mut self.hidden, &mut self.experts);
            let results = StepResults::new(shared, decoder, rows.len(), with_experts);
            let recorded = results
                .and_then(|results| RecordedStep::new(decoder, cache, results, size, (new, &rows)));
            *step = recorded.map_or(Step::Refused, |step| Step::Recorded(Box::new(step)));
        }
        let Step::Recorded(step) = step else {
            return Ok(None);
        };
        self.runs += 1;
        step.latest = self.runs;
        step.inputs.set(tables)?;
        // SAFETY: the decoder, the inputs and the result are kept. The cache discards the steps
        // when it replaces the pages, and others stay where they are.
        #[allow(unsafe_code)]
        let mut run = || unsafe { step.recording.run() };
        if run().is_err() {
            // Tensors of before may have left memory in the pool, from which recordings take none.
            release_cuda_memory(step.results.hidden.device())?;
            if run().is_err() {
                self.steps.insert(key, Step::Refused);
                return Ok(None);
            }
        }
        let StepResults { hidden, experts } = &step.results;
        // The caller may keep the experts beyond the next step.
        let experts = experts
            .as_ref()
            .map(|all| all.narrow(0, 0, n)?.force_contiguous());
        Ok(Some((hidden.narrow(0, 0, n)?, experts.transpose()?)))
    }
}

/// Returns the memory of recordings to the device, which the driver would keep.
impl Drop for RecordedSteps {
    fn drop(&mut self) {
        self.steps.clear();
        if let Some(hidden) = &self.hidden {
            // An error of earlier work, which the next call reports.
            let _ = Recording::release_memory(hidden.device());
        }
    }
}

/// Returns the oldest of the `most` latest runs.
fn oldest_of_latest(mut runs: Vec<u64>, most: usize) -> Option<u64> {
    runs.sort_unstable_by(|a, b| b.cmp(a));
    runs.truncate(most);
    runs.last().copied()
}

/// Returns the first `rows` of `shared`, which grows if it has fewer.
fn shared_rows(
    shared: &mut Option<Tensor>,
    (rows, width): (usize, usize),
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    if let Some(there) = shared
        && there.dims()[0] >= rows
    {
        return there.narrow(0, 0, rows);
    }
    let more = Tensor::zeros((rows, width), dtype, device)?;
    *shared = Some(more.clone());
    Ok(more)
}

impl StepResults {
    /// Returns the first `rows` of the tensors that all recordings share.
    fn new(
        (hidden, experts): (&mut Option<Tensor>, &mut Option<Tensor>),
        decoder: &Decoder,
        rows: usize,
        with_experts: bool,
    ) -> Result<Self> {
        let weight = decoder.output_weight();
        let (dtype, device) = (weight.dtype(), weight.device());
        let experts = with_experts.then(|| {
            let choices = decoder.expert_choices();
            shared_rows(experts, (rows, choices), DType::U32, device)
        });
        let size = (rows, decoder.config().hidden_size);
        Ok(Self {
            hidden: shared_rows(hidden, size, dtype, device)?,
            experts: experts.transpose()?,
        })
    }
}

impl RecordedStep {
    fn new(
        decoder: &Decoder,
        cache: &PagedCache,
        results: StepResults,
        size: StepSize,
        (new, rows): (&NewTokens, &[PagedRow]),
    ) -> Result<Self> {
        let device = results.hidden.device();
        let inputs = StepInputs::new(size, device)?;
        let (tokens, positions) = (inputs.tokens()?, inputs.positions()?);
        let (batch, states) = (&inputs.batch(new.slots, rows)?, &inputs.states(new.states)?);
        let operations = || {
            let pass = Pass {
                angles: &decoder.angles(&positions)?,
                context: Context::Cache {
                    cache,
                    batch,
                    states,
                },
                routes: Routes::default(),
                adapters: &[],
            };
            let x = decoder.embed(&tokens)?.detach();
            let (x, change, routers) = decoder.run_blocks(x, &pass)?;
            let hidden = decoder.norm(&x, change.as_ref())?.detach();
            results.hidden.slice_set(&hidden, 0, 0)?;
            if let Some(experts) = &results.experts {
                let mut column = 0;
                for RouterChoice { chosen, .. } in &routers {
                    experts.slice_set(chosen, 1, column)?;
                    column += chosen.dim(1)?;
                }
            }
            Ok(())
        };
        // SAFETY: all tensors from the pass are dropped with it.
        #[allow(unsafe_code)]
        let recording = unsafe { Recording::record(device, operations)? };
        Ok(Self {
            inputs,
            results,
            recording,
            latest: 0,
        })
    }
}

fn repeat_last<T: Copy>(all: &[T], more: usize) -> Vec<T> {
    let mut all = all.to_vec();
    if let Some(&last) = all.last() {
        all.resize(all.len() + more, last);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_runs_are_kept() {
        for (runs, most, oldest) in [
            (vec![3, 9, 1, 7], 2, Some(7)),
            (vec![3, 9, 1, 7], 4, Some(1)),
            (vec![5], 64, Some(5)),
            (vec![], 64, None),
        ] {
            assert_eq!(oldest_of_latest(runs, most), oldest, "{most}");
        }
    }
}
