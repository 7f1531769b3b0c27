//! llama.cpp's server: `make test-llama`.
//!
//! The server has the policy's weights, which were stored in four bits. It multiplies matrices in 8
//! bits, so the two differ slightly.

use std::path::Path;

use candle_grpo::nn::GgufDType;
use candle_grpo::train::Pretrained;
use serde_json::{Value, json};

use super::{Server, model, rewards, tiny, write_config};
use crate::support::{lines, succeeds};

fn start() -> Server {
    serve(&model().with_file_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
}

fn serve(file: &Path) -> Server {
    Server::start("llama-server", file)
}

#[test]
#[ignore = "needs llama.cpp: make test-llama"]
fn llama_cpp_reads_what_convert_writes() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let answers = |rollout: Value| -> Vec<Value> {
        let keys = [
            ("/rollout", rollout),
            ("/evaluation/sampler", json!({"greedy": true})),
        ];
        write_config(folder.path(), &keys);
        let arguments = ["eval", "run.json", "--out", "answers.jsonl", "--force"];
        succeeds(folder.path(), &arguments);
        lines(&folder.path().join("answers.jsonl"))
    };
    let local = answers(json!({"engine": "local"}));
    for (dtype, least) in [("f32", 0.9), ("f16", 0.9), ("q8_0", 0.6)] {
        let file = format!("{dtype}.gguf");
        let model = model.to_str().unwrap();
        succeeds(folder.path(), &["convert", model, &file, "--dtype", dtype]);
        let server = serve(&folder.path().join(&file));
        let served = answers(json!({"engine": "openai", "base_url": server.url()}));
        let pairs = local.iter().zip(&served);
        let same = pairs.filter(|(a, b)| a["completion"] == b["completion"]);
        let same = same.count() as f64 / local.len() as f64;
        println!("{dtype}: {same} of {} answers are equal", local.len());
        assert!(same >= least, "{dtype}: {same}");
    }
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
fn llama_cpp_judges_completions() {
    let server = start();
    let folder = tempfile::tempdir().unwrap();
    let judge = json!([{
        "kind": "judge", "url": format!("{}/v1", server.url()), "model": "any", "max_tokens": 8,
        "prompt": "Repeat this number: {sum}. The answer was: {completion}",
        "score": {"regex": r"(\d+)"}, "cache": "cache", "max_retries": 60, "on_failure": "score",
    }]);
    let answers = || -> Vec<Value> {
        let keys = [
            ("/rewards", judge.clone()),
            ("/evaluation/max_prompts", json!(20)),
            ("/evaluation/sampler", json!({"greedy": true})),
        ];
        write_config(folder.path(), &keys);
        let arguments = ["eval", "run.json", "--out", "answers.jsonl", "--force"];
        succeeds(folder.path(), &arguments);
        lines(&folder.path().join("answers.jsonl"))
    };
    let judged = answers();
    let scored = judged
        .iter()
        .filter(|answer| answer["reward"] != json!(0.0));
    let scored = scored.count();
    println!("{scored} of {} completions have a score", judged.len());
    assert!(scored > judged.len() / 2);
    // The replies are kept.
    drop(server);
    assert_eq!(answers(), judged);
}

/// The text of a tiny model is noise, and the same on both sides.
#[test]
#[ignore = "needs llama.cpp: make test-llama"]
fn llama_cpp_computes_what_each_family_does() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = Pretrained::load_without_weights(&model()).unwrap();
    let answers = |model: &str, rollout: Value| -> Vec<Value> {
        let keys = [
            ("/model", json!(model)),
            ("/rollout", rollout),
            ("/sampling/max_new_tokens", json!(8)),
            ("/evaluation/max_prompts", json!(20)),
            ("/evaluation/sampler", json!({"greedy": true})),
        ];
        write_config(folder.path(), &keys);
        let arguments = ["eval", "run.json", "--out", "answers.jsonl", "--force"];
        succeeds(folder.path(), &arguments);
        lines(&folder.path().join("answers.jsonl"))
    };
    let gemma = |more: Value| -> Value {
        let mut config = json!({"tie_word_embeddings": true, "sliding_window": 16});
        config
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        config
    };
    let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": true});
    for (family, more) in [
        ("llama", json!({})),
        ("mistral", json!({"sliding_window": null})),
        ("qwen2", json!({})),
        ("qwen3", json!({})),
        ("smollm3", json!({})),
        ("phi3", json!({"pad_token_id": 0})),
        ("olmo2", json!({})),
        (
            "granite",
            json!({"embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2, "logits_scaling": 1.5}),
        ),
        ("gemma2", gemma(json!({"query_pre_attn_scalar": 16}))),
        ("gemma3_text", gemma(json!({"query_pre_attn_scalar": 16}))),
        ("qwen3_moe", experts),
    ] {
        let tiny = tiny(&tokens, family, &more);
        tiny.save(&folder.path().join(family)).unwrap();
        let file = folder.path().join(format!("{family}.gguf"));
        tiny.save_gguf(&file, GgufDType::F32).unwrap();
        let local = answers(family, json!({"engine": "local"}));
        let server = serve(&file);
        let served = answers(
            family,
            json!({"engine": "openai", "base_url": server.url()}),
        );
        let pairs = local.iter().zip(&served);
        let same = pairs.filter(|(a, b)| a["completion"] == b["completion"]);
        let same = same.count() as f64 / local.len() as f64;
        println!("{family}: {same} of {} answers are equal", local.len());
        // llama.cpp keeps keys and values in 16 bits.
        assert!(same >= 0.8, "{family}: {same}");
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
        ("/sampling/temperature", json!(0.8)),
        ("/old_log_probs", json!("recompute")),
        (
            "/recipe/policy_loss/rollout_correction",
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
