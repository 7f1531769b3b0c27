//! Configuration files.

use std::path::Path;

use candle_grpo::config::{ConfigError, Document, Preset, RunConfig, SftRunConfig};
use candle_grpo::core::KlEstimator;
use candle_grpo::loss::{Recipe, Surrogate};
use candle_grpo::train::TrainConfig;
use rstest::rstest;
use serde_json::{Value, json};

use crate::teacher::needs_teacher;

const YAML: &str = "\
model: models/smol
data:
  train: a.jsonl
  held_out_rows: 8
rewards:
  - kind: numeric
    column: sum
  - {kind: regex, pattern: '^\\d+$', weight: 0.2, name: form}
";

const TOML: &str = "\
model = 'models/smol'

[data]
train = 'a.jsonl'
held_out_rows = 8

[[rewards]]
kind = 'numeric'
column = 'sum'

[[rewards]]
kind = 'regex'
pattern = '^\\d+$'
weight = 0.2
name = 'form'
";

fn yaml(more: &str) -> Result<RunConfig, ConfigError> {
    let text = format!("{YAML}{more}");
    RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), &text)?)
}

/// A run with further algorithm keys, which start with a comma, and a teacher if the preset learns
/// from one.
fn with_preset(preset: Option<Preset>, keys: &str) -> Result<RunConfig, ConfigError> {
    let teacher = if needs_teacher(preset) {
        "teacher: {model: models/large}\n"
    } else {
        ""
    };
    let name = json!(preset);
    yaml(&format!("{teacher}algorithm: {{preset: {name}{keys}}}\n"))
}

fn toml(more: &str) -> Result<RunConfig, ConfigError> {
    let text = format!("{TOML}\n{more}");
    RunConfig::new(&Document::from_toml(Path::new("run.toml"), &text)?)
}

#[test]
fn yaml_and_toml_give_the_same_run() {
    let a = yaml("algorithm: {preset: dapo, response_length: 50}\nseed: 3\n");
    let text = TOML.replace(
        "'models/smol'\n",
        "'models/smol'\nseed = 3\nrun_dir = 'runs/run'\n",
    );
    let text = format!("{text}[algorithm]\npreset = 'dapo'\nresponse_length = 50\n");
    let b = RunConfig::new(&Document::from_toml(Path::new("x.toml"), &text).unwrap());
    assert_eq!(
        a.unwrap().to_value().unwrap(),
        b.unwrap().to_value().unwrap()
    );
}

#[test]
fn absent_keys_have_their_defaults() {
    let run = yaml("").unwrap();
    assert_eq!(run.model.path, Path::new("models/smol"));
    assert_eq!(run.run_dir, Path::new("runs/run"));
    assert_eq!((run.max_steps, run.seed(), run.threads), (100, 0, None));
    assert_eq!(run.evaluation.every_steps, Some(10));
    assert_eq!(run.evaluation.sampler, run.train.sampling);
    assert_eq!(run.rewards[1].name(), "form");
    assert_eq!(run.rewards[1].weight, 0.2);
}

#[test]
fn every_preset_is_valid_and_equals_its_constructor() {
    for preset in Preset::ALL {
        let run = with_preset(Some(preset), ", response_length: 100");
        assert_eq!(run.unwrap().train.recipe, preset.recipe(100), "{preset:?}");
    }
    assert_eq!(Preset::Grpo.recipe(1), Recipe::grpo());
    assert_eq!(Preset::Dapo.recipe(20480), Recipe::dapo(20480, 4096));
}

/// Any single key in any preset can be set again without a change, so no part of a recipe is out of
/// reach.
#[test]
fn every_part_of_every_preset_can_be_laid_over_it() {
    fn parts(path: &[String], value: &serde_json::Value, all: &mut Vec<serde_json::Value>) {
        if let Some(map) = value.as_object() {
            for (key, value) in map {
                let mut path = path.to_vec();
                path.push(key.clone());
                let nested = path.iter().rev().fold(
                    value.clone(),
                    |inner, key| serde_json::json!({ key: inner }),
                );
                all.push(nested);
                parts(&path, value, all);
            }
        }
    }
    for preset in Preset::ALL {
        let recipe = preset.recipe(256);
        let mut all = Vec::new();
        parts(&[], &serde_json::to_value(&recipe).unwrap(), &mut all);
        assert!(all.len() > 20);
        for part in all {
            let run = with_preset(Some(preset), &format!(", recipe: {part}"));
            assert_eq!(run.unwrap().train.recipe, recipe, "{preset:?} {part}");
        }
    }
}

#[test]
fn single_keys_of_a_preset_are_overridden() {
    let run = yaml(
        "algorithm:\n  preset: grpo\n  recipe:\n    policy_loss:\n      kl: {coef: 0.1, kl: {estimator: k1}}\n      surrogate: {soft_gate: {}}\n    advantage: {name: rloo}\n    overlong: {max_length: 10, buffer: 5}\n",
    );
    let recipe = run.unwrap().train.recipe;
    let kl = recipe.policy_loss.kl.unwrap();
    assert_eq!((kl.coef, kl.kl.estimator), (0.1, KlEstimator::K1));
    assert!(matches!(
        recipe.policy_loss.surrogate,
        Surrogate::SoftGate(_)
    ));
    assert_eq!(
        recipe.advantage.pipeline(),
        Recipe::rloo().advantage.pipeline()
    );
    assert_eq!(recipe.overlong.unwrap().factor, 1.);
    assert_eq!(
        recipe.policy_loss.aggregation,
        Recipe::grpo().policy_loss.aggregation
    );
}

#[test]
fn sections_are_laid_over_defaults() {
    let run = yaml(
        "sampler: {temperature: 0.7}\noptimizer: {learning_rate: 1e-5}\nschedule: {warmup_steps: 3}\ntraining: {mini_batch_size: 4, adapters: {rank: 8, alpha: 16}}\nevaluation: {sampler: {greedy: true, max_new_tokens: 9}}\ncheckpoint: {keep: 5}\nthreads: 2\nrun_dir: here\n",
    )
    .unwrap();
    let train = &run.train;
    assert_eq!(train.sampling.temperature, 0.7);
    assert_eq!(
        (train.optimizer.learning_rate, train.optimizer.beta1),
        (1e-5, 0.9)
    );
    assert_eq!(train.schedule.warmup_steps, 3);
    assert_eq!(train.mini_batch_size, Some(4));
    assert_eq!(train.adapters.as_ref().unwrap().rank, 8);
    assert_eq!(
        (
            run.evaluation.sampler.temperature,
            run.evaluation.sampler.greedy
        ),
        (0.7, true)
    );
    assert_eq!(run.evaluation.sampler.max_new_tokens, 9);
    assert_eq!(
        (run.checkpoint.keep, run.checkpoint.every_steps),
        (5, Some(10))
    );
    assert_eq!(
        (run.threads, run.run_dir.as_path()),
        (Some(2), Path::new("here"))
    );
}

/// Settings with vLLM servers, and further settings.
fn with_vllm(more: &str, sampling: &str) -> Result<RunConfig, ConfigError> {
    yaml(&format!(
        "rollout: {{engine: vllm, base_url: 'http://a'{more}}}\n{sampling}"
    ))
}

#[test]
fn evaluations_have_the_constraint_of_training_unless_theirs_differs() {
    let form = "sampling: {structured_outputs: {json: {type: object, minProperties: 1}}}\n";
    let own = |sampler: &str| format!("{form}evaluation: {{sampler: {sampler}}}\n");
    let of_training = json!({"json": {"type": "object", "minProperties": 1}});
    for (text, of_evaluation) in [
        (form.to_owned(), of_training.clone()),
        (own("{top_k: 2}"), of_training.clone()),
        (own("{structured_outputs: null}"), Value::Null),
        (
            own("{structured_outputs: {choice: ['1', '2']}}"),
            json!({"choice": ["1", "2"]}),
        ),
    ] {
        let run = with_vllm("", &text).unwrap();
        run.check_training().unwrap();
        assert_eq!(
            json!(run.train.sampling.structured_outputs),
            of_training,
            "{text}"
        );
        let sampler = &run.evaluation.sampler;
        assert_eq!(json!(sampler.structured_outputs), of_evaluation, "{text}");
        let written = run.to_yaml().unwrap();
        let document = Document::from_yaml(Path::new("written.yaml"), &written).unwrap();
        let read = RunConfig::new(&document).unwrap();
        assert_eq!(read.to_value().unwrap(), run.to_value().unwrap());
    }
}

#[rstest]
#[case(
    "sampling: {structured_outputs: {regex: a}}\n",
    "sampling.structured_outputs: given, must be absent with engine local: only vllm and sglang mask tokens"
)]
#[case(
    "evaluation: {sampler: {structured_outputs: {regex: a}}}\n",
    "evaluation.sampler.structured_outputs: given, must be absent with engine local: only vllm and sglang mask tokens"
)]
#[case(
    "rollout: {engine: vllm, base_url: 'http://a'}\nsampling: {structured_outputs: {choice: [a, '']}}\n",
    "sampling.structured_outputs.choice[1]: \"\", must have at least one character"
)]
#[case(
    "sampling: {structured_outputs: {regex: a, choice: [a]}}\n",
    "sampling.structured_outputs"
)]
fn a_constraint_that_is_not_valid_is_named(#[case] more: &str, #[case] message: &str) {
    let error = yaml(more).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn a_constraint_of_evaluations_needs_an_engine_that_receives_weights() {
    let form = "sampling: {structured_outputs: {regex: a}}\n";
    let run = with_vllm(", weight_sync: none", form).unwrap();
    let error = run.check_training().unwrap_err().to_string();
    let message = "evaluation.sampler.structured_outputs: given, must be null if the engine receives no weights";
    assert!(error.contains(message), "{error}");
    let own = format!("{form}evaluation: {{sampler: {{structured_outputs: null}}}}\n");
    let run = with_vllm(", weight_sync: none", &own).unwrap();
    run.check_training().unwrap();
}

/// `grpo eval` samples in this process, unless the server's policy is fixed.
#[test]
fn a_constraint_of_an_evaluation_outside_of_a_run_needs_a_fixed_policy() {
    let form = "sampling: {structured_outputs: {regex: a}}\n";
    let run = with_vllm("", form).unwrap();
    let error = run.check_local_sampler().unwrap_err().to_string();
    let message =
        "evaluation.sampler.structured_outputs: given, must be null if the engine receives weights";
    assert!(error.contains(message), "{error}");
    with_vllm(", weight_sync: none", form)
        .unwrap()
        .check_local_sampler()
        .unwrap();
    let own = format!("{form}evaluation: {{sampler: {{structured_outputs: null}}}}\n");
    with_vllm("", &own).unwrap().check_local_sampler().unwrap();
}

#[test]
fn the_effective_configuration_reads_as_itself() {
    for more in [
        String::new(),
        "seed: 7\nevaluation: {sampler: {greedy: true}}\nalgorithm: {preset: rloo, prompt_length: 9}\ntraining: {top_entropy: 0.2}\n".to_owned(),
        "algorithm: {preset: openrlhf, adv_estimator: gae}\n".to_owned(),
    ] {
        let run = yaml(&more).unwrap();
        let written = run.to_yaml().unwrap();
        let again = Document::from_yaml(Path::new("other.yaml"), &written).unwrap();
        let again = RunConfig::new(&again).unwrap_or_else(|error| panic!("{error}\n{written}"));
        assert_eq!(again.to_value().unwrap(), run.to_value().unwrap());
        assert_eq!(again.train.recipe, run.train.recipe);
    }
}

/// Each key is kept with its path: a long one that holds many would take far more memory than the
/// file.
#[test]
fn a_long_path_is_refused() {
    let (file, key) = (Path::new("run"), "k".repeat(300));
    let yaml = Document::from_yaml(file, &format!("a: 1\n? {key}\n:\n  {key}: [1]\n"));
    let toml = Document::from_toml(file, &format!("a = 1\n[{key}]\n{key} = [1]\n"));
    for (document, line) in [(yaml, 4), (toml, 3)] {
        let error = document.unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("run:{line}: key \"kkkk")),
            "{error}"
        );
        assert!(
            error.ends_with("has 601 bytes, must have at most 500"),
            "{error}"
        );
    }
}

#[test]
fn without_held_out_rows_nothing_is_evaluated() {
    let run = |text: &str| {
        let document = Document::from_yaml(Path::new("run.yaml"), text).unwrap();
        RunConfig::new(&document).unwrap()
    };
    let plain = run("{model: m, data: {train: a.jsonl}, rewards: [{kind: exact}]}");
    assert_eq!(plain.evaluation.every_steps, None);
    let written = plain.to_yaml().unwrap();
    assert_eq!(run(&written).to_yaml().unwrap(), written);
}

/// The keys of an earlier version mean the same as those that they have become.
#[rstest]
#[case(
    "algorithm: {preset: dapo, rollout_batch_size: 4, num_return_sequences_in_group: 3, prompt_length: 9, response_length: 40, ppo_epochs: 2}\n",
    "preset: dapo\nprompts_per_step: 4\nnum_generations: 3\nmax_prompt_tokens: 9\nsampling: {max_new_tokens: 40}\nepochs: 2\n"
)]
#[case(
    "training: {micro_batch_size: 4, critic: null, sample_filters: [{kind: not_truncated}]}\nsampler: {top_k: 3}\n",
    "micro_batch_size: 4\nsample_filters: [{kind: not_truncated}]\nsampling: {top_k: 3}\n"
)]
#[case(
    "algorithm: {kl_coef: 0.125, entropy_loss_coef: 0.5, recipe: {overlong: {max_length: 8, buffer: 2}}}\n",
    "recipe: {policy_loss: {kl: {coef: 0.125}, entropy_coef: 0.5}, overlong: {max_length: 8, buffer: 2}}\n"
)]
#[case(
    "algorithm: {recipe: null, kl_coef: 0.125}\n",
    "recipe: {policy_loss: {kl: {coef: 0.125}}}\n"
)]
#[case(
    "algorithm: {use_pg_clip_range: true, pg_clip_low: 0.1, pg_clip_high: 0.3, loss_agg_mode: token-mean, importance_sampling: token}\n",
    "recipe: {policy_loss: {surrogate: {clip: {low: 0.1, high: 0.3}}, aggregation: token-mean}}\n"
)]
#[case(
    "algorithm: {preset: gspo, pg_clip: 0.125}\nsampler: {max_new_tokens: 8}\n",
    "preset: gspo\nrecipe: {policy_loss: {surrogate: {clip: {low: 0.125, high: 0.125}}}}\nsampling: {max_new_tokens: 8}\n"
)]
#[case(
    "algorithm: {loss_agg_mode: seq-mean-token-sum-norm, max_len_mask: true}\nsampling: {max_new_tokens: 8}\n",
    "recipe: {policy_loss: {aggregation: {seq-mean-token-sum-norm: {length: 8}}}}\nsample_filters: [{kind: shorter_than, length: 8}]\nsampling: {max_new_tokens: 8}\n"
)]
#[case(
    "training: {demonstrations: {batch_size: 2}}\ndemonstrations: {train: b.jsonl}\n",
    "demonstrations: {batch_size: 2}\ndemonstration_data: {train: b.jsonl}\n"
)]
#[case(
    "training: {sharded_optimizer: true, epochs: 2}\n",
    "sharding: optimizer\nepochs: 2\n"
)]
fn a_file_of_an_earlier_version_is_the_same_run(#[case] former: &str, #[case] native: &str) {
    let native = yaml(native).unwrap();
    assert_eq!(
        yaml(former).unwrap().to_value().unwrap(),
        native.to_value().unwrap()
    );
    let document = Document::from_yaml(Path::new("run.yaml"), &format!("{YAML}{former}")).unwrap();
    assert!(document.is_former());
    let translated = document.native().unwrap();
    assert!(!translated.is_former());
    // It can be written and read again.
    let written = serde_saphyr::to_string(translated.value()).unwrap();
    let again = Document::from_yaml(Path::new("run.yaml"), &written).unwrap();
    let again = RunConfig::new(&again).unwrap();
    assert_eq!(again.to_value().unwrap(), native.to_value().unwrap());
}

#[rstest]
#[case("true", "optimizer")]
#[case("false", "none")]
fn a_switch_of_an_earlier_version_is_what_ranks_divide(#[case] switch: &str, #[case] word: &str) {
    let former = yaml(&format!("sharded_optimizer: {switch}\n")).unwrap();
    let native = yaml(&format!("sharding: {word}\n")).unwrap();
    assert_eq!(former.to_value().unwrap(), native.to_value().unwrap());
    let sft = |key: &str| {
        let text = format!("model: m\ndata: {{train: a.jsonl}}\nsft: {{{key}}}\n");
        let document = Document::from_yaml(Path::new("sft.yaml"), &text).unwrap();
        SftRunConfig::new(&document).unwrap().sft.sharding
    };
    let former = sft(&format!("sharded_optimizer: {switch}"));
    assert_eq!(former, sft(&format!("sharding: {word}")));
}

#[rstest]
#[case("sampling:\nrollout:\nrecipe:\noptimizer:\nschedule:\n")]
#[case("sampler:\ntraining:\noptimizer:\nalgorithm: {recipe: null}\n")]
fn a_section_without_keys_has_the_defaults(#[case] text: &str) {
    let with = |text: &str| yaml(text).unwrap().to_value().unwrap();
    assert_eq!(with(text), with(""));
}

#[rstest]
#[case(
    "prompts_per_step: 0\n",
    "run.yaml:9: prompts_per_step: 0, must be at least 1"
)]
#[case(
    "sharded_optimizer: 2\n",
    "run.yaml:9: sharded_optimizer: 2, must be true or false"
)]
#[case(
    "sharded_optimizer: true\nsharding: resident\n",
    "run.yaml:9: sharded_optimizer: given, but sharding is given, too; give one of them"
)]
#[case(
    "sampling:\n  temperature: 0\n",
    "run.yaml:10: sampling.temperature: 0.0, must be from 1e-6 to 1e6 (evaluations have greedy for the most likely token)"
)]
#[case(
    "sampling:\n  greedy: true\n",
    "run.yaml:10: sampling.greedy: true, must be false in training: all completions of a group would be the same"
)]
#[case(
    "recipe:\n  policy_loss:\n    surrogate:\n      clip:\n        low: 2\n",
    "run.yaml:13: recipe.policy_loss.surrogate.clip.low: 2, must be from 0 to 1"
)]
#[case(
    "recipe:\n  policy_loss:\n    kl: {}\n",
    "run.yaml:11: recipe.policy_loss.kl.coef: absent, must be given"
)]
#[case(
    "max_steps: 3\npreset: gkd\n",
    "run.yaml:10: recipe.distillation_loss: given, but there is no teacher: give teacher.model, teacher.server or teacher.self"
)]
#[case(
    "preset: grop\n",
    "run.yaml:9: preset: \"grop\", must be one of grpo, dapo, dr_grpo, lite_ppo, gspo, luspo, gmpo, cispo, sapo, vespo, gpg, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, trl, verl, roll, twinkle, openrlhf, prime_rl, fipo, m2po, gkd; did you mean `grpo`?"
)]
// Both words.
#[case(
    "epochs: 3\ntraining:\n  epochs: 2\n",
    "run.yaml:11: training.epochs: given, but epochs is given, too; give one of them"
)]
#[case(
    "recipe: {overlong: null}\nalgorithm: {recipe: {group_filter: {}}}\n",
    "run.yaml:10: algorithm.recipe: given, but recipe is given, too; give one of them"
)]
#[case(
    "algorithm:\n  kl_coef: -1\n",
    "run.yaml:10: algorithm.kl_coef: -1, must be finite and at least 0"
)]
#[case(
    "preset: dapo\nalgorithm:\n  pg_variant: cispo\n  cispo_epsilon_low: 3\n",
    "run.yaml:12: algorithm.cispo_epsilon_low: 3, makes ratio_min -2, which must be an absolute ratio from 0 to 1"
)]
fn an_error_has_the_line_and_the_key_of_the_file(#[case] more: &str, #[case] message: &str) {
    assert_eq!(yaml(more).unwrap_err().to_string(), message);
}

#[rstest]
// Unknown keys, at every depth.
#[case("sed: 1\n", "run.yaml:9: sed: unknown key", "did you mean `seed`?")]
#[case(
    "algorithm:\n  preset: grpo\n  rewardclip: 1\n",
    "run.yaml:11: algorithm",
    "did you mean `reward_clip`?"
)]
#[case(
    "algorithm:\n  preset: grop\n",
    "run.yaml:10: algorithm.preset",
    "did you mean `grpo`?"
)]
#[case(
    "algorithm:\n  recipe:\n    policy_loss:\n      agregation: token-mean\n",
    "run.yaml:12: algorithm.recipe.policy_loss",
    "did you mean `aggregation`?"
)]
#[case(
    "algorithm:\n  recipe:\n    policy_loss:\n      surrogate:\n        clip:\n          lo: 1\n",
    "run.yaml:14: algorithm.recipe.policy_loss.surrogate",
    "did you mean `low`?"
)]
#[case(
    "algorithm:\n  recipe:\n    advantage:\n      name: rloo\n      gama: 1\n",
    "run.yaml:13: algorithm.recipe.advantage",
    "gama: unknown key"
)]
#[case(
    "training:\n  micro_batchsize: 1\n",
    "run.yaml:10: training",
    "did you mean `micro_batch_size`?"
)]
#[case(
    "optimizer: {lerning_rate: 1}\n",
    "run.yaml:9: optimizer",
    "did you mean `learning_rate`?"
)]
#[case(
    "sampler:\n  temprature: 1\n",
    "run.yaml:10: sampler",
    "did you mean `temperature`?"
)]
#[case(
    "evaluation:\n  sampler:\n    temprature: 1\n",
    "run.yaml:11: evaluation.sampler",
    "did you mean `temperature`?"
)]
#[case(
    "checkpoint:\n  kep: 1\n",
    "run.yaml:10: checkpoint",
    "did you mean `keep`?"
)]
// Values of the wrong kind.
#[case("seed: many\n", "run.yaml:9: seed: \"many\"", "must be a whole number")]
#[case("max_steps: -1\n", "run.yaml:9: max_steps:", "-1")]
#[case(
    "algorithm:\n  pg_clip: wide\n",
    "run.yaml:10: algorithm.pg_clip: \"wide\"",
    "must be a number"
)]
// Values that mean nothing.
#[case("max_steps: 0\n", "run.yaml:9: max_steps: 0", "at least 1")]
#[case(
    "algorithm:\n  rollout_batch_size: 0\n",
    "run.yaml:10: algorithm.rollout_batch_size: 0",
    "at least 1"
)]
#[case(
    "algorithm:\n  response_length: 0\n",
    "run.yaml:10: algorithm.response_length: 0",
    "at least 1"
)]
#[case(
    "algorithm:\n  num_return_sequences_in_group: 1\n  preset: grpo\n",
    "run.yaml:10: algorithm.num_return_sequences_in_group: 1",
    "at least 2"
)]
#[case(
    "algorithm:\n  num_return_sequences_in_group: 1\n",
    "run.yaml:10: algorithm.num_return_sequences_in_group: 1",
    "at least 2"
)]
#[case(
    "algorithm:\n  pg_clip: 2\n",
    "run.yaml:10: algorithm.pg_clip: ",
    "2, must be from 0 to 1"
)]
#[case(
    "sampler:\n  temperature: 0\n",
    "run.yaml:10: sampler.temperature: 0",
    "must be from 1e-6 to 1e6 (evaluations have greedy for the most likely token)"
)]
#[case(
    "training:\n  micro_batch_size: 4\n  micro_batch_tokens: 9\n",
    "run.yaml:10: training.micro_batch_size: 4",
    "must be absent with micro_batch_tokens"
)]
#[case(
    "training:\n  micro_batch_size: 0\n",
    "run.yaml:10: training.micro_batch_size: 0",
    "at least 1"
)]
#[case(
    "schedule:\n  decay_until: 0\n",
    "run.yaml:10: schedule.decay_until: 0",
    "at least 1"
)]
#[case(
    "evaluation:\n  pass_at: [2]\n",
    "run.yaml:10: evaluation.pass_at[0]: 2",
    "from 1 to samples_per_prompt, 1"
)]
#[case(
    "checkpoint:\n  keep: 0\n",
    "run.yaml:10: checkpoint.keep: 0",
    "at least 1"
)]
// Keys that have their place elsewhere.
#[case(
    "sampling:\n  seed: 2\n",
    "run.yaml:10: sampling.seed",
    "has its place at seed"
)]
#[case("sampler:\n  seed: 2\n", "run.yaml:10: sampler.seed", "at seed")]
// Not a file of YAML.
#[case("a: [1\n", "run.yaml:", "")]
#[case("seed: 1\nseed: 2\n", "run.yaml:10: seed: given twice", "once")]
#[case("seed: .nan\n", "run.yaml:9:", "")]
// Everything that training refuses.
#[case(
    "optimizer:\n  learning_rate: -1\n",
    "run.yaml:10: optimizer.learning_rate: -1",
    "at least 0"
)]
#[case(
    "optimizer: {epsilon: -1e-9}\n",
    "run.yaml:9: optimizer.epsilon: -",
    "at least 0"
)]
#[case(
    "optimizer: {weight_decay: -0.1}\n",
    "run.yaml:9: optimizer.weight_decay: -0.1",
    "at least 0"
)]
#[case("optimizer: {beta1: 1}\n", "run.yaml:9: optimizer.beta1: 1", "below 1")]
#[case(
    "optimizer: {beta2: -0.1}\n",
    "run.yaml:9: optimizer.beta2: -0.1",
    "below 1"
)]
#[case(
    "training: {adapters: {rank: 0, alpha: 1}}\n",
    "run.yaml:9: training.adapters.rank: 0",
    "from 1 to"
)]
#[case(
    "training: {max_grad_norm: -1}\n",
    "run.yaml:9: training.max_grad_norm: -1",
    "positive"
)]
#[case(
    "algorithm: {difficulty_mask: true, difficulty_low_threshold: 2}\n",
    "run.yaml:9: algorithm.difficulty_low_threshold",
    "the smaller one first"
)]
#[case(
    "algorithm: {adv_estimator: gae}\ntraining: {critic: {optimizer: {learning_rate: -1}}}\n",
    "run.yaml:10: training.critic.optimizer.learning_rate: -1",
    "at least 0"
)]
#[case("run_dir: ''\n", "run.yaml:9: run_dir: \"\"", "path of a directory")]
#[case(
    "run_dir: models\n",
    "run.yaml:1: model: models/smol",
    "outside of run_dir"
)]
#[case("run_dir: .\n", "run.yaml:1: model: models/smol", "outside of run_dir")]
// Sizes beyond any machine.
#[case(
    "algorithm: {rollout_batch_size: 125000000}\n",
    "run.yaml:9: algorithm.rollout_batch_size: 125000000",
    "1000000000 completions of up to 256 tokens take 9 TiB"
)]
#[case(
    "algorithm: {num_return_sequences_in_group: 1000000000}\n",
    "run.yaml:9: algorithm.num_return_sequences_in_group: 1000000000",
    "at most 1048576 completions"
)]
#[case(
    "algorithm: {response_length: 18446744073709551615}\n",
    "run.yaml:9: algorithm.response_length: 18446744073709551615",
    "at most"
)]
#[case(
    "algorithm: {preset: dapo, response_length: 18446744073709551615}\n",
    "run.yaml:9: algorithm.response_length: 18446744073709551615",
    "at most"
)]
#[case(
    "algorithm: {response_length: 1000000000}\n",
    "run.yaml:9: algorithm.response_length: 1000000000",
    "TiB a step"
)]
#[case(
    "training: {adapters: {rank: 100000000, alpha: 1}}\n",
    "run.yaml:9: training.adapters.rank: 100000000",
    "must be from 1 to 65536; the adapter of one map of 1024 inputs and outputs takes 3 TiB"
)]
#[case(
    "threads: 100000\n",
    "run.yaml:9: threads: 100000",
    "must be at most 1024; their stacks take 195 GiB"
)]
#[case(
    "max_steps: 18446744073709551615\n",
    "run.yaml:9: max_steps: 18446744073709551615",
    "at most"
)]
#[case(
    "evaluation: {samples_per_prompt: 1000000000}\n",
    "run.yaml:9: evaluation.samples_per_prompt: 1000000000",
    "at most"
)]
#[case(
    "training: {micro_batch_size: 9223372036854775807}\n",
    "run.yaml:9: training.micro_batch_size: 9223372036854775807",
    "at most"
)]
// Names of other trainers.
#[case(
    "num_iterations: 8\n",
    "run.yaml:9: num_iterations: unknown key",
    "here it is epochs"
)]
#[case(
    "algorithm: {beta: 0.1}\n",
    "run.yaml:9: algorithm.beta: unknown key",
    "here it is recipe.policy_loss.kl.coef"
)]
#[case(
    "learning_rate: 1e-6\n",
    "run.yaml:9: learning_rate: unknown key",
    "here it is optimizer.learning_rate"
)]
#[case(
    "training: {per_device_train_batch_size: 4}\n",
    "run.yaml:9: training.per_device_train_batch_size",
    "here it is micro_batch_size"
)]
#[case(
    "algorithm: {max_completion_length: 4}\n",
    "run.yaml:9: algorithm.max_completion_length",
    "here it is sampling.max_new_tokens"
)]
// A suggestion is accepted.
#[case(
    "training: {epoch: 2}\n",
    "run.yaml:9: training.epoch: unknown key",
    "did you mean `epochs`?"
)]
#[case(
    "sampler: {sed: 2}\n",
    "run.yaml:9: sampler.sed: unknown key",
    "did you mean seed?"
)]
// Types, in the words of the file.
#[case(
    "algorithm: [1]\n",
    "run.yaml:9: algorithm: a list",
    "must be a mapping of keys"
)]
#[case(
    "optimizer: fast\n",
    "run.yaml:9: optimizer: \"fast\"",
    "must be a mapping of keys"
)]
#[case(
    "checkpoint: {keep_best: 1}\n",
    "run.yaml:9: checkpoint.keep_best: 1",
    "must be true or false"
)]
fn an_error_names_line_key_and_requirement(
    #[case] more: &str,
    #[case] begins: &str,
    #[case] has: &str,
) {
    let error = yaml(more).unwrap_err().to_string();
    assert!(error.starts_with(begins) && error.contains(has), "{error}");
}

#[rstest]
#[case(
    "  - kind: numeric\n    column: sum\n",
    "  - kind: numeric\n    colunm: sum\n",
    "run.yaml:7: rewards[0]",
    "did you mean `column`?"
)]
#[case(
    "kind: regex",
    "kind: regx",
    "run.yaml:8: rewards[1]",
    "did you mean `regex`?"
)]
#[case(
    "'^\\d+$'",
    "'('",
    "run.yaml:8: rewards[1]",
    "must be a regular expression"
)]
#[case(
    "train: a.jsonl",
    "trian: a.jsonl",
    "run.yaml:3: data",
    "did you mean `train`?"
)]
#[case("  train: a.jsonl\n", "", "run.yaml:2: data.train: absent", "")]
#[case("model: models/smol\n", "", "run.yaml: model: absent", "")]
#[case(
    "model: models/smol\n",
    "model: {paht: x}\n",
    "run.yaml:1: model",
    "did you mean `path`?"
)]
fn an_error_in_a_required_section_names_it(
    #[case] from: &str,
    #[case] to: &str,
    #[case] begins: &str,
    #[case] has: &str,
) {
    assert!(YAML.contains(from));
    let text = YAML.replace(from, to);
    let document = Document::from_yaml(Path::new("run.yaml"), &text).unwrap();
    let error = RunConfig::new(&document).unwrap_err().to_string();
    assert!(error.starts_with(begins) && error.contains(has), "{error}");
}

/// Serde reads the options of a kind before it has their types.
#[rstest]
// Rewards, in a list and inside each other.
#[case(
    "rewards:\n  - kind: numeric\n  - kind: regex\n    pattern: a\n    whole: 1\n",
    "run.yaml:7: rewards[1].whole: 1, must be true or false"
)]
#[case(
    "rewards:\n  - kind: cosine\n    correct:\n      kind: numeric\n      tolerence: 1\n",
    "run.yaml:7: rewards[0].correct.tolerence: unknown key, did you mean `tolerance`?"
)]
#[case(
    "rewards:\n  - judges:\n      - kind: tags\n        tags: [a]\n      - pattern: 7\n        kind: regex\n    weight: 7\n    kind: ensemble\n",
    "run.yaml:7: rewards[0].judges[1].pattern: 7, must be a text"
)]
#[case(
    "rewards:\n  - kind: ensemble\n    judges:\n      - kind: json\n      - kind: tags\n",
    "run.yaml:7: rewards[0].judges[1].tags: absent, must be given"
)]
#[case(
    "rewards:\n  - kind: ensemble\n    judges:\n      - kind: json\n        column: jsn\n      - kind: jsn\n",
    "run.yaml:8: rewards[0].judges[1].kind: \"jsn\", must be one of numeric, math, exact, multiple_choice, f1, instructions, regex, tags, json, length, repetition, cosine, relative_length, program, code, reward_model, judge, ensemble; did you mean `json`?"
)]
#[case(
    "rewards:\n  - kind: ensemble\n    judges: [{kind: json}]\n    combine:\n      weigthed: [1]\n",
    "run.yaml:7: rewards[0].combine.weigthed: \"weigthed\", must be one of mean, min, max, median, majority, weighted; did you mean `weighted`?"
)]
// The request of a judge is free.
#[case(
    "rewards:\n  - kind: judge\n    extra_body: {model: 7, prompt: {}}\n    url: u\n    prompt: p\n    score: {json: s}\n    model: 7\n",
    "run.yaml:9: rewards[0].model: 7, must be a text"
)]
#[case(
    "rewards:\n  - kind: judge\n    extra_body: {scores: 1}\n    score:\n      scores: 1\n",
    "run.yaml:7: rewards[0].score.scores: unknown key, did you mean `scale`?"
)]
#[case(
    "rewards:\n  - kind: program\n    time_limit_seconds: 1\n    workers: -1\n    max_failures: -1\n",
    "run.yaml:6: rewards[0].workers: -1, must be a whole number, at least 0"
)]
#[case(
    "rewards:\n  - kind: math\n    column: 'yes'\n    decimals: 4294967296\n",
    "run.yaml:6: rewards[0].decimals: 4294967296, must be a whole number, at least 0"
)]
// Environments.
#[case(
    "environment:\n  tools:\n    - name: f\n      command: [f]\n      worker: 2\n  kind: tools\n",
    "run.yaml:7: environment.tools[0].worker: unknown key, did you mean `workers`?"
)]
#[case(
    "environment:\n  kind: agent\n  limits: {max_turns: 2}\n  format: lama\n",
    "run.yaml:6: environment.format: \"lama\", must be one of hermes, llama, marks; did you mean `llama`?"
)]
// Sample filters and the controller of a KL.
#[case(
    "sample_filters:\n  - kind: spread\n  - kind: difficulty\n    low: 0.1\n    high: hard\n",
    "run.yaml:7: sample_filters[1].high: \"hard\", must be a number"
)]
#[case(
    "reward_kl:\n  kind: adaptive\n  coef: 0.1\n  target: 0.1\n",
    "run.yaml:3: reward_kl.horizon: absent, must be given"
)]
// Kinds whose options serde reads at once.
#[case(
    "recipe:\n  advantage:\n    name: pipeline\n    sequence:\n      baseline: leave_on_out\n",
    "run.yaml:7: recipe.advantage.sequence.baseline: \"leave_on_out\", must be one of group_mean, leave_one_out, length_weighted, best_of_others, batch_mean, given, none; did you mean `leave_one_out`?"
)]
#[case(
    "rollout:\n  engine: vllm\n  base_url: u\n  max_retries: few\n",
    "run.yaml:6: rollout.max_retries: \"few\", must be a whole number"
)]
fn an_error_inside_a_kind_has_its_line_and_key(#[case] more: &str, #[case] message: &str) {
    let text = format!("model: m\ndata: {{train: d}}\n{more}");
    let document = Document::from_yaml(Path::new("run.yaml"), &text).unwrap();
    assert_eq!(RunConfig::new(&document).unwrap_err().to_string(), message);
}

#[rstest]
#[case(
    "[algorithm]\nrewardclip = 1\n",
    "run.toml:18: algorithm",
    "did you mean `reward_clip`?"
)]
#[case(
    "[algorithm.recipe.policy_loss]\nagregation = 'x'\n",
    "run.toml:18: algorithm.recipe.policy_loss",
    "did you mean `aggregation`?"
)]
#[case(
    "[optimizer]\nlearning_rate = inf\n",
    "run.toml:18: optimizer.learning_rate: inf, must be finite",
    ""
)]
#[case(
    "[optimizer]\nlearning_rate = 1979-05-27\n",
    "run.toml:18: 1979-05-27: a date",
    ""
)]
#[case("[optimizer\n", "run.toml:17:", "")]
fn an_error_in_toml_has_its_line(#[case] more: &str, #[case] begins: &str, #[case] has: &str) {
    let error = toml(more).unwrap_err().to_string();
    assert!(error.starts_with(begins) && error.contains(has), "{error}");
}

/// The hint after a value that YAML reads as true or false.
const HINT: &str =
    "(YAML reads y, n, yes, no, on and off as true or false, unless they are in quotation marks)";

#[rstest]
#[case(
    "rewards: [{kind: math, column: y}]",
    "rewards[0].column: true, must be a text"
)]
#[case(
    "rewards: [{kind: exact, column: no}]",
    "rewards[0].column: false, must be a text"
)]
#[case("rewards: [{kind: off}]", "rewards[0].kind: false, must be a text")]
#[case("data: {train: d, prompt: n}", "data.prompt: false, must be a text")]
#[case("schedule: {decay: no}", "schedule.decay: false, must be")]
#[case("model: {path: y}", "model.path: true, must be a text")]
#[case(
    "data: {train: y}",
    "data.train: true, expected a text or a list of texts"
)]
#[case(
    "data: {train: [d, no]}",
    "data.train[1]: false, expected a text or a list of texts"
)]
#[case(
    "rollout: {engine: vllm, base_url: [on]}",
    "rollout.base_url[0]: true, expected a text or a list of texts"
)]
#[case(
    "sampler: {stop_strings: [ok, no]}",
    "sampler.stop_strings[1]: false, must be a text"
)]
#[case(
    "rewards: [{kind: regex, pattern: a}, {kind: program, command: [python3, n]}]",
    "rewards[1].command[1]: false, must be a text"
)]
fn an_error_about_true_or_false_has_the_hint_to_quote(#[case] line: &str, #[case] message: &str) {
    let key = line.split(':').next().unwrap();
    let base = "model: m\ndata: {train: d}\nrewards: [{kind: json}]\n";
    let others = base.lines().filter(|other| !other.starts_with(key));
    let text: String = others
        .chain([line])
        .map(|line| format!("{line}\n"))
        .collect();
    let document = Document::from_yaml(Path::new("run.yaml"), &text).unwrap();
    let error = RunConfig::new(&document).unwrap_err().to_string();
    assert!(error.contains(message) && error.contains(HINT), "{error}");
}

#[rstest]
#[case(
    "max_steps: ten\n",
    "run.yaml:9: max_steps: \"ten\", must be a whole number"
)]
#[case(
    "max_steps: -1\n",
    "run.yaml:9: max_steps: -1, must be a whole number, at least 0"
)]
#[case(
    "max_steps: true\n",
    "run.yaml:9: max_steps: true, must be a whole number"
)]
#[case(
    "training: {adapters: {rank: 0, alpha: 1}}\n",
    "run.yaml:9: training.adapters.rank: 0, must be from 1 to 65536"
)]
#[case(
    "evaluation: {samples_per_prompt: 4, sampler: {greedy: true}}\n",
    "run.yaml:9: evaluation.samples_per_prompt: 4, must be 1 with greedy, whose completions are equal"
)]
#[case(
    "training: {load_in_4bit: true}\n",
    "run.yaml:9: training.load_in_4bit: unknown key; here it is base_weights"
)]
#[case(
    "training: {adapters: {r: 8}}\n",
    "run.yaml:9: training.adapters.r: unknown key; here it is adapters.rank"
)]
#[case("r: 8\n", "run.yaml:9: r: unknown key; here it is adapters.rank")]
#[case(
    "max_seq_length: 8\n",
    "run.yaml:9: max_seq_length: unknown key; here it is sampling.max_new_tokens"
)]
#[case(
    "optim: adamw_8bit\n",
    "run.yaml:9: optim: unknown key; here it is optimizer"
)]
#[case(
    "logging_steps: 1\n",
    "run.yaml:9: logging_steps: unknown key; here it is trackers"
)]
fn errors_name_the_key_its_value_and_the_requirement(#[case] more: &str, #[case] message: &str) {
    assert_eq!(yaml(more).unwrap_err().to_string(), message);
}

#[test]
fn a_run_dir_that_cannot_be_a_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for run_dir in [file.clone(), file.join("runs/a")] {
        let error = yaml(&format!("run_dir: {}\n", run_dir.display())).unwrap_err();
        let message = format!("run_dir: {} is not a directory", file.display());
        assert!(error.to_string().contains(&message), "{error}");
    }
    yaml(&format!(
        "run_dir: {}\n",
        folder.path().join("a/b").display()
    ))
    .unwrap();
}

#[test]
fn free_json_is_not_held_to_the_bounds_of_counts() {
    let text = "
model: m
data: {train: d, chat_template_kwargs: {ts: 1764282000000, nested: [1e300]}}
rewards:
  - kind: judge
    url: http://127.0.0.1:1
    model: j
    prompt: '{completion}'
    score: {words: {good: 1, bad: 0}}
    extra_body: {seed: 1234567890123}
    max_tokens_total: 2000000000000
    max_requests: 2000000000000
environment:
  kind: tools
  tools:
    - name: f
      command: [python3, f.py]
      parameters: {type: object, properties: {x: {type: integer, maximum: 9007199254740991}}}
";
    let document = Document::from_yaml(Path::new("run.yaml"), text).unwrap();
    if let Err(error) = RunConfig::new(&document) {
        panic!("{error}");
    }
    let error = yaml("max_steps: 2000000000000\n").unwrap_err().to_string();
    assert!(error.contains("must be at most 1099511627776"), "{error}");
}

#[test]
fn settings_without_an_effect_are_doubts() {
    let doubts = |more: &str| yaml(more).unwrap().doubts();
    assert_eq!(doubts(""), Vec::<String>::new());
    let observations = "recipe: {policy_loss: {observation_coef: 0.05}}\n";
    assert_eq!(
        doubts(observations),
        [
            "recipe.policy_loss.observation_coef: 0.05, and there is no environment: completions have no observations"
        ]
    );
    let environment = "environment: {kind: program, command: [cat]}\n";
    assert_eq!(
        doubts(&format!("{observations}{environment}")),
        Vec::<String>::new()
    );
    assert_eq!(
        doubts(
            "optimizer: {learning_rate: 0}\ntraining: {mini_batch_size: 100}\nalgorithm: {rollout_batch_size: 4, num_return_sequences_in_group: 4}\n"
        ),
        [
            "optimizer.learning_rate: 0, so the policy does not change",
            "mini_batch_size: 100, and a step has 16 completions: it makes one update",
        ]
    );
    let text = YAML
        .replace("weight: 0.2", "weight: 0")
        .replace("column: sum", "column: sum\n    weight: 0");
    let document = Document::from_yaml(Path::new("run.yaml"), &text).unwrap();
    assert_eq!(
        RunConfig::new(&document).unwrap().doubts(),
        ["rewards: all have the weight 0, so all rewards are equal"]
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = RunConfig::read(Path::new("/no/such.yaml"))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/no/such.yaml: cannot be read"),
        "{error}"
    );
}

#[test]
fn aliases_are_bounded() {
    let mut text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n".to_owned();
    for i in 1..12 {
        let inner = format!("*a{}, ", i - 1).repeat(10);
        text += &format!("a{i}: &a{i} [{inner}]\n");
    }
    let error = Document::from_yaml(Path::new("x.yaml"), &text).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("has too many aliases"), "{error}");
}

/// No message has the name of a Rust type or a library option.
#[test]
fn messages_have_no_words_of_libraries() {
    let texts = [
        "[1, 2]",
        "7",
        "hello",
        "{model: [1], data: {train: d}, rewards: [{kind: json}]}",
        "{model: m, data: d, rewards: [{kind: json}]}",
        "{model: m, data: {train: {a: 1}}, rewards: [{kind: json}]}",
        "{model: m, data: {train: d}, rewards: 1}",
        "{model: m, data: {train: d}, rewards: [1]}",
        "{model: m, data: {train: d}, rewards: [{}]}",
        "{model: m, data: {train: d}, rewards: [{kind: 1}]}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {preset: 1}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {loss_agg_mode: {a: 1}}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {recipe: 1}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {recipe: {advantage: 1}}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {recipe: {advantage: {name: 1}}}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], algorithm: {recipe: {policy_loss: {surrogate: {clip: 1}}}}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], training: {sample_filters: [1]}}",
        "{model: m, data: {train: d}, rewards: [{kind: json}], training: {reward_kl: 1}}",
        "a: 1\na: 2\n",
    ];
    let words = [
        "struct", "enum", "variant", "Sections", "Policy", "usize", "u64", "f64", "budget",
        "field", "tuple", "untagged",
    ];
    for text in texts {
        let document = Document::from_yaml(Path::new("run.yaml"), text);
        let error = document.and_then(|document| RunConfig::new(&document).map(drop));
        let error = error.expect_err(text).to_string();
        let found: Vec<_> = words.iter().filter(|word| error.contains(**word)).collect();
        assert!(found.is_empty(), "{found:?} in {error:?} of {text}");
    }
}

/// The one key for each effect works with every preset.
#[test]
fn epsilon_scale_and_kl_coefficient_are_one_key_for_every_preset() {
    fn find<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
        if let Value::Object(map) = value {
            for (name, value) in map {
                if name == key {
                    found.push(value);
                }
                find(value, key, found);
            }
        }
    }
    for preset in Preset::ALL.into_iter().map(Some).chain([None]) {
        let recipe = |keys: &str| {
            let run = with_preset(preset, keys);
            run.map(|run| serde_json::to_value(&run.train.recipe).unwrap())
        };
        let with = recipe(", kl_coef: 0.125").unwrap();
        let (mut coefs, mut kls) = (Vec::new(), Vec::new());
        find(&with["policy_loss"]["kl"], "coef", &mut coefs);
        find(&with["advantage"], "kl_penalty", &mut kls);
        for kl in &kls {
            find(kl, "coef", &mut coefs);
        }
        assert!(coefs.contains(&&json!(0.125)), "{preset:?}: {with}");
        assert!(
            coefs.iter().all(|coef| **coef == json!(0.125)),
            "{preset:?}: {with}"
        );
        // The trainers of these presets bound the estimate to 10; TRL does not.
        let kl = &with["policy_loss"]["kl"];
        let bounded = [Preset::Verl, Preset::Roll, Preset::Openrlhf].map(Some);
        if kls.is_empty() && !kl.is_null() {
            let bound = if bounded.contains(&preset) {
                json!(10.)
            } else {
                Value::Null
            };
            assert_eq!(kl["kl"]["value_clamp"], bound, "{preset:?}: {with}");
        }
        let off = recipe(", kl_coef: 0").unwrap();
        assert!(off["policy_loss"]["kl"].is_null(), "{preset:?}: {off}");

        // REINFORCE without a deviation has no epsilon and no scale.
        match recipe(", advantage_epsilon: 0.125") {
            Ok(with) => {
                let mut found = Vec::new();
                find(&with["reward_shaping"]["norm"], "epsilon", &mut found);
                find(&with["advantage"], "epsilon", &mut found);
                assert!(found.contains(&&json!(0.125)), "{preset:?}: {with}");
            }
            Err(error) => assert!(error.to_string().contains("advantage_epsilon"), "{error}"),
        }
        if let Ok(with) = recipe(", advantage_scale: batch") {
            let text = with.to_string();
            assert!(
                text.contains("\"scale\":\"batch\"") || text.contains("\"std\":\"batch\""),
                "{preset:?}: {with}"
            );
        }
    }
}

#[test]
fn a_hostile_file_is_an_error() {
    let deep = "[".repeat(200_000);
    let nested = "{a: ".repeat(50_000);
    let keys: String = (0..2000)
        .map(|i| format!("{}k:\n", " ".repeat(i)))
        .collect();
    for text in [
        deep.as_str(),
        &nested,
        &keys,
        "\0",
        "%YAML 9\n---\n",
        "&a [*a]",
        "? {}\n: 1",
        "!!binary x: 1",
        "---\na: 1\n---\nb: 2\n",
    ] {
        // The text may be valid YAML; it is no configuration.
        if let Ok(document) = Document::from_yaml(Path::new("x.yaml"), text) {
            assert!(RunConfig::new(&document).is_err());
        }
    }
    for text in [
        format!("a = {deep}"),
        format!("a = {}", "{b = ".repeat(50_000)),
        format!("[{}a]", "a.".repeat(50_000)),
        "\0".to_owned(),
    ] {
        if let Ok(document) = Document::from_toml(Path::new("x.toml"), &text) {
            assert!(RunConfig::new(&document).is_err());
        }
    }
}

#[test]
fn without_a_preset_the_algorithm_is_the_default_recipe() {
    let plain = yaml("").unwrap().train.recipe;
    assert_eq!(plain, Recipe::default());
    let grpo = yaml("algorithm: {preset: grpo}\n").unwrap().train.recipe;
    assert_eq!(plain, grpo);
    assert_eq!(plain, TrainConfig::default().recipe);
    assert!(plain.policy_loss.kl.is_none());
}
