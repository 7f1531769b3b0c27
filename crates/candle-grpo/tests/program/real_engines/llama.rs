//! llama.cpp's server: `make test-llama`.
//!
//! The server has the weights of the policy, which were four bits in its file. Its products of
//! matrices are in 8 bits, so the two differ by a little.

use serde_json::{Value, json};

use super::{Server, free_port, model, rewards, write_config};
use crate::support::{lines, succeeds};

fn start() -> Server {
    let file = model().with_file_name("SmolLM2-135M-Instruct.Q4_1.gguf");
    Server::start("llama-server", &file, free_port())
}

#[test]
#[ignore = "needs llama.cpp: make test-llama"]
fn a_model_is_evaluated_through_llama_cpp() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    let answers = |rollout: Value, greedy: bool| -> Vec<Value> {
        let keys = [
            ("/rollout", rollout),
            ("/evaluation/sampler", json!({"greedy": greedy})),
        ];
        write_config(folder.path(), &keys);
        let arguments = ["eval", "run.json", "--out", "answers.jsonl", "--force"];
        succeeds(folder.path(), &arguments);
        lines(&folder.path().join("answers.jsonl"))
    };
    let share = |count: usize, answers: &[Value]| count as f64 / answers.len() as f64;
    for greedy in [true, false] {
        let local = answers(json!({"engine": "local"}), greedy);
        let engine = json!({"engine": "openai", "base_url": server.url()});
        let served = answers(engine, greedy);
        let reward = |answers: &[Value]| -> f64 {
            let rewards = answers.iter().map(|a| a["reward"].as_f64().unwrap());
            rewards.sum::<f64>() / answers.len() as f64
        };
        let pairs = local.iter().zip(&served);
        let same = pairs.filter(|(a, b)| a["completion"] == b["completion"]);
        let same = share(same.count(), &local);
        let (local, served) = (reward(&local), reward(&served));
        println!("greedy {greedy}: {local} here, {served} there, {same} of the answers are equal");
        assert!((local - served).abs() < 0.1, "{local} and {served}");
        assert!(!greedy || same > 0.6, "{same}");
    }
}

#[test]
#[ignore = "needs llama.cpp: make test-llama"]
fn llama_cpp_is_a_teacher() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    let rollout = json!({"engine": "openai", "base_url": server.url(), "weight_sync": "none"});
    let keys = [
        ("/max_steps", json!(8)),
        ("/evaluation/every_steps", json!(8)),
        ("/rollout", rollout),
        ("/sampler/temperature", json!(0.8)),
        ("/training/old_log_probs", json!("recompute")),
        (
            "/algorithm/recipe/policy_loss/rollout_correction",
            json!({"weight": {"max": 2.}}),
        ),
    ];
    write_config(folder.path(), &keys);
    succeeds(folder.path(), &["train", "run.json", "--quiet"]);
    let rewards = rewards(folder.path());
    println!("held out: {rewards:?}");
    assert!(rewards[1] > rewards[0] + 0.1, "{rewards:?}");
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    let divergence = |line: &Value| line["rollout_kl"].as_f64().unwrap();
    let divergences: Vec<f64> = metrics.iter().map(divergence).collect();
    println!("divergence: {divergences:?}");
    // At first the policy has the weights of the teacher, and then it moves away.
    assert!(divergences[0].abs() < 0.05, "{divergences:?}");
}
