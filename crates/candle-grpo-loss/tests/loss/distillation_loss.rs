//! Divergences between distributions: values, gradients, masks and the tiled form.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::top_k;
use candle_grpo_loss::{
    Aggregation, DistillationLoss, OutputLayer, StepTotals, Support, Tail, TeacherLogits,
    distribution_statistics, linear_distillation_loss,
};
use candle_grpo_test_support::{assert_close, devices, message, noise, numbers};
use proptest::prelude::*;

const B: usize = 2;
const T: usize = 3;
const V: usize = 7;

fn logits(seed: u64) -> Vec<f64> {
    let numbers = noise(B * T * V, seed).into_iter();
    numbers.map(|x| 3. * x).collect()
}

fn tensor(x: &[f64], device: &Device) -> Result<Tensor> {
    Tensor::from_slice(x, (B, T, V), device)
}

fn losses() -> Vec<DistillationLoss> {
    let mut losses = Vec::new();
    for beta in [0., 0.3, 1.] {
        for support in [
            Support::Vocabulary,
            Support::Teacher { k: 3 },
            Support::Student { k: 2 },
            Support::Union { k: 2 },
            Support::Sampled { teacher_best: true },
            Support::Sampled {
                teacher_best: false,
            },
        ] {
            for tail in [Tail::Bucket, Tail::Renormalize, Tail::Drop] {
                losses.push(DistillationLoss {
                    beta,
                    temperature: 1.3,
                    support,
                    tail,
                    ..DistillationLoss::default()
                });
            }
        }
    }
    losses
}

fn mask(device: &Device) -> Result<Tensor> {
    Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], device)
}

/// Computes the loss, and the gradient for the student's logits.
fn compute(
    loss: &DistillationLoss,
    student: &[f64],
    teacher: &[f64],
    device: &Device,
) -> Result<(f64, Vec<f64>)> {
    let student = Var::from_tensor(&tensor(student, device)?)?;
    let teacher = tensor(teacher, device)?;
    let sampled = Tensor::new(&[[1u32, 6, 0], [3, 0, 0]], device)?;
    let mask = mask(device)?;
    let (loss, _) = loss.compute(
        &student,
        &TeacherLogits::Logits(&teacher),
        Some(&sampled),
        &mask,
        &StepTotals::count(&mask)?,
    )?;
    let gradients = loss.backward()?;
    let gradient = match gradients.get(&student) {
        Some(gradient) => numbers(gradient)?,
        None => vec![0.; B * T * V],
    };
    Ok((numbers(&loss)?[0], gradient))
}

#[test]
fn every_gradient_is_the_finite_difference_of_the_loss() -> Result<()> {
    let (student, teacher) = (logits(1), logits(2));
    for device in devices() {
        for loss in losses() {
            let (value, gradient) = compute(&loss, &student, &teacher, device)?;
            // The loss of the CPU, so the differences may be its.
            let (expected, _) = compute(&loss, &student, &teacher, &Device::Cpu)?;
            assert_close(&[value], &[expected], 1e-12);
            for i in 0..B * T * V {
                let moved = |by: f64| -> Result<f64> {
                    let mut moved = student.clone();
                    moved[i] += by;
                    Ok(compute(&loss, &moved, &teacher, &Device::Cpu)?.0)
                };
                let difference = (moved(1e-6)? - moved(-1e-6)?) / 2e-6;
                assert!(
                    (gradient[i] - difference).abs() < 1e-7,
                    "[{i}] {} against {difference} for {loss:?}",
                    gradient[i]
                );
            }
        }
    }
    Ok(())
}

#[test]
fn equal_distributions_have_no_divergence_and_others_a_positive_one() -> Result<()> {
    let (student, teacher) = (logits(3), logits(4));
    for device in devices() {
        for loss in losses() {
            let (same, gradient) = compute(&loss, &student, &student, device)?;
            assert_close(&[same], &[0.], 1e-12);
            if loss.tail != Tail::Drop {
                assert!(gradient.iter().all(|g| g.abs() < 1e-12), "{loss:?}");
            }
            let (other, _) = compute(&loss, &student, &teacher, device)?;
            assert!(other >= -1e-12, "{other} for {loss:?}");
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn logits_outside_the_mask_change_nothing(
        noise in prop::collection::vec(-1e3f64..1e3, V), pick in any::<prop::sample::Index>(),
    ) {
        let (student, teacher) = (logits(5), logits(6));
        let all = losses();
        let loss: &DistillationLoss = pick.get(&all);
        for device in devices() {
            let expected = compute(loss, &student, &teacher, device).unwrap();
            for with in [noise.clone(), vec![f64::NAN; V], vec![f64::INFINITY; V]] {
                let (mut s, mut t) = (student.clone(), teacher.clone());
                // The third token of the first row is outside the mask.
                s[2 * V..3 * V].copy_from_slice(&with);
                t[2 * V..3 * V].copy_from_slice(&with);
                prop_assert_eq!(&compute(loss, &s, &t, device).unwrap(), &expected);
            }
        }
    }
}

#[test]
fn a_support_of_all_entries_is_the_whole_vocabulary() -> Result<()> {
    let (student, teacher) = (logits(15), logits(16));
    for device in devices() {
        for beta in [0., 0.3, 1.] {
            let whole = DistillationLoss {
                beta,
                ..DistillationLoss::default()
            };
            let (expected, expected_gradient) = compute(&whole, &student, &teacher, device)?;
            for tail in [Tail::Bucket, Tail::Renormalize, Tail::Drop] {
                let part = DistillationLoss {
                    support: Support::Teacher { k: V + 3 },
                    tail,
                    ..whole
                };
                let (found, gradient) = compute(&part, &student, &teacher, device)?;
                assert_close(&[found], &[expected], 1e-12);
                assert_close(&gradient, &expected_gradient, 1e-12);
            }
        }
    }
    Ok(())
}

/// The bucket is summed over the others, so that a tail of 1e-9 keeps its digits in f32.
#[test]
fn a_small_tail_keeps_its_precision() -> Result<()> {
    for device in devices() {
        let student = Tensor::new(&[[[0f32, -20.7, -20.7]]], device)?;
        let teacher = Tensor::new(&[[[0f32, -0.7, -0.7]]], device)?;
        let loss = DistillationLoss {
            support: Support::Teacher { k: 1 },
            ..DistillationLoss::default()
        };
        let got = loss.per_token(&student, &TeacherLogits::Logits(&teacher), None)?;
        let tail = |x: f64| (1. / (1. + 2. * x.exp()), 2. * x.exp() / (1. + 2. * x.exp()));
        let (s, t) = (tail(-20.7), tail(-0.7));
        let expected = t.0 * (t.0 / s.0).ln() + t.1 * (t.1 / s.1).ln();
        assert_close(&numbers(&got)?, &[expected], 1e-5);
    }
    Ok(())
}

const SCALE: f64 = 1.7;
const CAP: f64 = 1.2;

/// A layer with all options.
fn layer<'a>(hidden: &'a Tensor, weight: &'a Tensor, bias: &'a Tensor) -> OutputLayer<'a> {
    OutputLayer {
        bias: Some(bias),
        logit_scale: SCALE,
        logit_cap: Some(CAP),
        ..OutputLayer::new(hidden, weight)
    }
}

/// Returns its logits.
fn logits_of(hidden: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let products = hidden.broadcast_matmul(&weight.t()?)?;
    (products.broadcast_add(bias)? * (SCALE / CAP))?.tanh()? * CAP
}

/// Teachers with the same distributions in each form.
struct Teachers {
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    logits: Tensor,
    ids: Tensor,
    log_probs: Tensor,
}

impl Teachers {
    fn new(hidden: Tensor, weight: Tensor, bias: Tensor, k: usize) -> Result<Self> {
        let logits = logits_of(&hidden, &weight, &bias)?;
        let ids = top_k(&logits, k)?;
        let total = logits.exp()?.sum_keepdim(2)?.log()?;
        let log_probs = logits.broadcast_sub(&total)?.gather(&ids, 2)?;
        Ok(Self {
            hidden,
            weight,
            bias,
            logits,
            ids,
            log_probs,
        })
    }

    fn layer(&self) -> TeacherLogits<'_> {
        TeacherLogits::Hidden(layer(&self.hidden, &self.weight, &self.bias))
    }

    fn top_k(&self) -> TeacherLogits<'_> {
        TeacherLogits::TopK {
            ids: &self.ids,
            log_probs: &self.log_probs,
        }
    }
}

/// `softmax(logits / temperature)` for each row.
fn probs(logits: &[f64], temperature: f64) -> Vec<Vec<f64>> {
    let softmax = |row: &[f64]| {
        let exps: Vec<f64> = row.iter().map(|x| (x / temperature).exp()).collect();
        let total: f64 = exps.iter().sum();
        exps.iter().map(|x| x / total).collect()
    };
    logits.chunks(V).map(softmax).collect()
}

fn entropies(logits: &Tensor, temperature: f64) -> Result<Vec<f64>> {
    let rows = probs(&numbers(logits)?, temperature);
    let entropy = |p: &Vec<f64>| -p.iter().map(|p| p * p.ln()).sum::<f64>();
    Ok(rows.iter().map(entropy).collect())
}

#[test]
fn divergences_follow_their_definition() -> Result<()> {
    let temperature = 1.3;
    let kl = |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum() };
    let (student, teacher) = (logits(13), logits(14));
    let pairs = probs(&student, temperature)
        .into_iter()
        .zip(probs(&teacher, temperature));
    let pairs: Vec<(Vec<f64>, Vec<f64>)> = pairs.collect();
    for device in devices() {
        for beta in [0., 0.3, 1.] {
            let loss = DistillationLoss {
                beta,
                temperature,
                ..DistillationLoss::default()
            };
            let teacher = tensor(&teacher, device)?;
            let found = loss.per_token(
                &tensor(&student, device)?,
                &TeacherLogits::Logits(&teacher),
                None,
            )?;
            let expected = pairs.iter().map(|(p, q)| {
                let mix = p.iter().zip(q).map(|(p, q)| (1. - beta) * p + beta * q);
                let mix: Vec<f64> = mix.collect();
                match beta {
                    0. => kl(q, p),
                    1. => kl(p, q),
                    beta => beta * kl(q, &mix) + (1. - beta) * kl(p, &mix),
                }
            });
            assert_close(&numbers(&found)?, &expected.collect::<Vec<_>>(), 1e-12);
        }
    }
    Ok(())
}

/// Logit gradients that f16 would round to 0.
#[test]
fn gradients_of_half_precision_are_as_precise_as_their_inputs() -> Result<()> {
    for device in devices() {
        let hidden = Tensor::from_vec(noise(B * T * 4, 1), (B, T, 4), device)?;
        let weight = Tensor::from_vec(noise(V * 4, 2), (V, 4), device)?;
        let teacher = tensor(&logits(3), device)?;
        let mask = mask(device)?;
        let totals = StepTotals {
            tokens: 1e7,
            ..StepTotals::count(&mask)?
        };
        let loss = DistillationLoss::default();
        for dtype in [DType::F16, DType::BF16] {
            let gradient = |to: DType| -> Result<Vec<f64>> {
                let half = |x: &Tensor| x.to_dtype(dtype)?.to_dtype(to);
                let (hidden, weight) = (half(&hidden)?, Var::from_tensor(&half(&weight)?)?);
                let student = OutputLayer::new(&hidden, &weight);
                let teacher = TeacherLogits::Logits(&teacher);
                let got = linear_distillation_loss(&loss, &student, &teacher, &mask, &totals)?;
                numbers(&got.gradients.weight.expect("a gradient"))
            };
            let expected = gradient(DType::F64)?;
            let largest = expected.iter().fold(0f64, |a, x| a.max(x.abs()));
            for (found, expected) in gradient(dtype)?.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 0.01 * largest,
                    "{found} against {expected} in {dtype:?}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn the_tiled_loss_equals_that_of_the_logits() -> Result<()> {
    let (width, k) = (4, 3);
    for device in devices() {
        let hidden = |seed| Tensor::from_vec(noise(B * T * width, seed), (B, T, width), device);
        let weight = |seed| Tensor::from_vec(noise(V * width, seed), (V, width), device);
        let bias = |seed| Tensor::from_vec(noise(V, seed), V, device);
        let (hidden_states, output_weight, output_bias) = (
            Var::from_tensor(&hidden(7)?)?,
            Var::from_tensor(&weight(8)?)?,
            Var::from_tensor(&bias(11)?)?,
        );
        // A gradient reaches hidden states that are computed from a variable, and a weight.
        let student_hidden = (hidden_states.as_tensor() * 1.)?;
        let teachers = Teachers::new(hidden(9)?, weight(10)?, bias(12)?, k)?;
        let mask = mask(device)?;
        let totals = StepTotals::count(&mask)?;
        for loss in losses() {
            if matches!(loss.support, Support::Sampled { .. }) {
                continue;
            }
            let mut pairs = vec![
                (TeacherLogits::Logits(&teachers.logits), teachers.layer()),
                (
                    TeacherLogits::Logits(&teachers.logits),
                    TeacherLogits::Logits(&teachers.logits),
                ),
            ];
            let mut loss = DistillationLoss { coef: 0.7, ..loss };
            if loss.support == (Support::Teacher { k }) {
                // Log-probs at one temperature do not determine those at another.
                loss.temperature = 1.;
                pairs.push((TeacherLogits::Logits(&teachers.logits), teachers.top_k()));
            }
            for (plain, tiled) in pairs {
                let logits = logits_of(&student_hidden, &output_weight, &output_bias)?;
                let (expected, metrics) = loss.compute(&logits, &plain, None, &mask, &totals)?;
                let store = expected.backward()?;
                let student = layer(&student_hidden, &output_weight, &output_bias);
                let got = linear_distillation_loss(&loss, &student, &tiled, &mask, &totals)?;
                assert_close(&numbers(&got.loss)?, &numbers(&expected)?, 1e-12);
                for (variable, gradient) in [
                    (&hidden_states, got.gradients.hidden),
                    (&output_weight, got.gradients.weight),
                    (&output_bias, got.gradients.bias),
                ] {
                    let expected = store.get(variable).expect("a gradient");
                    let gradient = gradient.expect("a gradient");
                    assert_close(&numbers(&gradient)?, &numbers(expected)?, 1e-12);
                }
                let (found, expected) = (got.metrics.to_host()?, metrics.to_host()?);
                let entropies = entropies(&logits, loss.temperature)?;
                let entropy = (entropies[0] + entropies[1] + entropies[T]) / 3.;
                assert_close(
                    &[found.get("student_entropy").unwrap_or_default()],
                    &[entropy],
                    1e-12,
                );
                for name in ["divergence", "student_mass", "teacher_mass"] {
                    assert_eq!(found.get(name).is_some(), expected.get(name).is_some());
                    let value = |x: Option<f64>| x.unwrap_or_default();
                    assert_close(
                        &[value(found.get(name))],
                        &[value(expected.get(name))],
                        1e-12,
                    );
                }
            }
        }
    }
    Ok(())
}

/// f32's fast path on the CPU against plain operations in f64.
#[test]
fn whole_distributions_in_f32_are_those_in_f64() -> Result<()> {
    let device = Device::Cpu;
    let (rows, vocabulary) = (5, 3001);
    let logits = |seed, scale: f64| -> Result<Tensor> {
        let mut numbers = noise(rows * vocabulary, seed);
        numbers.iter_mut().for_each(|x| *x *= scale);
        // Absent entries: in one, in the other, and in both.
        numbers[seed as usize % 2 * 7] = f64::NEG_INFINITY;
        numbers[9] = f64::NEG_INFINITY;
        Tensor::from_vec(numbers, (rows, vocabulary), &device)?.to_dtype(DType::F32)
    };
    for (beta, scale) in [(0., 3.), (0.3, 3.), (0.5, 40.), (0.9, 0.1), (1., 3.)] {
        let (student, teacher) = (logits(1, scale)?, logits(2, scale)?);
        let finite = |x: &Tensor| x.gt(-1e30)?.where_cond(x, &(x.zeros_like()? - 50.)?);
        // If an entry is absent in one, the divergence is infinite, unless there is a mix.
        let (student, teacher) = match beta {
            0. => (finite(&student)?, teacher),
            1. => (student, finite(&teacher)?),
            _ => (student, teacher),
        };
        let loss = DistillationLoss {
            beta,
            temperature: 1.3,
            ..DistillationLoss::default()
        };
        let slopes = [1., -0.5, 0., 2., 1.5];
        let compute = |dtype: DType| -> Result<(Vec<f64>, Vec<f64>)> {
            let student = Var::from_tensor(&student.to_dtype(dtype)?)?;
            let teacher = teacher.to_dtype(dtype)?;
            let divergences = loss.per_token(&student, &TeacherLogits::Logits(&teacher), None)?;
            let slopes = Tensor::new(&slopes, &device)?.to_dtype(dtype)?;
            let store = (&divergences * slopes)?.sum_all()?.backward()?;
            let gradient = store.get(&student).expect("a gradient");
            Ok((numbers(&divergences)?, numbers(gradient)?))
        };
        let ((found, gradient), (expected, slow)) = (compute(DType::F32)?, compute(DType::F64)?);
        assert!(
            expected.iter().all(|x| x.is_finite() && *x > 1e-4),
            "{expected:?}"
        );
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 2e-6 * (1. + expected),
                "{found} {expected}"
            );
        }
        let largest = slow.iter().fold(0f64, |a, x| a.max(x.abs()));
        assert!(largest > 1e-5, "{largest}");
        for (found, expected) in gradient.iter().zip(&slow) {
            assert!(
                (found - expected).abs() < 1e-4 * largest,
                "{found} {expected}"
            );
        }
    }
    Ok(())
}

/// The second entry's probability is the smallest f32, and half of it is 0.
#[test]
fn a_mix_that_f32_cannot_tell_from_0_is_not_infinite() -> Result<()> {
    for device in devices() {
        let student = Tensor::new(&[[0f32, -103.2]], device)?;
        let teacher = Tensor::new(&[[0f32, f32::NEG_INFINITY]], device)?;
        let loss = DistillationLoss {
            beta: 0.5,
            ..DistillationLoss::default()
        };
        let student = Var::from_tensor(&student)?;
        let found = loss.per_token(&student, &TeacherLogits::Logits(&teacher), None)?;
        assert_close(&numbers(&found)?, &[0.], 1e-6);
        let store = found.sum_all()?.backward()?;
        let gradient = numbers(store.get(&student).expect("a gradient"))?;
        assert_close(&gradient, &[0., 0.], 1e-6);
    }
    Ok(())
}

/// The vocabulary is so large that a chunk has three tokens.
#[test]
fn chunks_add_up() -> Result<()> {
    let (vocabulary, tokens) = ((1 << 20) + 1, 4);
    let device = Device::Cpu;
    let hidden = Tensor::from_vec(noise(tokens, 1), (1, tokens, 1), &device)?;
    let hidden = Var::from_tensor(&hidden)?;
    let weight = Var::from_tensor(&Tensor::from_vec(
        noise(vocabulary, 2),
        (vocabulary, 1),
        &device,
    )?)?;
    let bias = Tensor::from_vec(noise(vocabulary, 3), vocabulary, &device)?;
    let bias = Var::from_tensor(&bias)?;
    let ids = Tensor::new(
        &[[[5u32, 9], [0, 1], [vocabulary as u32 - 1, 2], [77, 78]]],
        &device,
    )?;
    let log_probs = Tensor::new(
        &[[[-0.2f64, -3.], [-1., -1.2], [-0.5, -2.], [-4., -5.]]],
        &device,
    )?;
    let teacher = TeacherLogits::TopK {
        ids: &ids,
        log_probs: &log_probs,
    };
    let mask = Tensor::ones((1, tokens), DType::U8, &device)?;
    let totals = StepTotals::count(&mask)?;
    let loss = DistillationLoss {
        support: Support::Teacher { k: 2 },
        ..DistillationLoss::default()
    };
    let student = OutputLayer {
        bias: Some(&bias),
        ..OutputLayer::new(&hidden, &weight)
    };
    let got = linear_distillation_loss(&loss, &student, &teacher, &mask, &totals)?;
    let logits = hidden.broadcast_matmul(&weight.t()?)?;
    let logits = logits.broadcast_add(&bias)?;
    let (expected, _) = loss.compute(&logits, &teacher, None, &mask, &totals)?;
    let store = expected.backward()?;
    assert_close(&numbers(&got.loss)?, &numbers(&expected)?, 1e-12);
    let gradients = [
        (&hidden, got.gradients.hidden, 1e-12),
        (&weight, got.gradients.weight, 1e-12),
        (&bias, got.gradients.bias, 1e-12),
    ];
    for (variable, gradient, tolerance) in gradients {
        let expected = numbers(store.get(variable).expect("a gradient"))?;
        let gradient = numbers(&gradient.expect("a gradient"))?;
        assert_close(&gradient, &expected, tolerance);
    }
    Ok(())
}

#[test]
fn constants_have_no_gradient_and_masks_of_zeros_have_zeros() -> Result<()> {
    for device in devices() {
        let states = Tensor::zeros((B, T, 4), DType::F32, device)?;
        let weight = Var::zeros((V, 4), DType::F32, device)?;
        let teacher = Tensor::zeros((B, T, V), DType::F32, device)?;
        let none = Tensor::zeros((B, T), DType::U8, device)?;
        let loss = DistillationLoss::default();
        let totals = StepTotals::count(&mask(device)?)?;
        let compute = |hidden: &Tensor| {
            let student = OutputLayer::new(hidden, &weight);
            let teacher = TeacherLogits::Logits(&teacher);
            linear_distillation_loss(&loss, &student, &teacher, &none, &totals)
        };
        let got = compute(&states)?;
        assert_eq!(numbers(&got.loss)?, [0.]);
        assert!(got.gradients.hidden.is_none());
        let zeros = got.gradients.weight.expect("a gradient");
        assert_eq!(numbers(&zeros)?, vec![0.; V * 4]);
        let states = Var::from_tensor(&states)?;
        let got = compute(&states)?;
        let zeros = got.gradients.hidden.expect("a gradient");
        assert_eq!(numbers(&zeros)?, vec![0.; B * T * 4]);
    }
    Ok(())
}

/// A log-prob near 0 leaves no room for other entries in f32.
#[test]
fn the_bucket_of_a_teacher_that_is_certain_is_not_empty() -> Result<()> {
    for device in devices() {
        let student = Var::from_tensor(&Tensor::new(&[[[3f32, 0., -1., 0.]]], device)?)?;
        let ids = Tensor::new(&[[[0u32, 2]]], device)?;
        let log_probs = Tensor::new(&[[[-1e-8f32, -20.]]], device)?;
        let teacher = TeacherLogits::TopK {
            ids: &ids,
            log_probs: &log_probs,
        };
        for beta in [0., 0.5, 1.] {
            let loss = DistillationLoss {
                beta,
                support: Support::Teacher { k: 2 },
                ..DistillationLoss::default()
            };
            let divergence = loss.per_token(&student, &teacher, None)?;
            let store = divergence.sum_all()?.backward()?;
            let found = numbers(&divergence)?[0];
            assert!(found > 0.01 && found < 10., "{found}");
            let gradient = numbers(store.get(&student).expect("a gradient"))?;
            // The student is less certain.
            assert!(gradient[0] < 0. && gradient[1] > 0., "{gradient:?}");
        }
        // Entries that cover the whole vocabulary leave no others.
        let ids = Tensor::new(&[[[0u32, 2, 1, 3]]], device)?;
        let log_probs = Tensor::new(&[[[0.5f32, 0.2, 0.2, 0.1]]], device)?.log()?;
        let teacher = TeacherLogits::TopK {
            ids: &ids,
            log_probs: &log_probs,
        };
        for beta in [0., 0.5, 1.] {
            let part = DistillationLoss {
                beta,
                support: Support::Teacher { k: 4 },
                ..DistillationLoss::default()
            };
            let found = numbers(&part.per_token(&student, &teacher, None)?)?;
            let logits = Tensor::new(&[[[0.5f32, 0.2, 0.2, 0.1]]], device)?.log()?;
            let whole = DistillationLoss {
                support: Support::Vocabulary,
                ..part
            };
            let expected = whole.per_token(&student, &TeacherLogits::Logits(&logits), None)?;
            assert_close(&found, &numbers(&expected)?, 1e-5);
        }
    }
    Ok(())
}

/// Padding may have any entries and log-probs.
#[test]
fn given_entries_outside_the_mask_are_not_read() -> Result<()> {
    for device in devices() {
        let logits = tensor(&logits(1), device)?;
        let loss = DistillationLoss {
            support: Support::Teacher { k: 1 },
            ..DistillationLoss::default()
        };
        let mask = mask(device)?;
        let totals = StepTotals::count(&mask)?;
        let compute = |padding: u32, log_prob: f64| {
            let ids = Tensor::new(
                &[[[1u32], [2], [padding]], [[3], [padding], [padding]]],
                device,
            )?;
            let pads = [[[-1.], [-0.5], [log_prob]], [[-2.], [log_prob], [log_prob]]];
            let log_probs = Tensor::new(&pads, device)?;
            let teacher = TeacherLogits::TopK {
                ids: &ids,
                log_probs: &log_probs,
            };
            let (loss, _) = loss.compute(&logits, &teacher, None, &mask, &totals)?;
            numbers(&loss)
        };
        let expected = compute(0, -1.)?;
        assert_eq!(compute(u32::MAX, f64::NAN)?, expected);
        // Those inside are checked.
        let ids = Tensor::full(7u32, (B, T, 1), device)?;
        let log_probs = Tensor::full(-1f64, (B, T, 1), device)?;
        let teacher = TeacherLogits::TopK {
            ids: &ids,
            log_probs: &log_probs,
        };
        let error = message(loss.per_token(&logits, &teacher, None));
        assert!(
            error.starts_with("teacher.ids: 7, must be below 7"),
            "{error}"
        );
    }
    Ok(())
}

/// NaN is not a divergence of 0, whatever the bounds.
#[test]
fn bounds_do_not_hide_what_is_not_a_number() -> Result<()> {
    for device in devices() {
        let student = tensor(&logits(1), device)?;
        let teacher = (tensor(&logits(2), device)? * f64::NAN)?;
        for (tail, value_clamp) in [(Tail::Drop, None), (Tail::Bucket, Some(2.))] {
            let loss = DistillationLoss {
                support: Support::Student { k: 2 },
                tail,
                value_clamp,
                ..DistillationLoss::default()
            };
            let found = loss.per_token(&student, &TeacherLogits::Logits(&teacher), None)?;
            assert!(numbers(&found)?.iter().all(|x| x.is_nan()));
        }
    }
    Ok(())
}

#[test]
fn the_first_of_equal_logits_is_the_greedy_token() -> Result<()> {
    for device in devices() {
        let logits = Tensor::new(&[[1f32, 3., 3.], [1., 3., 3.], [0., 0., 0.]], device)?;
        let targets = Tensor::new(&[1u32, 2, 0], device)?;
        let statistics = distribution_statistics(&logits, &targets, 2.)?;
        assert_eq!(numbers(&statistics.is_top1)?, [1., 0., 1.]);
        assert_close(
            &numbers(&statistics.mean_logit)?,
            &[3.5 / 3., 3.5 / 3., 0.],
            1e-6,
        );
        let uniform = numbers(&statistics.log_sum_squared_probs)?[2];
        assert_close(&[uniform], &[-(3f64.ln())], 1e-6);
    }
    Ok(())
}

#[test]
fn bad_options_and_shapes_are_named() -> Result<()> {
    let device = Device::Cpu;
    let logits = Tensor::zeros((B, T, V), DType::F32, &device)?;
    let teacher = TeacherLogits::Logits(&logits);
    for (loss, expected) in [
        (
            DistillationLoss {
                beta: 2.,
                ..DistillationLoss::default()
            },
            "distillation_loss.beta: 2, must be from 0 to 1",
        ),
        (
            DistillationLoss {
                support: Support::Teacher { k: 0 },
                ..DistillationLoss::default()
            },
            "distillation_loss.support.k: 0, must be at least 1",
        ),
        (
            DistillationLoss {
                aggregation: Aggregation::SeqMeanTokenSumNorm { length: 0. },
                ..DistillationLoss::default()
            },
            "distillation_loss.aggregation.length: 0, must be positive and finite",
        ),
        (
            DistillationLoss {
                tail_floor: Some(1.),
                ..DistillationLoss::default()
            },
            "distillation_loss.tail_floor: 1, must be above 0 and below 1",
        ),
        (
            DistillationLoss {
                tail_floor: Some(1e-7),
                tail: Tail::Drop,
                ..DistillationLoss::default()
            },
            "distillation_loss.tail_floor: 0.0000001, must be absent unless the tail is bucket, which it bounds",
        ),
        (
            DistillationLoss {
                log_prob_floor: Some(1.),
                ..DistillationLoss::default()
            },
            "distillation_loss.log_prob_floor: 1, must be finite and at most 0, as log-probs are",
        ),
        (
            DistillationLoss {
                coef: -1.,
                ..DistillationLoss::default()
            },
            "distillation_loss.coef: -1, must be finite and at least 0",
        ),
        (
            DistillationLoss {
                aggregation: Aggregation::PromptMeanTokenMean,
                ..DistillationLoss::default()
            },
            "distillation_loss.aggregation: prompt-mean-token-mean, must be token-mean, token-sum or one of the means over sequences: a mean over prompts is for policy losses",
        ),
        (
            DistillationLoss {
                support: Support::Sampled { teacher_best: true },
                ..DistillationLoss::default()
            },
            "sampled_tokens: absent, the support sampled needs them",
        ),
    ] {
        assert_eq!(message(loss.per_token(&logits, &teacher, None)), expected);
    }
    let narrow = Tensor::zeros((B, T, V - 1), DType::F32, &device)?;
    let error = message(DistillationLoss::default().per_token(&narrow, &teacher, None));
    assert!(error.starts_with("teacher: logits of shape"), "{error}");

    let hidden = Tensor::zeros((B, T, 4), DType::F32, &device)?;
    let weight = Tensor::zeros((V, 4), DType::F32, &device)?;
    let mask = mask(&device)?;
    let totals = StepTotals::count(&mask)?;
    let linear = |student: OutputLayer, teacher: &TeacherLogits| {
        let loss = DistillationLoss::default();
        message(linear_distillation_loss(
            &loss, &student, teacher, &mask, &totals,
        ))
    };
    let student = OutputLayer::new(&hidden, &weight);
    let other = hidden.narrow(1, 0, 2)?;
    let error = linear(OutputLayer::new(&other, &weight), &teacher);
    assert_eq!(error, "student.hidden: shape [2, 2, 4], must be [2, 3, ..]");
    let error = linear(
        student,
        &TeacherLogits::Hidden(OutputLayer::new(&other, &weight)),
    );
    assert_eq!(error, "teacher.hidden: shape [2, 2, 4], must be [2, 3, ..]");
    let narrow = weight.narrow(1, 0, 3)?;
    let error = linear(
        student,
        &TeacherLogits::Hidden(OutputLayer::new(&hidden, &narrow)),
    );
    assert_eq!(error, "teacher.weight: shape [7, 3], must be [V, 4]");
    let bias = Tensor::zeros(V - 1, DType::F32, &device)?;
    let biased = OutputLayer {
        bias: Some(&bias),
        ..student
    };
    assert_eq!(
        linear(biased, &teacher),
        "student.bias: shape [6], must be [7]"
    );
    let scaled = OutputLayer {
        logit_scale: 0.,
        ..student
    };
    assert!(linear(scaled, &teacher).starts_with("student.logit_scale: 0, must be"));
    Ok(())
}
