//! SGLang.

use serde_json::{Value, json};

use super::openai::{self, end, number, token};
use super::protocol::{
    Call, DrawRequest, Drawn, Failure, Protocol, ScoreRequest, Scored, ServedModel, Server,
};
use super::weights::{EngineWeights, WeightFormat};
use crate::rollout::StructuredOutputs;

/// An SGLang server (0.5), started with `--enable-lora` for adapters. The client follows SGLang's
/// source and has not been tested with a real server.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sglang;

impl Protocol for Sglang {
    fn describe(&self, server: &Server, _: Option<&str>) -> Result<ServedModel, Failure> {
        let answer = server.ask(&Call::get("/get_server_info"), 0)?;
        let length = ["/max_req_input_len", "/context_length"]
            .iter()
            .find_map(|place| answer.pointer(place)?.as_u64());
        Ok(ServedModel {
            // Requests only name adapters.
            name: String::new(),
            max_model_len: length.map(|length| length as usize),
        })
    }

    fn draw(&self, request: &DrawRequest) -> Call {
        let sampling = &request.sampling;
        let mut body = json!({
            "input_ids": request.prompt,
            "sampling_params": {
                "n": 1,
                "temperature": request.temperature(),
                "top_p": sampling.top_p,
                "top_k": match sampling.top_k { 0 => -1, k => k as i64 },
                "min_p": sampling.min_p,
                "max_new_tokens": request.max_new_tokens,
                "stop": sampling.stop_strings,
                "stop_token_ids": sampling.stop_token_ids,
                // Seeds are signed.
                "sampling_seed": request.seed >> 1,
                "no_stop_trim": true,
                // A stop string may be a special token.
                "skip_special_tokens": false,
            },
            "return_logprob": true,
            "logprob_start_len": -1,
            "stream": false,
        });
        if let Some(structured) = &sampling.structured_outputs {
            let (name, text) = match structured {
                StructuredOutputs::Regex(regex) => ("regex", regex.clone()),
                StructuredOutputs::Choice(choices) => ("ebnf", one_of(choices)),
                StructuredOutputs::Json(schema) => ("json_schema", json!(schema).to_string()),
                StructuredOutputs::Grammar(grammar) => ("ebnf", grammar.clone()),
            };
            body["sampling_params"][name] = json!(text);
        }
        if request.is_adapter {
            body["lora_path"] = json!(request.model);
        }
        Call::post("/generate", body)
    }

    fn structures_outputs(&self) -> bool {
        true
    }

    fn parse(&self, answer: &Value) -> Result<Drawn, Failure> {
        let malformed = |message: &str| Failure::Malformed(message.to_owned());
        let answer = single(answer);
        let meta = &answer["meta_info"];
        let tokens: Option<Vec<u32>> = answer["output_ids"]
            .as_array()
            .and_then(|ids| ids.iter().map(token).collect());
        let tokens = tokens.ok_or_else(|| malformed("output_ids: absent or not token ids"))?;
        let log_probs: Option<Vec<f32>> = meta["output_token_logprobs"]
            .as_array()
            .and_then(|list| list.iter().map(|entry| number(&entry[0])).collect());
        let log_probs = log_probs.ok_or_else(|| {
            malformed("output_token_logprobs: absent or not numbers, must be one for each token")
        })?;
        let reason = &meta["finish_reason"];
        Ok(Drawn {
            tokens,
            log_probs,
            end: end(&reason["type"], &reason["matched"])?,
            weight_version: meta["weight_version"].as_str().map(str::to_owned),
        })
    }

    fn score(&self, server: &Server, request: &ScoreRequest<'_>) -> Result<Vec<Scored>, Failure> {
        let mut body = json!({
            "input_ids": request.tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.},
            "return_logprob": true,
            "logprob_start_len": 0,
            "stream": false,
        });
        if request.best > 0 {
            body["top_logprobs_num"] = json!(request.best);
        }
        let answer = server.ask(&Call::post("/generate", body), request.num_named())?;
        let meta = &single(&answer)["meta_info"];
        let pair = |entry: &Value| Some((token(&entry[1])?, number(&entry[0])?));
        let field = "input_token_logprobs";
        let log_probs = request.read(field, &meta[field], |id, entry| {
            pair(entry).filter(|(named, _)| *named == id)
        })?;
        let best = match request.best {
            0 => vec![Vec::new(); log_probs.len()],
            _ => {
                let field = "input_top_logprobs";
                request.read(field, &meta[field], |_, entry| {
                    entry.as_array()?.iter().map(pair).collect()
                })?
            }
        };
        let pairs = log_probs.into_iter().zip(best);
        let scored = pairs.map(|((_, log_prob), best)| Scored { log_prob, best });
        Ok(scored.collect())
    }

    fn load(&self, server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
        let path = weights.path.display().to_string();
        match weights.format {
            WeightFormat::Adapter => {
                let body = json!({"lora_name": weights.name(), "lora_path": path});
                let load = || succeeded(server, "/load_lora_adapter", body.clone());
                match load() {
                    // The adapter may already be loaded, with the same weights or others.
                    Err(Failure::Status {
                        status: 400,
                        message,
                    }) if message.contains("already") => {
                        self.unload(server, &weights.name())?;
                        load()?;
                    }
                    result => result?,
                }
                for old in &weights.replaced {
                    self.unload(server, old)?;
                }
                Ok(())
            }
            WeightFormat::Disk => {
                server.call(&Call::post(
                    "/pause_generation",
                    json!({"mode": "in_place"}),
                ))?;
                let body = json!({
                    "model_path": path,
                    "flush_cache": true,
                    "weight_version": weights.name(),
                });
                let loaded = succeeded(server, "/update_weights_from_disk", body);
                // A server that stays paused answers nothing.
                let resumed = server.call(&Call::post("/continue_generation", json!({})));
                loaded?;
                resumed?;
                if self.serves(server, weights)? {
                    Ok(())
                } else {
                    Err(Failure::LostWeights(format!(
                        "/get_model_info: another version than {}, which it has just loaded",
                        weights.name()
                    )))
                }
            }
            format @ (WeightFormat::Memory | WeightFormat::SharedMemory) => {
                self.join(server, format)
            }
        }
    }

    fn unload(&self, server: &Server, adapter: &str) -> Result<(), Failure> {
        openai::unload(server, "/unload_lora_adapter", adapter)
    }

    fn interrupt(&self, server: &Server) -> Result<(), Failure> {
        let body = json!({"rid": "", "abort_all": true});
        server.call_briefly(&Call::post("/abort_request", body))?;
        Ok(())
    }

    fn serves(&self, server: &Server, weights: &EngineWeights) -> Result<bool, Failure> {
        let answer = server.call(&Call::get("/get_model_info"))?;
        Ok(answer["weight_version"] == weights.name())
    }
}

/// Returns a grammar of these texts.
fn one_of(choices: &[String]) -> String {
    // EBNF has the escapes of JSON.
    let texts: Vec<String> = choices.iter().map(|text| json!(text).to_string()).collect();
    format!("root ::= {}", texts.join(" | "))
}

/// Returns the answer to a single prompt, which is an object, or a list with one entry.
fn single(answer: &Value) -> &Value {
    match answer {
        Value::Array(answers) if answers.len() == 1 => &answers[0],
        answer => answer,
    }
}

/// Sends a request whose answer reports whether it succeeded.
fn succeeded(server: &Server, path: &str, body: Value) -> Result<(), Failure> {
    let answer = server.call(&Call::post(path, body))?;
    match answer["success"].as_bool() {
        Some(true) => Ok(()),
        _ => Err(Failure::Malformed(format!(
            "{path}: {answer}, must be a success"
        ))),
    }
}
