//! Tests of `gated_delta_rule` against a recurrent loop in f64.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    DeltaHeads, PrefixTree, arithmetic_dtype, composed, gated_delta_rule, gated_delta_rule_gradient,
};
use candle_grpo_test_support::{assert_close, cases, devices, gradient, message, numbers};
use proptest::prelude::*;

use crate::layout::{Layout, layouts};
use crate::prefixes::{Prefixes, prefixes};
use crate::strategies::dtypes;
use crate::twin::{check_gradient_alone, check_views, noisy, rounding};

/// The rows of one value head in f64, and the formulas of the recurrence.
#[derive(Clone)]
struct Recurrence {
    query: Vec<Vec<f64>>,
    key: Vec<Vec<f64>>,
    value: Vec<Vec<f64>>,
    g: Vec<f64>,
    beta: Vec<f64>,
}

/// A matrix of rows.
type State = Vec<Vec<f64>>;

/// Returns the transposed state times a vector.
fn read(state: &State, x: &[f64]) -> Vec<f64> {
    let mut result = vec![0.0; state[0].len()];
    for (row, x) in state.iter().zip(x) {
        for (result, entry) in result.iter_mut().zip(row) {
            *result += entry * x;
        }
    }
    result
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Adds the product of a column and a row.
fn add_outer(state: &mut State, column: &[f64], row: &[f64], factor: f64) {
    for (target, x) in state.iter_mut().zip(column) {
        for (target, y) in target.iter_mut().zip(row) {
            *target += factor * x * y;
        }
    }
}

fn unit(x: &[f64]) -> Vec<f64> {
    let norm = (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x / norm).collect()
}

/// Returns the gradient of x given x and that of `unit(x)`.
fn unit_gradient(x: &[f64], gradient: &[f64]) -> Vec<f64> {
    let norm = (dot(x, x) + 1e-6).sqrt();
    let along = dot(x, gradient) / norm.powi(3);
    let pairs = x.iter().zip(gradient);
    pairs.map(|(x, g)| g / norm - x * along).collect()
}

impl Recurrence {
    fn new(inputs: &[Vec<f64>; 3], heads: DeltaHeads, head: usize) -> Self {
        let [qkv, g, beta] = inputs;
        let keys = heads.key_heads * heads.key_dim;
        let key_head = head / (heads.value_heads / heads.key_heads);
        let width = 2 * keys + heads.value_heads * heads.value_dim;
        let piece = |first: usize, len: usize| -> Vec<Vec<f64>> {
            let rows = qkv.chunks_exact(width);
            rows.map(|row| row[first..first + len].to_vec()).collect()
        };
        let gate = |x: &[f64]| {
            x.iter()
                .skip(head)
                .step_by(heads.value_heads)
                .copied()
                .collect()
        };
        Self {
            query: piece(key_head * heads.key_dim, heads.key_dim),
            key: piece(keys + key_head * heads.key_dim, heads.key_dim),
            value: piece(2 * keys + head * heads.value_dim, heads.value_dim),
            g: gate(g),
            beta: gate(beta),
        }
    }

    /// Returns the results of the rows of a sequence, and the states before each.
    fn forward(&self, rows: &[u32]) -> (Vec<Vec<f64>>, Vec<State>) {
        let mut state = vec![vec![0.0; self.value[0].len()]; self.key[0].len()];
        let (mut results, mut states) = (Vec::new(), Vec::new());
        for &row in rows {
            let at = row as usize;
            states.push(state.clone());
            state
                .iter_mut()
                .flatten()
                .for_each(|x| *x *= self.g[at].exp());
            let key = unit(&self.key[at]);
            let predicted = read(&state, &key);
            let change: Vec<f64> = self.value[at]
                .iter()
                .zip(&predicted)
                .map(|(value, predicted)| self.beta[at] * (value - predicted))
                .collect();
            add_outer(&mut state, &key, &change, 1.0);
            let scale = (key.len() as f64).sqrt();
            let query: Vec<f64> = unit(&self.query[at]).iter().map(|x| x / scale).collect();
            results.push(read(&state, &query));
        }
        (results, states)
    }

    /// Adds the gradients of the rows of a sequence to `sums`, given those of its results.
    fn add_backward(&self, rows: &[u32], of_results: &[Vec<f64>], sums: &mut Self) {
        let (_, states) = self.forward(rows);
        let mut of_state = vec![vec![0.0; self.value[0].len()]; self.key[0].len()];
        for (place, &row) in rows.iter().enumerate().rev() {
            let at = row as usize;
            let (key, beta) = (unit(&self.key[at]), self.beta[at]);
            let scale = (key.len() as f64).sqrt();
            let query: Vec<f64> = unit(&self.query[at]).iter().map(|x| x / scale).collect();
            let mut decayed = states[place].clone();
            decayed
                .iter_mut()
                .flatten()
                .for_each(|x| *x *= self.g[at].exp());
            let predicted = read(&decayed, &key);
            let error: Vec<f64> = self.value[at]
                .iter()
                .zip(&predicted)
                .map(|(v, p)| v - p)
                .collect();
            let change: Vec<f64> = error.iter().map(|x| beta * x).collect();
            let mut after = decayed.clone();
            add_outer(&mut after, &key, &change, 1.0);

            let of_result = &of_results[place];
            add_outer(&mut of_state, &query, of_result, 1.0);
            let of_query: Vec<f64> = after
                .iter()
                .map(|row| dot(row, of_result) / scale)
                .collect();
            let of_change = read(&of_state, &key);
            let of_key: Vec<f64> = of_state
                .iter()
                .zip(&decayed)
                .map(|(of, decayed)| dot(of, &change) - beta * dot(decayed, &of_change))
                .collect();
            let add = |sum: &mut [f64], x: Vec<f64>| {
                sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            };
            add(
                &mut sums.query[at],
                unit_gradient(&self.query[at], &of_query),
            );
            add(&mut sums.key[at], unit_gradient(&self.key[at], &of_key));
            add(
                &mut sums.value[at],
                of_change.iter().map(|x| beta * x).collect(),
            );
            sums.beta[at] += dot(&of_change, &error);
            add_outer(&mut of_state, &key, &of_change, -beta);
            sums.g[at] += of_state
                .iter()
                .zip(&decayed)
                .map(|(x, y)| dot(x, y))
                .sum::<f64>();
            of_state
                .iter_mut()
                .flatten()
                .for_each(|x| *x *= self.g[at].exp());
        }
    }

    fn zeros(&self) -> Self {
        let zeros = |x: &[Vec<f64>]| x.iter().map(|row| vec![0.0; row.len()]).collect();
        Self {
            query: zeros(&self.query),
            key: zeros(&self.key),
            value: zeros(&self.value),
            g: vec![0.0; self.g.len()],
            beta: vec![0.0; self.beta.len()],
        }
    }
}

/// Returns the result of the recurrence for each row, and the gradients of `qkv`, `g` and `beta`.
fn recurrent(
    inputs: &[Vec<f64>; 3],
    heads: DeltaHeads,
    prefixes: &Prefixes,
    of_result: &[f64],
) -> (Vec<f64>, [Vec<f64>; 3]) {
    let rows = prefixes.count();
    let (values, keys) = (
        heads.value_heads * heads.value_dim,
        heads.key_heads * heads.key_dim,
    );
    let group = heads.value_heads / heads.key_heads;
    let (key_dim, dim) = (heads.key_dim, heads.value_dim);
    let mut result = vec![0.0; rows * values];
    let mut gradients = inputs.each_ref().map(|x| vec![0.0; x.len()]);
    for head in 0..heads.value_heads {
        let of_head = Recurrence::new(inputs, heads, head);
        let mut sums = of_head.zeros();
        let mut is_new = vec![true; rows];
        for sequence in &prefixes.sequences {
            let (results, _) = of_head.forward(sequence);
            // The gradient of a shared row counts once.
            let of_results: Vec<Vec<f64>> = sequence
                .iter()
                .zip(results)
                .map(|(&row, o)| {
                    let at = row as usize * values + head * dim;
                    result[at..at + dim].copy_from_slice(&o);
                    if std::mem::take(&mut is_new[row as usize]) {
                        of_result[at..at + dim].to_vec()
                    } else {
                        vec![0.0; dim]
                    }
                })
                .collect();
            of_head.add_backward(sequence, &of_results, &mut sums);
        }
        let key_head = head / group;
        for row in 0..rows {
            let at = row * (2 * keys + values);
            for (first, from) in [
                (key_head * key_dim, &sums.query[row]),
                (keys + key_head * key_dim, &sums.key[row]),
                (2 * keys + head * dim, &sums.value[row]),
            ] {
                for (place, x) in from.iter().enumerate() {
                    gradients[0][at + first + place] += x;
                }
            }
            gradients[1][row * heads.value_heads + head] = sums.g[row];
            gradients[2][row * heads.value_heads + head] = sums.beta[row];
        }
    }
    (result, gradients)
}

/// Returns `qkv` of a dtype, and `g` and `beta` in f32.
fn random_inputs(rows: usize, heads: DeltaHeads, dtype: DType, seed: u64) -> Result<[Tensor; 3]> {
    let width = 2 * heads.key_heads * heads.key_dim + heads.value_heads * heads.value_dim;
    let gate = |seed| noisy(&[rows, heads.value_heads], seed, DType::F32);
    let qkv = noisy(&[rows, width], seed, dtype)?;
    Ok([
        // Not near 0, where the derivative of a unit vector is huge.
        (&qkv + (qkv.sign()? * 0.5)?)?,
        // Slow and fast decay.
        (gate(seed ^ 1)?.sqr()? * -0.7)?,
        ((gate(seed ^ 2)? + 1.0)? * 0.5)?,
    ])
}

fn heads() -> impl Strategy<Value = DeltaHeads> {
    let dim = || prop_oneof![1usize..9, Just(16), Just(33)];
    (1usize..3, 1usize..4, dim(), dim()).prop_map(|(key_heads, group, key_dim, value_dim)| {
        DeltaHeads {
            key_heads,
            value_heads: key_heads * group,
            key_dim,
            value_dim,
        }
    })
}

/// Checks results and gradients of the fused path and of the twin in f64.
fn check(prefixes: &Prefixes, heads: DeltaHeads, inputs: &[Tensor; 3], seed: u64) -> Result<()> {
    let [qkv, g, beta] = inputs;
    let tree = prefixes.tree()?;
    let in_f64 = [numbers(qkv)?, numbers(g)?, numbers(beta)?];
    let shape = [prefixes.count(), heads.value_heads * heads.value_dim];
    let of_result = noisy(&shape, seed ^ 3, qkv.dtype())?;
    let (expected, expected_gradients) = recurrent(&in_f64, heads, prefixes, &numbers(&of_result)?);
    for device in devices() {
        for is_twin in [false, true] {
            let convert = |x: &Tensor| {
                if is_twin {
                    x.to_dtype(DType::F64)?.to_device(device)
                } else {
                    x.to_device(device)
                }
            };
            let variables = inputs
                .iter()
                .map(|x| Var::from_tensor(&convert(x)?))
                .collect::<Result<Vec<_>>>()?;
            let [qkv, g, beta] = &variables[..] else {
                unreachable!()
            };
            let o = if is_twin {
                composed::gated_delta_rule(qkv, g, beta, heads, &tree)?
            } else {
                gated_delta_rule(qkv, g, beta, heads, &tree)?
            };
            assert_eq!((o.dims(), o.dtype()), (&shape[..], qkv.dtype()));
            let tolerance = if is_twin {
                1e-9
            } else {
                5.0 * rounding(qkv.dtype())
            };
            assert_close(&numbers(&o)?, &expected, tolerance);
            let store = (&o * convert(&of_result)?)?.sum_all()?.backward()?;
            for (at, (variable, expected)) in variables.iter().zip(&expected_gradients).enumerate()
            {
                // The gradients of g are sums over all later rows, whose terms cancel. Their
                // rounding is that of the largest partial sum.
                let largest = match at {
                    1 => expected
                        .iter()
                        .fold(1.0, |largest: f64, x| largest.max(x.abs())),
                    _ => 1.0,
                };
                assert_close(&gradient(&store, variable)?, expected, tolerance * largest);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 256)))]
    /// Chunks have 64 rows.
    #[test]
    fn results_and_gradients_equal_the_recurrence_in_f64(
        prefixes in prefixes(prop_oneof![0usize..9, 60usize..70, 125usize..135]),
        heads in heads(),
        dtype in dtypes(),
        layouts in [layouts(), layouts(), layouts()],
        seed in any::<u64>(),
    ) {
        let inputs = random_inputs(prefixes.count(), heads, dtype, seed)?;
        let [qkv, g, beta] = &inputs;
        let views = [layouts[0].apply(qkv)?, layouts[1].apply(g)?, layouts[2].apply(beta)?];
        check(&prefixes, heads, &views, seed)?;
        let tree = prefixes.tree()?;
        for device in devices() {
            let inputs = [(qkv, layouts[0]), (g, layouts[1]), (beta, layouts[2])];
            check_views(device, &inputs, |x| {
                let o = gated_delta_rule(x[0], x[1], x[2], heads, &tree)?;
                let score = o.to_dtype(DType::F32)?.sqr()?.sum_all()?;
                Ok((vec![o], score))
            })?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]

    /// A state that leaks to the next sequence changes its results. A GPU may sum in another order.
    #[test]
    fn packed_sequences_do_not_influence_each_other(
        lengths in prop::collection::vec(prop_oneof![1usize..9, 60usize..70], 1..5),
        heads in heads(),
        dtype in dtypes(),
        seed in any::<u64>(),
    ) {
        let rows = lengths.iter().sum();
        let inputs = random_inputs(rows, heads, dtype, seed)?;
        let of_result = noisy(&[rows, heads.value_heads * heads.value_dim], seed ^ 3, dtype)?;
        for device in devices() {
            let on = |x: &Tensor| x.to_device(device);
            let [qkv, g, beta] = [on(&inputs[0])?, on(&inputs[1])?, on(&inputs[2])?];
            let of_result = on(&of_result)?;
            let tree = PrefixTree::new(&lengths)?;
            let o = gated_delta_rule(&qkv, &g, &beta, heads, &tree)?;
            let gradients =
                gated_delta_rule_gradient([&qkv, &g, &beta], heads, &tree, &of_result)?;
            let mut first = 0;
            for &length in &lengths {
                let own = |x: &Tensor| x.narrow(0, first, length);
                let tree = PrefixTree::new(&[length])?;
                let inputs = [&own(&qkv)?, &own(&g)?, &own(&beta)?];
                let [qkv, g, beta] = inputs;
                let alone = gated_delta_rule(qkv, g, beta, heads, &tree)?;
                let tolerance = match (device.is_cpu(), dtype) {
                    (true, _) => 0.0,
                    (false, DType::F32 | DType::F64) => 1e-4,
                    (false, _) => 2e-2,
                };
                assert_close(&numbers(&own(&o)?)?, &numbers(&alone)?, tolerance);
                let alone = gated_delta_rule_gradient(inputs, heads, &tree, &own(&of_result)?)?;
                for (together, alone) in gradients.iter().zip(&alone) {
                    assert_close(&numbers(&own(together)?)?, &numbers(alone)?, tolerance);
                }
                first += length;
            }
        }
    }

    /// The gradients of the branches are summed in their prefix.
    #[test]
    fn shared_prefixes_equal_unshared_sequences(
        prefixes in prefixes(prop_oneof![0usize..9, 60usize..70]),
        heads in heads(),
        seed in any::<u64>(),
    ) {
        let rows = prefixes.count();
        let inputs = random_inputs(rows, heads, DType::F32, seed)?;
        let of_result = noisy(&[rows, heads.value_heads * heads.value_dim], seed ^ 3, DType::F32)?;
        let [qkv, g, beta] = &inputs;
        let tree = prefixes.tree()?;
        let o = gated_delta_rule(qkv, g, beta, heads, &tree)?;
        let gradients = gated_delta_rule_gradient([qkv, g, beta], heads, &tree, &of_result)?;

        let variables = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        let unshared = variables.iter().map(|x| prefixes.unshare(x)).collect::<Result<Vec<_>>>()?;
        let all = gated_delta_rule(
            &unshared[0],
            &unshared[1],
            &unshared[2],
            heads,
            &prefixes.unshared_tree()?,
        )?;
        let first = Tensor::new(prefixes.first_positions(), &Device::Cpu)?;
        let all = all.index_select(&first, 0)?;
        assert_close(&numbers(&o)?, &numbers(&all)?, 1e-5);
        let store = (all * of_result)?.sum_all()?.backward()?;
        for (found, variable) in gradients.iter().zip(&variables) {
            assert_close(&numbers(found)?, &gradient(&store, variable)?, 2e-5);
        }
    }
}

const HEADS: DeltaHeads = DeltaHeads {
    key_heads: 1,
    value_heads: 2,
    key_dim: 3,
    value_dim: 2,
};

/// The gradients that the other tests expect.
#[test]
fn gradients_of_the_recurrence_equal_finite_differences() -> Result<()> {
    let prefixes = Prefixes {
        sequences: vec![vec![0, 1, 2, 3], vec![0, 1, 4], vec![5, 6]],
    };
    let inputs = random_inputs(prefixes.count(), HEADS, DType::F64, 5)?;
    let inputs = [
        numbers(&inputs[0])?,
        numbers(&inputs[1])?,
        numbers(&inputs[2])?,
    ];
    let of_result = numbers(&noisy(&[prefixes.count(), 4], 6, DType::F64)?)?;
    let score = |inputs: &[Vec<f64>; 3]| {
        dot(
            &recurrent(inputs, HEADS, &prefixes, &of_result).0,
            &of_result,
        )
    };
    let (_, gradients) = recurrent(&inputs, HEADS, &prefixes, &of_result);
    for (input, gradient) in gradients.iter().enumerate() {
        for (at, &gradient) in gradient.iter().enumerate() {
            let moved = |step: f64| {
                let mut inputs = inputs.clone();
                inputs[input][at] += step;
                score(&inputs)
            };
            let difference = (moved(1e-6) - moved(-1e-6)) / 2e-6;
            assert_close(&[gradient], &[difference], 1e-7);
        }
    }
    Ok(())
}

/// Keys that repeat, without decay: the system of a chunk is as far from the identity as possible.
#[test]
fn equal_keys_of_several_chunks_equal_the_recurrence() -> Result<()> {
    let prefixes = Prefixes {
        sequences: vec![(0..200).collect()],
    };
    let [qkv, g, beta] = random_inputs(200, HEADS, DType::F32, 8)?;
    let qkv = Layout::BroadcastFirst.apply(&qkv)?;
    check(&prefixes, HEADS, &[qkv, (g * 0.0)?, beta.ones_like()?], 8)
}

/// Gates that forget the state leave no infinite decay.
#[test]
fn a_large_decay_equals_the_recurrence() -> Result<()> {
    let prefixes = Prefixes {
        sequences: vec![(0..100).collect()],
    };
    let [qkv, g, beta] = random_inputs(100, HEADS, DType::F32, 9)?;
    check(&prefixes, HEADS, &[qkv, ((g * 1000.0)? - 30.0)?, beta], 9)
}

#[test]
fn the_backward_pass_without_a_graph_is_bit_identical() -> Result<()> {
    let tree = PrefixTree::with_shared_rows(&[3, 4], &[0, 1, 2, 0, 1, 3, 4])?;
    let [qkv, g, beta] = random_inputs(5, HEADS, DType::F32, 1)?;
    let wide = |x: &Tensor| x.to_dtype(arithmetic_dtype(x.dtype()));
    check_gradient_alone(
        &[&qkv, &g, &beta],
        |x| gated_delta_rule(x[0], &wide(x[1])?, &wide(x[2])?, HEADS, &tree),
        |x, gradient| {
            let inputs = [x[0], &wide(x[1])?, &wide(x[2])?];
            let gradients = gated_delta_rule_gradient(inputs, HEADS, &tree, gradient)?;
            let dtype = x[0].dtype();
            gradients.iter().map(|x| x.to_dtype(dtype)).collect()
        },
    )
}

/// Head sizes that are not whole vectors, in tasks that reuse buffers.
#[test]
fn nan_stays_in_its_sequence_and_its_branch() -> Result<()> {
    let tree = PrefixTree::with_shared_rows(&[3, 3, 2], &[0, 1, 2, 0, 1, 3, 4, 5])?;
    let [qkv, g, beta] = random_inputs(6, HEADS, DType::F32, 2)?;
    for poisoned in 0..3 {
        let inputs = [&qkv, &g, &beta].into_iter().enumerate().map(|(index, x)| {
            let row = if index == poisoned { f32::NAN } else { 0.0 };
            let added = Tensor::new(&[[0f32], [0.], [row], [0.], [0.], [0.]], &Device::Cpu)?;
            x.broadcast_add(&added)
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let inputs = [&inputs[0], &inputs[1], &inputs[2]];
        let o =
            gated_delta_rule(inputs[0], inputs[1], inputs[2], HEADS, &tree)?.to_vec2::<f32>()?;
        let is_finite = |row: &Vec<f32>| row.iter().all(|x| x.is_finite());
        let finite: Vec<bool> = o.iter().map(is_finite).collect();
        assert_eq!(finite, [true, true, false, true, true, true]);

        let ones = Tensor::ones((6, 4), DType::F32, &Device::Cpu)?;
        let [gradient, ..] = gated_delta_rule_gradient(inputs, HEADS, &tree, &ones)?;
        let finite: Vec<bool> = gradient.to_vec2::<f32>()?.iter().map(is_finite).collect();
        // The gradient of the prefix contains that of the branch.
        assert_eq!(finite, [false, false, false, true, true, true]);
    }
    Ok(())
}

#[test]
fn an_error_names_the_wrong_argument() -> Result<()> {
    let tree = PrefixTree::new(&[2])?;
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let (qkv, gate) = (zeros(&[2, 10], DType::F32)?, zeros(&[2, 2], DType::F32)?);
    let call = |qkv: &Tensor, g: &Tensor, beta: &Tensor, heads| {
        message(gated_delta_rule(qkv, g, beta, heads, &tree))
    };
    let with = |change: fn(&mut DeltaHeads)| {
        let mut heads = HEADS;
        change(&mut heads);
        call(&qkv, &gate, &gate, heads)
    };
    assert!(with(|heads| heads.key_dim = 0).contains("heads.key_dim: 0, must be at least 1"));
    let error = with(|heads| heads.key_heads = 4);
    assert!(
        error.contains("heads.value_heads: 2, must be a multiple of key_heads, 4"),
        "{error}"
    );
    let error = with(|heads| heads.value_dim = 3);
    assert!(
        error.contains("qkv: shape [2, 10], must be [N, 12], 2 * 1 * 3 + 2 * 3"),
        "{error}"
    );
    let error = call(&qkv, &qkv, &gate, HEADS);
    assert!(
        error.contains("g: shape [2, 10], must be [2, 2]"),
        "{error}"
    );
    let error = call(&qkv, &gate, &gate.to_dtype(DType::F64)?, HEADS);
    assert!(
        error.contains("beta: F64, must be F32 for qkv of F32"),
        "{error}"
    );
    let error = call(&qkv.to_dtype(DType::U32)?, &gate, &gate, HEADS);
    assert!(
        error.contains("qkv: U32, must be of a float dtype"),
        "{error}"
    );
    let tree = PrefixTree::new(&[3])?;
    let error = message(gated_delta_rule(&qkv, &gate, &gate, HEADS, &tree));
    assert!(
        error.contains("qkv: 2 rows, must be the rows of tree, 3"),
        "{error}"
    );
    let tree = PrefixTree::new(&[2])?;
    let inputs = [&qkv, &gate, &gate];
    let error = message(gated_delta_rule_gradient(inputs, HEADS, &tree, &qkv));
    assert!(
        error.contains("gradient: shape [2, 10], must be that of the result, [2, 4]"),
        "{error}"
    );
    Ok(())
}
