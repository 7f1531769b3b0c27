//! The numbers of passes.

use candle_core::{D, Device, Tensor};
use candle_grpo_loss::surrogate::{Clip, DetachedWeight};
use candle_grpo_loss::{Aggregation, PolicyBatch, PolicyLoss, StepTotals, Surrogate};
use candle_grpo_nn::{Decoder, Gradients, Lora, LoraConfig};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{Running, base, numbers, pass, step, tokens};

/// An example: tokens, targets, log-probs of the sampler, advantages. A target need not be the next
/// token, and an advantage may be 0.
struct Row {
    read: Vec<u32>,
    targets: Vec<u32>,
    old: Vec<f32>,
    advantages: Vec<f32>,
}

fn rows() -> Vec<Row> {
    vec![
        Row {
            read: vec![1, 2, 3, 4, 5],
            targets: vec![0, 3, 4, 5, 0],
            old: vec![0., -2.0, -3.2, -2.9, -2.2],
            advantages: vec![0., 0.5, -1.5, 2., 1.],
        },
        Row {
            read: vec![1, 2, 9, 9, 8, 7, 6, 5, 4],
            targets: vec![2, 9, 9, 8, 7, 6, 5, 4, 11],
            old: vec![-2.4, -1.2, -2.5, -4.5, -2.6, -2.1, -3.0, -2.7, -2.0],
            advantages: vec![1., -1., 0.25, 3., -2., 0., 0.5, 1., -0.75],
        },
        Row {
            read: vec![7],
            targets: vec![3],
            old: vec![-2.5],
            advantages: vec![-0.5],
        },
    ]
}

impl Row {
    fn json(&self, loss: &str) -> Value {
        let mut inputs = json!({"target_tokens": tokens(&self.targets)});
        if loss == "cross_entropy" {
            inputs["weights"] = numbers(&self.advantages);
        } else {
            inputs["logprobs"] = numbers(&self.old);
            inputs["advantages"] = numbers(&self.advantages);
        }
        json!({
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": self.read}]},
            "loss_fn_inputs": inputs,
        })
    }
}

/// The losses of a row's tokens by their formula.
fn formula(loss: &str, row: &Row, log_probs: &[f32]) -> Vec<f64> {
    let tokens = log_probs.iter().zip(&row.old).zip(&row.advantages);
    let loss = tokens.map(|((&log_prob, &old), &advantage)| {
        let (log_prob, advantage) = (f64::from(log_prob), f64::from(advantage));
        let ratio = (log_prob - f64::from(old)).exp();
        match loss {
            "cross_entropy" => -advantage * log_prob,
            "importance_sampling" => -ratio * advantage,
            "ppo" => -(ratio * advantage).min(ratio.clamp(0.8, 1.2) * advantage),
            "cispo" => -ratio.clamp(0.8, 1.2) * advantage * log_prob,
            _ => unreachable!(),
        }
    });
    loss.collect()
}

/// Our own loss in Candle's graph: the same surrogate over dense log-probs.
fn surrogate(loss: &str) -> Surrogate {
    match loss {
        "cross_entropy" => Surrogate::PolicyGradient,
        // No ratio here reaches the upper bound.
        "importance_sampling" => Clip::asymmetric(1., 1e6).into(),
        "ppo" => Clip::symmetric(0.2).into(),
        "cispo" => DetachedWeight {
            ratio_min: Some(0.8),
            ..DetachedWeight::at_most(1.2)
        }
        .into(),
        _ => unreachable!(),
    }
}

/// The log-probs of all rows in Candle's graph, and the norm of the gradient of their loss.
fn in_a_graph(loss: &str, seed: u64) -> (Vec<Vec<f32>>, f64) {
    let (model, parameters) = base();
    let lora = Lora::init(LoraConfig::all_linear(4, 32.), &model, seed, &Device::Cpu).unwrap();
    let decoder = Decoder::new(&model, lora.var_builder(&parameters).unwrap()).unwrap();
    let policy_loss = PolicyLoss {
        surrogate: surrogate(loss),
        aggregation: Aggregation::TokenSum,
        log_ratio_clamp: None,
        ..PolicyLoss::default()
    };
    let mut gradients = Gradients::new();
    let mut all = Vec::new();
    for row in rows() {
        let flat = |values: &[f32]| {
            Tensor::new(values, &Device::Cpu)
                .unwrap()
                .unsqueeze(0)
                .unwrap()
        };
        let read = Tensor::new(row.read.as_slice(), &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let mask = read.ones_like().unwrap();
        let hidden = decoder.padded_hidden_states(&read, &mask).unwrap();
        let logits = decoder.logits(&hidden).unwrap();
        let log_probs = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
        let targets = Tensor::new(row.targets.as_slice(), &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let targets = targets.unsqueeze(D::Minus1).unwrap();
        let log_probs = log_probs.gather(&targets, D::Minus1).unwrap();
        let log_probs = log_probs.squeeze(D::Minus1).unwrap();
        all.push(log_probs.squeeze(0).unwrap().to_vec1().unwrap());
        let batch = PolicyBatch::new(&log_probs, &flat(&row.advantages), &mask)
            .old_log_probs(&flat(&row.old));
        let totals = StepTotals::count(&mask).unwrap();
        let output = policy_loss.compute(&batch, &totals).unwrap();
        gradients
            .accumulate(&output.loss, lora.parameters())
            .unwrap();
    }
    (all, gradients.global_norm().unwrap())
}

fn found(result: &Value) -> Vec<Vec<f32>> {
    let outputs = result["loss_fn_outputs"].as_array();
    let outputs = outputs.unwrap_or_else(|| panic!("{result}"));
    let row = |output: &Value| serde_json::from_value(output["logprobs"]["data"].clone()).unwrap();
    outputs.iter().map(row).collect()
}

#[rstest]
fn a_pass_has_the_numbers_of_our_own_loss(
    #[values("cross_entropy", "importance_sampling", "ppo", "cispo")] loss: &str,
) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.model(&server.session(), 0, 3);
    let data: Vec<Value> = rows().iter().map(|row| row.json(loss)).collect();
    let forward = server.call("forward", &pass(&model, 1, loss, &data));
    let backward = server.call("forward_backward", &pass(&model, 2, loss, &data));
    assert_eq!(forward, backward);

    let (expected, norm) = in_a_graph(loss, 3);
    let log_probs = found(&backward);
    for (found, expected) in log_probs.iter().flatten().zip(expected.iter().flatten()) {
        assert!(
            (found - expected).abs() < 1e-6 * expected.abs().max(1.),
            "{found} {expected}"
        );
    }
    let rows = rows();
    let terms = rows.iter().zip(&log_probs);
    let terms: Vec<f64> = terms.flat_map(|(row, x)| formula(loss, row, x)).collect();
    let (value, size) = (
        terms.iter().sum::<f64>(),
        terms.iter().map(|x| x.abs()).sum::<f64>(),
    );
    let reported = backward["metrics"]["loss:sum"].as_f64().unwrap();
    assert!((reported - value).abs() < 1e-6 * size, "{reported} {value}");

    let stepped = server.call("optim_step", &step(&model, 3));
    let grad_norm = stepped["metrics"]["grad_norm"].as_f64().unwrap();
    assert!((grad_norm - norm).abs() < 1e-6 * norm, "{grad_norm} {norm}");
}

#[test]
fn gradients_of_passes_add_up() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let session = server.session();
    let loss = "importance_sampling";
    let data: Vec<Value> = rows().iter().map(|row| row.json(loss)).collect();
    let norms = [
        vec![data.clone()],
        data.iter().map(|x| vec![x.clone()]).collect(),
    ];
    let norms = norms.into_iter().enumerate().map(|(number, passes)| {
        let model = server.model(&session, number as u64, 3);
        let mut seq = 0;
        for data in passes {
            seq += 1;
            server.post("forward_backward", &pass(&model, seq, loss, &data));
        }
        let stepped = server.call("optim_step", &step(&model, seq + 1));
        stepped["metrics"]["grad_norm"].as_f64().unwrap()
    });
    let norms: Vec<f64> = norms.collect();
    assert!((norms[0] - norms[1]).abs() < 1e-6 * norms[0], "{norms:?}");
}

#[test]
fn a_loss_of_zeros_has_a_gradient_of_zeros() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.model(&server.session(), 0, 3);
    let row = Row {
        advantages: vec![0.; 5],
        ..rows().swap_remove(0)
    };
    let data = [row.json("ppo")];
    let found = server.call("forward_backward", &pass(&model, 1, "ppo", &data));
    assert_eq!(found["metrics"]["loss:sum"], 0.);
    let stepped = server.call("optim_step", &step(&model, 2));
    assert_eq!(stepped["metrics"]["grad_norm"], 0., "{stepped}");
}

#[test]
fn bounds_of_the_ratio_are_options() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.model(&server.session(), 0, 3);
    let data: Vec<Value> = rows().iter().map(|row| row.json("ppo")).collect();
    let mut body = pass(&model, 1, "ppo", &data);
    let wide = json!({"clip_low_threshold": 0., "clip_high_threshold": 1e6});
    body["forward_backward_input"]["loss_fn_config"] = wide;
    let found = server.call("forward", &body);
    let free = rows()
        .iter()
        .map(|row| row.json("importance_sampling"))
        .collect::<Vec<_>>();
    let expected = server.call("forward", &pass(&model, 2, "importance_sampling", &free));
    assert_eq!(found, expected);
}

#[rstest]
#[case("ppo", json!({"clip_low_threshold": 1.5}), "loss_fn_config.clip_low_threshold: 1.5, must be a ratio from 0 to 1")]
#[case("cispo", json!({"clip_high_threshold": 0.5}), "loss_fn_config.clip_high_threshold: 0.5, must be a finite ratio of at least 1")]
#[case("ppo", json!({"other": 1.0}), "loss_fn_config: other, must be clip_low_threshold or clip_high_threshold")]
#[case("cross_entropy", json!({"clip_low_threshold": 0.5}), "loss_fn_config: clip_low_threshold, must be absent for this loss_fn")]
fn wrong_options_of_a_loss_are_named(
    #[case] loss: &str,
    #[case] options: Value,
    #[case] words: &str,
) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let data: Vec<Value> = rows().iter().map(|row| row.json(loss)).collect();
    let mut body = pass(&model, 1, loss, &data);
    body["forward_backward_input"]["loss_fn_config"] = options;
    assert_eq!(server.call("forward", &body)["error"], words);
}
