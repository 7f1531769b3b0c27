//! Importing TRL, verl and OpenRLHF files.

use std::fs;
use std::path::Path;

use candle_grpo::config::{Document, Import, RunConfig, Severity, System, Verdict};
use candle_grpo::core::selection::SampleFilter;
use candle_grpo::core::{KlEstimator, Scale};
use candle_grpo::loss::{Aggregation, Recipe, Surrogate};
use candle_grpo::nn::optim::StateMemory;
use candle_grpo::train::TrainConfig;
use rstest::rstest;
use serde_json::json;

fn import_of(text: &str, processes: usize) -> Import {
    let document = Document::from_yaml(Path::new("other.yaml"), text).unwrap();
    Import::of_processes(&document, processes).expect("a file of another trainer")
}

fn import(text: &str) -> Import {
    import_of(text, 1)
}

/// Imports a script and adds a reward.
fn script(text: &str) -> (Import, RunConfig) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.sh");
    fs::write(&file, text).unwrap();
    let import = Import::new(&Document::read(&file).unwrap()).unwrap();
    let native = serde_saphyr::to_string(import.document.value()).unwrap();
    let native = format!("{native}rewards: [{{kind: numeric}}]\n");
    let document = Document::from_yaml(Path::new("native.yaml"), &native).unwrap();
    let run = RunConfig::new(&document).unwrap_or_else(|error| panic!("{error}\n{native}"));
    (import, run)
}

fn run(import: &Import) -> RunConfig {
    RunConfig::new(&import.document).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the keys above [`Severity::Note`].
fn refused(import: &Import) -> Vec<&str> {
    let keys = import.keys.iter();
    let keys = keys.filter(|key| key.severity != Severity::Note);
    keys.map(|key| key.path.as_str()).collect()
}

const TRL: &str = "\
model_name_or_path: m
dataset_name: d.jsonl
rewards: [{kind: math, column: solution}]
num_generations: 8
";

fn trl(more: &str) -> TrainConfig {
    let import = import(&format!("{TRL}{more}\n"));
    assert_eq!(import.system, System::Trl);
    assert_eq!(refused(&import), Vec::<&str>::new());
    run(&import).train
}

#[test]
fn the_example_of_the_page_about_trl_is_the_same_run_on_both_sides() {
    let theirs = import(
        "\
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: train.parquet
data: {held_out: test.parquet}
rewards: [{kind: math, column: solution}]
output_dir: runs/math
max_steps: 100
seed: 7
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 8
max_completion_length: 512
temperature: 1.0
chat_template_kwargs: {enable_thinking: false}
learning_rate: 1e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_steps: 5
beta: 0.01
bf16: true
gradient_checkpointing: true
mask_truncated_completions: true
eval_strategy: steps
eval_steps: 10
save_steps: 10
save_total_limit: 2
report_to: wandb
",
    );
    theirs.check(false).unwrap();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-trl.md");
    let page = fs::read_to_string(docs).unwrap();
    let ours = page.split("```yaml\n").nth(1).unwrap();
    let ours = ours.split("```").next().unwrap();
    let ours = Document::from_yaml(Path::new("docs.yaml"), ours).unwrap();
    let mut theirs = run(&theirs).to_value().unwrap();
    let mut ours = RunConfig::new(&ours).unwrap().to_value().unwrap();
    // All 64 completions, which is what an absent key means.
    assert_eq!(theirs["mini_batch_size"], 64);
    theirs["mini_batch_size"] = serde_json::Value::Null;
    // A program in examples/ stands for report_to.
    ours["trackers"] = json!([]);
    assert_eq!(theirs, ours);
}

/// Returns prompts, completions per update and per pass, passes, and steps.
fn sizes(text: &str, processes: usize) -> (usize, Option<usize>, usize, usize, usize) {
    let run = run(&import_of(&format!("{TRL}{text}"), processes));
    let train = run.train;
    (
        train.prompts_per_step,
        train.mini_batch_size,
        train.micro_batch_size,
        train.epochs,
        run.max_steps,
    )
}

/// A TRL step is an update; here a step samples.
#[test]
fn the_sizes_of_trl_keep_their_meaning() {
    let text = "num_iterations: 2\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nsteps_per_generation: 8\nmax_steps: 200\n";
    // 8 x 8 completions in groups of 8; 2 passes over 2 updates of 8 x 4.
    assert_eq!(sizes(text, 1), (8, Some(32), 8, 2, 50));
    assert_eq!(sizes(text, 4), (32, Some(128), 8, 2, 50));
    // An update takes two generations, so a step samples both.
    let text = "per_device_train_batch_size: 8\ngradient_accumulation_steps: 16\nsteps_per_generation: 8\nmax_steps: 200\n";
    assert_eq!(sizes(text, 1), (16, Some(128), 8, 1, 200));
    let text = "per_device_train_batch_size: 4\ngeneration_batch_size: 32\nmax_steps: 10\n";
    // 32 completions for 8 updates of 4; with two processes 4 of 8.
    assert_eq!(sizes(text, 1), (4, Some(4), 4, 1, 2));
    assert_eq!(sizes(text, 2), (4, Some(8), 4, 1, 3));
    let uneven = import(&format!(
        "{TRL}per_device_train_batch_size: 12\nmax_steps: 1\n"
    ));
    assert_eq!(refused(&uneven), ["per_device_train_batch_size"]);
}

#[test]
fn counts_and_shares_of_updates_of_trl_become_steps() {
    let text = "data: {held_out: h.jsonl}\nnum_iterations: 2\nmax_steps: 100\nwarmup_steps: 0.1\neval_steps: 25\nsave_steps: 0.25\n";
    let run = run(&import(&format!("{TRL}{text}")));
    // 50 steps of 2 updates.
    assert_eq!(run.train.schedule.warmup_steps, 5);
    assert_eq!(run.evaluation.every_steps, Some(13));
    assert_eq!(run.checkpoint.every_steps, Some(13));
    // The schedule of transformers decays to 0 by default.
    assert_eq!(run.train.schedule.decay_until, Some(50));
    assert_eq!(run.train.schedule.min_lr_ratio, 0.);
    let unknown = import(&format!("{TRL}num_train_epochs: 2\nwarmup_ratio: 0.1\n"));
    assert_eq!(refused(&unknown), ["num_train_epochs", "warmup_ratio"]);
    // A default that differs is named.
    let left_out: Vec<&str> = import(TRL)
        .defaults
        .iter()
        .map(|default| default.key)
        .collect();
    assert_eq!(left_out, ["num_train_epochs", "lr_scheduler_type"]);
}

/// transformers writes -1 for a run that epochs bound, and then nothing says when a decay ends.
#[test]
fn a_file_of_trl_without_a_number_of_steps_has_no_decay() {
    let import = import(&format!("{TRL}max_steps: -1\nlr_scheduler_type: cosine\n"));
    assert_eq!(refused(&import), ["lr_scheduler_type"]);
    let value = run(&import).to_value().unwrap();
    assert!(value["schedule"]["decay_until"].is_null(), "{value}");
    let text = serde_saphyr::to_string(import.document.value()).unwrap();
    assert!(!text.contains("schedule"), "{text}");
}

/// A section that both trainers have can hold the advised keys too.
#[test]
fn a_key_that_the_report_asks_for_is_used() {
    let text = VERL.replace("ESTIMATOR", "grpo");
    let verl = text.replace("data: {", "data: {prompt_key: question, ");
    assert_eq!(refused(&import(&verl)), ["data.prompt_key"]);
    let verl = verl.replace("data: {", "data: {prompt: \"{question}\", ");
    let openrlhf = "actor: {model_name_or_path: m}\ndata: {prompt_dataset: d.jsonl, input_template: Q, prompt: \"{question}\", prompt_probs: \"1\", weights: [2.0]}\nrewards: [{kind: json}]\nmax_steps: 3\n";
    for (text, weights) in [(verl.as_str(), json!(null)), (openrlhf, json!([2.]))] {
        let import = import(text);
        assert_eq!(refused(&import), Vec::<&str>::new());
        let run = run(&import).to_value().unwrap();
        assert_eq!(run["data"]["prompt"], "{question}");
        assert_eq!(run["data"]["weights"], weights);
    }
}

#[rstest]
#[case("schedule: {warmup_steps: 2}", 0., Some(5))]
#[case(
    "schedule: {decay: cosine, decay_until: 4, min_lr_ratio: 0.5}",
    0.5,
    Some(4)
)]
fn our_schedule_and_a_scheduler_of_trl_stand_side_by_side(
    #[case] ours: &str,
    #[case] min_lr_ratio: f64,
    #[case] decay_until: Option<usize>,
) {
    let schedule = trl(&format!("max_steps: 5\nlr_scheduler_type: linear\n{ours}")).schedule;
    assert_eq!(
        (schedule.min_lr_ratio, schedule.decay_until),
        (min_lr_ratio, decay_until)
    );
}

#[test]
fn the_regular_expression_of_trl_needs_a_server() {
    let server = "max_steps: 5\nrollout: {engine: vllm, base_url: 'http://a'}";
    for (value, expected) in [
        ("null", json!(null)),
        ("'[0-9]+'", json!({"regex": "[0-9]+"})),
    ] {
        let run = trl(&format!("{server}\nvllm_structured_outputs_regex: {value}"));
        assert_eq!(json!(run.sampling.structured_outputs), expected);
    }
    let text = format!("{TRL}max_steps: 5\nvllm_structured_outputs_regex: a\n");
    let error = RunConfig::new(&import(&text).document).unwrap_err();
    let message = "must be absent with engine local";
    assert!(error.to_string().contains(message), "{error}");
}

#[test]
fn our_schedule_stands_beside_the_options_of_a_scheduler_of_trl() {
    let text = "max_steps: 5\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.25}\nschedule: {decay: cosine, decay_until: 4}";
    let schedule = trl(text).schedule;
    assert_eq!(
        (schedule.min_lr_ratio, schedule.decay_until),
        (0.25, Some(4))
    );
    assert_eq!(
        trl("max_steps: 5\nlr_scheduler_kwargs: {}")
            .schedule
            .min_lr_ratio,
        0.
    );
    let other = import(&format!(
        "{TRL}max_steps: 5\nlr_scheduler_kwargs: {{num_cycles: 2}}\n"
    ));
    assert_eq!(refused(&other), ["lr_scheduler_kwargs.num_cycles"]);
    assert!(other.check(true).is_ok());
}

#[test]
fn a_recipe_of_ours_is_laid_over_the_loss_of_trl() {
    let ours = "recipe: {policy_loss: {rollout_correction: {weight: {max: 3.0}}}}";
    let recipe = trl(&format!("max_steps: 1\nloss_type: grpo\n{ours}")).recipe;
    assert_eq!(
        recipe.policy_loss.aggregation,
        Aggregation::SeqMeanTokenMean
    );
    assert!(recipe.policy_loss.rollout_correction.is_some());
    assert_eq!(recipe.advantage, Recipe::trl().advantage);
}

#[test]
fn a_preset_of_ours_decides_instead_of_the_loss_of_trl() {
    let recipe = trl("max_steps: 1\nloss_type: grpo\nepsilon: 0.1\npreset: dr_grpo").recipe;
    assert_eq!(
        recipe.policy_loss.surrogate,
        Recipe::trl().policy_loss.surrogate
    );
    assert_eq!(recipe.advantage, Recipe::dr_grpo(512.).advantage);
}

#[test]
fn the_defaults_of_trl_apply() {
    let train = trl("max_steps: 5");
    assert_eq!(train.recipe, Recipe::trl());
    assert_eq!((train.prompts_per_step, train.num_generations), (1, 8));
    assert_eq!(train.sampling.max_new_tokens, 512);
    assert_eq!(train.sampling.seed, 42);
    assert_eq!(train.optimizer.weight_decay, 0.);
}

#[rstest]
#[case("loss_type: grpo", Aggregation::SeqMeanTokenMean)]
#[case("loss_type: bnpo", Aggregation::TokenMean)]
#[case("loss_type: dr_grpo\nmax_completion_length: 64", Aggregation::SeqMeanTokenSumNorm { length: 64. })]
fn a_loss_of_trl_is_its_aggregation(#[case] text: &str, #[case] expected: Aggregation) {
    let recipe = trl(&format!("{text}\nmax_steps: 1")).recipe;
    assert_eq!(recipe.policy_loss.aggregation, expected);
    assert_eq!(recipe.advantage, Recipe::trl().advantage);
}

#[test]
fn the_clip_and_the_advantage_of_trl_are_set() {
    let train = trl(
        "epsilon: 0.1\nepsilon_high: 0.3\ndelta: 4.0\nscale_rewards: false\nbeta: 0.5\nmax_steps: 1",
    );
    let Surrogate::Clip(clip) = train.recipe.policy_loss.surrogate else {
        panic!("a loss that clips")
    };
    assert_eq!((clip.low, clip.high, clip.delta), (0.1, 0.3, Some(4.)));
    let stage = train.recipe.advantage.pipeline().sequence.unwrap();
    assert_eq!(stage.scale, Scale::None);
    let kl = train.recipe.policy_loss.kl.unwrap();
    assert_eq!((kl.coef, kl.kl.value_clamp), (0.5, None));
    // The weight of CISPO has one bound, which TRL takes as it is.
    let train = trl("loss_type: cispo\nepsilon_high: 5.0\nmax_steps: 1");
    assert_eq!(
        train.recipe.policy_loss.surrogate,
        Recipe::cispo().policy_loss.surrogate
    );
    assert_eq!(
        train.recipe.advantage.pipeline(),
        Recipe::trl().advantage.pipeline()
    );
}

#[rstest]
#[case("learning_rat: 1e-6", "did you mean `learning_rate`?")]
#[case(
    "repetition_penalty: 1.05",
    "a penalty changes the distribution of tokens"
)]
#[case("reward_funcs: [accuracy_reward]\nrewards: null", "set rewards")]
#[case("loss_type: other", "other, must be one of the losses")]
#[case("lr_scheduler_type: polynomial", "must be constant, linear, cosine")]
fn a_key_of_trl_without_a_counterpart_is_an_error(#[case] line: &str, #[case] words: &str) {
    let text = TRL.replace("rewards: [{kind: math, column: solution}]\n", "");
    let error = import(&format!("{text}bf16: true\n{line}\n")).check(false);
    let error = error.unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

#[test]
fn an_error_in_an_imported_file_has_its_key_and_line() {
    let import = import(&format!("{TRL}max_steps: 3\nepsilon: 7\n"));
    let error = RunConfig::new(&import.document).unwrap_err().to_string();
    assert!(
        error.starts_with("other.yaml:6: epsilon: 7, must be"),
        "{error}"
    );
}

/// Another trainer's keys in our own file are slips, answered with a suggestion, however many they
/// are.
#[test]
fn a_file_with_our_sections_is_not_imported() {
    let text = "model: m\ndata: {train: d}\nnum_iterations: 8\nbeta: 0.1\nlearning_rate: 1e-6\n";
    let document = Document::from_yaml(Path::new("run.yaml"), text).unwrap();
    assert!(Import::new(&document).is_none());
    let error = RunConfig::new(&document).unwrap_err().to_string();
    let place = "num_iterations: unknown key; here it is epochs";
    assert!(error.contains(place), "{error}");
}

#[test]
fn the_example_of_the_page_about_verl_is_the_same_run_on_both_sides() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-verl.md");
    let page = fs::read_to_string(docs).unwrap();
    let block = |kind: &str| {
        let block = page.split(&format!("```{kind}\n")).nth(1).unwrap();
        block.split("```").next().unwrap().to_owned()
    };
    let (import, theirs) = script(&block("sh"));
    assert_eq!(import.system, System::Verl);
    import.check(false).unwrap();
    let ours = Document::from_yaml(Path::new("docs.yaml"), &block("yaml")).unwrap();
    let ours = RunConfig::new(&ours).unwrap().to_value().unwrap();
    let theirs = theirs.to_value().unwrap();
    for section in [
        "model",
        "data",
        "recipe",
        "prompts_per_step",
        "num_generations",
        "max_prompt_tokens",
        "sampling",
        "epochs",
        "mini_batch_size",
        "micro_batch_tokens",
        "activation_checkpointing",
        "optimizer",
        "schedule",
        "checkpoint",
        "max_steps",
    ] {
        assert_eq!(theirs[section], ours[section], "{section}");
    }
    // verl evaluates with the most likely tokens by default.
    assert_eq!(theirs["evaluation"]["sampler"]["greedy"], true);
}

const VERL: &str = "\
data: {train_files: d.parquet, train_batch_size: 8}
rewards: [{kind: numeric}]
actor_rollout_ref:
  model: {path: m}
  actor: {ppo_mini_batch_size: 4, ppo_epochs: 3}
  rollout: {n: 5}
trainer: {total_training_steps: 10}
algorithm: {adv_estimator: ESTIMATOR, use_kl_in_reward: true, kl_penalty: mse, kl_ctrl: {kl_coef: 0.004}}
";

/// Hydra writes every key, most without a value.
#[test]
fn absent_values_of_a_whole_file_are_no_keys() {
    let text = VERL.replace("ESTIMATOR", "grpo").replace(
        "trainer: {",
        "critic: {optim: null}\nray_kwargs: {ray_init: {num_cpus: null}}\ntrainer: {esi: null, device: cuda, ",
    );
    let import = import(&text.replace("path: m", "path: m, override_config: {}"));
    assert_eq!(refused(&import), Vec::<&str>::new());
    assert_eq!(run(&import).max_steps, 10);
}

#[test]
fn a_variable_of_a_file_of_roll_is_no_key() {
    let file = |key: &str| {
        import(&format!(
            "pretrain: m\n{key}: 7\nresponse_length: ${{length}}\nactor_train: {{data_args: {{file_name: d.jsonl}}}}\nrewards: [{{kind: json}}]\n"
        ))
    };
    assert_eq!(refused(&file("length")), Vec::<&str>::new());
    assert_eq!(run(&file("length")).train.sampling.max_new_tokens, 7);
    assert_eq!(refused(&file("lengths")), ["lengths"]);
}

#[test]
fn the_sizes_of_verl_keep_their_meaning() {
    let import = import(&VERL.replace("ESTIMATOR", "grpo"));
    let run = run(&import);
    let train = run.train;
    assert_eq!((train.prompts_per_step, train.num_generations), (8, 5));
    assert_eq!((train.mini_batch_size, train.epochs), (Some(20), 3));
    assert_eq!(run.max_steps, 10);
    let sizes = import.sizes.unwrap();
    assert_eq!((sizes.sampled, sizes.update, sizes.updates), (40., 20., 6.));
    assert_eq!(sizes.all_updates, Some(60.));
}

/// verl checkpoints by default, which matters here where it offloads.
#[test]
fn the_activations_of_verl_are_checkpointed_to_be_offloaded() {
    let train = |model: &str| {
        let text = VERL.replace("ESTIMATOR", "grpo");
        let text = text.replace("{path: m}", &format!("{{path: m, {model}}}"));
        run(&import(&text)).train
    };
    for (model, offloading, checkpointing) in [
        ("enable_activation_offload: false", false, false),
        ("enable_gradient_checkpointing: true", false, true),
        ("enable_activation_offload: true", true, true),
    ] {
        let train = train(model);
        assert_eq!(train.activation_offloading, offloading, "{model}");
        assert_eq!(
            train.activation_checkpointing,
            checkpointing.into(),
            "{model}"
        );
    }
}

#[rstest]
#[case::absent("lora_rank: 8", false)]
#[case::apart("lora_rank: 8, lora: {merge: false}", false)]
#[case::merged("lora_rank: 8, lora: {merge: true}", true)]
#[case::no_adapters("lora_rank: 0, lora: {merge: true}", false)]
fn the_sampler_merges_the_adapters_that_verl_merges(#[case] model: &str, #[case] merged: bool) {
    let text = VERL.replace("ESTIMATOR", "grpo");
    let import = import(&text.replace("{path: m}", &format!("{{path: m, {model}}}")));
    assert_eq!(refused(&import), Vec::<&str>::new());
    let train = run(&import).train;
    assert_eq!(train.rollout.merge_adapters, merged);
    assert_eq!(train.adapters.is_some(), !model.contains("lora_rank: 0"));
}

#[rstest]
#[case::off("{path: m}", false, StateMemory::Device)]
#[case::on("{path: m}", true, StateMemory::Host)]
#[case::adapters("{path: m, lora_rank: 8}", true, StateMemory::Device)]
fn the_optimizer_is_in_main_memory_where_verl_trains_from_there(
    #[case] model: &str,
    #[case] offloads: bool,
    #[case] memory: StateMemory,
) {
    let text = VERL
        .replace("ESTIMATOR", "grpo")
        .replace("{path: m}", model);
    let fsdp =
        format!("actor: {{fsdp_config: {{offload_policy: {offloads}, optimizer_offload: true}}, ");
    let text = text.replace("actor: {", &fsdp);
    let import = import(&text);
    assert_eq!(refused(&import), Vec::<&str>::new());
    assert_eq!(run(&import).train.optimizer.memory, memory);
}

/// CISPO clips a weight, whose bounds are ratios.
#[test]
fn the_clip_widths_of_cispo_in_verl_are_bounds_of_its_weight() {
    let clip = "policy_loss: {loss_mode: cispo}, clip_ratio_low: 0.25, clip_ratio_high: 0.5";
    let text = VERL.replace("ESTIMATOR", "grpo");
    let text = text.replace("ppo_epochs: 3", &format!("ppo_epochs: 3, {clip}"));
    let Surrogate::DetachedWeight(weight) = run(&import(&text)).train.recipe.policy_loss.surrogate
    else {
        panic!("a loss with a weight")
    };
    assert_eq!(
        (weight.ratio_min, weight.ratio_max),
        (Some(0.75), Some(1.5))
    );
}

/// verl subtracts a KL from the rewards before GRPO normalizes them, and from token rewards with
/// any other estimator.
#[test]
fn the_kl_in_the_rewards_of_verl_has_its_place() {
    let train = run(&import(&VERL.replace("ESTIMATOR", "grpo"))).train;
    let stage = train.recipe.advantage.pipeline().sequence.unwrap();
    let penalty = stage.kl_penalty.unwrap();
    assert_eq!(
        (penalty.coef, penalty.kl.estimator),
        (0.004, KlEstimator::K2)
    );
    let train = run(&import(&VERL.replace("ESTIMATOR", "gae"))).train;
    let stage = train.recipe.advantage.pipeline().tokens.unwrap();
    let penalty = stage.kl_penalty.unwrap();
    assert_eq!(
        (penalty.coef, penalty.kl.estimator),
        (0.004, KlEstimator::K2)
    );
    assert_eq!((stage.gamma, stage.lambda), (1., Some(1.)));
    assert_eq!(train.critic.unwrap().optimizer.learning_rate, 1e-5);
}

#[test]
fn what_verl_has_and_we_do_not_is_refused() {
    let file = |line: &str| {
        let text = VERL
            .replace("ESTIMATOR", "grpo")
            .replace("rollout: {n: 5}", line);
        import(&text)
    };
    for (line, key) in [
        (
            "rollout: {n: 5, multi_turn: {enable: true}}",
            "actor_rollout_ref.rollout.multi_turn.enable",
        ),
        ("rolout: {n: 5}", "actor_rollout_ref.rolout.n"),
    ] {
        assert_eq!(refused(&file(line)), [key]);
    }
    // Adapters of Megatron's fused layers.
    let of = |model: &str| {
        let text = VERL.replace("ESTIMATOR", "grpo");
        import(&text.replace("{path: m}", &format!("{{path: m, {model}}}")))
    };
    let fused = of("lora: {rank: 32, merge: true}");
    assert_eq!(refused(&fused), ["actor_rollout_ref.model.lora.rank"]);
    assert_eq!(refused(&of("lora: {rank: 0}")), Vec::<&str>::new());
    let off = file("rollout: {n: 5, multi_turn: {enable: false}, top_k: -1}");
    assert_eq!(refused(&off), Vec::<&str>::new());
    assert_eq!(run(&off).train.sampling.top_k, 0);
}

/// The options in OpenRLHF's DAPO script.
const OPENRLHF: &str = "\
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 \\
   --algo.kl.init_coef 1e-3 \\
   --algo.kl.use_loss \\
   --algo.kl.estimator k3 \\
   --algo.advantage.estimator group_norm \\
   --algo.dynamic_filtering_enable \\
   --algo.dynamic_filtering_range 0 1 \\
   --actor.eps_clip_low_high 0.2 0.27 \\
   --actor.model_name_or_path m \\
   --ckpt.save_steps 20 \\
   --train.micro_batch_size 8 \\
   --train.batch_size 128 \\
   --rollout.batch_size 64 \\
   --rollout.n_samples_per_prompt 8 \\
   --rollout.max_new_tokens 512 \\
   --data.max_len 2048 \\
   --data.prompt_dataset d.jsonl \\
   --data.apply_chat_template \\
   --actor.adam.lr 5e-7
";

#[test]
fn the_options_of_openrlhf_are_those_of_the_run() {
    let (import, run) = script(OPENRLHF);
    assert_eq!(import.system, System::OpenRlhf);
    assert_eq!(refused(&import), Vec::<&str>::new());
    let train = run.train;
    assert_eq!((train.prompts_per_step, train.num_generations), (64, 8));
    // 512 completions are four updates.
    assert_eq!(
        (train.mini_batch_size, train.micro_batch_size),
        (Some(128), 8)
    );
    assert_eq!(import.sizes.unwrap().updates, 4.);
    assert_eq!(
        (train.sampling.max_new_tokens, run.max_prompt_tokens),
        (512, 1536)
    );
    let loss = train.recipe.policy_loss;
    let Surrogate::Clip(clip) = loss.surrogate else {
        panic!("a loss that clips")
    };
    assert_eq!((clip.low, clip.high), (0.2, 0.27));
    let kl = loss.kl.unwrap();
    assert_eq!((kl.coef, kl.kl.estimator), (1e-3, KlEstimator::K3));
    // The KL is in the loss, and not in the rewards, too.
    let advantage = train.recipe.advantage.pipeline();
    assert!(
        advantage
            .tokens
            .is_none_or(|stage| stage.kl_penalty.is_none())
    );
    let filter = train.recipe.group_filter.unwrap();
    assert_eq!((filter.mean_above, filter.mean_below), (Some(0.), Some(1.)));
    assert_eq!(train.optimizer.beta2, 0.95);
    assert!(train.sample_filters == Vec::<SampleFilter>::new());
    let left_out = import.defaults.iter().map(|default| default.key);
    assert_eq!(
        left_out.collect::<Vec<_>>(),
        ["train.num_episodes", "actor.lr_scheduler"]
    );
}

#[rstest]
#[case::weights("--ds.adam_offload", StateMemory::Host)]
#[case::adapters("--ds.adam_offload --ds.lora.rank 8", StateMemory::Device)]
fn the_optimizer_is_in_main_memory_where_that_of_openrlhf_is(
    #[case] options: &str,
    #[case] memory: StateMemory,
) {
    let (import, run) = script(&format!("{} {options}\n", OPENRLHF.trim_end()));
    assert_eq!(refused(&import), Vec::<&str>::new());
    assert_eq!(run.train.optimizer.memory, memory);
}

#[test]
fn the_example_of_the_page_about_openrlhf_is_the_same_run_on_both_sides() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-openrlhf.md");
    let page = fs::read_to_string(docs).unwrap();
    let block = |kind: &str| {
        let block = page.split(&format!("```{kind}\n")).nth(1).unwrap();
        block.split("```").next().unwrap().to_owned()
    };
    let (import, theirs) = script(&block("sh"));
    assert_eq!(refused(&import), ["reward.remote_url"]);
    let ours = Document::from_yaml(Path::new("docs.yaml"), &block("yaml")).unwrap();
    let mut ours = RunConfig::new(&ours).unwrap().to_value().unwrap();
    let mut theirs = theirs.to_value().unwrap();
    for run in [&mut ours, &mut theirs] {
        run["rewards"] = serde_json::Value::Null;
    }
    assert_eq!(theirs, ours);
}

#[test]
fn a_flat_file_of_an_older_openrlhf_has_the_same_keys() {
    let import = import(
        "pretrain: m\nadam_offload: true\nprompt_data: d.jsonl\nn_samples_per_prompt: 4\nrollout_batch_size: 6\ntrain_batch_size: 12\nadvantage_estimator: group_norm\nmax_steps: 20\nrewards: [{kind: json}]\n",
    );
    assert_eq!(import.system, System::OpenRlhf);
    assert_eq!(refused(&import), Vec::<&str>::new());
    let run = run(&import);
    assert_eq!(run.train.optimizer.memory, StateMemory::Host);
    assert_eq!(
        (run.train.prompts_per_step, run.train.mini_batch_size),
        (6, Some(12))
    );
    assert_eq!(run.train.schedule.decay_until, Some(20));
    // 3% of the steps.
    assert_eq!(run.train.schedule.warmup_steps, 1);
}

/// A ROLL update has the completions from all workers, and its keys count one worker's.
#[test]
fn the_workers_of_roll_count_in_an_update() {
    let file = |devices: &str, tensor: usize| {
        import(&format!(
            "pretrain: m\nrollout_batch_size: 32\nnum_return_sequences_in_group: 8\nmax_steps: 5\nactor_train:\n  device_mapping: {devices}\n  training_args: {{per_device_train_batch_size: 2, gradient_accumulation_steps: 4}}\n  strategy_args: {{strategy_config: {{tensor_model_parallel_size: {tensor}}}}}\n"
        ))
    };
    for (devices, tensor, update) in [("list(range(0,8))", 1, 64.), ("[0, 1, 2, 3]", 2, 16.)] {
        let import = file(devices, tensor);
        assert_eq!(refused(&import), ["actor_train.device_mapping"]);
        let error = import.check(false).unwrap_err().to_string();
        let advice = format!("set mini_batch_size to {update}, the completions of");
        assert!(error.contains(&advice), "{error}");
        let sizes = import.sizes.unwrap();
        assert_eq!((sizes.sampled, sizes.update), (256., update));
        assert_eq!(sizes.all_updates, Some(5. * 256. / update));
    }
    assert_eq!(refused(&file("list(range(2,4))", 2)), Vec::<&str>::new());
}

/// In the words of this version or of an earlier one.
#[rstest]
#[case("mini_batch_size: 64")]
#[case("training: {mini_batch_size: 64}")]
fn a_key_of_ours_in_a_file_of_another_trainer_comes_first(#[case] key: &str) {
    let roll = import(&format!(
        "pretrain: m\n{key}\nactor_train:\n  device_mapping: [0, 1]\n  data_args: {{file_name: d.jsonl}}\n  training_args: {{gradient_accumulation_steps: 4}}\nrewards: [{{kind: json}}]\n"
    ));
    assert_eq!(refused(&roll), Vec::<&str>::new());
    assert_eq!(run(&roll).train.mini_batch_size, Some(64));
    let train = trl(&format!("{key}\nmax_steps: 1"));
    assert_eq!(train.mini_batch_size, Some(64));
}

#[test]
fn a_key_that_roll_gives_our_name_is_used() {
    let roll = import(
        "pretrain: m\nmax_grad_norm: 0.5\nactor_train: {data_args: {file_name: d.jsonl}}\nrewards: [{kind: json}]\n",
    );
    assert_eq!(run(&roll).train.max_grad_norm, 0.5);
}

/// Checks what the report says about each key.
#[track_caller]
fn reports(import: &Import, expected: &[(&str, &str)]) {
    let report = import.to_string();
    let lines: Vec<_> = report
        .lines()
        .filter_map(|line| line.split_once("used: "))
        .map(|(key, used)| (key.trim(), used))
        .collect();
    for expected in expected {
        assert!(lines.contains(expected), "{expected:?}: {report}");
    }
}

#[test]
fn the_report_names_what_each_key_has_become() {
    let roll = import(
        "pretrain: m\nmax_len_mask: true\nuse_kl_loss: true\nkl_loss_coef: 0.25\npg_clip: 0.125\nppo_epochs: 2\nrollout_batch_size: 32\nactor_train: {data_args: {file_name: d.jsonl}}\nrewards: [{kind: json}]\n",
    );
    reports(
        &roll,
        &[
            ("pretrain", "model.path"),
            ("max_len_mask", "sample_filters"),
            ("use_kl_loss", "recipe.policy_loss.kl"),
            ("kl_loss_coef", "recipe.policy_loss.kl.coef"),
            (
                "pg_clip",
                "recipe.policy_loss.surrogate.clip.high, recipe.policy_loss.surrogate.clip.low",
            ),
            ("ppo_epochs", "epochs"),
            ("rollout_batch_size", "prompts_per_step"),
        ],
    );
    let trl = import(&format!(
        "{TRL}max_steps: 1\nepsilon: 0.2\nepsilon_high: 0.28\nscale_rewards: batch\n"
    ));
    reports(
        &trl,
        &[
            ("epsilon", "it is the default"),
            ("epsilon_high", "recipe.policy_loss.surrogate.clip.high"),
            ("scale_rewards", "recipe.advantage.scale"),
        ],
    );
}

/// A file that was accepted stays so without a switch.
#[test]
fn every_file_of_the_page_about_roll_is_accepted() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/from-roll.md");
    let page = fs::read_to_string(docs).unwrap();
    let mut imported = 0;
    for block in page.split("```yaml\n").skip(1) {
        let block = block.split("```").next().unwrap();
        let document = Document::from_yaml(Path::new("docs.yaml"), block).unwrap();
        if let Some(import) = Import::new(&document) {
            import.check(false).unwrap();
            assert!(
                import
                    .keys
                    .iter()
                    .any(|key| matches!(key.verdict, Verdict::Used(_)))
            );
            imported += 1;
        }
    }
    assert_eq!(imported, 2);
}
