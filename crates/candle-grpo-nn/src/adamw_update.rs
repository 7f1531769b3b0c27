//! The arithmetic of one AdamW update.

use std::cell::RefCell;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, Var, bail};

/// The numbers of one update, the same for all elements of a variable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Coefficients {
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) epsilon: f64,
    /// `1 - learning_rate * weight_decay`, or 1 without decay.
    pub(crate) keep: f64,
    /// `learning_rate / (1 - beta1^t)`.
    pub(crate) step_size: f64,
    /// `sqrt(1 - beta2^t)`.
    pub(crate) root_correction: f64,
}

/// Updates a variable and its moments in place. All are f32, contiguous and of one shape.
pub(crate) fn update(
    variable: &Var,
    moments: (&Var, &Var),
    gradient: &Tensor,
    coefficients: Coefficients,
) -> Result<()> {
    if variable.device().is_cpu() {
        update_in_one_pass(variable, moments, gradient, coefficients)
    } else {
        update_composed(variable, moments, gradient, coefficients)
    }
}

/// Plain Candle ops, for every device.
pub(crate) fn update_composed(
    variable: &Var,
    (average, square): (&Var, &Var),
    gradient: &Tensor,
    c: Coefficients,
) -> Result<()> {
    let p = variable.as_detached_tensor();
    let m = ((average.as_detached_tensor() * c.beta1)? + (gradient * (1.0 - c.beta1))?)?;
    let v = ((square.as_detached_tensor() * c.beta2)? + (gradient.sqr()? * (1.0 - c.beta2))?)?;
    let denominator = ((v.sqrt()? / c.root_correction)? + c.epsilon)?;
    let p = ((p * c.keep)? - ((&m / denominator)? * c.step_size)?)?;
    average.set(&m)?;
    square.set(&v)?;
    variable.set(&p)
}

/// One pass over the memory without temporaries: the composed update is bound by allocation and memory.
fn update_in_one_pass(
    variable: &Var,
    (average, square): (&Var, &Var),
    gradient: &Tensor,
    c: Coefficients,
) -> Result<()> {
    let (storage, layout) = gradient.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(gradient)) = &*storage else {
        bail!("the gradient must be f32 on the CPU");
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("the gradient must be contiguous");
    };
    let g = &gradient[start..end];
    on_slice(variable, |p| {
        on_slice(average, |m| {
            on_slice(square, |v| {
                update_slices(p, m, v, g, c);
                Ok(())
            })
        })
    })
}

fn update_slices(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], c: Coefficients) {
    let (beta1, beta2, epsilon) = (c.beta1 as f32, c.beta2 as f32, c.epsilon as f32);
    let (one_minus_beta1, one_minus_beta2) = ((1.0 - c.beta1) as f32, (1.0 - c.beta2) as f32);
    let (keep, step_size, correction) = (
        c.keep as f32,
        c.step_size as f32,
        (1.0 / c.root_correction) as f32,
    );
    for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(g) {
        *m = *m * beta1 + g * one_minus_beta1;
        *v = *v * beta2 + g * g * one_minus_beta2;
        *p = *p * keep - step_size * (*m / (v.sqrt() * correction + epsilon));
    }
}

/// Runs `f` on the numbers of an f32 CPU variable.
fn on_slice(variable: &Var, f: impl FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
    variable.inplace_op1(&OnSlice(RefCell::new(f)))
}

/// An in-place op gets `&self`, a closure that mutates needs `&mut`: hence the cell, borrowed once per call.
struct OnSlice<F>(RefCell<F>);

impl<F: FnMut(&mut [f32]) -> Result<()>> InplaceOp1 for OnSlice<F> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(data), Some((start, end))) = (storage, layout.contiguous_offsets())
        else {
            bail!("adamw: variables and moments must be contiguous f32");
        };
        (self.0.borrow_mut())(&mut data[start..end])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// `count` numbers without pattern, with zeros among them.
    fn wave(count: usize, frequency: f64, scale: f64) -> Result<Tensor> {
        let values: Vec<f32> = (0..count)
            .map(|i| {
                if i % 7 == 3 {
                    0.0
                } else {
                    (((i * i) as f64 * frequency).sin() * scale) as f32
                }
            })
            .collect();
        Tensor::from_vec(values, count, &Device::Cpu)
    }

    #[test]
    fn one_pass_is_the_composed_update() -> Result<()> {
        let count = 1001;
        let start = [
            wave(count, 0.37, 2.0)?,
            wave(count, 0.11, 0.1)?,
            wave(count, 0.71, 0.1)?.sqr()?,
        ];
        let fresh = || {
            start
                .iter()
                .map(Var::from_tensor)
                .collect::<Result<Vec<_>>>()
        };
        let (fused, composed) = (fresh()?, fresh()?);
        let coefficients = Coefficients {
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            keep: 0.97,
            step_size: 0.3,
            root_correction: 0.8,
        };
        // A gradient that begins inside its storage.
        let gradient = wave(count + 5, 0.53, 1.0)?.narrow(0, 5, count)?;
        update_in_one_pass(&fused[0], (&fused[1], &fused[2]), &gradient, coefficients)?;
        update_composed(
            &composed[0],
            (&composed[1], &composed[2]),
            &gradient,
            coefficients,
        )?;
        for ((fused, composed), start) in fused.iter().zip(&composed).zip(&start) {
            let (fused, composed) = (fused.to_vec1::<f32>()?, composed.to_vec1::<f32>()?);
            assert_ne!(fused, start.to_vec1::<f32>()?);
            for (fused, composed) in fused.iter().zip(&composed) {
                assert!(
                    (fused - composed).abs() <= 1e-6 * (1.0 + composed.abs()),
                    "{fused} is not {composed}"
                );
            }
        }
        Ok(())
    }
}
