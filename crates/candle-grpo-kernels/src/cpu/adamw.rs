//! The CPU path of [`adamw`](crate::adamw()).

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use pulp::Arch;
use rayon::prelude::*;

use super::element::Element;
use super::simd::{BLOCK, prefetch};
use super::slice::{self, CHUNK, range, with_floats};
use crate::adamw::{AdamWStep, AdamWTensors, Coefficients, Narrow};

/// Prefetch distance in elements. The step is bound by memory and reads four streams, so the
/// hardware prefetcher does not suffice at page boundaries.
const AHEAD: usize = 512;
const PART: usize = 64;

/// Updates all parameters. A core updates whole small parameters and chunks of large ones.
pub(crate) fn step(parameters: &[&AdamWTensors], step: &AdamWStep) -> Result<()> {
    parameters.par_iter().try_for_each(|tensors| {
        let pass = Pass {
            gradient: tensors.gradient.contiguous()?,
            coefficients: step.coefficients(tensors.weight_decay),
        };
        // A closure writes one tensor, so the slices of several tensors need nested closures.
        slice::write_f32(tensors.average, |average| {
            slice::write_f32(tensors.square, |square| match tensors.master {
                None => pass.write(
                    tensors.parameter,
                    State {
                        average,
                        square,
                        master: None,
                    },
                ),
                Some(master) => slice::write_f32(master, |master| {
                    let master = Some(master);
                    pass.write(
                        tensors.parameter,
                        State {
                            average,
                            square,
                            master,
                        },
                    )
                }),
            })
        })
    })
}

/// The inputs of the step of one parameter.
struct Pass {
    gradient: Tensor,
    coefficients: Coefficients,
}

/// The optimizer state that the step of one parameter writes, of one length.
struct State<'a> {
    average: &'a mut [f32],
    square: &'a mut [f32],
    master: Option<&'a mut [f32]>,
}

impl Pass {
    fn write(&self, parameter: &Tensor, state: State) -> Result<()> {
        parameter.inplace_op1(&WriteParameter {
            pass: self,
            state: RefCell::new(Some(state)),
        })
    }

    fn update<P: Element>(&self, parameter: &mut [P], state: State) -> Result<()> {
        let (storage, layout) = self.gradient.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            bail!("gradient: not on the CPU");
        };
        let range = range(layout)?;
        with_floats!(storage, "gradient", gradient => {
            state.update(parameter, &gradient[range], self.coefficients);
        });
        Ok(())
    }
}

struct WriteParameter<'a> {
    pass: &'a Pass,
    /// Taken by the only call: an in-place operation has a shared reference to itself.
    state: RefCell<Option<State<'a>>>,
}

impl InplaceOp1 for WriteParameter<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let range = range(layout)?;
        let Some(state) = self.state.take() else {
            return Ok(());
        };
        with_floats!(storage, "parameter", parameter => {
            self.pass.update(&mut parameter[range], state)
        })
    }
}

impl State<'_> {
    fn update<P: Element, G: Element>(
        self,
        parameter: &mut [P],
        gradient: &[G],
        coefficients: Coefficients,
    ) {
        let coefficients = Narrow::from(coefficients);
        let chunks = parameter
            .par_chunks_mut(CHUNK)
            .zip(self.average.par_chunks_mut(CHUNK))
            .zip(self.square.par_chunks_mut(CHUNK))
            .zip(gradient.par_chunks(CHUNK));
        match self.master {
            None => chunks.for_each(|(((p, m), v), g)| {
                Arch::new().dispatch(|| coefficients.update_rounded(p, m, v, g));
            }),
            Some(master) => {
                chunks
                    .zip(master.par_chunks_mut(CHUNK))
                    .for_each(|((((p, m), v), g), master)| {
                        Arch::new().dispatch(|| coefficients.update_master(p, master, m, v, g));
                    })
            }
        }
    }
}

impl Narrow {
    /// Updates the parameter in f32, and rounds it to its dtype.
    #[inline(always)]
    fn update_rounded<P: Element, G: Element>(
        &self,
        parameter: &mut [P],
        average: &mut [f32],
        square: &mut [f32],
        gradient: &[G],
    ) {
        let mut buffer = [0.0; BLOCK];
        let blocks = parameter
            .chunks_mut(BLOCK)
            .zip(average.chunks_mut(BLOCK))
            .zip(square.chunks_mut(BLOCK))
            .zip(gradient.chunks(BLOCK));
        for (((p, m), v), g) in blocks {
            if let Some(weights) = P::as_f32_mut(p) {
                self.update_block(weights, m, v, g);
                continue;
            }
            let weights = &mut buffer[..p.len()];
            P::widen(p, weights);
            self.update_block(weights, m, v, g);
            round(weights, p);
        }
    }

    /// Updates the master, and rounds it to the parameter.
    #[inline(always)]
    fn update_master<P: Element, G: Element>(
        &self,
        parameter: &mut [P],
        master: &mut [f32],
        average: &mut [f32],
        square: &mut [f32],
        gradient: &[G],
    ) {
        let blocks = parameter
            .chunks_mut(BLOCK)
            .zip(master.chunks_mut(BLOCK))
            .zip(average.chunks_mut(BLOCK))
            .zip(square.chunks_mut(BLOCK))
            .zip(gradient.chunks(BLOCK));
        for ((((p, master), m), v), g) in blocks {
            self.update_block(master, m, v, g);
            round(master, p);
        }
    }

    #[inline(always)]
    fn update_block<G: Element>(&self, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[G]) {
        let mut buffer = [0.0; BLOCK];
        let g = G::widened(g, &mut buffer[..g.len()]);
        let parts = p
            .chunks_mut(PART)
            .zip(m.chunks_mut(PART))
            .zip(v.chunks_mut(PART))
            .zip(g.chunks(PART));
        for (((p, m), v), g) in parts {
            for x in [&*p, m, v, g] {
                prefetch(x, AHEAD);
            }
            self.update_part(p, m, v, g);
        }
    }

    /// Plain loops, which the compiler vectorizes.
    #[inline(always)]
    fn update_part(&self, p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32]) {
        for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = g * self.gradient_factor;
            *m = *m * self.beta1 + g * self.one_minus_beta1;
            *v = *v * self.beta2 + g * g * self.one_minus_beta2;
            let denominator = v.sqrt() * self.inverse_root_correction + self.epsilon;
            *p = *p * self.keep - self.step_size * (*m / denominator);
        }
    }
}

#[inline(always)]
fn round<P: Element>(weights: &[f32], parameter: &mut [P]) {
    for (parameter, &weight) in parameter.iter_mut().zip(weights) {
        *parameter = P::nearest(weight);
    }
}
