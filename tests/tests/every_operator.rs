//! Tests of all operators together: in a small decoder every input of every operator has a
//! gradient, and training changes it.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_kernels::{
    AdamWStep, AdamWTensors, LogProbOptions, TokenLogProbs, adamw, attention, embedding,
    linear_log_prob, log_prob, rms_norm, rope, scale_gradients, squared_gradient_norms, swiglu,
};
use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals};
use candle_grpo_test_support::{assert_close, devices, noise_tensor, numbers};
use rstest::rstest;

const VOCAB: usize = 11;
const WIDTH: usize = 16;
const HEAD: usize = 8;
const INNER: usize = 20;
const PROMPT: usize = 2;

/// Two prompts with two responses each.
const IDS: [[u32; 6]; 4] = [
    [1, 2, 3, 4, 5, 6],
    [1, 2, 7, 8, 9, 0],
    [0, 3, 10, 1, 4, 2],
    [0, 3, 6, 9, 5, 8],
];
/// The last two rows are padded on the left.
const MASK: [[u8; 6]; 4] = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 1],
    [0, 1, 1, 1, 1, 1],
    [0, 1, 1, 1, 1, 1],
];
const RESPONSE_MASK: [[u8; 4]; 4] = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]];
const REWARDS: [f32; 4] = [1., 0., 1., 0.];

/// The computation of log-probs from hidden states.
#[derive(Debug, Clone, Copy)]
enum Output {
    Logits,
    Linear,
    /// The weight is also the embedding.
    Tied,
}

/// A decoder that creates a variable at its first use.
struct Network {
    output: Output,
    dtype: DType,
    device: Device,
    variables: RefCell<BTreeMap<&'static str, Var>>,
}

impl Network {
    fn new(output: Output, dtype: DType, device: &Device) -> Self {
        Self {
            output,
            dtype,
            device: device.clone(),
            variables: RefCell::default(),
        }
    }

    fn variable(
        &self,
        name: &'static str,
        shape: &[usize],
        size: f64,
        dtype: DType,
    ) -> Result<Tensor> {
        let mut variables = self.variables.borrow_mut();
        if let Some(variable) = variables.get(name) {
            return Ok(variable.as_tensor().clone());
        }
        let seed = variables.len() as u64;
        let values = (noise_tensor(shape, seed, DType::F32, &self.device)? * size)?;
        let variable = Var::from_tensor(&values.to_dtype(dtype)?)?;
        let tensor = variable.as_tensor().clone();
        variables.insert(name, variable);
        Ok(tensor)
    }

    fn weight(&self, name: &'static str, shape: &[usize]) -> Result<Tensor> {
        self.variable(name, shape, 0.5, self.dtype)
    }

    /// Returns an input of an operator: `x` plus a variable that reaches the loss only through this
    /// operator.
    fn input(&self, name: &'static str, x: &Tensor) -> Result<Tensor> {
        x + self.variable(name, x.dims(), 0.05, x.dtype())?
    }

    /// Computes a linear map in f32, because Candle has no bf16 product on the CPU.
    fn linear(&self, name: &'static str, x: &Tensor, width: usize) -> Result<Tensor> {
        let weight = self.weight(name, &[width, x.dim(1)?])?;
        let wide = |x: &Tensor| x.to_dtype(DType::F32);
        wide(x)?.matmul(&wide(&weight)?.t()?)?.to_dtype(self.dtype)
    }

    /// Returns cosines and sines of the angles of all positions, `[B * S, HEAD / 2]`.
    fn angles(&self) -> Result<(Tensor, Tensor)> {
        let length = IDS[0].len();
        let angles = (0..IDS.len() * length).flat_map(|row| {
            (0..HEAD / 2).map(move |i| (row % length) as f32 / 10f32.powi(i as i32))
        });
        let angles = Tensor::from_iter(angles, &self.device)?.reshape(((), HEAD / 2))?;
        Ok((angles.cos()?, angles.sin()?))
    }

    /// Returns the final hidden states at the positions that predict responses, `[B, T, WIDTH]`.
    fn hidden(&self, table: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let mask = Tensor::new(&MASK, &self.device)?;
        let (cos, sin) = self.angles()?;
        let x = embedding(&ids.flatten_all()?, &self.input("embedding.weight", table)?)?;

        let normed = rms_norm(
            &self.input("rms_norm.x", &x)?,
            &self.weight("rms_norm.weight", &[WIDTH])?,
            1e-6,
        )?;
        let query = self.linear("query", &normed, 2 * HEAD)?;
        let key = self.linear("key", &normed, HEAD)?;
        let value = self.linear("value", &normed, HEAD)?;
        let query = rope(&self.input("rope.query", &query)?, &cos, &sin)?;
        let key = rope(&self.input("rope.key", &key)?, &cos, &sin)?;
        let mixed = attention(
            &self.input("attention.query", &query)?,
            &self.input("attention.key", &key)?,
            &self.input("attention.value", &value)?,
            &mask,
            HEAD,
            (HEAD as f64).powf(-0.5),
        )?;
        let x = (x + self.linear("mix", &mixed, WIDTH)?)?;

        let gate = self.linear("gate", &x, INNER)?;
        let up = self.linear("up", &x, INNER)?;
        let inner = swiglu(
            &self.input("swiglu.gate", &gate)?,
            &self.input("swiglu.up", &up)?,
        )?;
        let x = (x + self.linear("down", &inner, WIDTH)?)?;
        let length = IDS[0].len();
        x.reshape((IDS.len(), length, WIDTH))?
            .narrow(1, PROMPT - 1, length - PROMPT)
    }

    fn forward(&self) -> Result<TokenLogProbs> {
        let ids = Tensor::new(&IDS, &self.device)?;
        let targets = ids.narrow(1, PROMPT, IDS[0].len() - PROMPT)?;
        let mask = self.response_mask()?;
        let options = LogProbOptions {
            mask: Some(&mask),
            ..Default::default()
        };
        let table = self.weight("table", &[VOCAB, WIDTH])?;
        let hidden = self.hidden(&table, &ids)?;
        let weight = match self.output {
            Output::Logits => {
                let (batch, tokens, width) = hidden.dims3()?;
                let rows = hidden.reshape((batch * tokens, width))?;
                let logits = self.linear("output", &rows, VOCAB)?;
                let logits = logits.reshape((batch, tokens, VOCAB))?;
                let logits = self.input("log_prob.logits", &logits)?;
                return log_prob(&logits, &targets, 0.9, options);
            }
            Output::Linear => self.weight("output", &[VOCAB, WIDTH])?,
            Output::Tied => table,
        };
        linear_log_prob(
            &self.input("linear_log_prob.hidden", &hidden)?,
            &self.input("linear_log_prob.weight", &weight)?,
            Some(&self.weight("linear_log_prob.bias", &[VOCAB])?),
            &targets,
            0.9,
            options,
        )
    }

    fn response_mask(&self) -> Result<Tensor> {
        Tensor::new(&RESPONSE_MASK, &self.device)
    }

    fn loss(&self, tokens: &TokenLogProbs, old: &Tensor) -> Result<Tensor> {
        let rewards = Tensor::new(&REWARDS, &self.device)?;
        let advantages = GroupAdvantage::grpo().compute(&rewards, 2, Scale::Group)?;
        let mask = self.response_mask()?;
        let log_probs = self.input("policy_loss.log_probs", &tokens.log_probs)?;
        let entropy = self.input("policy_loss.entropy", &tokens.entropy)?;
        let reference = (old - 0.1)?;
        let batch = PolicyBatch::new(&log_probs, &advantages, &mask)
            .old_log_probs(old)
            .ref_log_probs(&reference)
            .entropy(&entropy);
        let loss = PolicyLoss {
            entropy_coef: 0.01,
            ..PolicyLoss::grpo()
        };
        Ok(loss.compute(&batch, &StepTotals::count(&mask)?)?.loss)
    }

    /// Returns the gradients of all variables, in the order of their names. Checks that each is
    /// finite and not 0 everywhere.
    fn gradients(&self, store: &GradStore) -> Result<Vec<Tensor>> {
        let variables = self.variables.borrow();
        let gradients = variables.iter().map(|(name, variable)| {
            let Some(gradient) = store.get(variable) else {
                panic!("{name} has no gradient");
            };
            assert_eq!(
                (gradient.dims(), gradient.dtype()),
                (variable.dims(), variable.dtype())
            );
            let values = numbers(gradient)?;
            assert!(values.iter().all(|g| g.is_finite()), "{name}: {values:?}");
            assert!(
                values.iter().any(|g| *g != 0.),
                "{name} has a gradient of 0"
            );
            gradient.detach().contiguous()
        });
        gradients.collect()
    }

    fn values(&self) -> Result<BTreeMap<&'static str, Vec<f64>>> {
        let variables = self.variables.borrow();
        let values = variables
            .iter()
            .map(|(name, variable)| Ok((*name, numbers(variable)?)));
        values.collect()
    }
}

/// Optimizer state of a variable.
struct State {
    variable: Var,
    master: Option<Var>,
    average: Var,
    square: Var,
}

impl State {
    fn new(variable: &Var) -> Result<Self> {
        let wide = variable.as_detached_tensor().to_dtype(DType::F32)?;
        let zeros = || Var::zeros(variable.shape(), DType::F32, variable.device());
        Ok(Self {
            variable: variable.clone(),
            master: (variable.dtype() != DType::F32)
                .then(|| Var::from_tensor(&wide))
                .transpose()?,
            average: zeros()?,
            square: zeros()?,
        })
    }

    fn with<'a>(&'a self, gradient: &'a Tensor) -> AdamWTensors<'a> {
        AdamWTensors {
            parameter: &self.variable,
            master: self.master.as_ref(),
            average: &self.average,
            square: &self.square,
            gradient,
            weight_decay: 0.,
        }
    }
}

fn norm(gradients: &[&Tensor]) -> Result<f64> {
    let squares = numbers(&squared_gradient_norms(gradients)?)?;
    Ok(squares.iter().sum::<f64>().sqrt())
}

#[rstest]
fn every_input_has_a_gradient_and_training_changes_it(
    #[values(Output::Logits, Output::Linear, Output::Tied)] output: Output,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    const MAX_NORM: f64 = 0.05;
    for device in devices() {
        let network = Network::new(output, dtype, device);
        let first = network.forward()?.log_probs.detach();
        let mut losses = vec![numbers(&network.loss(&network.forward()?, &first)?)?[0]];
        let start = network.values()?;
        let states = network
            .variables
            .borrow()
            .values()
            .map(State::new)
            .collect::<Result<Vec<_>>>()?;
        for step in 1..=4 {
            let store = network.loss(&network.forward()?, &first)?.backward()?;
            let gradients = network.gradients(&store)?;
            let gradients: Vec<&Tensor> = gradients.iter().collect();
            let before = norm(&gradients)?;
            assert!(before > MAX_NORM, "a norm of {before} is not clipped");
            scale_gradients(&gradients, MAX_NORM / before)?;
            assert_close(&[norm(&gradients)? / MAX_NORM], &[1.], 1e-2);

            let tensors = states.iter().zip(gradients);
            let tensors: Vec<_> = tensors.map(|(state, g)| state.with(g)).collect();
            let numbers_of_step = AdamWStep {
                learning_rate: 0.001,
                beta1: 0.9,
                beta2: 0.99,
                epsilon: 1e-8,
                step,
            };
            adamw(&tensors, &numbers_of_step)?;
            losses.push(numbers(&network.loss(&network.forward()?, &first)?)?[0]);
        }
        for (name, end) in network.values()? {
            assert_ne!(end, start[name], "{name} did not move");
        }
        assert!(losses.is_sorted_by(|a, b| a > b), "{losses:?}");

        let rows = |log_probs: &Tensor| numbers(&log_probs.sum(1)?);
        let (first, last) = (rows(&first)?, rows(&network.forward()?.log_probs)?);
        for ((first, last), reward) in first.iter().zip(&last).zip(REWARDS) {
            assert_eq!(last > first, reward > 0., "{first} became {last}");
        }
    }
    Ok(())
}

/// In training another result would hide a result without a graph.
#[rstest]
fn each_result_of_log_prob_has_a_gradient_of_every_input(
    #[values(Output::Logits, Output::Linear)] output: Output,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    for device in devices() {
        let network = Network::new(output, dtype, device);
        let tokens = network.forward()?;
        for result in [&tokens.log_probs, &tokens.entropy, &tokens.log_sum_exp] {
            network.gradients(&result.sum_all()?.backward()?)?;
        }
    }
    Ok(())
}
