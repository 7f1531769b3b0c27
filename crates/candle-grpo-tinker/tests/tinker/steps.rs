//! Optimizer steps.

use rstest::rstest;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{Running, example, pass, step};

/// Makes two steps over different examples. Returns the log-probs after them.
fn trained(server: &Running, options: &Value) -> Value {
    let model = server.new_model();
    let texts = [vec![1, 2, 3, 4, 5], vec![9, 8, 7]];
    for (text, seq) in texts.iter().zip([1, 3]) {
        let body = pass(&model, seq, "cross_entropy", &[example(text)]);
        server.post("forward_backward", &body);
        let mut body = step(&model, seq + 1);
        for (name, value) in options.as_object().unwrap() {
            body["adam_params"][name] = value.clone();
        }
        server.call("optim_step", &body);
    }
    let last = pass(&model, 5, "cross_entropy", &[example(&texts[0])]);
    server.call("forward", &last)["loss_fn_outputs"].clone()
}

#[rstest]
#[case(json!({"learning_rate": 0.02}))]
#[case(json!({"beta1": 0.8}))]
#[case(json!({"beta2": 0.9}))]
#[case(json!({"eps": 1e-2}))]
#[case(json!({"weight_decay": 0.5}))]
#[case(json!({"grad_clip_norm": 1e-6}))]
fn each_option_of_a_step_counts(#[case] options: Value) {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let defaults = json!({
        "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0., "grad_clip_norm": 0.,
    });
    let expected = trained(&server, &json!({}));
    assert_eq!(trained(&server, &defaults), expected);
    // No gradient here has this norm.
    assert_eq!(trained(&server, &json!({"grad_clip_norm": 1e6})), expected);
    assert_ne!(trained(&server, &options), expected);
}

#[test]
fn a_step_that_fails_clears_the_gradients() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let data = [example(&[1, 2, 3])];
    server.post("forward_backward", &pass(&model, 1, "cross_entropy", &data));
    let mut wrong = step(&model, 2);
    wrong["adam_params"]["beta1"] = json!(2.);
    let failed = server.call("optim_step", &wrong);
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("beta1"), "{error}");
    let failed = server.call("optim_step", &step(&model, 3));
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("gradient"), "{error}");
}

#[test]
fn a_step_without_gradients_is_a_failed_result() {
    let folder = tempdir().unwrap();
    let server = Running::start(folder.path());
    let model = server.new_model();
    let failed = server.call("optim_step", &step(&model, 1));
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("gradient"), "{error}");
}
