//! Checksums of a server's weights.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_grpo_test_support::Reply;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::fake_server::Fault;
use super::{Setup, short};

type Checksums = BTreeMap<String, String>;

/// The checksums of vLLM's parameters: queries, keys and values are one, and so are gate and up.
fn checksums(setup: &Setup, version: u64) -> Checksums {
    let parameters = setup.policy(version).parameters;
    let bytes = |name: &str| -> Vec<u8> {
        let weight = parameters.get(name).unwrap().as_detached_tensor();
        let numbers = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        numbers.into_iter().flat_map(f32::to_le_bytes).collect()
    };
    let mut checksums = Checksums::new();
    for (name, _) in parameters.iter() {
        let with = |part: &str| {
            let name = name.replace("q_proj", part);
            name.replace("gate_proj", part)
        };
        let (name, bytes) = if name.contains("q_proj") {
            let parts = ["q_proj", "k_proj", "v_proj"].map(|part| bytes(&with(part)));
            (with("qkv_proj"), parts.concat())
        } else if name.contains("gate_proj") {
            let parts = ["gate_proj", "up_proj"].map(|part| bytes(&with(part)));
            (with("gate_up_proj"), parts.concat())
        } else if ["k_proj", "v_proj", "up_proj"]
            .iter()
            .any(|part| name.contains(part))
        {
            continue;
        } else {
            (name.to_owned(), bytes(name))
        };
        let digest = Sha256::digest(&bytes);
        let text = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        checksums.insert(name, text);
    }
    checksums
}

/// A server whose checksums a test chooses.
struct Checked {
    setup: Setup,
    config: RolloutConfig,
    reported: Arc<Mutex<Checksums>>,
}

impl Checked {
    fn new() -> Self {
        let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
        let reported = Arc::new(Mutex::new(checksums(&setup, 1)));
        let reports = Arc::clone(&reported);
        setup.servers[0].set_faults(move |request| {
            let answer = || json!({"checksums": &*reports.lock().unwrap()});
            let is_check = request.path() == "/weight_checker";
            is_check.then(|| Fault::Instead(Reply::new(200, answer().to_string())))
        });
        let config = RolloutConfig {
            check_weights: true,
            ..setup.impatient()
        };
        Self {
            setup,
            config,
            reported,
        }
    }

    /// Sends the weights of two versions. The server reports the checksums of `first` and `second`.
    fn push(&self, first: Checksums, second: Checksums) -> Result<(), String> {
        let client = self.setup.client(&self.config, &short());
        for (version, reported) in [(1, first), (2, second)] {
            *self.reported.lock().unwrap() = reported;
            let pushed = self.setup.policy(version).push(&client);
            pushed.map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    }
}

const QKV: &str = "model.layers.0.self_attn.qkv_proj.weight";
const GATE_UP: &str = "model.layers.1.mlp.gate_up_proj.weight";
const NORM: &str = "model.norm.weight";

#[test]
fn weights_that_arrive_have_the_checksums_of_the_files() {
    let checked = Checked::new();
    let right = [1, 2].map(|version| checksums(&checked.setup, version));
    for name in [QKV, GATE_UP, NORM, "model.embed_tokens.weight"] {
        assert_ne!(right[0][name], right[1][name]);
    }
    let [first, second] = right;
    assert_eq!(checked.push(first, second), Ok(()));
}

/// The log-probs of a probe need not show it.
#[test]
fn one_weight_that_did_not_arrive_is_named() {
    for name in [QKV, GATE_UP, NORM] {
        let checked = Checked::new();
        let [first, mut second] = [1, 2].map(|version| checksums(&checked.setup, version));
        second.insert(name.to_owned(), first[name].clone());
        let error = checked.push(first, second).unwrap_err();
        let expected = format!("{name} and 0 other weights differ from those of policy-000002");
        assert!(error.contains(&expected), "{error}");
        assert!(error.contains(&checked.setup.servers[0].url()), "{error}");
    }
}

/// Weights in another form are left out, and the others are compared.
#[test]
fn weights_in_a_form_of_the_server_are_not_compared() {
    let checked = Checked::new();
    let pack = |version: u64| {
        let mut packed = checksums(&checked.setup, version);
        packed.insert(QKV.to_owned(), format!("packed {version}"));
        packed.remove(GATE_UP);
        packed.insert("model.rotary.cache".to_owned(), "its own".to_owned());
        packed
    };
    assert_eq!(checked.push(pack(1), pack(2)), Ok(()));
    let mut wrong = pack(2);
    wrong.insert(NORM.to_owned(), "another".to_owned());
    let error = checked.push(pack(1), wrong).unwrap_err();
    assert!(error.contains(NORM), "{error}");
}

#[test]
fn a_server_without_a_comparable_weight_is_an_error() {
    let checked = Checked::new();
    let none = Checksums::from([(QKV.to_owned(), "packed".to_owned())]);
    let error = checked.push(none.clone(), none).unwrap_err();
    let must = "none of the 1 weights of the server has the checksum of the transferred one, so rollout.check_weights must be false";
    assert!(error.contains(must), "{error}");
}

#[test]
fn a_server_without_checksums_is_named() {
    let checked = Checked::new();
    // Older than 0.32.
    checked.setup.servers[0].set_faults(|_| None);
    let error = checked
        .push(Checksums::new(), Checksums::new())
        .unwrap_err();
    assert!(error.contains("404"), "{error}");
    assert!(error.contains("/weight_checker"), "{error}");
}
