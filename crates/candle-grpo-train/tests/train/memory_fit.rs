//! Settings that fit into memory.

use candle_grpo_nn::optim::{MasterWeights, Sharding, StateForm, StateMemory};
use candle_grpo_nn::{DecoderConfig, LoraConfig};
use candle_grpo_train::learn::{Auto, MemoryFit, MemoryPlan, MicroBatchTokens};
use candle_grpo_train::{ActivationCheckpointing, ComputeDType, SamplingConfig, TrainConfig};
use rstest::rstest;
use serde_json::json;

use crate::common;

const PROMPT: usize = 100;

/// 2 mini-batches of 8 completions each. The model reads up to 299 tokens of a prompt with its
/// completion, and 100 + 8 * 199 of a mini-batch.
fn config() -> TrainConfig {
    TrainConfig {
        prompts_per_step: 2,
        num_generations: 8,
        mini_batch_size: Some(8),
        sampling: SamplingConfig {
            max_new_tokens: 200,
            ..SamplingConfig::default()
        },
        ..TrainConfig::default()
    }
}

fn auto() -> TrainConfig {
    TrainConfig {
        micro_batch_tokens: Some(MicroBatchTokens::Auto(Auto::Auto)),
        ..config()
    }
}

fn model() -> DecoderConfig {
    DecoderConfig {
        vocab_size: 1000,
        hidden_size: 128,
        intermediate_size: 512,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: 1,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}

fn plan(config: &TrainConfig) -> anyhow::Result<MemoryPlan> {
    MemoryPlan::new(&model(), config, PROMPT, 0)
}

fn peak(config: &TrainConfig, tokens: usize) -> usize {
    let config = TrainConfig {
        micro_batch_tokens: Some(tokens.into()),
        ..config.clone()
    };
    plan(&config).unwrap().peak()
}

fn fit<T>(bytes: usize, found: impl FnOnce(&MemoryFit<'_>) -> T) -> T {
    found(&MemoryFit {
        bytes,
        host_bytes: Some(0),
        model: &model(),
        prompt_tokens: PROMPT,
        plan: &plan,
    })
}

#[rstest]
#[case::all_of_an_update(usize::MAX, Some(1728))]
#[case::one_sequence(peak(&config(), 320), Some(320))]
#[case::not_even_one(peak(&config(), 320) - 1, None)]
fn the_largest_micro_batch_that_fits_is_chosen(
    #[case] bytes: usize,
    #[case] expected: Option<usize>,
) {
    for config in [config(), auto()] {
        let tokens = fit(bytes, |fit| fit.micro_batch_tokens(&config).unwrap());
        assert_eq!(tokens, expected);
    }
}

/// A plan may be smaller with more tokens, because the passes after the first one are then shorter.
#[rstest]
fn the_chosen_micro_batch_fits_and_the_next_one_does_not(
    #[values(512, 768, 1024, 1280)] tokens: usize,
    #[values(0, 1)] bytes_less: usize,
) {
    let bytes = peak(&config(), tokens) - bytes_less;
    let chosen = fit(bytes, |fit| {
        fit.micro_batch_tokens(&auto()).unwrap().unwrap()
    });
    assert_eq!(chosen % 64, 0);
    assert!(peak(&config(), chosen) <= bytes, "{chosen}");
    assert!(peak(&config(), chosen + 64) > bytes, "{chosen}");
}

#[test]
fn a_wrong_setting_is_an_error() {
    let config = TrainConfig {
        epochs: 0,
        ..auto()
    };
    let error = fit(usize::MAX, |fit| {
        fit.micro_batch_tokens(&config).unwrap_err()
    });
    assert_eq!(error.to_string(), "epochs: 0, must be at least 1");
}

#[test]
fn a_smaller_micro_batch_is_the_first_change() {
    let config = config();
    let change = fit(peak(&config, 640), |fit| fit.smallest_change(&config));
    assert_eq!(change.unwrap(), ["micro_batch_tokens: 640"]);
}

/// With one sequence in a pass, fewer layers are kept: as many as fit.
#[test]
fn the_fewest_layers_are_recomputed() {
    let peak_of = |layers| {
        let config = TrainConfig {
            activation_checkpointing: ActivationCheckpointing::Layers(layers),
            ..config()
        };
        peak(&config, 320)
    };
    assert!(peak_of(2) < peak_of(1) && peak_of(1) < peak_of(0));
    for layers in [1, 2] {
        let change = fit(peak_of(layers), |fit| fit.smallest_change(&auto()));
        let expected = format!("activation_checkpointing: {layers}");
        assert_eq!(change.unwrap(), [expected]);
    }
    let change = fit(peak_of(2) + 1, |fit| fit.smallest_change(&auto()));
    assert_eq!(change.unwrap(), ["activation_checkpointing: 2"]);
}

/// Copies with merged adapters are for speed alone.
#[rstest]
#[case::one_change(None, &["rollout.merge_adapters: false"])]
#[case::several(Some(2), &["activation_checkpointing: true", "micro_batch_tokens: 320", "rollout.merge_adapters: false"])]
fn adapters_are_no_longer_merged(#[case] layers: Option<usize>, #[case] expected: &[&str]) {
    let mut merged = TrainConfig {
        adapters: Some(LoraConfig::all_linear(8, 16.)),
        ..config()
    };
    let mut fitting = TrainConfig {
        micro_batch_tokens: Some(320.into()),
        ..merged.clone()
    };
    if layers.is_some() {
        fitting.activation_checkpointing = true.into();
    } else {
        merged.micro_batch_tokens = Some(MicroBatchTokens::Auto(Auto::Auto));
    }
    merged.rollout.merge_adapters = true;
    let bytes = plan(&fitting).unwrap().peak();
    let change = fit(bytes, |fit| fit.smallest_change(&merged));
    assert_eq!(change.unwrap(), expected);
}

/// Where the peak is that of sampling, a smaller cache helps.
#[test]
fn a_cache_that_fits_is_chosen() {
    let drawing = |max_cache_mib| {
        let mut config = config();
        config.sampling.max_new_tokens = 20;
        config.sampling.max_batch_size = 4096;
        config.sampling.max_cache_mib = max_cache_mib;
        config.mini_batch_size = Some(1);
        config.prompts_per_step = 2048;
        config
    };
    let peak_of = |mib| plan(&drawing(mib)).unwrap().peak();
    assert_eq!(peak_of(Some(4)) - peak_of(Some(3)), 1 << 20);
    let change = fit(peak_of(Some(3)), |fit| fit.smallest_change(&drawing(None)));
    assert_eq!(change.unwrap(), ["sampling.max_cache_mib: 3"]);
    let change = fit(peak_of(Some(4)) - 1, |fit| {
        fit.smallest_change(&drawing(Some(8)))
    });
    assert_eq!(change.unwrap(), ["sampling.max_cache_mib: 3"]);
}

/// Where the peak is that of sampling and not of the cache, no setting of the update helps.
#[test]
fn fewer_completions_are_drawn_at_once() {
    let drawing = |max_batch_size| {
        let mut config = config();
        config.sampling.max_new_tokens = 20;
        config.mini_batch_size = Some(1);
        config.prompts_per_step = 64;
        config.sampling.max_batch_size = max_batch_size;
        config.sampling.max_cache_mib = Some(1);
        config
    };
    let peak_of = |size| plan(&drawing(size)).unwrap().peak();
    assert!(peak_of(128) < peak_of(256) && peak_of(256) < peak_of(512));
    for size in [128, 256] {
        let change = fit(peak_of(size), |fit| fit.smallest_change(&drawing(512)));
        let expected = format!("sampling.max_batch_size: {size}");
        assert_eq!(change.unwrap(), [expected]);
    }
}

/// One rank divides nothing.
#[rstest]
fn several_changes_fit_together(
    #[values(Sharding::None, Sharding::Optimizer, Sharding::Resident)] sharding: Sharding,
) {
    let config = TrainConfig {
        sharding,
        ..config()
    };
    let mut smallest = TrainConfig {
        activation_checkpointing: true.into(),
        ..config.clone()
    };
    smallest.optimizer.state = StateForm::Blocks8;
    let bytes = peak(&smallest, 320);
    let change = fit(bytes, |fit| fit.smallest_change(&config));
    assert_eq!(
        change.unwrap(),
        [
            "activation_checkpointing: true",
            "micro_batch_tokens: 320",
            "optimizer.state: 8bit",
        ]
    );
    assert_eq!(fit(1000, |fit| fit.smallest_change(&config)), None);
}

/// A model whose blocks are larger than the buffers of ranks.
fn large() -> DecoderConfig {
    DecoderConfig {
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 24,
        ..model()
    }
}

/// Weights and state take the most of the memory, so that no smaller pass helps.
#[rstest]
#[case::ranks(4, |run: &mut TrainConfig| run.sharding = Sharding::Optimizer, "sharding: optimizer")]
#[case::one_rank(1, |run: &mut TrainConfig| run.optimizer.state = StateForm::Blocks8, "optimizer.state: 8bit")]
#[case::adapters(
    1, |run: &mut TrainConfig| run.adapters = Some(LoraConfig::all_linear(16, 32.)),
    "adapters: {rank: 16, alpha: 32}"
)]
fn one_change_of_the_run_comes_before_several(
    #[case] world_size: usize,
    #[case] change: fn(&mut TrainConfig),
    #[case] expected: &str,
) {
    let model = large();
    let plan = |config: &TrainConfig| MemoryPlan::of_rank(&model, config, (PROMPT, 0), world_size);
    let run = TrainConfig {
        activation_checkpointing: true.into(),
        micro_batch_tokens: Some(320.into()),
        ..config()
    };
    let mut changed = run.clone();
    change(&mut changed);
    let fit = MemoryFit {
        bytes: plan(&changed).unwrap().peak(),
        host_bytes: Some(0),
        model: &model,
        prompt_tokens: PROMPT,
        plan: &plan,
    };
    assert_eq!(fit.smallest_change(&run).unwrap(), [expected]);
}

/// On a GPU with main memory for the state of the optimizer, or too little. The plan is that of a
/// GPU on any device.
#[rstest]
fn an_optimizer_moves_to_host_memory_if_that_has_room(
    #[values(false, true)] has_room: bool,
    #[values(false, true)] is_one_change: bool,
) {
    let model = large();
    let plan = |config: &TrainConfig| {
        let mut plan = MemoryPlan::new(&model, config, PROMPT, 0)?;
        if config.optimizer.memory == StateMemory::Host {
            plan.host += std::mem::take(&mut plan.optimizer);
        }
        Ok(plan)
    };
    let small = TrainConfig {
        activation_checkpointing: true.into(),
        micro_batch_tokens: Some(320.into()),
        ..config()
    };
    let run = TrainConfig {
        prompts_per_step: 16,
        mini_batch_size: None,
        ..config()
    };
    let run = if is_one_change { small.clone() } else { run };
    let mut on_host = TrainConfig {
        prompts_per_step: run.prompts_per_step,
        mini_batch_size: run.mini_batch_size,
        ..small
    };
    let state = plan(&on_host).unwrap().optimizer;
    on_host.optimizer.memory = StateMemory::Host;
    let fit = MemoryFit {
        bytes: plan(&on_host).unwrap().peak(),
        host_bytes: Some(if has_room { state } else { state - 1 }),
        model: &model,
        prompt_tokens: PROMPT,
        plan: &plan,
    };
    let change = fit.smallest_change(&run).unwrap();
    let moves = change.contains(&"optimizer.memory: host".to_owned());
    assert_eq!(moves, has_room, "{change:?}");
    if has_room {
        let others = if is_one_change { 0 } else { 2 };
        assert_eq!(change.len(), 1 + others, "{change:?}");
    }
}

/// Each token takes a KiB of main memory beside a GPU.
#[test]
fn main_memory_bounds_the_tokens_of_a_pass() {
    let model = model();
    let plan = |config: &TrainConfig| {
        let tokens = config
            .micro_batch_tokens
            .as_ref()
            .map(|tokens| json!(tokens));
        let host = tokens.and_then(|tokens| tokens.as_u64()).unwrap_or(0) as usize * 1024;
        Ok(MemoryPlan {
            host,
            ..plan(config)?
        })
    };
    for (kib, expected) in [
        (usize::MAX >> 10, Some(1728)),
        (703, Some(640)),
        (200, None),
    ] {
        let fit = MemoryFit {
            bytes: usize::MAX,
            host_bytes: Some(kib << 10),
            model: &model,
            prompt_tokens: PROMPT,
            plan: &plan,
        };
        assert_eq!(fit.micro_batch_tokens(&auto()).unwrap(), expected);
    }
}

/// The bytes of the inputs of layers that can move in [`of_gpu`].
const INPUTS: usize = 1 << 26;

/// The plan of training on a GPU, on any device.
fn of_gpu(model: &DecoderConfig, config: &TrainConfig) -> anyhow::Result<MemoryPlan> {
    let mut plan = MemoryPlan::new(model, config, PROMPT, 0)?;
    (plan.packed, plan.sampling) = (0, 0);
    if config.activation_offloading {
        plan.training = plan.training.saturating_sub(INPUTS);
        plan.host += INPUTS;
    }
    if config.optimizer.memory == StateMemory::Host {
        plan.host += std::mem::take(&mut plan.optimizer);
    }
    Ok(plan)
}

/// If one change is not enough, the inputs of layers move to main memory, and then the optimizer,
/// as far as there is room.
#[rstest]
#[case::both(true, true)]
#[case::inputs(true, false)]
#[case::optimizer(false, true)]
fn what_moves_to_main_memory_has_room_there(#[case] inputs: bool, #[case] optimizer: bool) {
    let model = large();
    let plan = |config: &TrainConfig| of_gpu(&model, config);
    let run = TrainConfig {
        prompts_per_step: 16,
        mini_batch_size: None,
        ..config()
    };
    let mut changed = TrainConfig {
        activation_checkpointing: true.into(),
        activation_offloading: inputs,
        micro_batch_tokens: Some(320.into()),
        ..run.clone()
    };
    if optimizer {
        changed.optimizer.memory = StateMemory::Host;
    }
    let needed = plan(&changed).unwrap();
    let fit = MemoryFit {
        bytes: needed.peak(),
        host_bytes: Some(needed.host),
        model: &model,
        prompt_tokens: PROMPT,
        plan: &plan,
    };
    let change = fit.smallest_change(&run).unwrap();
    let has = |text: &str| change.iter().any(|each| each == text);
    assert_eq!(has("activation_offloading: true"), inputs, "{change:?}");
    assert_eq!(has("optimizer.memory: host"), optimizer, "{change:?}");
    assert!(!has("optimizer.state: 8bit"), "{change:?}");
}

/// On a GPU with main memory for the inputs of layers, or too little. The plan is that of a GPU on
/// any device.
#[rstest]
fn inputs_of_layers_move_to_main_memory_before_the_optimizer(
    #[values(false, true)] has_room: bool,
    #[values(false, true)] is_checkpointed: bool,
) {
    let model = large();
    let plan = |config: &TrainConfig| of_gpu(&model, config);
    let run = TrainConfig {
        activation_checkpointing: is_checkpointed.into(),
        micro_batch_tokens: Some(320.into()),
        ..config()
    };
    let offloaded = TrainConfig {
        activation_checkpointing: true.into(),
        activation_offloading: true,
        ..run.clone()
    };
    let fit = MemoryFit {
        bytes: plan(&offloaded).unwrap().peak(),
        host_bytes: Some(if has_room { INPUTS } else { INPUTS - 1 }),
        model: &model,
        prompt_tokens: PROMPT,
        plan: &plan,
    };
    let change = fit.smallest_change(&run).unwrap();
    let moves = change.contains(&"activation_offloading: true".to_owned());
    // A single change of the run comes before two that keep it.
    assert_eq!(moves, has_room && is_checkpointed, "{change:?}");
    assert_eq!(change.len(), 1, "{change:?}");
    assert!(!change[0].starts_with("optimizer.memory"), "{change:?}");
}

/// A run of four ranks that divide `sharding` fits with one sequence in a pass, as `smallest`.
///
/// In f32, where ranks do not divide the weights, its peak is that of drawing, and dividing the
/// gradients does not help.
#[rstest]
#[case::one_more(
    ComputeDType::F32, Sharding::None, (Sharding::Optimizer, StateForm::F32),
    &["sharding: optimizer"]
)]
#[case::no_more_than_the_optimizer(
    ComputeDType::Bf16, Sharding::None, (Sharding::Optimizer, StateForm::F32),
    &["sharding: optimizer"]
)]
#[case::all(
    ComputeDType::Bf16, Sharding::None, (Sharding::Resident, StateForm::Blocks8),
    &["sharding: resident", "optimizer.state: 8bit"]
)]
#[case::more_than_the_optimizer(
    ComputeDType::Bf16, Sharding::Optimizer, (Sharding::Resident, StateForm::Blocks8),
    &["sharding: resident", "optimizer.state: 8bit"]
)]
#[case::no_more(
    ComputeDType::Bf16, Sharding::Resident, (Sharding::Resident, StateForm::Blocks8),
    &["optimizer.state: 8bit"]
)]
fn several_changes_name_what_ranks_divide_once(
    #[case] compute_dtype: ComputeDType,
    #[case] sharding: Sharding,
    #[case] smallest: (Sharding, StateForm),
    #[case] expected: &[&str],
) {
    let model = large();
    let plan = |config: &TrainConfig| MemoryPlan::of_rank(&model, config, (PROMPT, 0), 4);
    let run = TrainConfig {
        sharding,
        compute_dtype,
        // A pass is so long that no other change is enough alone.
        prompts_per_step: 16,
        mini_batch_size: None,
        ..config()
    };
    let mut fits = TrainConfig {
        activation_checkpointing: true.into(),
        micro_batch_tokens: Some(320.into()),
        sharding: smallest.0,
        ..run.clone()
    };
    fits.optimizer.state = smallest.1;
    let fit = MemoryFit {
        bytes: plan(&fits).unwrap().peak(),
        host_bytes: Some(0),
        model: &model,
        prompt_tokens: PROMPT,
        plan: &plan,
    };
    let change = fit.smallest_change(&run).unwrap();
    let first = ["activation_checkpointing: true", "micro_batch_tokens: 320"];
    assert_eq!(change, [&first, expected].concat());
}

/// Settings that the run has already are not named.
#[test]
fn several_changes_are_those_that_help() {
    let mut small = TrainConfig {
        activation_checkpointing: true.into(),
        compute_dtype: ComputeDType::Bf16,
        ..config()
    };
    small.optimizer.state = StateForm::Blocks8;
    let mut smallest = small.clone();
    smallest.optimizer.master_weights = MasterWeights::Bf16;
    let bytes = peak(&smallest, 320);
    let change = fit(bytes, |fit| fit.smallest_change(&small));
    let expected = ["micro_batch_tokens: 320", "optimizer.master_weights: bf16"];
    assert_eq!(change.unwrap(), expected);
}

/// The settings of `run` with `changes`.
fn changed(run: &TrainConfig, changes: &[String]) -> TrainConfig {
    let mut settings = serde_json::to_value(run).unwrap();
    for change in changes {
        let (key, value) = change.split_once(": ").unwrap();
        let mut place = &mut settings;
        for key in key.split('.') {
            place = &mut place[key];
        }
        *place = match value {
            "{rank: 16, alpha: 32}" => json!({"rank": 16, "alpha": 32}),
            value => serde_json::from_str(value).unwrap_or_else(|_| value.into()),
        };
    }
    serde_json::from_value(settings).unwrap()
}

/// In any memory for which there are some.
#[rstest]
#[case::one_rank(1, config())]
#[case::ranks(3, config())]
#[case::sequences(1, TrainConfig { micro_batch_size: 4, ..config() })]
#[case::few_layers(1, TrainConfig { activation_checkpointing: ActivationCheckpointing::Layers(1), ..config() })]
#[case::bf16_masters(2, with_bf16_masters())]
#[case::adapters(1, TrainConfig { adapters: Some(LoraConfig::all_linear(8, 16.)), ..config() })]
fn a_run_with_the_changes_is_valid_and_fits(#[case] world_size: usize, #[case] run: TrainConfig) {
    let model = DecoderConfig {
        hidden_size: 512,
        intermediate_size: 1024,
        ..model()
    };
    let plan = |config: &TrainConfig| MemoryPlan::of_rank(&model, config, (PROMPT, 0), world_size);
    let peak = plan(&run).unwrap().peak();
    let mut named = Vec::new();
    for bytes in (1..40).map(|part| peak / 40 * part) {
        let fit = MemoryFit {
            bytes,
            host_bytes: Some(0),
            model: &model,
            prompt_tokens: PROMPT,
            plan: &plan,
        };
        let Some(changes) = fit.smallest_change(&run) else {
            continue;
        };
        let changed = plan(&changed(&run, &changes));
        assert!(changed.unwrap().peak() <= bytes, "{changes:?}");
        named.extend(changes);
    }
    assert!(named.contains(&"base_weights: q4_k".to_owned()));
    // Those of the run stay.
    let new = named.iter().any(|change| change.starts_with("adapters:"));
    assert_eq!(new, run.adapters.is_none());
}

fn with_bf16_masters() -> TrainConfig {
    let mut run = TrainConfig {
        compute_dtype: ComputeDType::Bf16,
        ..config()
    };
    run.optimizer.master_weights = MasterWeights::Bf16;
    run
}

#[test]
fn a_trainer_needs_a_number() {
    let config = TrainConfig {
        micro_batch_tokens: Some(MicroBatchTokens::Auto(Auto::Auto)),
        micro_batch_size: TrainConfig::default().micro_batch_size,
        ..common::config()
    };
    let error = common::try_trainer(|_: &candle_grpo_train::Sample| 0., config);
    assert_eq!(
        error.err().unwrap().to_string(),
        "micro_batch_tokens: auto, must be a number in a trainer: MemoryFit::micro_batch_tokens chooses one"
    );
}

/// The GB of a rank in the table of docs/scaling.md, which `scripts/scaling-model` prints.
#[rstest]
#[case::qwen2_7b("7.6 billion", (3584, 28), (28, 4), 18_944, 152_064)]
#[case::qwen3_14b("14.8 billion", (5120, 40), (40, 8), 17_408, 151_936)]
#[case::qwen3_32b("32.8 billion", (5120, 64), (64, 8), 25_600, 151_936)]
fn the_documentation_has_the_memory_of_the_plan(
    #[case] name: &str,
    #[case] (hidden_size, num_hidden_layers): (usize, usize),
    #[case] (num_attention_heads, num_key_value_heads): (usize, usize),
    #[case] intermediate_size: usize,
    #[case] vocab_size: usize,
) {
    let model = DecoderConfig {
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim: Some(128),
        intermediate_size,
        vocab_size,
        tie_word_embeddings: false,
        ..DecoderConfig::default()
    };
    let gigabytes = |sharding, state, samples: bool| {
        let mut config = TrainConfig {
            sharding,
            compute_dtype: ComputeDType::Bf16,
            micro_batch_size: 1,
            sampling: SamplingConfig {
                max_new_tokens: 1,
                ..SamplingConfig::default()
            },
            ..config()
        };
        config.optimizer.state = state;
        let plan = MemoryPlan::of_rank(&model, &config, (1, 0), 8).unwrap();
        let phase = if samples { plan.held } else { plan.training };
        (plan.weights + plan.optimizer + phase) as f64 / 1e9
    };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scaling.md");
    let page = std::fs::read_to_string(path).unwrap();
    // The first table of the page with this model.
    let row = (page.lines()).find_map(|line| line.strip_prefix(&format!("| {name} | ")));
    let row = row.unwrap().trim_end_matches(" |");
    let columns = [
        (Sharding::None, false),
        (Sharding::Optimizer, false),
        (Sharding::Resident, false),
        (Sharding::Full, false),
        (Sharding::Full, true),
    ];
    let cells: Vec<&str> = row.split(" | ").collect();
    assert_eq!(cells.len(), columns.len(), "{row}");
    for (cell, (sharding, samples)) in cells.into_iter().zip(columns) {
        let (f32_state, blocks) = cell.trim_end_matches(')').split_once(" (").unwrap();
        for (number, state) in [(f32_state, StateForm::F32), (blocks, StateForm::Blocks8)] {
            let number = number.parse::<f64>().unwrap();
            let plan = gigabytes(sharding, state, samples);
            // The page has whole numbers, and leaves out norms and the scales of blocks.
            let rounding = 0.5 + plan / 100.;
            assert!(
                (number - plan).abs() <= rounding,
                "{sharding:?} {state:?}: {number}, must be {plan}"
            );
        }
    }
}
