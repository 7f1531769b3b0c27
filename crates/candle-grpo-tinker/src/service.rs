//! The API calls, except for waiting.

use std::sync::Arc;

use candle_grpo_base::server::{Refusal, random_id};
use candle_grpo_nn::DecoderConfig;
use candle_grpo_train::SamplingConfig;
use serde_json::{Value, json};

use crate::base::BaseInfo;
use crate::loss::LossFn;
use crate::queue::{Queues, RequestId, SamplerId, internal};
use crate::sampling::SampleWork;
use crate::store::{
    ModelId, ModelRecord, SamplerRecord, Start, UNNAMED, WeightsPath, session_name, unnamed,
    weights_name,
};
use crate::wire::request::{
    CreateModel, CreateSampler, Heartbeat, Load, LoraOptions, OfModel, OptimStep, OptimizerKind,
    Pass, PassInput, Retrieve, Sample, Save, Stop, WeightsInfo,
};
use crate::work::{SaveRequest, WeightsKind, Work};

/// Adapter rank, if a request has none.
const DEFAULT_RANK: usize = 32;

/// Maximum number of requests for samples that a client sends at the same time.
const MAX_CONCURRENT_SAMPLES: usize = 256;

/// Maximum number of samples per request.
const MAX_SAMPLES: usize = 4096;

/// The API calls.
pub(crate) struct Service {
    base: BaseInfo,
    queues: Arc<Queues>,
    max_request_bytes: usize,
}

/// The answer to a call with a result that must be retrieved.
fn promised(id: &RequestId) -> Value {
    match id {
        RequestId::Train(model, _) => {
            json!({"request_id": id.to_string(), "model_id": model.to_string()})
        }
        RequestId::Sample(..) => json!({"request_id": id.to_string()}),
    }
}

fn ensure_adamw(optimizer: Option<&OptimizerKind>) -> Result<(), Refusal> {
    match optimizer {
        Some(optimizer) if optimizer.kind != "adamw" => {
            let kind = &optimizer.kind;
            Err(Refusal::invalid("optimizer_config.type", kind, "be adamw"))
        }
        _ => Ok(()),
    }
}

impl Service {
    pub(crate) fn new(base: BaseInfo, queues: Arc<Queues>, max_request_bytes: usize) -> Self {
        Self {
            base,
            queues,
            max_request_bytes,
        }
    }

    pub(crate) fn queues(&self) -> &Queues {
        &self.queues
    }

    pub(crate) fn max_request_bytes(&self) -> usize {
        self.max_request_bytes
    }

    fn model(&self) -> &DecoderConfig {
        &self.base.model
    }

    pub(crate) fn health(&self) -> Result<Value, Refusal> {
        self.queues.ensure_working()?;
        Ok(json!({"status": "ok"}))
    }

    /// Client settings.
    pub(crate) fn client_config(&self) -> Value {
        json!({
            "pjwt_auth_enabled": false,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": true,
            // Compression costs more time than it saves on one machine.
            "proto_compress_fwdbwd": false,
            "sample_use_retrieve_futures": false,
            // Each of them waits on a connection.
            "sample_max_concurrent_requests": MAX_CONCURRENT_SAMPLES,
            "sample_join_sampling_session": false,
            "custom_loss_server_side": false,
        })
    }

    pub(crate) fn capabilities(&self) -> Value {
        json!({"supported_models": [{
            "model_name": self.base.name,
            "max_context_length": self.model().max_position_embeddings,
            "trainable": true,
            "sampleable": true,
        }]})
    }

    pub(crate) fn create_session(&self) -> Result<Value, Refusal> {
        let id = random_id();
        self.queues.store().add_session(&id).map_err(internal)?;
        self.queues.add_session(id.clone());
        Ok(json!({"type": "create_session", "session_id": id}))
    }

    pub(crate) fn heartbeat(&self, request: &Heartbeat) -> Result<Value, Refusal> {
        self.queues.ensure_session(&request.session_id)?;
        Ok(json!({"type": "session_heartbeat"}))
    }

    pub(crate) fn finish_session(&self, id: &str) -> Result<Value, Refusal> {
        self.queues.finish(id)?;
        Ok(Value::Null)
    }

    /// Returns a session's model id.
    fn model_id(&self, session: &str, number: u64) -> Result<ModelId, Refusal> {
        self.queues.ensure_session(session)?;
        let session = session_name(session).unwrap_or_default().to_owned();
        Ok(ModelId { session, number })
    }

    pub(crate) fn create_model(&self, request: &CreateModel) -> Result<Value, Refusal> {
        let id = self.model_id(&request.session_id, request.model_seq_id)?;
        self.base.ensure_name(&request.base_model)?;
        ensure_adamw(request.optimizer_config.as_ref())?;
        let default = LoraOptions {
            rank: DEFAULT_RANK,
            seed: None,
            train_mlp: true,
            train_attn: true,
        };
        let options = request.lora_config.as_ref().unwrap_or(&default);
        let record = ModelRecord {
            start: Start::Seed(options.seed.unwrap_or_else(|| seed_of(&id.to_string()))),
            rank: options.rank,
            train_attn: options.train_attn,
            train_mlp: options.train_mlp,
        };
        let lora = self.base.lora(&record);
        lora.map_err(|error| Refusal::within("lora_config: ", &error))?;
        self.queues.add_model(&id, record)?;
        self.queues
            .promise(&id, Some(0), &Work::Create)
            .map(|id| promised(&id))
    }

    pub(crate) fn get_info(&self, request: &OfModel) -> Result<Value, Refusal> {
        let id = ModelId::parse(&request.model_id)?;
        let record = self.queues.model(&id)?;
        Ok(json!({
            "type": "get_info",
            "model_id": id.to_string(),
            "model_name": self.base.name,
            "model_data": {
                "arch": self.model().model_type,
                "model_name": self.base.name,
                "tokenizer_id": self.base.name,
            },
            "is_lora": true,
            "lora_rank": record.rank,
        }))
    }

    pub(crate) fn pass(&self, pass: Pass) -> Result<Value, Refusal> {
        let id = ModelId::parse(&pass.model_id)?;
        let work = pass
            .input
            .and_then(|input| self.pass_work(&input, pass.backward));
        self.promise(&id, pass.seq_id, work)
    }

    fn pass_work(&self, input: &PassInput, backward: bool) -> Result<Work, Refusal> {
        let loss = LossFn::new(&input.loss_fn, &input.loss_fn_config)?;
        if input.data.is_empty() {
            return Err(Refusal::invalid("data", "[]", "have at least one example"));
        }
        let rows = input.data.iter().enumerate();
        let rows = rows.map(|(at, datum)| loss.row(&format!("data[{at}]"), datum, &self.base));
        Ok(Work::Pass {
            rows: rows.collect::<Result<_, Refusal>>()?,
            loss,
            backward,
        })
    }

    /// Promises work. A refused request takes its turn, too: its future reports the refusal.
    fn promise(
        &self,
        id: &ModelId,
        seq: Option<u64>,
        work: Result<Work, Refusal>,
    ) -> Result<Value, Refusal> {
        let work = work.unwrap_or_else(|refusal| Work::Refused(refusal.message));
        self.queues.promise(id, seq, &work).map(|id| promised(&id))
    }

    pub(crate) fn optim_step(&self, request: OptimStep) -> Result<Value, Refusal> {
        let id = ModelId::parse(&request.model_id)?;
        let work = match (request.adam_params, request.optimizer_params) {
            (_, Some(other)) => {
                let name = "optimizer_params.type";
                let must = "be absent: models train with adam_params";
                Err(Refusal::invalid(name, other.kind, must))
            }
            (params, None) => Ok(Work::OptimStep(params.unwrap_or_default())),
        };
        self.promise(&id, request.seq_id, work)
    }

    pub(crate) fn save_weights(&self, request: Save) -> Result<Value, Refusal> {
        let id = ModelId::parse(&request.model_id)?;
        let work = match &request.path {
            Some(name) => named(name, WeightsKind::Training, request.overwrite),
            None => Err(Refusal::invalid(
                "path",
                "absent",
                "be the name of the weights",
            )),
        };
        self.promise(&id, request.seq_id, work)
    }

    pub(crate) fn save_weights_for_sampler(&self, request: Save) -> Result<Value, Refusal> {
        let id = ModelId::parse(&request.model_id)?;
        let kind = request.kind.as_deref().unwrap_or("snapshot");
        let work = match (kind, &request.path, request.sampling_session_seq_id) {
            ("snapshot", Some(name), _) => named(name, WeightsKind::Sampler, true),
            ("snapshot", None, Some(number)) => Ok(Work::Save(SaveRequest {
                kind: WeightsKind::Sampler,
                name: unnamed(number),
                overwrite: true,
                sampler: Some(number),
            })),
            ("snapshot", None, None) => {
                let must = "be given, or sampling_session_seq_id";
                Err(Refusal::invalid("path", "absent", must))
            }
            (other, _, _) => Err(Refusal::invalid("kind", other, "be snapshot")),
        };
        self.promise(&id, request.seq_id, work)
    }

    pub(crate) fn load_weights(&self, request: Load) -> Result<Value, Refusal> {
        if let Some(name) = &request.base_model {
            self.base.ensure_name(name)?;
        }
        let path = WeightsPath::parse(&request.path)?;
        if let Some(id) = &request.model_id {
            let id = ModelId::parse(id)?;
            let work = Work::Load {
                path: request.path,
                optimizer: request.optimizer,
            };
            return self.promise(&id, request.seq_id, Ok(work));
        }
        let (Some(session), Some(number)) = (&request.session_id, request.model_seq_id) else {
            let must = "be given, or session_id and model_seq_id";
            return Err(Refusal::invalid("model_id", "absent", must));
        };
        let id = self.model_id(session, number)?;
        let source = self.source(&path)?;
        let record = ModelRecord {
            start: Start::Weights {
                path: request.path,
                optimizer: request.optimizer,
            },
            ..source
        };
        self.queues.add_model(&id, record)?;
        self.queues
            .promise(&id, Some(0), &Work::Create)
            .map(|id| promised(&id))
    }

    /// Returns the record for the model that saved weights come from.
    fn source(&self, path: &WeightsPath) -> Result<ModelRecord, Refusal> {
        let store = self.queues.store();
        let missing = || Refusal::missing("path", path, "be saved weights of this server");
        if !store.weights(path).exists() {
            return Err(missing());
        }
        store.model_record(&path.model).map_err(|_| missing())
    }

    pub(crate) fn weights_info(&self, request: &WeightsInfo) -> Result<Value, Refusal> {
        let record = self.source(&WeightsPath::parse(&request.tinker_path)?)?;
        Ok(json!({
            "base_model": self.base.name,
            "is_lora": true,
            "lora_rank": record.rank,
            "train_unembed": false,
            "train_mlp": record.train_mlp,
            "train_attn": record.train_attn,
        }))
    }

    pub(crate) fn training_run(&self, id: &str) -> Result<Value, Refusal> {
        let id = ModelId::parse(id)?;
        let record = self.queues.model(&id)?;
        Ok(json!({
            "training_run_id": id.to_string(),
            "base_model": self.base.name,
            "model_owner": "local",
            "is_lora": true,
            "lora_rank": record.rank,
            "last_request_time": "1970-01-01T00:00:00Z",
        }))
    }

    /// Checks a sampling request's weights.
    fn sampler_record(
        &self,
        base_model: Option<&str>,
        model_path: Option<&str>,
    ) -> Result<SamplerRecord, Refusal> {
        if let Some(name) = base_model {
            self.base.ensure_name(name)?;
        }
        if let Some(path) = model_path {
            self.source(&WeightsPath::parse(path)?)?;
        }
        if base_model.is_none() && model_path.is_none() {
            let must = "be given, or model_path";
            return Err(Refusal::invalid("base_model", "absent", must));
        }
        Ok(SamplerRecord {
            model_path: model_path.map(str::to_owned),
        })
    }

    pub(crate) fn create_sampler(&self, request: CreateSampler) -> Result<Value, Refusal> {
        self.queues.ensure_session(&request.session_id)?;
        let (base, path) = (request.base_model.as_deref(), request.model_path.as_deref());
        let record = self.sampler_record(base, path)?;
        let (session, number) = (&request.session_id, request.sampling_session_seq_id);
        let id = self.queues.add_sampler(session, number, record)?;
        Ok(json!({"type": "create_sampling_session", "sampling_session_id": id.0}))
    }

    pub(crate) fn get_sampler(&self, id: &str) -> Result<Value, Refusal> {
        let record = self.queues.sampler(&SamplerId(id.to_owned()))?;
        Ok(json!({
            "sampler_id": id,
            "base_model": self.base.name,
            "model_path": record.model_path,
        }))
    }

    pub(crate) fn sample(&self, request: Sample) -> Result<Value, Refusal> {
        let number = |name: &str, value: i64| match value {
            0 => Ok(()),
            value => {
                let must = "be 0: the server does not have it (docs/tinker.md)";
                Err(Refusal::invalid(name, value, must))
            }
        };
        number("topk_prompt_logprobs", request.topk_prompt_logprobs)?;
        number("topk_sample_logprobs", request.topk_sample_logprobs)?;
        number("prompt_alt_tokens_k", request.prompt_alt_tokens_k)?;
        for (name, is_given) in [
            (
                "target_prompt_logprobs",
                request.target_prompt_logprobs.is_some(),
            ),
            (
                "record_stability_info",
                request.record_stability_info == Some(true),
            ),
        ] {
            if is_given {
                let must = "be absent: the server does not have it (docs/tinker.md)";
                return Err(Refusal::invalid(name, "given", must));
            }
        }
        let samples = request.num_samples;
        if !(1..=MAX_SAMPLES).contains(&samples) {
            let must = format!("be from 1 to {MAX_SAMPLES}");
            return Err(Refusal::invalid("num_samples", samples, &must));
        }
        let queues = &self.queues;
        let (id, weights, seq) = match &request.sampling_session_id {
            Some(id) => {
                let id = SamplerId(id.clone());
                let weights = queues.sampler(&id)?;
                (id, weights, request.seq_id)
            }
            // Clients share this queue, so their numbers are not unique.
            None => {
                let (base, path) = (request.base_model.as_deref(), request.model_path.as_deref());
                let weights = self.sampler_record(base, path)?;
                (queues.direct().clone(), weights, None)
            }
        };
        let work = self.sample_work(weights, &request)?;
        let seed = request.sampling_params.seed;
        let promise = queues.promise_samples(&id, seq, |id| SampleWork {
            seed: seed.unwrap_or_else(|| seed_of(&id.to_string())),
            ..work
        })?;
        let sequences = (0..samples).map(|at| format!("{promise}#{at}"));
        let mut answer = promised(&promise);
        answer["sample_sequence_ids"] = sequences.collect();
        Ok(answer)
    }

    fn sample_work(&self, weights: SamplerRecord, request: &Sample) -> Result<SampleWork, Refusal> {
        let params = &request.sampling_params;
        let prompt = request.prompt.tokens("prompt")?;
        let model = self.model();
        self.base.ensure_tokens("prompt", &prompt)?;
        let positions = model.max_position_embeddings;
        let room = positions.saturating_sub(prompt.len());
        let max_new_tokens = params.max_tokens.unwrap_or(room);
        if max_new_tokens == 0 || max_new_tokens > room {
            let must = format!(
                "be from 1 to {room}: the model has {positions} positions, and the prompt {} tokens",
                prompt.len()
            );
            return Err(Refusal::invalid(
                "sampling_params.max_tokens",
                max_new_tokens,
                &must,
            ));
        }
        let defaults = || self.base.stop_token_ids.clone();
        let (stop_token_ids, stop_strings) = match &params.stop {
            None => (defaults(), Vec::new()),
            Some(Stop::String(text)) => (defaults(), vec![text.clone()]),
            // No end but the maximum length.
            Some(Stop::Tokens(ids)) if ids.is_empty() => (Vec::new(), Vec::new()),
            Some(Stop::Tokens(ids)) => ([defaults(), ids.clone()].concat(), Vec::new()),
            Some(Stop::Strings(texts)) => (defaults(), texts.clone()),
        };
        let greedy = params.temperature == 0.;
        let top_k = match params.top_k {
            -1 | 0 => 0,
            k => usize::try_from(k)
                .map_err(|_| Refusal::invalid("sampling_params.top_k", k, "be at least -1"))?,
        };
        let sampling = SamplingConfig {
            temperature: if greedy { 1. } else { params.temperature },
            greedy,
            top_k,
            top_p: params.top_p,
            stop_token_ids,
            stop_strings,
            max_new_tokens: positions,
            ..SamplingConfig::default()
        };
        let valid = sampling.validate_for(model.vocab_size);
        valid.map_err(|error| Refusal::within("sampling_params.", &error))?;
        let last = request.prompt_logprobs_last_n;
        let prompt_log_probs = match (request.prompt_logprobs == Some(true), last) {
            (false, None) => None,
            (true, None) => Some(prompt.len()),
            (true, Some(last)) if (1..prompt.len()).contains(&last) => Some(last),
            (_, Some(last)) => {
                let must = "be from 1 to the prompt's tokens less one, with prompt_logprobs";
                return Err(Refusal::invalid("prompt_logprobs_last_n", last, must));
            }
        };
        Ok(SampleWork {
            weights,
            prompt,
            num_samples: request.num_samples,
            seed: 0,
            max_new_tokens,
            prompt_log_probs,
            sampling,
        })
    }

    pub(crate) fn cancel(&self, request: &Retrieve) -> Result<Value, Refusal> {
        self.queues.cancel(&RequestId::parse(&request.request_id)?);
        Ok(Value::Null)
    }
}

fn named(name: &str, kind: WeightsKind, overwrite: bool) -> Result<Work, Refusal> {
    let name = weights_name(name)?;
    if name.starts_with(UNNAMED) {
        let must = format!("not begin with {UNNAMED}");
        return Err(Refusal::invalid("path", name, &must));
    }
    Ok(Work::Save(SaveRequest {
        kind,
        name: name.to_owned(),
        overwrite,
        sampler: None,
    }))
}

/// Returns the seed for a request without one, from its id.
fn seed_of(id: &str) -> u64 {
    let digest = crate::digest(id.as_bytes());
    u64::from_le_bytes(*digest.first_chunk().unwrap_or(&[0; 8]))
}
