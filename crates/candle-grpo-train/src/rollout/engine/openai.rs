//! OpenAI's completions API with token ids, as vLLM and llama.cpp extend it.

use serde_json::{Map, Value, json};

use super::protocol::{Call, DrawRequest, Drawn, End, Failure, Protocol, ServedModel, Server};
use super::weights::EngineWeights;

/// Any server with `/v1/completions` that accepts token ids and returns token ids with log-probs,
/// in vLLM's or llama.cpp's form. It does not load weights.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenAi;

/// Unloads an adapter with a request to `path`.
pub(super) fn unload(server: &Server, path: &str, adapter: &str) -> Result<(), Failure> {
    match server.call_briefly(&Call::post(path, json!({"lora_name": adapter}))) {
        // A restarted server does not have it.
        Ok(_)
        | Err(Failure::Status {
            status: 400 | 404, ..
        }) => Ok(()),
        Err(failure) => Err(failure),
    }
}

impl Protocol for OpenAi {
    fn describe(&self, server: &Server, name: Option<&str>) -> Result<ServedModel, Failure> {
        describe(server, name)
    }

    fn draw(&self, request: &DrawRequest) -> Call {
        let mut body = body(request);
        // llama.cpp accepts 32 bits, and all ones mean a random seed.
        body.insert("seed".to_owned(), json!(request.seed >> 33));
        body.insert("logprobs".to_owned(), json!(1));
        // llama.cpp: all tokens, the sampling log-probs, and the filters in the local generator's
        // order.
        body.insert("verbose".to_owned(), json!(true));
        body.insert("return_tokens".to_owned(), json!(true));
        body.insert("post_sampling_probs".to_owned(), json!(true));
        let samplers = ["temperature", "top_k", "top_p", "min_p"];
        body.insert("samplers".to_owned(), json!(samplers));
        // llama.cpp reports no log-probs for a stop string's tokens.
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

/// Requests the models, and selects the one called `name`, or the first one.
pub(super) fn describe(server: &Server, name: Option<&str>) -> Result<ServedModel, Failure> {
    let answer = server.ask(&Call::get("/v1/models"), 0)?;
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
    // llama.cpp reports its configured length in the metadata.
    let length = ["/max_model_len", "/meta/n_ctx"]
        .iter()
        .find_map(|place| model.pointer(place)?.as_u64());
    Ok(ServedModel {
        name: id.to_owned(),
        max_model_len: length.map(|length| length as usize),
    })
}

/// Returns the fields that all servers accept. Every distribution field is sent, because a server
/// would otherwise use defaults from its model directory.
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

/// Parses llama.cpp's own answer form. It has no log-prob for a token that ends within a character,
/// or for a final stop string's tokens. Its token list in OpenAI's form has the same gaps.
fn parse_llama(answer: &Value) -> Result<Drawn, Failure> {
    let malformed = |message: &str| Failure::Malformed(message.to_owned());
    let tokens = answer["tokens"].as_array();
    let tokens: Option<Vec<u32>> = tokens.and_then(|ids| ids.iter().map(token).collect());
    let tokens = tokens.ok_or_else(|| malformed("tokens: absent or not token ids"))?;
    let pair = |entry: &Value| Some((token(&entry["id"])?, number(&entry["prob"])?.ln()));
    let named: Option<Vec<(u32, f32)>> = match &answer["completion_probabilities"] {
        Value::Null => Some(Vec::new()),
        entries => entries
            .as_array()
            .and_then(|entries| entries.iter().map(pair).collect()),
    };
    let log_probs = named.and_then(|named| align(&tokens, &named));
    let log_probs = log_probs.ok_or_else(|| {
        malformed("completion_probabilities: not a list of some tokens with their probabilities")
    })?;
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

/// Returns the log-prob for each of `tokens`; `named` lists some of them in order. NaN if several
/// equal tokens make it ambiguous. `None` if a listed token is missing.
fn align(tokens: &[u32], named: &[(u32, f32)]) -> Option<Vec<f32>> {
    let mut log_probs = vec![f32::NAN; tokens.len()];
    // First and last place for each listed token.
    let mut places = Vec::with_capacity(named.len());
    let mut next = 0;
    for (id, _) in named {
        next += tokens[next..].iter().position(|token| token == id)? + 1;
        places.push(next - 1);
    }
    let mut end = tokens.len();
    for ((id, log_prob), first) in named.iter().zip(places).rev() {
        end = tokens[..end].iter().rposition(|token| token == id)?;
        if end == first {
            log_probs[end] = *log_prob;
        }
    }
    Some(log_probs)
}

/// Parses the only choice in vLLM's answer form.
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

/// Returns a completion's end. `matched` is a text if a stop string has ended it.
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

/// Parses a token id.
pub(super) fn token(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// Parses a log-prob.
pub(super) fn number(value: &Value) -> Option<f32> {
    Some(value.as_f64()? as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probs_are_those_of_the_tokens_that_are_certain() {
        // 7 and 8 are within a character, and 9 ends it.
        let tokens = [1, 7, 8, 9, 2, 2, 7];
        let named = [(1, -1.), (9, -2.), (2, -3.), (2, -4.)];
        let found = align(&tokens, &named).unwrap();
        let lacks: Vec<bool> = found.iter().map(|x| x.is_nan()).collect();
        assert_eq!(lacks, [false, true, true, false, false, false, true]);
        assert_eq!(
            (found[0], found[3], found[4], found[5]),
            (-1., -2., -3., -4.)
        );

        // One of two equal tokens.
        let found = align(&[5, 5, 1], &[(5, -1.), (1, -2.)]).unwrap();
        assert!(found[0].is_nan() && found[1].is_nan());
        assert_eq!(found[2], -2.);

        assert_eq!(align(&[1, 2], &[(2, -1.), (1, -1.)]), None);
        assert_eq!(align(&[1], &[(1, -1.), (1, -1.)]), None);
        assert!(align(&[3], &[]).unwrap()[0].is_nan());
    }
}
