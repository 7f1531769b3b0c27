//! The policy from which a fake server samples.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_grpo_nn::{DecoderConfig, Lora, Parameters};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::{Reference, TeacherDistributions};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{
    CompletionSeed, GenerationBatch, LocalGenerator, PolicyWeights, PromptRequest,
};
use candle_grpo_train::{
    Completion, ComputeDType, FinishReason, Generator, SamplingConfig, TokenBatch,
};
use tokenizers::Tokenizer;

/// Distribution for the log-probs that a server reports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogProbs {
    /// `softmax(logits)`.
    Raw,
    /// `softmax(logits / temperature)`.
    Temperature,
    /// After temperature, top-k, top-p and min-p.
    Processed,
}

/// A policy with its initial weights.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) model: DecoderConfig,
    pub(crate) parameters: Parameters,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// The end-of-text token.
    pub(crate) end: u32,
}

/// A policy with its adapters, whose weights come from directories.
pub(crate) struct ServedPolicy {
    pub(crate) served: Served,
    pub(crate) log_probs: LogProbs,
    /// Maximum length of a prompt and its completion.
    pub(crate) max_model_len: usize,
    pub(crate) seeds: Seeds,
    base: Parameters,
    weights: Arc<Weights>,
    adapters: BTreeMap<String, (String, Arc<Weights>)>,
}

/// Completion seeds by the number that a request carries instead: a completion then has the same
/// tokens that [`LocalGenerator`] samples. Any other number is the seed itself.
pub(crate) type Seeds = Arc<Mutex<HashMap<u64, CompletionSeed>>>;

/// Returns the seeds that a sampler with this seed gives to `[streams, prompts, samples, turns]`.
pub(crate) fn seeds(seed: u64, counts: [u64; 4]) -> Seeds {
    let mut seeds = HashMap::new();
    for number in 0..counts.iter().product() {
        let mut left = number;
        let [stream, prompt, sample, turn] = counts.map(|count| {
            let place = left % count;
            left /= count;
            place
        });
        let seed = CompletionSeed {
            seed,
            stream,
            prompt,
            sample,
            turn,
        };
        seeds.insert(seed.to_u64() >> 1, seed);
        // With 31 bits.
        seeds.insert(seed.to_u64() >> 33, seed);
    }
    Arc::new(Mutex::new(seeds))
}

/// Returns these weights, multiplied by `factor`.
pub(crate) fn scaled(model: &DecoderConfig, parameters: &Parameters, factor: f64) -> Parameters {
    let scaled = parameters.frozen_copy().unwrap();
    let scaled = scaled
        .into_iter()
        .map(|(name, x)| (name, (x * factor).unwrap()))
        .collect();
    Parameters::from_tensors(model, scaled, device()).unwrap()
}

/// Returns the log-probs of tokens after a prompt.
pub(crate) fn log_probs(
    model: &Reference,
    (prompt, tokens): (&[u32], &[u32]),
    temperature: f64,
) -> Result<Vec<f32>> {
    let batch = TokenBatch::new(&[(prompt, tokens)], device())?;
    let log_probs = model.log_probs(&batch, temperature)?;
    Ok(log_probs.flatten_all()?.to_vec1()?)
}

/// The policy's weights, with or without an adapter.
pub(crate) struct Weights {
    generator: LocalGenerator,
    reference: Reference,
}

impl Weights {
    fn new(model: &DecoderConfig, parameters: &Parameters) -> Result<Self> {
        Ok(Self {
            generator: LocalGenerator::new(model, parameters)?,
            reference: Reference::new(model, parameters, ComputeDType::F32)?,
        })
    }
}

/// A completion request.
pub(crate) struct Draw {
    pub(crate) prompt: Vec<u32>,
    pub(crate) completions: u64,
    pub(crate) seed: i64,
    /// The temperature is 0 for greedy decoding.
    pub(crate) sampling: SamplingConfig,
}

/// A completion with the log-probs that the server reports.
pub(crate) struct Drawn {
    pub(crate) tokens: Vec<u32>,
    pub(crate) log_probs: Vec<f32>,
    pub(crate) finish_reason: FinishReason,
    pub(crate) text: String,
    /// True if a client aborted it.
    pub(crate) is_aborted: bool,
}

impl Drawn {
    /// Leaves the first `length` tokens.
    pub(crate) fn abort(&mut self, length: usize) {
        if self.tokens.len() >= length {
            self.tokens.truncate(length);
            self.log_probs.truncate(length);
            self.is_aborted = true;
        }
    }
}

impl ServedPolicy {
    pub(crate) fn new(served: Served, log_probs: LogProbs) -> Self {
        let base = served.parameters.clone();
        Self {
            log_probs,
            max_model_len: served.model.max_position_embeddings,
            seeds: Arc::default(),
            weights: Arc::new(Weights::new(&served.model, &base).unwrap()),
            base,
            adapters: BTreeMap::new(),
            served,
        }
    }

    /// Restores the initial weights, and removes the adapters.
    pub(crate) fn restart(&mut self) {
        *self = Self {
            max_model_len: self.max_model_len,
            seeds: Arc::clone(&self.seeds),
            ..Self::new(self.served.clone(), self.log_probs)
        };
    }

    /// Reads the weights in a Hugging Face directory. Adapters still apply to the previous weights.
    pub(crate) fn read_weights(&mut self, folder: &str) -> Result<()> {
        let folder = Path::new(folder);
        let shape = DecoderConfig::from_hugging_face(&fs::read(folder.join("config.json"))?)?;
        self.base = Parameters::load_folder(&shape, folder, device())?;
        self.weights = Arc::new(Weights::new(&self.served.model, &self.base)?);
        Ok(())
    }

    /// Sets all weights. Adapters still apply to the previous ones.
    pub(crate) fn set_weights(&mut self, weights: HashMap<String, Tensor>) -> Result<()> {
        self.base = Parameters::from_tensors(&self.served.model, weights, device())?;
        self.weights = Arc::new(Weights::new(&self.served.model, &self.base)?);
        Ok(())
    }

    /// Reads the adapter in a PEFT directory.
    pub(crate) fn read_adapter(&mut self, name: &str, folder: &str) -> Result<()> {
        let adapters = Lora::load(Path::new(folder), &self.served.model, device())?;
        let merged = PolicyWeights {
            version: 0,
            model: &self.served.model,
            parameters: &self.base,
            adapters: Some(&adapters),
        }
        .merged()?;
        let adapter = (
            folder.to_owned(),
            Arc::new(Weights::new(&self.served.model, &merged)?),
        );
        self.adapters.insert(name.to_owned(), adapter);
        Ok(())
    }

    pub(crate) fn remove_adapter(&mut self, name: &str) -> bool {
        self.adapters.remove(name).is_some()
    }

    /// Adapter names and directories.
    pub(crate) fn adapters(&self) -> BTreeMap<String, String> {
        let adapters = self.adapters.iter();
        adapters
            .map(|(name, (folder, _))| (name.clone(), folder.clone()))
            .collect()
    }

    /// Returns the weights with an adapter; `None` if it is not loaded.
    pub(crate) fn weights(&self, adapter: Option<&str>) -> Option<Arc<Weights>> {
        Some(Arc::clone(match adapter {
            None => &self.weights,
            Some(name) => &self.adapters.get(name)?.1,
        }))
    }

    /// Checks a request as servers do.
    pub(crate) fn check(&self, draw: &Draw) -> Result<()> {
        let vocabulary = self.served.model.vocab_size;
        ensure!(!draw.prompt.is_empty(), "prompt is empty");
        if let Some(id) = draw.prompt.iter().find(|&&id| id as usize >= vocabulary) {
            anyhow::bail!("Token id {id} is out of vocabulary");
        }
        ensure!(draw.completions > 0, "n must be at least 1, got 0.");
        let new = draw.sampling.max_new_tokens;
        ensure!(new > 0, "max_tokens must be at least 1, got 0.");
        let (length, most) = (draw.prompt.len(), self.max_model_len);
        ensure!(
            length + new <= most,
            "This model's maximum context length is {most} tokens, and {length} + {new} were asked for"
        );
        if draw.sampling.temperature != 0. {
            draw.sampling.validate()?;
        }
        Ok(())
    }

    /// Prepares to sample completions. The policy may change meanwhile.
    pub(crate) fn drawing(&self, weights: Arc<Weights>) -> Drawing {
        Drawing {
            weights,
            tokenizer: Arc::clone(&self.served.tokenizer),
            log_probs: self.log_probs,
            seeds: Arc::clone(&self.seeds),
        }
    }
}

/// A policy's state at one request.
pub(crate) struct Drawing {
    tokenizer: Arc<Tokenizer>,
    weights: Arc<Weights>,
    log_probs: LogProbs,
    seeds: Seeds,
}

impl Drawing {
    /// Log-probs over the vocabulary at temperature 1, at each prompt position except the first.
    pub(crate) fn score(&self, prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
        ensure!(prompt.len() > 1, "a prompt of one token has no log-probs");
        let batch = TokenBatch::new(&[prompt.split_at(1)], device())?;
        log_distributions(&self.weights.reference, &batch)?
            .squeeze(0)?
            .to_vec2()
            .map_err(Into::into)
    }

    pub(crate) fn draw(&self, draw: &Draw) -> Result<Vec<Drawn>> {
        let mut sampling = draw.sampling.clone();
        sampling.greedy = sampling.temperature == 0.;
        if sampling.greedy {
            sampling.temperature = 1.;
        }
        let seeds = (0..draw.completions).map(|i| {
            let seed = draw.seed.wrapping_add_unsigned(i) as u64;
            let own = CompletionSeed {
                seed,
                stream: 0,
                prompt: 0,
                sample: 0,
                turn: 0,
            };
            *self.seeds.lock().unwrap().get(&seed).unwrap_or(&own)
        });
        let request = PromptRequest {
            tokens: &draw.prompt,
            seeds: seeds.collect(),
            max_new_tokens: sampling.max_new_tokens,
        };
        let tokenizer = Arc::clone(&self.tokenizer);
        let decode = move |tokens: &[u32]| {
            let text = tokenizer.decode(tokens, true);
            text.map_err(|e| anyhow::anyhow!("{e}"))
        };
        let batch = GenerationBatch {
            prompts: &[request],
            sampling: &sampling,
            decode: Some(&decode),
            progress: &NoProgress,
            records_experts: false,
            partial: None,
        };
        let mut completions: Vec<Option<Completion>> = vec![None; draw.completions as usize];
        let mut deliver = |place: usize, completion: Completion| {
            completions[place] = Some(completion);
            Ok(())
        };
        self.weights.generator.generate(&batch, &mut deliver)?;
        let mut drawn = Vec::new();
        for completion in completions {
            let completion = completion.context("a completion is missing")?;
            drawn.push(Drawn {
                text: decode(&completion.tokens)?,
                log_probs: self.log_probs(draw, &completion)?,
                tokens: completion.tokens,
                finish_reason: completion.finish_reason,
                is_aborted: false,
            });
        }
        Ok(drawn)
    }

    fn log_probs(&self, draw: &Draw, completion: &Completion) -> Result<Vec<f32>> {
        let greedy = draw.sampling.temperature == 0.;
        match self.log_probs {
            LogProbs::Processed if !greedy => Ok(completion.drawn_log_probs.clone()),
            LogProbs::Temperature if !greedy => completion.log_probs.clone().context("log-probs"),
            _ => {
                let pair = (draw.prompt.as_slice(), completion.tokens.as_slice());
                log_probs(&self.weights.reference, pair, 1.)
            }
        }
    }
}

/// Log-distributions at a batch's responses, `[B, T, V]`.
pub(crate) fn log_distributions(model: &Reference, batch: &TokenBatch) -> Result<Tensor> {
    let TeacherDistributions::Hidden { hidden, weight, .. } = model.distributions(batch)? else {
        anyhow::bail!("a model in this process gives no hidden states");
    };
    let logits = hidden.broadcast_matmul(&weight.t()?)?;
    let total = logits.exp()?.sum_keepdim(2)?.log()?;
    Ok(logits.broadcast_sub(&total)?)
}
