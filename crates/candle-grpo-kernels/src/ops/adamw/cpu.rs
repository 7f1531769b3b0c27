//! The CPU path of [`adamw`](crate::adamw()).

use candle_core::{CpuStorage, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

use super::moments::{self, SIGNED, UNSIGNED};
use super::rounding::{Random, stochastic};
use super::{AdamWStep, AdamWTensors, Narrow};
use crate::cpu::element::Element;
use crate::cpu::instructions::vectors;
use crate::cpu::simd::{BLOCK, L1, prefetch};
use crate::cpu::slice::{self, CHUNK, with_floats};

/// Prefetch distance in elements. The step is memory-bound and reads four streams, so the hardware
/// prefetcher does not suffice at page boundaries.
const AHEAD: usize = 512;
const PART: usize = 64;

/// Updates all parameters. A core updates whole small parameters, and chunks from large ones.
pub(crate) fn step(parameters: &[&AdamWTensors], step: &AdamWStep) -> Result<()> {
    parameters.par_iter().try_for_each(|tensors| {
        let gradient = tensors.gradient.contiguous()?;
        let coefficients = Narrow::from(step.coefficients(tensors.weight_decay));
        // A closure writes one tensor, so several tensors need nested closures.
        with_moment(tensors.average, |average| {
            with_moment(tensors.square, |square| {
                with_master(tensors.master, |master| {
                    slice::write_storage(tensors.parameter, |storage, range| {
                        with_floats!(storage, "parameter", parameter => {
                            let parameter = &mut parameter[range];
                            let random = tensors.random(step);
                            let state = State { average, square, master, random };
                            let (storage, layout) = gradient.storage_and_layout();
                            let range = slice::range(layout)?;
                            with_floats!(slice::on_cpu(&storage)?, "gradient", gradient => {
                                state.update(parameter, &gradient[range], &coefficients);
                                Ok(())
                            })
                        })
                    })
                })
            })
        })
    })
}

/// A moment that a step updates.
pub(super) enum Moment<'a> {
    Numbers(&'a mut [f32]),
    /// Blocks of codes, see [`moments`].
    Blocks(&'a mut [u8]),
}

impl<'a> Moment<'a> {
    /// Splits into moments for each [`CHUNK`] elements.
    fn chunks(self) -> Vec<Moment<'a>> {
        match self {
            Self::Numbers(numbers) => numbers.chunks_mut(CHUNK).map(Moment::Numbers).collect(),
            Self::Blocks(blocks) => {
                let bytes = CHUNK / moments::NUMBERS_IN_BLOCK * moments::BYTES;
                blocks.chunks_mut(bytes).map(Moment::Blocks).collect()
            }
        }
    }
}

pub(super) fn with_moment(tensor: &Tensor, write: impl FnOnce(Moment) -> Result<()>) -> Result<()> {
    slice::write_storage(tensor, |storage, range| match storage {
        CpuStorage::U8(blocks) => write(Moment::Blocks(&mut blocks[range])),
        CpuStorage::F32(numbers) => write(Moment::Numbers(&mut numbers[range])),
        _ => bail!("a moment of {} elements, must be f32 or u8", range.len()),
    })
}

pub(super) fn with_master(
    tensor: Option<&Tensor>,
    write: impl FnOnce(Option<&mut [f32]>) -> Result<()>,
) -> Result<()> {
    match tensor {
        None => write(None),
        Some(tensor) => slice::write_f32(tensor, |master| write(Some(master))),
    }
}

/// Optimizer state to update for one parameter.
pub(super) struct State<'a> {
    pub(super) average: Moment<'a>,
    pub(super) square: Moment<'a>,
    pub(super) master: Option<&'a mut [f32]>,
    pub(super) random: Option<Random>,
}

impl State<'_> {
    pub(super) fn update<P: Element, G: Element>(
        self,
        parameter: &mut [P],
        gradient: &[G],
        coefficients: &Narrow,
    ) {
        let count = parameter.len().div_ceil(CHUNK);
        let masters: Vec<_> = match self.master {
            None => (0..count).map(|_| None).collect(),
            Some(master) => master.chunks_mut(CHUNK).map(Some).collect(),
        };
        let random = self.random;
        parameter
            .par_chunks_mut(CHUNK)
            .zip(masters)
            .zip(self.average.chunks())
            .zip(self.square.chunks())
            .zip(gradient.par_chunks(CHUNK))
            .enumerate()
            .for_each(|(at, ((((p, master), m), v), g))| {
                let random = random.map(|random| random.after(at * CHUNK));
                vectors().dispatch(|| match (m, v) {
                    (Moment::Numbers(m), Moment::Numbers(v)) => {
                        coefficients.update(p, master, random, m, v, g);
                    }
                    (Moment::Blocks(m), Moment::Blocks(v)) => {
                        coefficients.update_quantized(p, master, random, m, v, g);
                    }
                    // Both moments have the same form.
                    _ => {}
                });
            });
    }
}

impl Narrow {
    #[inline(always)]
    fn update<P: Element, G: Element>(
        &self,
        parameter: &mut [P],
        master: Option<&mut [f32]>,
        random: Option<Random>,
        average: &mut [f32],
        square: &mut [f32],
        gradient: &[G],
    ) {
        match master {
            None => self.update_rounded(parameter, random, average, square, gradient),
            Some(master) => self.update_master(parameter, master, average, square, gradient),
        }
    }

    /// Like [`Self::update`], with moments in blocks.
    #[inline(always)]
    fn update_quantized<P: Element, G: Element>(
        &self,
        parameter: &mut [P],
        mut master: Option<&mut [f32]>,
        random: Option<Random>,
        average: &mut [u8],
        square: &mut [u8],
        gradient: &[G],
    ) {
        let (signed, unsigned) = (&*SIGNED, &*UNSIGNED);
        let [mut m, mut v] = [[0.0; moments::NUMBERS_IN_BLOCK]; 2];
        let blocks = parameter
            .chunks_mut(moments::NUMBERS_IN_BLOCK)
            .zip(average.chunks_mut(moments::BYTES))
            .zip(square.chunks_mut(moments::BYTES))
            .zip(gradient.chunks(moments::NUMBERS_IN_BLOCK));
        for (at, (((p, average), square), g)) in blocks.enumerate() {
            let (m, v) = (&mut m[..p.len()], &mut v[..p.len()]);
            signed.read(average, m);
            unsigned.read(square, v);
            let first = at * moments::NUMBERS_IN_BLOCK;
            let master = master.as_deref_mut();
            let master = master.map(|master| &mut master[first..first + p.len()]);
            let random = random.map(|random| random.after(first));
            self.update(p, master, random, m, v, g);
            signed.write(m, average);
            unsigned.write(v, square);
        }
    }

    /// Updates the parameter in f32, and rounds it to its dtype.
    #[inline(always)]
    fn update_rounded<P: Element, G: Element>(
        &self,
        parameter: &mut [P],
        random: Option<Random>,
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
        for (at, (((p, m), v), g)) in blocks.enumerate() {
            if let Some(weights) = P::as_f32_mut(p) {
                self.update_block(weights, m, v, g);
                continue;
            }
            let weights = &mut buffer[..p.len()];
            P::widen(p, weights);
            self.update_block(weights, m, v, g);
            match (random, P::as_bf16_mut(p)) {
                (Some(random), Some(p)) => round_at_random(weights, random.after(at * BLOCK), p),
                _ => round(weights, p),
            }
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
                prefetch::<L1, _>(x.as_ptr().wrapping_add(AHEAD), x.len());
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

#[inline(always)]
fn round_at_random(weights: &[f32], random: Random, parameter: &mut [bf16]) {
    let mut numbers = [0; BLOCK];
    let numbers = &mut numbers[..weights.len()];
    random.fill(numbers);
    for ((parameter, &weight), &number) in parameter.iter_mut().zip(weights).zip(&*numbers) {
        *parameter = stochastic(weight, number);
    }
}
