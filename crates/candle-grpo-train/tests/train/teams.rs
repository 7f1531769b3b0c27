//! Ranks in teams, which divide the tokens of each sequence.

use candle_grpo_loss::Recipe;
use candle_grpo_loss::surrogate::ClipCov;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{DecoderConfig, LoraConfig};
use candle_grpo_test_support::{device, on_ranks, stay_on_cpu};
use candle_grpo_train::learn::MemoryPlan;
use candle_grpo_train::{TrainConfig, Trainer, TrainerParts};
use rstest::rstest;

use crate::common::{
    digest, model, model_with_states, parameters_of, parts, parts_with_experts, prompts, tokenizer,
    trainer_of,
};
use crate::demonstrations;
use crate::ranks::{advantage, assert_equal_to_one_rank, config, run, surrogate, with_critic};

/// Settings in which `size` ranks share each pass.
fn in_teams(size: usize, config: TrainConfig) -> TrainConfig {
    TrainConfig {
        sequence_ranks: size,
        ..config
    }
}

/// Checks that runs of ranks in teams equal a run with one rank up to rounding, and are
/// bit-identical on all ranks. The first element is the number of ranks, the second that in a team.
fn assert_equal_in_teams(
    build: impl Fn(TrainConfig) -> TrainerParts + Sync,
    config: &TrainConfig,
    teams: &[(usize, usize)],
) {
    let alone = run(&mut trainer_of(build(config.clone())), 3);
    assert!(alone.metrics.iter().any(|metrics| !metrics.skipped));
    for &(world_size, size) in teams {
        let build = || build(in_teams(size, config.clone()));
        assert_equal_to_one_rank(build, 3, world_size, &alone);
    }
}

const TEAMS: [(usize, usize); 4] = [(2, 2), (3, 3), (4, 2), (4, 4)];

#[rstest]
#[case::grpo(Recipe::grpo())]
#[case::whole_sequences(Recipe::gspo())]
#[case::dynamic_sampling(Recipe::dapo(8, 4))]
#[case::kl_in_the_reward(Recipe::reinforce_plus_plus(0.01))]
#[case::selected_tokens(surrogate(ClipCov::default()))]
#[case::optimal_token_baseline(advantage(r#"{"name": "optimal_token_baseline"}"#))]
fn teams_that_share_passes_train_as_one_rank(#[case] recipe: Recipe) {
    stay_on_cpu();
    assert_equal_in_teams(|config| parts(digest, config), &config(recipe), &TEAMS);
}

/// With a critic, adapters, recomputed blocks and passes of few tokens.
#[rstest]
fn teams_divide_what_other_ranks_divide(
    #[values(Sharding::None, Sharding::Optimizer, Sharding::Resident)] sharding: Sharding,
    #[values(true, false)] with_adapters: bool,
) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
        adapters: with_adapters.then(|| LoraConfig::all_linear(3, 6.)),
        activation_checkpointing: true.into(),
        micro_batch_size: TrainConfig::default().micro_batch_size,
        micro_batch_tokens: Some(24.into()),
        ..with_critic()
    };
    assert_equal_in_teams(
        |config| parts(digest, config),
        &config,
        &[(2, 2), (4, 2), (3, 3)],
    );
}

#[rstest]
fn teams_balance_and_replay_experts(#[values(0., 0.1)] router_aux_loss_coef: f64) {
    stay_on_cpu();
    let config = TrainConfig {
        router_aux_loss_coef,
        router_replay: true,
        // Expert balance is computed per micro-batch.
        micro_batch_size: 1,
        ..config(Recipe::grpo())
    };
    assert_equal_in_teams(
        |config| parts_with_experts(digest, config),
        &config,
        &[(2, 2), (4, 2)],
    );
}

/// The ranks divide the rows of demonstrations as without teams.
#[rstest]
fn teams_learn_from_demonstrations(
    #[values(Sharding::None, Sharding::Resident)] sharding: Sharding,
) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding,
        demonstrations: Some(demonstrations::demonstrations(0.3)),
        ..config(Recipe::grpo())
    };
    let build = |config| demonstrations::parts(digest, config);
    assert_equal_in_teams(build, &config, &[(2, 2), (4, 2)]);
}

/// All passes before the first update are forward passes, whose tokens have the bits of one rank.
#[rstest]
fn metrics_of_the_first_update_have_the_bits_of_one_rank(#[values(2, 3, 4)] size: usize) {
    stay_on_cpu();
    let config = TrainConfig {
        mini_batch_size: None,
        epochs: 1,
        ..config(Recipe::reinforce_plus_plus(0.01))
    };
    let metrics = |mut trainer: Trainer| {
        let found = trainer.step().unwrap().policy.into_iter();
        let bits = found.map(|(name, value)| (name, value.to_bits()));
        bits.collect::<Vec<_>>()
    };
    let alone = metrics(trainer_of(parts(digest, config.clone())));
    assert!(alone.len() > 5, "{alone:?}");
    for found in on_ranks(size, |collective| {
        metrics(trainer_of(TrainerParts {
            collective,
            ..parts(digest, in_teams(size, config.clone()))
        }))
    }) {
        assert_eq!(found, alone);
    }
}

#[test]
fn a_size_of_teams_that_does_not_fit_is_an_error() {
    stay_on_cpu();
    let error = |parts: TrainerParts| Trainer::new(parts).err().unwrap().to_string();
    let settings = |size| in_teams(size, config(Recipe::grpo()));
    for error in on_ranks(3, |collective| {
        error(TrainerParts {
            collective,
            ..parts(digest, settings(2))
        })
    }) {
        assert_eq!(
            error,
            "sequence_ranks: 2, must divide the number of processes, 3"
        );
    }
    assert_eq!(
        error(parts(digest, settings(0))),
        "sequence_ranks: 0, must be at least 1"
    );
    for error in on_ranks(2, |collective| {
        let model = model_with_states();
        let parameters = parameters_of(&model, device());
        let prompts = prompts(&["a"]);
        error(TrainerParts {
            collective,
            ..TrainerParts::new(model, parameters, tokenizer(), prompts, digest, settings(2))
        })
    }) {
        assert_eq!(
            error,
            "sequence_ranks: 2, must be 1 for a model with a gated delta rule, whose states follow one another"
        );
    }
}

/// The tensors of a pass over a long prompt.
#[rstest]
fn a_rank_plans_its_share_of_the_activations(#[values(true, false)] checkpointing: bool) {
    let model = DecoderConfig {
        hidden_size: 512,
        intermediate_size: 1536,
        num_hidden_layers: 12,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..model()
    };
    let config = TrainConfig {
        activation_checkpointing: checkpointing.into(),
        micro_batch_size: 1,
        ..config(Recipe::grpo())
    };
    let plan = |size: usize| {
        let config = in_teams(size, config.clone());
        MemoryPlan::of_rank(&model, &config, (32_768, 0), 8).unwrap()
    };
    let whole = plan(1);
    for size in [2, 4, 8] {
        let own = plan(size);
        let share = whole.activations / size;
        assert!(own.activations >= share, "{} of {share}", own.activations);
        // A rank has the keys and values of all tokens in one block.
        let most = share + whole.activations / 8;
        assert!(own.activations < most, "{} of {share}", own.activations);
        assert_eq!(own.weights, whole.weights);
    }
}
