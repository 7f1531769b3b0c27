//! Settings that fit into memory.

use candle_grpo_nn::DecoderConfig;
use candle_grpo_train::learn::{Auto, MemoryFit, MemoryPlan, MicroBatchTokens};
use candle_grpo_train::{ActivationCheckpointing, SamplingConfig, TrainConfig};
use rstest::rstest;

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
    let change = fit(peak_of(2), |fit| fit.smallest_change(&auto()));
    assert_eq!(change.unwrap(), ["activation_checkpointing: 2"]);
    let change = fit(peak_of(2) + 1, |fit| fit.smallest_change(&auto()));
    assert_eq!(change.unwrap(), ["activation_checkpointing: 2"]);
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
    let change = fit(peak_of(128), |fit| fit.smallest_change(&drawing(512)));
    assert_eq!(change.unwrap(), ["sampling.max_batch_size: 128"]);
}

#[test]
fn several_changes_fit_together() {
    let mut smallest = TrainConfig {
        activation_checkpointing: true.into(),
        ..config()
    };
    smallest.optimizer.state = candle_grpo_nn::optim::StateForm::Blocks8;
    let bytes = peak(&smallest, 320);
    let change = fit(bytes, |fit| fit.smallest_change(&config()));
    assert_eq!(
        change.unwrap(),
        [
            "activation_checkpointing: true",
            "micro_batch_tokens: 320",
            "optimizer.state: 8bit",
        ]
    );
    assert_eq!(fit(1000, |fit| fit.smallest_change(&config())), None);
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
