//! Distillation from a teacher.

use std::path::Path;

use candle_core::Device;
use candle_grpo::config::Preset;
use candle_grpo::nn::Parameters;
use candle_grpo::train::Pretrained;
use candle_grpo::train::model::character_tokenizer;
use candle_grpo_test_support::{HttpServer, Reply, Request};
use rstest::rstest;
use serde_json::{Value, json};

use super::support::{folder, grpo, lines, said, succeeds, write_long_model};

const CONFIG: &str = "
model: model
teacher: {model: teacher}
sampling: {max_new_tokens: 6}
data: {train: data.jsonl}
rewards: [{kind: regex, pattern: a, weight: 0}]
prompts_per_step: 8
num_generations: 4
recipe: {policy_loss: {surrogate: policy_gradient, distillation: {coef: 1.0}, aggregation: token-mean}}
optimizer: {learning_rate: 1e-2}
checkpoint: {every_steps: 10}
max_steps: 40
run_dir: run
threads: 1
";

/// Returns whether a run with `preset` needs a teacher.
pub(crate) fn needs_teacher(preset: Option<Preset>) -> bool {
    preset.is_some_and(|preset| preset.recipe(1).distillation_loss.is_some())
}

/// Trains `model` without a teacher until it draws 'a' in most places, in the folder `run_dir`.
fn train_alone(folder: &Path, model: &str, run_dir: &str) {
    let text = CONFIG
        .replace("teacher: {model: teacher}\n", "")
        .replace("model: model", &format!("model: {model}"))
        .replace("weight: 0", "weight: 1")
        .replace("pattern: a", "pattern: '^aaa'")
        .replace("distillation: {coef: 1.0}, ", "")
        .replace("run_dir: run", &format!("run_dir: {run_dir}"));
    let file = format!("{run_dir}.yaml");
    std::fs::write(folder.join(&file), text).unwrap();
    succeeds(folder, &["train", &file, "--quiet"]);
}

/// The sampled-token term in [`CONFIG`].
const OF_TOKENS: &str = "{policy_loss: {surrogate: policy_gradient, distillation: {coef: 1.0}, aggregation: token-mean}}";

#[rstest]
#[case::of_tokens(OF_TOKENS, "distillation_gap_abs")]
#[case::of_distributions(
    "{policy_loss: {loss_coef: 0}, distillation_loss: {beta: 0.5}}",
    "divergence"
)]
#[case::of_the_best_tokens(
    "{policy_loss: {loss_coef: 0}, distillation_loss: {support: {teacher: {k: 2}}}}",
    "divergence"
)]
fn the_policy_approaches_the_teacher_and_resumes_bit_identically(
    #[case] recipe: &str,
    #[case] metric: &str,
) {
    let config = CONFIG.replace(OF_TOKENS, recipe);
    let whole = folder(&config);
    let resumed = folder(&config.replace("max_steps: 40", "max_steps: 20"));
    for folder in [&whole, &resumed] {
        write_long_model(&folder.path().join("fresh"), "abcde", 24, 4);
        train_alone(folder.path(), "fresh", "teacher");
    }
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    std::fs::write(resumed.path().join("run.yaml"), &config).unwrap();
    let resume = ["train", "run.yaml", "--quiet", "--resume"];
    succeeds(resumed.path(), &resume);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics, lines(&resumed.path().join("run/metrics.jsonl")));
    let gap = |step: usize| metrics[step][metric].as_f64().unwrap();
    let mean = |steps: std::ops::Range<usize>| steps.map(gap).sum::<f64>() / 5.;
    let (first, last) = (mean(0..5), mean(35..40));
    assert!(last < 0.7 * first, "{first} {last}");
}

#[test]
fn a_teacher_that_does_not_fit_is_named() {
    let folder = folder(CONFIG);
    let path = folder.path();
    write_long_model(&path.join("teacher"), "abcde", 24, 4);
    write_long_model(&path.join("short"), "abcde", 7, 4);
    write_long_model(&path.join("other"), "edcba", 24, 4);
    let other = Pretrained::load(&path.join("other"), &Device::Cpu).unwrap();
    assert_ne!(
        other.tokenizer.get_vocab(true),
        character_tokenizer("abcde").unwrap().get_vocab(true)
    );
    for (from, to, words) in [
        ("", "", None),
        (
            "teacher: {model: teacher}\n",
            "",
            Some("recipe.policy_loss.distillation: given, but there is no teacher"),
        ),
        (
            "{model: teacher}",
            "{}",
            Some("run.yaml:3: teacher: must have the key model, the key server or the key self"),
        ),
        (
            "{model: teacher}",
            "{model: teacher, server: {engine: vllm, base_url: 'http://a'}}",
            Some("run.yaml:3: teacher.server: given, must be absent with teacher.model"),
        ),
        (
            "{model: teacher}",
            "{model: teacher, self: {prompt: '{prompt}b'}}",
            Some("run.yaml:3: teacher.self: given, must be absent with teacher.model"),
        ),
        (
            "{model: teacher}",
            "{server: {engine: vllm, base_url: 'http://a'}, self: {prompt: '{prompt}b'}}",
            Some("run.yaml:3: teacher.self: given, must be absent with teacher.server"),
        ),
        ("{model: teacher}", "{self: {prompt: '{prompt}b'}}", None),
        (
            "{model: teacher}",
            "{self: {}}",
            Some("run.yaml:3: teacher.self.prompt: absent, must be given, or prompt_column"),
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}b', refresh: {every_steps: 0}}}",
            Some("run.yaml:3: teacher.self.refresh.every_steps: 0, must be at least 1"),
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}ababababababababababab'}}",
            Some(
                "run.yaml:3: teacher.self: a prompt of 25 tokens, must be at most 18: the model has 24 positions",
            ),
        ),
        (
            "{model: teacher}",
            "{by: source}",
            Some("run.yaml:3: teacher.by: given, must be absent without teacher.models"),
        ),
        (
            "{model: teacher}",
            "{models: {a: {model: teacher}}}",
            Some("run.yaml:3: teacher.models: given, must be absent without teacher.by"),
        ),
        (
            "{model: teacher}",
            "{by: source, model: teacher, models: {a: {model: teacher}}}",
            Some("run.yaml:3: teacher.model: given, must be absent with teacher.models"),
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {}}}",
            Some(
                "run.yaml:3: teacher.models.a: must have the key model, the key server or the key self",
            ),
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {by: source, model: teacher}}}",
            Some("run.yaml:3: teacher.models.a: must have one of the keys model, server and self"),
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {self: {prompt: a}}, b: {self: {prompt: b}}}}",
            Some(
                "run.yaml:3: teacher.models.b.self: given, must be absent: another teacher has it",
            ),
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {server: {engine: openai, base_url: 'http://a'}}}}",
            Some("run.yaml:3: teacher.models.a.server.engine: openai, must be vllm or sglang"),
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {model: teacher}}}",
            Some(
                "run.yaml:3: teacher.models.a: given, but no prompt has \"a\" in the column \"source\"",
            ),
        ),
        (
            "{model: teacher}",
            "{self: {prompt: 'a', sibling: {}}}",
            Some(
                "run.yaml:3: teacher.self.sibling: given, must be absent unless prompt contains {sibling}",
            ),
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}{sibling}b', sibling: {}}}",
            None,
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}abcdeabcdeabcde{sibling}', sibling: {}}}",
            None,
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}abcdeabcdeabcdea{sibling}', sibling: {}}}",
            Some("run.yaml:3: teacher.self: a prompt of 19 tokens, must be at most 18"),
        ),
        (
            "{model: teacher}",
            "{server: {engine: openai, base_url: 'http://a'}}",
            Some("run.yaml:3: teacher.server.engine: openai, must be vllm or sglang"),
        ),
        (
            "{model: teacher}",
            "{server: {engine: vllm, base_url: 'http://a', weight_sync: disk}}",
            Some("run.yaml:3: teacher.server.weight_sync: given, must be absent"),
        ),
        (
            "{model: teacher}",
            "{server: {engine: vllm, base_url: 'http://a'}}",
            None,
        ),
        (
            "{model: teacher}",
            "{server: {engine: vllm, base_url: 'http://a/'}}\nrollout: {engine: vllm, base_url: 'http://a', sleep_mode: true}",
            Some("run.yaml:3: teacher.server.base_url: http://a/, must be another server"),
        ),
        (
            "{model: teacher}\nsampling: {",
            "{server: {engine: sglang, base_url: 'http://a'}}\nsampling: {temperature: 0.7, ",
            Some("run.yaml:4: sampling.temperature: 0.7, must be 1 with teacher.server"),
        ),
        (
            "distillation: {coef: 1.0}, ",
            "",
            Some("run.yaml:3: teacher: given, but no term of the recipe learns from it"),
        ),
        (
            "{model: teacher}",
            "{model: none}",
            Some("run.yaml:3: teacher.model: loading none: there is no such file"),
        ),
        (
            "{model: teacher}",
            "{model: other}",
            Some("run.yaml:3: teacher.model: has a different vocabulary than the policy"),
        ),
        (
            "{model: teacher}",
            "{model: short}",
            Some("run.yaml:3: teacher.model: has 7 positions, must have at least 9"),
        ),
        ("{model: teacher}", "{path: teacher}", Some("teacher")),
        (OF_TOKENS, "{distillation_loss: {}}", None),
        (
            OF_TOKENS,
            "{distillation_loss: {beta: 2}}",
            Some("recipe.distillation_loss.beta: 2, must be from 0 to 1"),
        ),
        (
            OF_TOKENS,
            "{distillation_loss: {support: {sampled: {teacher_best: true}}}}",
            Some("recipe.distillation_loss.support: sampled, must be another one"),
        ),
    ] {
        assert_checked(path, &CONFIG.replacen(from, to, 1), words);
    }
}

/// A teacher must have room for its own rows only.
#[test]
fn a_teacher_fits_the_rows_that_it_teaches() {
    let folder = folder(CONFIG);
    let path = folder.path();
    write_long_model(&path.join("teacher"), "abcde", 24, 4);
    write_long_model(&path.join("short"), "abcde", 8, 4);
    let rows = [
        ("abc", "long"),
        ("d", "short"),
        ("ee", "short"),
        ("cabd", "none"),
    ];
    let rows = rows.map(|(prompt, source)| json!({"prompt": prompt, "source": source}).to_string());
    std::fs::write(path.join("data.jsonl"), rows.join("\n")).unwrap();
    for (long, short, words) in [
        ("teacher", "short", None),
        (
            "short",
            "teacher",
            Some("teacher.models.long.model: has 8 positions, must have at least 9"),
        ),
    ] {
        let teachers = format!(
            "{{by: source, models: {{long: {{model: {long}}}, short: {{model: {short}}}}}}}"
        );
        let text = CONFIG.replace("{model: teacher}", &teachers);
        assert_checked(path, &text, words);
    }
}

/// Checks a configuration, which must be valid, or an error with these words.
fn assert_checked(path: &Path, config: &str, words: Option<&str>) {
    std::fs::write(path.join("run.yaml"), config).unwrap();
    let output = grpo(path, &["check", "run.yaml"]);
    let said = said(&output);
    let code = if words.is_some() { 3 } else { 0 };
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(words.unwrap_or("")), "{said}");
}

/// The policy learns to answer as if its prompt ended in other letters.
#[rstest]
#[case::frozen("", false)]
#[case::moving_average(", refresh: {every_steps: 1, alpha: 0.05}", true)]
fn the_policy_learns_from_itself_and_resumes_bit_identically(
    #[case] refresh: &str,
    #[case] is_saved: bool,
) {
    let teacher = format!("teacher: {{self: {{prompt_column: hint{refresh}}}}}\n");
    let config = CONFIG
        .replace("teacher: {model: teacher}\n", &teacher)
        .replace(
            OF_TOKENS,
            "{policy_loss: {loss_coef: 0}, distillation_loss: {}}",
        )
        .replace("model: model", "model: first");
    let whole = folder(&config);
    let resumed = folder(&config.replace("max_steps: 40", "max_steps: 20"));
    for folder in [&whole, &resumed] {
        write_long_model(&folder.path().join("fresh"), "abcde", 24, 4);
        train_alone(folder.path(), "fresh", "first");
        let output = grpo(folder.path(), &["check", "run.yaml"]);
        assert_eq!(output.status.code(), Some(4), "{}", said(&output));
        let words = "data.jsonl:1: the teacher's prompt 0: column \"hint\": absent";
        assert!(said(&output).contains(words), "{}", said(&output));
        let rows = ["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"];
        let row = |prompt: &&str| json!({"prompt": prompt, "hint": format!("{prompt}bcdb")});
        let rows: Vec<String> = rows.iter().map(|prompt| row(prompt).to_string()).collect();
        std::fs::write(folder.path().join("data.jsonl"), rows.join("\n")).unwrap();
    }
    let printed = succeeds(whole.path(), &["check", "run.yaml"]);
    let schedule = if is_saved {
        "updated every 1 steps with weight 0.05"
    } else {
        "frozen"
    };
    let line = format!("Teacher: the policy, {schedule}, with the column \"hint\" as its prompt.");
    assert!(printed.contains(&line), "{printed}");
    assert!(printed.contains(", teacher 1 MiB,"), "{printed}");
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    std::fs::write(resumed.path().join("run.yaml"), &config).unwrap();
    succeeds(
        resumed.path(),
        &["train", "run.yaml", "--quiet", "--resume"],
    );
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics, lines(&resumed.path().join("run/metrics.jsonl")));
    let checkpoint = whole.path().join("run/checkpoints/step-000040");
    assert_eq!(checkpoint.join("teacher.safetensors").exists(), is_saved);
    let mean = |steps: std::ops::Range<usize>| {
        let all = steps.map(|step| metrics[step]["divergence"].as_f64().unwrap());
        all.sum::<f64>() / 5.
    };
    let (first, last) = (mean(0..5), mean(35..40));
    assert!(first > 1e-4 && last < 0.7 * first, "{first} {last}");
}

/// Without rewards, the teacher alone decides.
#[test]
fn a_run_with_a_teacher_needs_no_reward() {
    let without =
        |config: &str| config.replace("rewards: [{kind: regex, pattern: a, weight: 0}]\n", "");
    let config = without(CONFIG).replace("max_steps: 40", "max_steps: 3");
    let folder = folder(&config);
    let path = folder.path();
    write_long_model(&path.join("teacher"), "abcde", 24, 4);
    let printed = succeeds(path, &["check", "run.yaml"]);
    assert!(
        printed.contains("Rewards: none, the teacher decides."),
        "{printed}"
    );
    succeeds(path, &["train", "run.yaml", "--quiet"]);
    let metrics = lines(&path.join("run/metrics.jsonl"));
    for step in &metrics {
        assert_eq!(step["reward_mean"], 0.);
        assert!(step["grad_norm"].as_f64().unwrap() > 0.);
    }
    for (from, to) in [
        // The weight moves the credit of rewards only.
        (
            OF_TOKENS,
            "{advantage: {name: grpo, tokens: {teacher_weight: {}}}}",
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}{sibling}b', sibling: {}}}",
        ),
    ] {
        std::fs::write(path.join("run.yaml"), config.replace(from, to)).unwrap();
        let output = grpo(path, &["check", "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(said(&output).contains("rewards: none, must be at least one"));
    }
    // Without rewards, all groups are equal.
    for (filter, is_valid) in [
        ("{}", false),
        ("{spread: false, mean_above: 0.5}", false),
        ("{spread: false, mean_below: 0.5}", true),
        ("null", true),
    ] {
        let text = config.replace(
            "{policy_loss",
            &format!("{{group_filter: {filter}, policy_loss"),
        );
        std::fs::write(path.join("run.yaml"), text).unwrap();
        let output = grpo(path, &["check", "run.yaml"]);
        let words = "recipe.group_filter: drops every group, must be null without rewards";
        assert_eq!(
            said(&output).contains(words),
            !is_valid,
            "{}",
            said(&output)
        );
        let code = if is_valid { 0 } else { 3 };
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
    }
}

/// A model teaches some rows, the policy itself others, and a third part has no teacher.
#[test]
fn each_row_learns_from_the_teacher_of_its_column_and_resumes_bit_identically() {
    let teachers = "{by: source, models: {a: {model: teacher}, b: {self: {prompt: '{prompt}e'}}}}";
    let config = CONFIG
        .replace("{model: teacher}", teachers)
        .replace(OF_TOKENS, "{distillation_loss: {}}")
        .replace("max_steps: 40", "max_steps: 6")
        .replace("every_steps: 10", "every_steps: 3");
    let whole = folder(&config);
    let resumed = folder(&config.replace("max_steps: 6", "max_steps: 3"));
    for folder in [&whole, &resumed] {
        write_long_model(&folder.path().join("teacher"), "abcde", 24, 4);
        let rows = ["abc", "d", "ee", "ca", "b", "cd", "ed", "a", "cc", "dab"];
        let sources = [json!("a"), json!("b"), json!("c"), Value::Null];
        let rows = rows.iter().zip(sources.iter().cycle());
        let rows = rows.map(|(prompt, source)| json!({"prompt": prompt, "source": source}));
        let rows: Vec<String> = rows.map(|row| row.to_string()).collect();
        std::fs::write(folder.path().join("data.jsonl"), rows.join("\n")).unwrap();
    }
    let printed = succeeds(whole.path(), &["check", "run.yaml"]);
    let line = "Teacher: by the column \"source\"; a: teacher; b: the policy, frozen, with the prompt \"{prompt}e\".";
    assert!(printed.contains(line), "{printed}");
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    std::fs::write(resumed.path().join("run.yaml"), &config).unwrap();
    succeeds(
        resumed.path(),
        &["train", "run.yaml", "--quiet", "--resume"],
    );
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics, lines(&resumed.path().join("run/metrics.jsonl")));
    for step in &metrics {
        let [all, a, b] =
            ["divergence", "divergence/a", "divergence/b"].map(|name| step[name].as_f64().unwrap());
        assert!(a.min(b) <= all && all <= a.max(b), "{all} {a} {b}");
        let share = step["teacher_share"].as_f64().unwrap();
        assert!(0. < share && share < 1., "{share}");
    }
}

#[test]
fn a_teacher_of_distributions_fits_the_logits_of_the_policy() {
    let config = CONFIG.replace(OF_TOKENS, "{distillation_loss: {}}");
    let folder = folder(&config);
    let path = folder.path();
    write_long_model(&path.join("teacher"), "abcde", 24, 4);
    let printed = succeeds(path, &["check", "run.yaml"]);
    assert!(printed.contains(", teacher 1 MiB,"), "{printed}");
    let mut wide = Pretrained::load(&path.join("model"), &Device::Cpu).unwrap();
    wide.model.vocab_size = 64;
    wide.parameters = Parameters::init(&wide.model, 1, &Device::Cpu).unwrap();
    std::fs::remove_dir_all(path.join("model")).unwrap();
    wide.save(&path.join("model")).unwrap();
    let output = grpo(path, &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let words =
        "run.yaml:3: teacher.model: has 6 logits, must have at least 64, as many as the policy";
    assert!(said(&output).contains(words), "{}", said(&output));

    let server = "{server: {engine: vllm, base_url: 'http://a'}}";
    for (loss, words) in [
        (
            "{}",
            "support: \"vocabulary\", must be {teacher: {k: ...}} with teacher.server",
        ),
        (
            "{support: {teacher: {k: 2}}, temperature: 2.0}",
            "temperature: 2, must be 1 with teacher.server",
        ),
    ] {
        let text = config.replace("{model: teacher}", server);
        let text = text.replace(
            "distillation_loss: {}",
            &format!("distillation_loss: {loss}"),
        );
        std::fs::write(path.join("run.yaml"), text).unwrap();
        let output = grpo(path, &["check", "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        let words = format!("recipe.distillation_loss.{words}");
        assert!(said(&output).contains(&words), "{}", said(&output));
    }
}

/// A teacher server that gives each token the probability 1/6, as vLLM does.
fn uniform_teacher() -> HttpServer {
    HttpServer::start(|request: &Request| {
        let answer = match request.path() {
            "/health" => json!({}),
            "/v1/models" => json!({"data": [{"id": "large", "max_model_len": 64}]}),
            "/v1/completions" => {
                let body: Value = serde_json::from_slice(&request.body).unwrap();
                assert_eq!(body["model"], "large");
                let prompt = body["prompt"].as_array().unwrap();
                let k = body["prompt_logprobs"].as_u64().unwrap();
                let entry = |id: &Value| {
                    let ids = [id.as_u64().unwrap()].into_iter().chain(0..k);
                    let named = ids.map(|id| (id.to_string(), json!({"logprob": -(6f64.ln())})));
                    Value::Object(named.collect())
                };
                let named: Vec<Value> = prompt.iter().map(entry).collect();
                json!({"choices": [{"prompt_logprobs": named}]})
            }
            _ => return Reply::new(404, "{}"),
        };
        Reply::new(200, answer.to_string())
    })
}

#[rstest]
#[case::of_tokens(OF_TOKENS)]
#[case::of_the_best_tokens(
    "{policy_loss: {loss_coef: 0}, distillation_loss: {support: {teacher: {k: 3}}}}"
)]
fn the_policy_approaches_a_teacher_on_a_server(#[case] recipe: &str) {
    let server = uniform_teacher();
    let url = server.url();
    let text = CONFIG.replace(OF_TOKENS, recipe).replace(
        "{model: teacher}",
        &format!("{{server: {{engine: vllm, base_url: '{url}'}}}}"),
    );
    let folder = folder(&text);
    train_alone(folder.path(), "model", "first");
    let text = text.replace("model: model", "model: first");
    std::fs::write(folder.path().join("run.yaml"), text).unwrap();
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    let entropy = |step: usize| metrics[step]["entropy"].as_f64().unwrap();
    assert!(
        entropy(39) > entropy(0) + 0.2,
        "{} {}",
        entropy(0),
        entropy(39)
    );
}

/// [`CONFIG`] without rewards, whose only signal is what the teacher samples.
fn of_samples() -> String {
    let rewards = "rewards: [{kind: regex, pattern: a, weight: 0}]\n";
    let recipe = format!("recipe: {OF_TOKENS}\n");
    let samples = "demonstrations: {coef: {peak: 1}, teacher_samples: {samples_per_prompt: 2}}\n";
    CONFIG.replace(rewards, "").replace(&recipe, samples)
}

#[test]
fn the_policy_learns_from_samples_of_the_teacher_and_resumes_bit_identically() {
    let config = of_samples();
    let whole = folder(&config);
    let resumed = folder(&config.replace("max_steps: 40", "max_steps: 20"));
    for folder in [&whole, &resumed] {
        write_long_model(&folder.path().join("fresh"), "abcde", 24, 4);
        train_alone(folder.path(), "fresh", "teacher");
    }
    let printed = succeeds(whole.path(), &["check", "run.yaml"]);
    for line in [
        "Teacher: teacher.",
        "Rewards: none, the teacher decides.",
        "Demonstrations: the teacher samples 2 for each prompt of a step, of at most 6 tokens, at temperature 1.",
        ", teacher 1 MiB,",
    ] {
        assert!(printed.contains(line), "{line} in {printed}");
    }
    succeeds(whole.path(), &["train", "run.yaml", "--quiet"]);
    succeeds(resumed.path(), &["train", "run.yaml", "--quiet"]);
    std::fs::write(resumed.path().join("run.yaml"), &config).unwrap();
    let resume = ["train", "run.yaml", "--quiet", "--resume"];
    succeeds(resumed.path(), &resume);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics, lines(&resumed.path().join("run/metrics.jsonl")));
    let mean = |name: &str, steps: std::ops::Range<usize>| {
        let all = steps.map(|step| metrics[step][name].as_f64().unwrap());
        all.sum::<f64>() / 5.
    };
    let loss = |steps| mean("demonstration_loss", steps);
    let (first, last) = (loss(0..5), loss(35..40));
    assert!(last < 0.7 * first, "{first} {last}");
    for step in &metrics {
        assert_eq!(
            (&step["skipped"], &step["sampled_groups"]),
            (&json!(false), &json!(0))
        );
        assert!(step["demonstration_length"].as_f64().unwrap() <= 6.);
    }
    assert!(succeeds(whole.path(), &["report", "run"]).contains("report"));
}

#[test]
fn samples_of_a_teacher_are_refused_where_they_mean_nothing() {
    let config = of_samples();
    let folder = folder(&config);
    let path = folder.path();
    write_long_model(&path.join("teacher"), "abcde", 24, 4);
    let samples = "teacher_samples: {samples_per_prompt: 2}";
    for (from, to, words) in [
        (
            "teacher: {model: teacher}\n",
            "",
            "run.yaml:7: demonstrations.teacher_samples: given, but there is no teacher",
        ),
        (
            "{model: teacher}",
            "{self: {prompt: '{prompt}b'}}",
            "run.yaml:3: teacher.self: given, must be absent with demonstrations.teacher_samples",
        ),
        (
            "{model: teacher}",
            "{by: source, models: {a: {model: teacher}}}",
            "run.yaml:3: teacher.models: given, must be absent with demonstrations.teacher_samples",
        ),
        (
            "{model: teacher}",
            "{server: {engine: local}}",
            "run.yaml:3: teacher.server.engine: local, must be vllm, sglang or openai",
        ),
        (
            "prompts_per_step: 8",
            "demonstration_data: {train: data.jsonl}\nprompts_per_step: 8",
            "run.yaml:6: demonstration_data: given, must be absent with demonstrations.teacher_samples",
        ),
        (
            "prompts_per_step: 8",
            "environment: {kind: program, command: [game]}\nprompts_per_step: 8",
            "run.yaml:9: demonstrations.teacher_samples: given, must be absent with an environment",
        ),
        (
            samples,
            "batch_size: 4, teacher_samples: {}",
            "run.yaml:8: demonstrations.batch_size: 4, must be absent with teacher_samples",
        ),
        (
            samples,
            "teacher_samples: {min_reward: 1}",
            "run.yaml:8: demonstrations.teacher_samples.min_reward: given, must be absent without rewards",
        ),
        (
            samples,
            "teacher_samples: {temperature: 0}",
            "run.yaml:8: demonstrations.teacher_samples.temperature: 0.0, must be",
        ),
        (
            samples,
            "teacher_samples: {max_new_tokens: 30}",
            "run.yaml:8: demonstrations.teacher_samples.max_new_tokens: 30, must be at most",
        ),
        (
            samples,
            "teacher_samples: {count: 2}",
            "run.yaml:8: demonstrations.teacher_samples.count: unknown key",
        ),
        (
            samples,
            "batch_size: 4",
            "run.yaml:8: demonstrations: given, but there are no rows: give demonstration_data.train, or demonstrations.teacher_samples",
        ),
        (
            "{max_new_tokens: 6}",
            "{max_new_tokens: 6, structured_outputs: {regex: a}}",
            "sampling.structured_outputs: given, must be absent with engine local",
        ),
    ] {
        assert_checked(path, &config.replacen(from, to, 1), Some(words));
    }
    // The teacher has 24 positions, and the policy fewer.
    write_long_model(&path.join("short"), "abcde", 8, 4);
    write_long_model(&path.join("model"), "abcde", 24, 3);
    for (teacher, words) in [
        ("teacher", None),
        (
            "short",
            Some("teacher.model: has 8 positions, must have at least 9"),
        ),
    ] {
        let text = config.replace("{model: teacher}", &format!("{{model: {teacher}}}"));
        assert_checked(path, &text, words);
    }
}

/// A server that always answers "ab" and the stop token, as llama.cpp does.
#[test]
fn the_policy_learns_from_samples_of_a_server_that_only_samples() {
    let server = super::engines::fixed_policy();
    let url = server.url();
    let config = of_samples().replace(
        "{model: teacher}",
        &format!("{{server: {{engine: openai, base_url: '{url}'}}}}"),
    );
    let folder = folder(&config);
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    let metrics = lines(&folder.path().join("run/metrics.jsonl"));
    let number = |step: usize, name: &str| metrics[step][name].as_f64().unwrap();
    assert_eq!(number(0, "demonstration_length"), 3.);
    let (first, last) = (
        number(0, "demonstration_loss"),
        number(39, "demonstration_loss"),
    );
    assert!(last < 0.2 * first, "{first} {last}");
    assert!(number(39, "demonstration_token_accuracy") > 0.9);
    // It names no log-probs of given tokens.
    let scored = config.replace(
        "demonstrations:",
        &format!("recipe: {OF_TOKENS}\ndemonstrations:"),
    );
    let words = "teacher.server.engine: openai, must be vllm or sglang";
    assert_checked(folder.path(), &scored, Some(words));
}

/// One teacher scores the completions of the policy, and samples its own.
#[test]
fn a_teacher_scores_and_samples_in_one_run() {
    let config = CONFIG.replace("max_steps: 40", "max_steps: 2")
        + "demonstrations: {coef: {peak: 0.3}, teacher_samples: {min_reward: 0.5}}\n";
    let folder = folder(&config);
    write_long_model(&folder.path().join("teacher"), "abcde", 24, 4);
    let settings = succeeds(folder.path(), &["check", "run.yaml", "--all"]);
    std::fs::write(folder.path().join("run.yaml"), settings).unwrap();
    succeeds(folder.path(), &["train", "run.yaml", "--quiet"]);
    for step in lines(&folder.path().join("run/metrics.jsonl")) {
        for name in [
            "distillation_gap_abs",
            "demonstration_coef",
            "demonstration_kept",
            "demonstration_reward",
        ] {
            assert!(step[name].is_number(), "{name} in {step}");
        }
        assert_eq!(step["sampled_groups"], 8);
    }
}
