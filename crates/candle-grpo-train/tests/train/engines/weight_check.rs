//! Checksums of a server's weights.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_grpo_test_support::Reply;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::fake_server::Fault;
use super::{Setup, short};

pub(super) type Checksums = BTreeMap<String, String>;

/// The checksums of vLLM's parameters: queries, keys and values are one, and so are gate and up.
pub(super) fn checksums(setup: &Setup, version: u64) -> Checksums {
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
        checksums.insert(format!("dp0:pp0:pcp0:tp0:{name}"), text);
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

const QKV: &str = "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj.weight";
const GATE_UP: &str = "dp0:pp0:pcp0:tp0:model.layers.1.mlp.gate_up_proj.weight";
const NORM: &str = "dp0:pp0:pcp0:tp0:model.norm.weight";
const EMBEDDING: &str = "dp0:pp0:pcp0:tp0:model.embed_tokens.weight";

/// The name without the rank.
fn weight(name: &str) -> &str {
    name.rsplit_once(':').unwrap().1
}

#[test]
fn weights_that_arrive_have_the_checksums_of_the_files() {
    let checked = Checked::new();
    let right = [1, 2].map(|version| checksums(&checked.setup, version));
    for name in [QKV, GATE_UP, NORM, EMBEDDING] {
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
        let name = weight(name);
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
    assert!(error.contains(weight(NORM)), "{error}");
}

/// Processes that divide a weight have other checksums. Those with the whole weight have the same.
#[test]
fn weights_that_processes_divide_are_not_compared() {
    let checked = Checked::new();
    let divide = |version: u64| {
        let mut divided = checksums(&checked.setup, version);
        for (name, checksum) in divided.clone() {
            let checksum = match name.as_str() {
                NORM => checksum,
                _ => format!("part of {name} in {version}"),
            };
            divided.insert(name.replace("tp0", "tp1"), checksum);
        }
        divided
    };
    assert_eq!(checked.push(divide(1), divide(2)), Ok(()));
    let mut wrong = divide(2);
    wrong.insert(NORM.replace("tp0", "tp1"), "another".to_owned());
    let error = checked.push(divide(1), wrong).unwrap_err();
    assert!(error.contains(weight(NORM)), "{error}");
}

/// With `--enable-lora`, layers are inside others.
#[test]
fn layers_for_adapters_have_the_weights_of_their_base() {
    let checked = Checked::new();
    let wrap = |version: u64| -> Checksums {
        let wrapped = checksums(&checked.setup, version).into_iter();
        let wrapped = wrapped.filter(|(name, _)| name.contains("proj"));
        wrapped
            .map(|(name, checksum)| {
                (
                    name.replace("proj.weight", "proj.base_layer.weight"),
                    checksum,
                )
            })
            .collect()
    };
    assert!(wrap(1).keys().all(|name| name.contains("base_layer")));
    assert_eq!(checked.push(wrap(1), wrap(2)), Ok(()));
}

#[test]
fn a_server_without_a_comparable_weight_is_an_error() {
    let checked = Checked::new();
    let none = Checksums::from([(QKV.to_owned(), "packed".to_owned())]);
    let error = checked.push(none.clone(), none).unwrap_err();
    let url = checked.setup.servers[0].url();
    let must = "none of its 1 weights has the name and checksum of a transferred one; either they did not arrive, or the server keeps them in another form, for which it must be false";
    assert_eq!(error, format!("rollout.check_weights: {url}: {must}"));
}

#[test]
fn a_server_without_checksums_is_named() {
    let checked = Checked::new();
    // Older than 0.32.
    checked.setup.servers[0].set_faults(|_| None);
    let error = checked
        .push(Checksums::new(), Checksums::new())
        .unwrap_err();
    let url = checked.setup.servers[0].url();
    assert!(
        error.starts_with(&format!("rollout.check_weights: {url}: status 404")),
        "{error}"
    );
    assert!(error.contains("/weight_checker"), "{error}");
}
