//! A loop that learns.

use candle_grpo_tinker::TinkerConfig;
use candle_grpo_train::Pretrained;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{self, MODEL, Running, numbers, tokens};

/// The prompt of each sample.
const PROMPT: [u32; 2] = [1, 2];

/// The token that the loop rewards.
const REWARDED: u32 = 3;

/// Returns a model whose adapters can change its distribution: the output layer, which has none, is
/// larger than a new one.
fn pretrained() -> Pretrained {
    let pretrained = running::pretrained();
    let output = pretrained.parameters.get("lm_head.weight").unwrap();
    let larger = (output.as_detached_tensor() * 20.).unwrap();
    output.set(&larger).unwrap();
    pretrained
}

/// The share of rewarded tokens in a sample.
fn reward(sampled: &[u32]) -> f32 {
    let count = sampled.iter().filter(|&&token| token == REWARDED).count();
    count as f32 / sampled.len() as f32
}

/// An example for `importance_sampling`: the prompt has no advantage.
fn policy_example(sampled: &[u32], log_probs: &[f32], advantage: f32) -> Value {
    let text = [&PROMPT, sampled].concat();
    let prompt = vec![0.; PROMPT.len() - 1];
    json!({
        "model_input": {"chunks": [{"tokens": text[..text.len() - 1]}]},
        "loss_fn_inputs": {
            "target_tokens": tokens(&text[1..]),
            "logprobs": numbers(&[&prompt, log_probs].concat()),
            "advantages": numbers(&[prompt, vec![advantage; sampled.len()]].concat()),
        },
    })
}

/// A policy gradient with the group's mean reward as its baseline, as a client computes it.
#[test]
fn a_loop_over_http_learns() {
    let folder = tempdir().unwrap();
    let server = Running::serve(TinkerConfig::new(folder.path(), MODEL), pretrained());
    let model = server.new_model();
    let mut means = Vec::new();
    for step in 0..20u64 {
        let seq = 3 * step;
        let save = json!({
            "model_id": model, "seq_id": seq + 1, "sampling_session_seq_id": step,
        });
        let saved = server.call("save_weights_for_sampler", &save);
        let request = json!({
            "sampling_session_id": saved["sampling_session_id"], "seq_id": 0, "num_samples": 32,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 8, "seed": step, "stop": []},
        });
        let samples = server.call("asample", &request)["sequences"].clone();
        let samples: Vec<(Vec<u32>, Vec<f32>)> = samples
            .as_array()
            .unwrap()
            .iter()
            .map(|sample| {
                let tokens = serde_json::from_value(sample["tokens"].clone()).unwrap();
                (
                    tokens,
                    serde_json::from_value(sample["logprobs"].clone()).unwrap(),
                )
            })
            .collect();
        let rewards: Vec<f32> = samples.iter().map(|(tokens, _)| reward(tokens)).collect();
        let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
        let data = samples.iter().zip(&rewards);
        let data: Vec<Value> = data
            .map(|((tokens, log_probs), reward)| policy_example(tokens, log_probs, reward - mean))
            .collect();
        let pass = json!({
            "model_id": model, "seq_id": seq + 2,
            "forward_backward_input": {"data": data, "loss_fn": "importance_sampling"},
        });
        let passed = server.call("forward_backward", &pass);
        // On-policy: the ratios are 1, and the advantages add up to 0.
        let loss = passed["metrics"]["loss:sum"].as_f64().unwrap();
        assert!(loss.abs() < 1e-4, "{loss}");
        let step = json!({
            "model_id": model, "seq_id": seq + 3, "adam_params": {"learning_rate": 0.006},
        });
        server.call("optim_step", &step);
        means.push(mean);
    }
    let (first, last) = (means[0], means[means.len() - 1]);
    assert!(first < 0.2 && last > 0.8, "{means:?}");
}
