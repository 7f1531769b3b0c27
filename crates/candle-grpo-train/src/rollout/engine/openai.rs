//! The completions API of OpenAI with token ids, as vLLM and llama.cpp extend it.

use serde_json::{Map, Value, json};

use super::protocol::{Call, DrawRequest, Drawn, End, Failure, Protocol, ServedModel, Server};
use super::weights::EngineWeights;

/// Any server with `/v1/completions` that takes token ids and returns token ids with log-probs: in
/// vLLM's form, or in llama.cpp's. It takes no weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenAi;

impl Protocol for OpenAi {
    fn describe(&self, server: &Server, name: Option<&str>) -> Result<ServedModel, Failure> {
        describe(server, name)
    }

    fn draw(&self, request: &DrawRequest) -> Call {
        let mut body = body(request);
        // llama.cpp takes 32 bits, of which all ones stand for a random seed.
        body.insert("seed".to_owned(), json!(request.seed >> 33));
        body.insert("logprobs".to_owned(), json!(1));
        // llama.cpp: all tokens, the log-probs of the draw, and the filters in the order of the
        // local generator.
        body.insert("verbose".to_owned(), json!(true));
        body.insert("return_tokens".to_owned(), json!(true));
        body.insert("post_sampling_probs".to_owned(), json!(true));
        let samplers = ["temperature", "top_k", "top_p", "min_p"];
        body.insert("samplers".to_owned(), json!(samplers));
        // llama.cpp names no log-probs of the tokens of a stop string.
        if request.log_probs {
            body.remove("stop");
        }
        Call::post("/v1/completions", Value::Object(body))
    }

    fn parse(&self, answer: &Value) -> Result<Drawn, Failure> {
        match answer.get("__verbose") {
            Some(answer) => parse_llama(answer),
            None => parse(answer),
        }
    }

    fn load(&self, _: &Server, _: &EngineWeights) -> Result<(), Failure> {
        let message = "a server with the API of OpenAI takes no weights";
        Err(Failure::LostWeights(message.to_owned()))
    }

    fn serves(&self, _: &Server, _: &EngineWeights) -> Result<bool, Failure> {
        Ok(false)
    }
}

/// Asks for the models, and takes the one called `name`, or the first one.
pub(super) fn describe(server: &Server, name: Option<&str>) -> Result<ServedModel, Failure> {
    let answer = server.call(&Call::get("/v1/models"))?;
    let models = answer["data"].as_array().map_or(&[][..], Vec::as_slice);
    let names: Vec<&str> = models.iter().filter_map(|m| m["id"].as_str()).collect();
    let found = match name {
        Some(name) => models.iter().find(|model| model["id"] == name),
        None => models.first(),
    };
    let Some((model, id)) = found.and_then(|model| Some((model, model["id"].as_str()?))) else {
        return Err(Failure::Malformed(match name {
            Some(name) => format!("/v1/models: lists {names:?}, must list {name:?}"),
            None => "/v1/models: lists no model, must list at least one".to_owned(),
        }));
    };
    // llama.cpp has the length that it was started with in the metadata.
    let length = ["/max_model_len", "/meta/n_ctx"]
        .iter()
        .find_map(|place| model.pointer(place)?.as_u64());
    Ok(ServedModel {
        name: id.to_owned(),
        max_model_len: length.map(|length| length as usize),
    })
}

/// The fields that all servers take. Every field of the distribution is sent: a server would take
/// defaults from the folder of its model.
pub(super) fn body(request: &DrawRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let fields = json!({
        "model": request.model,
        "prompt": request.prompt,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature(),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": sampling.stop_strings,
        "stop_token_ids": sampling.stop_token_ids,
        "return_token_ids": true,
        "stream": false,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Reads an answer of llama.cpp in its own form. It has fewer log-probs than tokens if the end of a
/// token is within a character, or a stop string has ended the completion. The list of tokens in
/// the form of OpenAI has the same gaps.
fn parse_llama(answer: &Value) -> Result<Drawn, Failure> {
    let malformed = |message: &str| Failure::Malformed(message.to_owned());
    let tokens = answer["tokens"].as_array();
    let tokens: Option<Vec<u32>> = tokens.and_then(|ids| ids.iter().map(token).collect());
    let tokens = tokens.ok_or_else(|| malformed("tokens: absent or not token ids"))?;
    let log_prob = |entry: &Value| Some(number(&entry["prob"])?.ln());
    let log_probs: Option<Vec<f32>> = match &answer["completion_probabilities"] {
        Value::Null => Some(Vec::new()),
        entries => entries
            .as_array()
            .and_then(|entries| entries.iter().map(log_prob).collect()),
    };
    let log_probs = log_probs
        .ok_or_else(|| malformed("completion_probabilities: not a list of probabilities"))?;
    let end = match answer["stop_type"].as_str() {
        Some("limit") => End::Length,
        Some("eos") => End::StopToken,
        Some("word") => End::StopString,
        _ => {
            return Err(Failure::Malformed(format!(
                "stop_type: {}, must be limit, eos or word",
                answer["stop_type"]
            )));
        }
    };
    Ok(Drawn {
        tokens,
        log_probs,
        end,
        weight_version: None,
    })
}

/// Reads the only choice of an answer in vLLM's form.
pub(super) fn parse(answer: &Value) -> Result<Drawn, Failure> {
    let malformed = |message: &str| Failure::Malformed(message.to_owned());
    let choice = match answer["choices"].as_array().map(Vec::as_slice) {
        Some([choice]) => choice,
        Some(choices) => {
            let message = format!("choices: {}, must be 1", choices.len());
            return Err(Failure::Malformed(message));
        }
        None => return Err(malformed("choices: absent, must be a list of one")),
    };
    let log_probs = &choice["logprobs"];
    let tokens = choice["token_ids"].as_array();
    let tokens: Option<Vec<u32>> = tokens.and_then(|ids| ids.iter().map(token).collect());
    let tokens = tokens.ok_or_else(|| {
        malformed("token_ids: absent or not token ids; the server must return token ids")
    })?;
    let log_probs = log_probs["token_logprobs"].as_array();
    let log_probs: Option<Vec<f32>> = log_probs.and_then(|list| list.iter().map(number).collect());
    let log_probs = log_probs
        .ok_or_else(|| malformed("logprobs: absent or not numbers, must be one for each token"))?;
    Ok(Drawn {
        tokens,
        log_probs,
        end: end(&choice["finish_reason"], &choice["stop_reason"])?,
        weight_version: None,
    })
}

/// The end of a completion. `matched` is a text if a stop string has ended it.
pub(super) fn end(reason: &Value, matched: &Value) -> Result<End, Failure> {
    match (reason.as_str(), matched) {
        (Some("length"), _) => Ok(End::Length),
        (Some("stop"), Value::String(_)) => Ok(End::StopString),
        (Some("stop"), _) => Ok(End::StopToken),
        (Some("abort"), _) => Ok(End::Aborted),
        _ => Err(Failure::Malformed(format!(
            "finish_reason: {reason}, must be stop, length or abort"
        ))),
    }
}

/// A token id.
pub(super) fn token(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// A log-prob.
pub(super) fn number(value: &Value) -> Option<f32> {
    Some(value.as_f64()? as f32)
}
