//! Checks that doc comments state option defaults.

use std::collections::BTreeMap;

use candle_grpo_kernels::{DrawOptions, HeadTransform, LogProbOptions, RmsNormOptions};
use candle_grpo_test_support::assert_defaults_are_documented;
use serde_json::json;

#[test]
fn each_option_states_its_default() {
    let log_prob = LogProbOptions::default();
    let draw = DrawOptions::default();
    let heads = HeadTransform::default();
    let norm = RmsNormOptions::default();
    let defaults = BTreeMap::from([
        (
            "LogProbOptions",
            json!({
                "mask": log_prob.mask.map(|_| "given"),
                "gradient_into_logits": log_prob.gradient_into_logits,
                "logit_cap": log_prob.logit_cap,
            }),
        ),
        (
            "DrawOptions",
            json!({
                "temperature": draw.temperature,
                "top_k": draw.top_k,
                "top_p": draw.top_p,
                "min_p": draw.min_p,
                "greedy": draw.greedy,
            }),
        ),
        (
            "HeadTransform",
            json!({
                "norms": heads.norms.map(|_| "given"),
                "angles": heads.angles.map(|_| "given"),
                "head_dim": heads.head_dim,
                "has_gates": heads.has_gates,
            }),
        ),
        (
            "RmsNormOptions",
            json!({
                "epsilon": norm.epsilon,
                "is_offset": norm.is_offset,
            }),
        ),
    ]);
    assert_defaults_are_documented(env!("CARGO_MANIFEST_DIR"), &defaults);
}

/// Reads a file in this crate.
fn text(path: &str) -> String {
    let path = format!("{}/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("a file of the crate")
}

/// The rows in the operator table, without links.
fn operators(text: &str, prefix: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix(prefix))
        .skip_while(|line| !line.starts_with("| operator"))
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            // The target of a link to a function that shares its name with a module.
            let mut row = line.replace(['[', ']'], "");
            while let Some(end) = row.find("())") {
                let start = row[..end].rfind('(').expect("the start of the destination");
                row.replace_range(start..end + 3, "");
            }
            row
        })
        .collect()
}

#[test]
fn the_readme_has_the_operators_of_the_first_page() {
    let page = operators(&text("src/lib.rs"), "//! ");
    assert!(page.len() > 20, "{page:?}");
    assert_eq!(page, operators(&text("README.md"), ""));
}

#[test]
fn the_first_page_names_each_function() {
    let source = text("src/lib.rs");
    let page: String = source
        .lines()
        .filter(|line| line.starts_with("//!"))
        .collect();
    for exported in source.split("pub use ").skip(1) {
        let names = exported.split(';').next().unwrap_or_default();
        let (_, names) = names.rsplit_once("::").expect("the path of an item");
        for name in names.split(['{', '}', ',']).map(str::trim) {
            let is_function = name.starts_with(|c: char| c.is_ascii_lowercase());
            // The page describes the backward passes together.
            if is_function && !name.ends_with("_gradient") {
                assert!(page.contains(&format!("[`{name}`]")), "{name}");
            }
        }
    }
}
