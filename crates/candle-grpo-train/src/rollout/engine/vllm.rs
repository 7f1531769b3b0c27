//! vLLM.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::openai::{self, number};
use super::protocol::{
    Call, Checksums, DrawRequest, Drawn, Failure, Part, Protocol, ScoreRequest, Scored,
    ServedModel, Server,
};
use super::vllm_transfer::{self, paused};
use super::weights::{EngineWeights, WeightFormat};
use super::{vllm_ipc, vllm_nccl};
use crate::rollout::StructuredOutputs;

/// A vLLM server (0.32), started with `VLLM_SERVER_DEV_MODE=1` for whole weights, or with
/// `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` for adapters. Over NCCL, whole weights
/// also need `--weight-transfer-config '{"backend":"nccl"}'`. With `"ipc"` in its place and
/// `VLLM_ALLOW_INSECURE_SERIALIZATION=1`, the server reads them from memory of its own GPU. With
/// `--enable-sleep-mode`, it can sleep.
#[derive(Debug, Clone, Copy, Default)]
pub struct Vllm;

impl Protocol for Vllm {
    fn describe(&self, server: &Server, name: Option<&str>) -> Result<ServedModel, Failure> {
        openai::describe(server, name)
    }

    fn draw(&self, request: &DrawRequest) -> Call {
        let mut body = openai::body(request);
        // Seeds are signed.
        body.insert("seed".to_owned(), json!(request.seed >> 1));
        // Only the sampled token's log-prob.
        body.insert("logprobs".to_owned(), json!(0));
        // Only the request's stop tokens end a completion.
        body.insert("ignore_eos".to_owned(), json!(true));
        body.insert("include_stop_str_in_output".to_owned(), json!(true));
        // A stop string may be a special token.
        body.insert("skip_special_tokens".to_owned(), json!(false));
        if let Some(structured) = &request.sampling.structured_outputs {
            let (name, value) = match structured {
                StructuredOutputs::Regex(regex) => ("regex", json!(regex)),
                StructuredOutputs::Choice(choices) => ("choice", json!(choices)),
                StructuredOutputs::Json(schema) => ("json", json!(schema)),
                StructuredOutputs::Grammar(grammar) => ("grammar", json!(grammar)),
            };
            body.insert("structured_outputs".to_owned(), json!({name: value}));
        }
        Call::post("/v1/completions", Value::Object(body))
    }

    fn structures_outputs(&self) -> bool {
        true
    }

    fn parse(&self, answer: &Value) -> Result<Drawn, Failure> {
        openai::parse(answer)
    }

    fn score(&self, server: &Server, request: &ScoreRequest<'_>) -> Result<Vec<Scored>, Failure> {
        let body = json!({
            "model": request.model,
            "prompt": request.tokens,
            // The most likely tokens, and the prompt's token if it is not one of them.
            "prompt_logprobs": request.best,
            // vLLM samples at least one token.
            "max_tokens": 1,
            "temperature": 1.,
            "stream": false,
        });
        let answer = server.ask(&Call::post("/v1/completions", body), request.num_named())?;
        let named = &answer["choices"][0]["prompt_logprobs"];
        request.read("prompt_logprobs", named, |id, entry| {
            let named = entry.as_object()?.iter();
            let log_prob = |entry: &Value| number(&entry["logprob"]);
            let pairs = named.map(|(id, entry)| Some((id.parse().ok()?, log_prob(entry)?)));
            let mut best: Vec<(u32, f32)> = pairs.collect::<Option<_>>()?;
            best.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
            best.truncate(request.best);
            Some(Scored {
                log_prob: log_prob(&entry[id.to_string()])?,
                best,
            })
        })
    }

    fn load(&self, server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
        match weights.format {
            WeightFormat::Adapter => {
                load_adapter(server, weights)?;
                for old in &weights.replaced {
                    self.unload(server, old)?;
                }
            }
            WeightFormat::Disk => paused(server, || reload(server, weights))?,
            WeightFormat::Memory | WeightFormat::SharedMemory => {
                if weights.format == WeightFormat::Memory {
                    vllm_nccl::load(server, weights)?;
                } else {
                    vllm_ipc::load(server, weights)?;
                }
                // Some versions ignore the version in the request that ends an update.
                if !self.serves(server, weights)? {
                    set_version(server, weights)?;
                }
            }
        }
        if self.serves(server, weights)? {
            Ok(())
        } else {
            let message = format!("it does not serve {} after loading it", weights.name());
            Err(Failure::LostWeights(message))
        }
    }

    fn unload(&self, server: &Server, adapter: &str) -> Result<(), Failure> {
        openai::unload(server, "/v1/unload_lora_adapter", adapter)
    }

    fn join(&self, server: &Server, format: WeightFormat) -> Result<(), Failure> {
        match format {
            WeightFormat::Memory => vllm_nccl::join(server),
            WeightFormat::SharedMemory => vllm_ipc::join(server),
            WeightFormat::Adapter | WeightFormat::Disk => Ok(()),
        }
    }

    fn leave(&self, server: &Server) {
        vllm_transfer::shut_down(server);
    }

    fn sleep(&self, server: &Server) -> Result<(), Failure> {
        // Level 2 gives up the weights, too. Requests that still run are nobody's.
        let slept = server.call(&Call::post("/sleep?level=2&mode=abort", json!({})));
        slept.map(drop).map_err(without_sleep)
    }

    fn wake(&self, server: &Server, part: Part) -> Result<(), Failure> {
        let tag = match part {
            Part::Weights => "weights",
            Part::Cache => "kv_cache",
        };
        let path = format!("/wake_up?tags={tag}");
        let answer = server.call(&Call::post(path, json!({})));
        let answer = answer.map_err(without_sleep)?;
        if part == Part::Cache && answer["status"] != "awake" {
            return Err(Failure::Malformed(format!(
                "/wake_up: status: {}, must be awake",
                answer["status"]
            )));
        }
        Ok(())
    }

    fn checksums(&self, server: &Server) -> Result<Checksums, Failure> {
        let body = json!({"action": "checksum"});
        let answer = server.call(&Call::post("/weight_checker", body));
        let answer = answer.map_err(|failure| match failure {
            Failure::Status { status: 404, .. } => Failure::Unsupported(format!(
                "{failure}; it must be vLLM 0.32 or newer, started with VLLM_SERVER_DEV_MODE=1"
            )),
            failure => failure,
        })?;
        let reported: BTreeMap<String, String> = BTreeMap::deserialize(&answer["checksums"])
            .map_err(|error| Failure::Malformed(format!("/weight_checker: checksums: {error}")))?;
        let mut checksums = Checksums::new();
        for (name, checksum) in reported {
            // The rank of the process is before the name: `dp0:pp0:pcp0:tp0:model.norm.weight`.
            let name = name.rsplit_once(':').map_or(&*name, |(_, name)| name);
            // With --enable-lora, layers are inside others.
            let name = name.replace(".base_layer.", ".");
            checksums.entry(name).or_default().insert(checksum);
        }
        Ok(checksums)
    }

    fn interrupt(&self, server: &Server) -> Result<(), Failure> {
        server.call_briefly(&Call::post("/abort_requests", json!({})))?;
        Ok(())
    }

    fn serves(&self, server: &Server, weights: &EngineWeights) -> Result<bool, Failure> {
        match weights.format {
            WeightFormat::Adapter => {
                let answer = server.call(&Call::get("/v1/models"))?;
                let models = answer["data"].as_array();
                let mut models = models.into_iter().flatten();
                Ok(models.any(|model| model["id"] == weights.name()))
            }
            WeightFormat::Disk | WeightFormat::Memory | WeightFormat::SharedMemory => {
                let answer = server.call(&Call::get("/weight_info"))?;
                Ok(answer["weight_version"] == weights.name())
            }
        }
    }
}

/// Adds to an answer without the path what the server must be.
fn without_sleep(failure: Failure) -> Failure {
    match failure {
        Failure::Status { status: 404, .. } => Failure::Unsupported(format!(
            "{failure}; it must be vLLM, started with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
        )),
        failure => failure,
    }
}

/// Loads a whole directory into the engine. An engine that fails to read it has lost its weights.
fn reload(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let folder = weights.path.display().to_string();
    let body = json!({"method": "reload_weights", "kwargs": {"weights_path": folder}});
    server.call(&Call::post("/collective_rpc", body))?;
    reset_prefix_cache(server)?;
    set_version(server, weights)
}

fn set_version(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let body = json!({"new_version": weights.name()});
    server.call(&Call::post("/update_weight_version", body))?;
    Ok(())
}

/// Clears keys and values from earlier weights. A server that still needs them refuses.
pub(super) fn reset_prefix_cache(server: &Server) -> Result<(), Failure> {
    let answer = server.call(&Call::post("/reset_prefix_cache", json!({})))?;
    if answer["success"] == false {
        Err(Failure::Malformed(
            "/reset_prefix_cache: the cache is in use, must be reset".to_owned(),
        ))
    } else {
        Ok(())
    }
}

/// Loads an adapter under its own name.
fn load_adapter(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let body = json!({
        "lora_name": weights.name(),
        "lora_path": weights.path.display().to_string(),
        "load_inplace": true,
    });
    server.call(&Call::post("/v1/load_lora_adapter", body))?;
    if weights.is_beside_others {
        return Ok(());
    }
    // Keys and values are cached by name and path, which an earlier run may have used for other
    // weights. Without VLLM_SERVER_DEV_MODE, the cache cannot be reset.
    match reset_prefix_cache(server) {
        Ok(()) | Err(Failure::Status { status: 404, .. }) => Ok(()),
        Err(failure) => Err(failure),
    }
}
