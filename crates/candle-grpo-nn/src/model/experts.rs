//! A mixture of experts, a channel mixer.

use std::ops::Range;

use candle_core::{Result, Tensor, Var, bail};
use candle_grpo_kernels::{ExpertWeights, experts};
use candle_nn::VarBuilder;

use crate::config::architecture::ExpertsPlan;
use crate::model::block::Mixer;
use crate::model::linear::Linear;
use crate::model::mlp::{Mlp, MlpRecord};
use crate::model::pass::{NO_BACKWARD, Pass};
use crate::model::routes::RouterChoice;
use crate::optim::grad_sink::GradSink;
use crate::router::{Router, Routing};

/// A router sends each token to some experts and sums their outputs, weighted by gates (Shazeer et
/// al. 2017, <https://arxiv.org/abs/1701.06538>).
///
/// Passes without a gradient that have few rows on a GPU compute all experts in a few launches, and
/// do not wait for it ([`experts`]). In other passes, choosing the experts synchronizes with the
/// device.
#[derive(Debug, Clone)]
pub(crate) struct Experts {
    router: Linear,
    routing: Router,
    experts: Vec<Mlp>,
    /// The experts' weights for [`experts`]. `None` without a kernel for them, if they have
    /// adapters or are quantized, and if their addresses change.
    grouped: Option<ExpertWeights>,
    /// Router number within the decoder.
    number: usize,
}

/// Forward-pass tensors that the backward pass needs.
pub(crate) struct ExpertsRecord {
    router: RouterChoice,
    /// `None` for a pass that has no backward pass.
    kept: Option<Kept>,
}

/// The chosen experts' results, and their inputs.
struct Kept {
    /// Gates for the chosen experts, `[N, top_k]`.
    gates: Tensor,
    plan: Plan,
    /// Expert inputs, grouped by expert.
    rows: Tensor,
    /// One per expert that has rows.
    records: Vec<MlpRecord>,
    /// Expert outputs for each token, `[N, top_k, hidden]`.
    results: Tensor,
}

/// Assigns rows to experts.
struct Plan {
    /// Each row's token, u32.
    tokens: Tensor,
    /// For each token and chosen expert, the row, u32 `[N * top_k]`.
    places: Tensor,
    /// Inverse of `places`: each row's index there, u32; `u32::MAX` for a row that no token reads.
    slots: Tensor,
    /// Each expert's rows.
    ranges: Vec<Range<usize>>,
}

impl Plan {
    /// With `reaches_all`, an expert without tokens gets one row that no token reads, so that its
    /// gradient is 0 instead of absent.
    fn new(chosen: &Tensor, experts: usize, reaches_all: bool) -> Result<Self> {
        let top_k = chosen.dim(1)?;
        let chosen_by_slot = chosen.flatten_all()?.to_vec1::<u32>()?;
        let mut slots_of = vec![Vec::new(); experts];
        for (slot, &expert) in chosen_by_slot.iter().enumerate() {
            match slots_of.get_mut(expert as usize) {
                Some(slots) => slots.push(slot as u32),
                None => bail!("experts: {expert}, must be below {experts}"),
            }
        }
        let (mut tokens, mut row_slots, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
        let mut places = vec![0; chosen_by_slot.len()];
        for slots in slots_of {
            let first = tokens.len();
            for slot in slots {
                places[slot as usize] = tokens.len() as u32;
                tokens.push(slot / top_k as u32);
                row_slots.push(slot);
            }
            if reaches_all && tokens.len() == first {
                tokens.push(0);
                row_slots.push(u32::MAX);
            }
            ranges.push(first..tokens.len());
        }
        let device = chosen.device();
        Ok(Self {
            tokens: Tensor::new(tokens, device)?,
            places: Tensor::new(places, device)?,
            slots: Tensor::new(row_slots, device)?,
            ranges,
        })
    }

    /// Joins the experts' rows into one for each token and chosen expert, `[N, top_k, hidden]`.
    /// Each tensor is released as soon as it has been read.
    fn by_token(&self, parts: Vec<Tensor>, (n, hidden): (usize, usize)) -> Result<Tensor> {
        let rows = Tensor::cat(&parts, 0)?;
        drop(parts);
        rows.index_select(&self.places, 0)?.reshape((n, (), hidden))
    }

    /// Row ranges for experts that have any, with the expert index.
    fn ranges(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        let ranges = self.ranges.iter().enumerate();
        ranges.filter(|(_, range)| !range.is_empty())
    }
}

impl Experts {
    pub(crate) fn new(plan: &ExpertsPlan, number: usize, vb: &VarBuilder) -> Result<Self> {
        let experts = plan.experts.iter().map(|plan| Mlp::new(plan, vb));
        let experts = experts.collect::<Result<Vec<_>>>()?;
        let grouped = if ExpertWeights::have_kernel(vb.dtype(), vb.device()) {
            let weights = experts.iter().map(Mlp::plain_weights);
            let weights = weights.collect::<Option<Vec<_>>>();
            weights.map(ExpertWeights::new).transpose()?
        } else {
            None
        };
        Ok(Self {
            router: Linear::new(&plan.router, vb)?,
            routing: plan.routing,
            experts,
            grouped,
            number,
        })
    }

    /// Prepares for weights whose addresses change.
    pub(crate) fn release_addresses(&mut self) {
        self.grouped = None;
    }

    /// The weights for a pass without a gradient over this number of rows, if it needs no wait.
    pub(crate) fn grouped(&self, rows: usize) -> Option<&ExpertWeights> {
        let grouped = self.grouped.as_ref();
        grouped.filter(|weights| weights.fuse(rows, self.routing.top_k()))
    }

    /// Computes the gradient with respect to the router's logits, given the gate gradients.
    fn logits_gradient(&self, choice: &RouterChoice, of_gates: &Tensor) -> Result<Tensor> {
        let RouterChoice { logits, chosen } = choice;
        let logits = Var::from_tensor(logits)?;
        let gates = self.routing.replay(&logits, chosen)?.gates;
        let store = (gates * of_gates)?.sum_all()?.backward()?;
        match store.get(&logits) {
            Some(gradient) => Ok(gradient.detach()),
            None => bail!("logits: no gradient"),
        }
    }
}

impl ExpertsRecord {
    pub(crate) fn router(&self) -> &RouterChoice {
        &self.router
    }
}

impl Mixer for Experts {
    type Record = ExpertsRecord;

    fn linear(&mut self) -> Vec<&mut Linear> {
        let experts = self.experts.iter_mut().flat_map(Mixer::linear);
        experts.chain([&mut self.router]).collect()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, ExpertsRecord)> {
        let products = pass.products();
        let logits = self.router.forward(x, pass)?;
        if !products.have_gradients()
            && pass.routes.replayed.is_none()
            && let Some(weights) = self.grouped(x.dim(0)?)
        {
            let Routing {
                experts: chosen,
                gates,
            } = self.routing.route_detached(&logits)?;
            let y = experts(&x.detach(), weights, &chosen, &gates)?;
            let router = RouterChoice { logits, chosen };
            return Ok((y, ExpertsRecord { router, kept: None }));
        }
        let chosen = match pass.routes.replayed(self.number, self.routing.top_k())? {
            Some(chosen) => chosen,
            None => self.routing.route_detached(&logits)?.experts,
        };
        let reaches_all = products.have_gradients();
        // Checks the expert indices, since a GPU must not read out of range.
        let plan = Plan::new(&chosen, self.experts.len(), reaches_all)?;
        let routing = self.routing.replay(&logits, &chosen)?;
        let rows = x.index_select(&plan.tokens, 0)?;
        let (mut records, mut results) = (Vec::new(), Vec::new());
        for (expert, range) in plan.ranges() {
            let rows = rows.narrow(0, range.start, range.len())?;
            let (y, record) = self.experts[expert].forward(&rows, pass)?;
            results.push(y);
            records.push(record);
        }
        let (n, hidden) = x.dims2()?;
        let results = plan.by_token(results, (n, hidden))?;
        let weights = routing.gates.to_dtype(x.dtype())?.unsqueeze(2)?;
        let y = results.broadcast_mul(&weights)?.sum(1)?;
        let record = ExpertsRecord {
            router: RouterChoice {
                logits,
                chosen: routing.experts,
            },
            kept: Some(Kept {
                gates: routing.gates,
                plan,
                rows,
                records,
                results,
            }),
        };
        Ok((y, record))
    }

    fn backward(
        &self,
        x: &Tensor,
        record: ExpertsRecord,
        pass: &Pass,
        gradient: &Tensor,
        sink: &mut GradSink,
    ) -> Result<Tensor> {
        let (n, hidden) = x.dims2()?;
        let gradient = gradient.unsqueeze(1)?;
        let ExpertsRecord {
            router,
            kept: Some(kept),
        } = record
        else {
            bail!("{NO_BACKWARD}");
        };
        let Kept {
            gates,
            plan,
            rows,
            records,
            results,
        } = kept;
        let of_gates = results.broadcast_mul(&gradient)?;
        drop(results);
        let of_gates = of_gates.to_dtype(gates.dtype())?.sum(2)?;
        let mut of_logits = self.logits_gradient(&router, &of_gates)?;
        if let Some(balance) = pass.routes.balance {
            let of_balance = balance.of_logits(&router.logits)?;
            of_logits = (of_logits + of_balance.to_dtype(router.logits.dtype())?)?;
        }
        let of_logits = of_logits.to_dtype(x.dtype())?;
        let weights = gates.to_dtype(x.dtype())?.unsqueeze(2)?;
        let of_slots = weights.broadcast_mul(&gradient)?.reshape(((), hidden))?;
        let of_results = of_slots.index_select(&plan.slots, 0)?;
        drop(of_slots);
        let mut of_rows = Vec::new();
        for ((expert, range), kept) in plan.ranges().zip(records) {
            let part = |x: &Tensor| x.narrow(0, range.start, range.len());
            let (rows, gradient) = (part(&rows)?, part(&of_results)?);
            of_rows.push(self.experts[expert].backward(&rows, kept, pass, &gradient, sink)?);
        }
        drop((rows, of_results));
        let of_x = plan.by_token(of_rows, (n, hidden))?.sum(1)?;
        self.router
            .backward(x, &of_logits, Some(of_x), (pass, sink))
    }
}
