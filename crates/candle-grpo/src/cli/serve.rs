//! `grpo serve`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use candle_grpo::config::ModelConfig;
use candle_grpo::nn::BaseWeights;
use candle_grpo::run::adapter_engine;
use candle_grpo::tinker::{TinkerConfig, TinkerListener};
use candle_grpo::train::ComputeDType;
use candle_grpo::train::rollout::{Engine, RolloutConfig};

use super::console::Console;
use super::exit::Exit;
use super::load;

#[derive(clap::Args)]
pub(super) struct ServeArguments {
    /// Serve this model with the API of Tinker: a Hugging Face directory, a GGUF file, a run
    /// directory (its best checkpoint), or a Hugging Face hub name.
    #[arg(long, value_name = "MODEL", required = true)]
    tinker: PathBuf,
    /// The port; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// The address. Any but a loopback address needs --api-key-env.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,
    /// The directory for sessions, results and weights.
    #[arg(long, default_value = "grpo-tinker", value_name = "FOLDER")]
    folder: PathBuf,
    /// The model name for clients, which they pass as base_model. Default: MODEL. The client loads
    /// its tokenizer by this name.
    #[arg(long)]
    name: Option<String>,
    /// The environment variable with the API key.
    #[arg(long, value_name = "VARIABLE")]
    api_key_env: Option<String>,
    /// Compute in bf16 instead of f32.
    #[arg(long)]
    bf16: bool,
    /// The form of the base model's linear maps in memory: dense, stored (the blocks of a GGUF
    /// file), q4_0, q5_0, q8_0, q4_k, q5_k or q6_k.
    #[arg(long, default_value = "dense", value_name = "FORM", value_parser = base_weights)]
    base_weights: BaseWeights,
    /// The maximum number of tokens in a training pass, unless a single example has more.
    #[arg(long, default_value_t = defaults().micro_batch_tokens, value_name = "N")]
    micro_batch_tokens: usize,
    /// The maximum number of samples drawn at the same time.
    #[arg(long, default_value_t = defaults().max_batch_size, value_name = "N")]
    max_batch_size: usize,
    /// The maximum size of a request in bytes.
    #[arg(long, default_value_t = defaults().max_request_bytes, value_name = "BYTES")]
    max_request_bytes: usize,
    /// The maximum number of waiting requests of a model or a sampling session.
    #[arg(long, default_value_t = defaults().max_waiting, value_name = "N")]
    max_waiting: usize,
    /// The number of models that stay in memory, and of saved weights to sample from. Others are
    /// loaded again when their turn comes.
    #[arg(long, default_value_t = defaults().max_loaded_models, value_name = "N")]
    max_loaded_models: usize,
    /// Sample with these servers instead of in this process: vllm or sglang.
    #[arg(long, value_name = "ENGINE", value_parser = engine, requires = "engine_base_url")]
    engine: Option<Engine>,
    /// A server of --engine, without /v1. Give it again for each server.
    #[arg(long, value_name = "URL", requires = "engine")]
    engine_base_url: Vec<String>,
    /// The name under which the servers serve MODEL. Default: the first one that they list.
    #[arg(long, value_name = "NAME", requires = "engine")]
    engine_served_model_name: Option<String>,
    /// The environment variable with the API key of the servers.
    #[arg(long, value_name = "VARIABLE", requires = "engine")]
    engine_api_key_env: Option<String>,
    /// The maximum mean difference between the log-probs of a server and of this process.
    #[arg(
        long,
        value_name = "NATS",
        requires = "engine",
        default_value_t = RolloutConfig::default().log_prob_tolerance
    )]
    engine_log_prob_tolerance: f64,
    /// Only log warnings.
    #[arg(short, long)]
    quiet: bool,
}

/// The defaults of options.
fn defaults() -> TinkerConfig {
    TinkerConfig::new("", "")
}

fn engine(name: &str) -> Result<Engine, String> {
    serde_json::from_value(name.into()).map_err(|error| error.to_string())
}

fn base_weights(name: &str) -> Result<BaseWeights, String> {
    serde_json::from_value(name.into()).map_err(|error| error.to_string())
}

/// Serves a model until it is asked to stop.
pub(super) fn serve(arguments: &ServeArguments) -> Result<(), Exit> {
    let name = arguments.name.clone();
    let dtype = if arguments.bf16 {
        ComputeDType::Bf16
    } else {
        ComputeDType::F32
    };
    let config = TinkerConfig {
        listen: SocketAddr::new(arguments.host, arguments.port),
        folder: arguments.folder.clone(),
        model_name: name.unwrap_or_else(|| arguments.tinker.display().to_string()),
        api_key_env: arguments.api_key_env.clone(),
        compute_dtype: dtype,
        micro_batch_tokens: arguments.micro_batch_tokens,
        max_batch_size: arguments.max_batch_size,
        max_request_bytes: arguments.max_request_bytes,
        max_waiting: arguments.max_waiting,
        max_loaded_models: arguments.max_loaded_models,
    };
    // Wrong options are errors before the model is loaded.
    let listener = TinkerListener::bind(config);
    let mut listener = listener.map_err(|error| Exit::Config(format!("{error:#}")))?;
    if let Some(engine) = arguments.engine {
        let engine = adapter_engine(&RolloutConfig {
            engine,
            base_url: arguments.engine_base_url.clone(),
            served_model_name: arguments.engine_served_model_name.clone(),
            api_key_env: arguments.engine_api_key_env.clone(),
            log_prob_tolerance: arguments.engine_log_prob_tolerance,
            ..RolloutConfig::default()
        });
        let engine = engine.map_err(|error| Exit::Config(format!("{error:#}")))?;
        listener = listener.with_engine(engine);
    }
    let console = Console::new(arguments.quiet);
    let model = ModelConfig {
        path: load::model_file(&arguments.tinker, &console)?,
        ..ModelConfig::default()
    };
    let pretrained = load::base(&model, arguments.base_weights, dtype)?;
    let server = listener.serve(pretrained);
    let server = server.map_err(|error| Exit::Run(format!("{error:#}")))?;
    console.stop_when_asked();
    console.print(&format!("http://{}", server.address()))?;
    console.wait_for_stop();
    drop(server);
    Ok(())
}
