//! A training step for a whole model: log-probs at every position, forward and backward.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, add_matmul, default_device,
};
use candle_grpo_nn::{Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens, Parameters};
use clap::Parser;
use serde::Serialize;

use crate::median;
use crate::memory::Meter;
use crate::model::{decoder_in, read_model};

/// Times forward and backward passes of a model with random weights
#[derive(Debug, Parser)]
struct Args {
    /// The model's config.json; without it, the dimensions of SmolLM2-135M
    #[arg(long)]
    model: Option<PathBuf>,
    /// Number of blocks, if different from the file
    #[arg(long)]
    layers: Option<usize>,
    /// Number of sequences per step
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Number of tokens per sequence
    #[arg(long, default_value_t = 128)]
    length: usize,
    /// Dtype for weights and activations: f32 or bf16. Gradients are f32
    #[arg(long, default_value = "f32")]
    dtype: DType,
    /// Keep only block inputs, and recompute the rest
    #[arg(long)]
    checkpointing: bool,
    /// On a GPU, move the block inputs to main memory until they are needed
    #[arg(long, requires = "checkpointing")]
    offloading: bool,
    /// Measured steps, whose median is reported
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Run one step per line on standard input, and print its milliseconds and its peak memory
    /// beyond the weights in MiB
    #[arg(long)]
    serve: bool,
}

/// The main function for programs that measure a training step.
pub fn training_main(allocator: &str) -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0, "rounds: 0, must be at least 1");
    let mut model = read_model(args.model.as_deref())?;
    if let Some(layers) = args.layers {
        model.num_hidden_layers = layers;
        model.layer_types.truncate(layers);
    }
    let device = default_device()?;
    let step = Step::new(&args, &model, &device)?;
    step.run()?;
    if args.serve {
        for line in std::io::stdin().lock().lines() {
            line?;
            let Measured { ms, peak_mib } = step.run()?;
            println!("{ms}\t{peak_mib}");
            std::io::stdout().flush()?;
        }
        return Ok(());
    }
    let products = Products::new(&args, &step.parameters, &device)?;
    let (mut steps, mut bare) = (Vec::new(), Vec::new());
    let mut memory = 0.0;
    for _ in 0..args.rounds {
        let measured = step.run()?;
        memory = measured.peak_mib;
        steps.push(measured.ms);
        bare.push(products.run()?);
    }
    let (ms, products_ms) = (median(steps), median(bare));
    let tokens = (args.sequences * args.length) as f64;
    let report = Report {
        allocator,
        layers: model.num_hidden_layers,
        tokens,
        checkpointing: args.checkpointing,
        offloading: args.offloading,
        ms,
        tokens_per_second: tokens / ms * 1e3,
        products_ms,
        products_gflops: products.flop / products_ms / 1e6,
        ratio_to_products: ms / products_ms,
        peak_mib: memory,
        gradients_mib: step.parameters.num_elements() as f64 * 4.0 / MIB,
        resident_mib: resident_peak_mib()?,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

const MIB: f64 = (1 << 20) as f64;

#[derive(Debug, Serialize)]
struct Report<'a> {
    allocator: &'a str,
    layers: usize,
    tokens: f64,
    checkpointing: bool,
    offloading: bool,
    ms: f64,
    tokens_per_second: f64,
    /// Time for the linear layers' matrix products alone.
    products_ms: f64,
    products_gflops: f64,
    ratio_to_products: f64,
    /// Peak memory beyond the weights.
    peak_mib: f64,
    gradients_mib: f64,
    /// Peak memory of the process.
    resident_mib: f64,
}

fn resident_peak_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
    let kib: f64 = kib.context("/proc/self/status: no VmHWM")?.parse()?;
    Ok(kib / 1024.0)
}

struct Step {
    parameters: Parameters,
    decoder: Decoder,
    /// The output layer's weight.
    output: Var,
    tokens: PackedTokens,
    targets: Tensor,
    mask: Tensor,
}

struct Measured {
    ms: f64,
    peak_mib: f64,
}

impl Step {
    fn new(args: &Args, model: &DecoderConfig, device: &Device) -> Result<Self> {
        let parameters = Parameters::init(model, 0, device)?;
        let decoder = decoder_in(model, &parameters, args.dtype)?
            .with_activation_checkpointing(args.checkpointing)?
            .with_activation_offloading(args.offloading);
        let output = match args.dtype {
            DType::F32 => parameters.get(decoder.output_name()).cloned(),
            _ => Some(Var::from_tensor(decoder.output_weight())?),
        };
        let tokens = args.sequences * args.length;
        let ids: Vec<u32> = (0..tokens as u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % model.vocab_size as u32)
            .collect();
        let targets = ids.iter().skip(1).copied().chain([0]).collect::<Vec<_>>();
        let sequences: Vec<Vec<u32>> = ids.chunks(args.length).map(<[u32]>::to_vec).collect();
        // A sequence's last token predicts nothing.
        let mask: Vec<u8> = (1..=tokens)
            .map(|next| u8::from(next % args.length != 0))
            .collect();
        Ok(Self {
            parameters,
            decoder,
            output: output.context("output weight")?,
            tokens: PackedTokens::new(&sequences, device)?,
            targets: Tensor::new(targets, device)?,
            mask: Tensor::new(mask, device)?,
        })
    }

    fn run(&self) -> Result<Measured> {
        let device = self.targets.device();
        device.synchronize()?;
        let memory = Meter::start(device)?;
        let start = Instant::now();
        let (hidden, recorded) = self.decoder.record(&self.tokens)?;
        let hidden = Var::from_tensor(&hidden)?;
        let name = self.decoder.output_name();
        let options = LogProbOptions {
            mask: Some(&self.mask),
            ..Default::default()
        };
        let layer = LinearLogProb::new(&hidden, &self.output, None, &self.targets, 1.0, options)?;
        let tokens = layer.forward()?;
        let none = tokens.entropy.zeros_like()?;
        let derivatives = TokenLogProbs {
            log_probs: (&none - 1e-3)?,
            entropy: none.clone(),
            log_sum_exp: none,
        };
        let found = layer.backward(&tokens, &derivatives)?;
        let mut gradients = Gradients::new();
        gradients.add(name, &found.weight.context("a gradient of the weight")?)?;
        let hidden_gradient = found.hidden.context("a gradient of the hidden states")?;
        recorded.backward(&hidden_gradient, &self.parameters, &mut gradients)?;
        device.synchronize()?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        gradients.ensure_complete(&self.parameters)?;
        Ok(Measured {
            ms,
            peak_mib: memory.peak_mib(device)?,
        })
    }
}

/// Matrix products for the linear layers in a step.
struct Products {
    /// For each shape in the blocks: input rows, output rows, weight and number of layers.
    blocks: Vec<(Factor, Factor, Factor, usize)>,
    /// Input rows, one logit tile, and its part of the output layer's weight.
    output: (Factor, Factor, Factor),
    flop: f64,
}

/// A matrix that serves as a factor in products, and one that sums others.
struct Factor {
    values: Tensor,
    sum: Tensor,
}

impl Factor {
    fn new(shape: (usize, usize), dtype: DType, device: &Device) -> Result<Self> {
        let ones = |dtype| Tensor::ones(shape, dtype, device);
        Ok(Self {
            values: ones(dtype)?,
            sum: ones(DType::F32)?,
        })
    }
}

/// Number of output layer tiles.
const TILES: usize = 24;

impl Products {
    fn new(args: &Args, parameters: &Parameters, device: &Device) -> Result<Self> {
        let tokens = args.sequences * args.length;
        let product = |outputs, inputs| -> Result<_> {
            let factor = |rows, columns| Factor::new((rows, columns), args.dtype, device);
            Ok((
                factor(tokens, inputs)?,
                factor(tokens, outputs)?,
                factor(outputs, inputs)?,
            ))
        };
        let mut layers: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut vocabulary = (0, 0);
        for (name, weight) in parameters.iter() {
            // Other shapes, such as norms, are not linear layers.
            let Ok(shape) = weight.dims2() else { continue };
            if name.starts_with("model.layers.") {
                *layers.entry(shape).or_default() += 1
            } else {
                vocabulary = shape
            }
        }
        let in_blocks: usize = layers.iter().map(|((m, n), layers)| m * n * layers).sum();
        let (vocab_size, hidden_size) = vocabulary;
        // Three products per linear layer; four for the output layer, which computes its logits
        // twice.
        let flop = 2 * tokens * (3 * in_blocks + 4 * vocab_size * hidden_size);
        let blocks = layers
            .into_iter()
            .map(|((outputs, inputs), layers)| {
                let (x, y, weight) = product(outputs, inputs)?;
                Ok((x, y, weight, layers))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            blocks,
            output: product(vocab_size / TILES, hidden_size)?,
            flop: flop as f64,
        })
    }

    /// Runs the products.
    fn run(&self) -> Result<f64> {
        let (rows, tile, weight) = &self.output;
        let device = rows.sum.device();
        device.synchronize()?;
        let start = Instant::now();
        for (x, y, weight, layers) in &self.blocks {
            for _ in 0..*layers {
                add_matmul(&y.sum, &x.values, &weight.values.t()?)?;
                add_matmul(&x.sum, &y.values, &weight.values)?;
                add_matmul(&weight.sum, &y.values.t()?, &x.values)?;
            }
        }
        for _ in 0..TILES {
            for _ in 0..2 {
                add_matmul(&tile.sum, &rows.values, &weight.values.t()?)?;
            }
            add_matmul(&rows.sum, &tile.values, &weight.values)?;
            add_matmul(&weight.sum, &tile.values.t()?, &rows.values)?;
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}
