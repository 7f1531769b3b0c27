//! Runs that are equal up to rounding.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor, safetensors};
use candle_grpo::train::RunDir;
use serde_json::Value;

use super::support::lines;

/// Asserts that two runs with at most 5 steps have the same metrics, evaluations and weights, up to
/// the order of their sums. Both have the learning rate 3e-3 and an epsilon of 1e-3.
///
/// A sum over n f32 numbers in another order differs by about sqrt(n) * 2^-24 of its terms, which
/// is 1e-6 for 2^8 numbers. The gradient norm is at most 1, so each gradient differs by at most
/// that. AdamW multiplies it by at most 3e-3 / 1e-3 in each step: 5 steps change a weight by less
/// than 2e-5. A metric is a sum over them, which may differ by 1e-4.
pub(crate) fn assert_close_runs(found: &Path, expected: &Path, steps: usize) {
    for name in ["metrics.jsonl", "evaluations.jsonl"] {
        let (found, expected) = (lines(&found.join(name)), lines(&expected.join(name)));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (found, expected) in found.iter().zip(&expected) {
            assert_close(found, expected, name);
        }
    }
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let of = |run: &Path| tensors(&RunDir::checkpoints(run).path(steps).join(name));
        let (found, expected) = (of(found), of(expected));
        assert_eq!(found.len(), expected.len(), "{name}");
        for (tensor, expected) in &expected {
            assert_eq!(found[tensor].len(), expected.len(), "{name}: {tensor}");
            for (a, b) in found[tensor].iter().zip(expected) {
                let close = (a - b).abs() <= 2e-5 * (1. + b.abs());
                assert!(close, "{name}: {tensor}: {a}, must be {b}");
            }
        }
    }
}

fn tensors(path: &Path) -> HashMap<String, Vec<f64>> {
    let tensors = safetensors::load(path, &Device::Cpu).unwrap();
    let values = |x: Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1();
    let tensors = tensors.into_iter();
    tensors
        .map(|(name, x)| (name, values(x).unwrap()))
        .collect()
}

fn assert_close(found: &Value, expected: &Value, path: &str) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            let names = |map: &serde_json::Map<String, Value>| map.keys().cloned().collect();
            let (found_names, names): (Vec<String>, Vec<String>) = (names(found), names(expected));
            assert_eq!(found_names, names, "{path}");
            for (name, found) in found {
                assert_close(found, &expected[name], &format!("{path}/{name}"));
            }
        }
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len(), "{path}");
            for (found, expected) in found.iter().zip(expected) {
                assert_close(found, expected, path);
            }
        }
        _ => match (found.as_f64(), expected.as_f64()) {
            (Some(a), Some(b)) => {
                assert!(
                    (a - b).abs() <= 1e-4 * (1. + b.abs()),
                    "{path}: {a}, must be {b}"
                );
            }
            _ => assert_eq!(found, expected, "{path}"),
        },
    }
}
