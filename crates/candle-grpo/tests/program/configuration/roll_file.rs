//! Whole ROLL configuration files.

use std::path::Path;

use candle_grpo::config::{Document, Import, RunConfig, Verdict};
use candle_grpo::core::rewards::NormLevel;
use candle_grpo::core::selection::SampleFilter;

const FILE: &str = r#"
defaults:
  - ../config/zero@_here_
hydra:
  run:
    dir: .
exp_name: run-${seed}
seed: 42
output_dir: ./output
system_envs:
  A: '1'
num_gpus_per_node: 8
max_steps: 100
save_steps: 20
eval_steps: 5
rollout_batch_size: 16
prompt_length: 2048
response_length: 8192
num_return_sequences_in_group: 8
ppo_epochs: 1
adv_estimator: "reinforce"
value_clip: 0.5
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
norm_mean_type: batch
norm_std_type: batch
max_len_mask: true
error_max_len_clip: false
length_loss_weight: false
difficulty_loss_weight: true
add_token_level_kl: false
whiten_advantages: true
pretrain: models/${exp_name}
actor_train:
  worker_cls: a.b.C
  model_args:
    flash_attn: fa2
    dtype: bf16
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    gradient_accumulation_steps: 8
    per_device_train_batch_size: 2
    warmup_steps: 20
  data_args:
    template: qwen3
    file_name:
      - data/math.jsonl
    domain_interleave_probs:
      math_rule: 1
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${zero3}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args:
    max_new_tokens: ${response_length}
    temperature: 0.99
    num_return_sequences: ${num_return_sequences_in_group}
validation:
  data_args:
    file_name: data/test.jsonl
  generating_args:
    temperature: 0.6
reference:
  strategy_args:
    strategy_name: hf_infer
something_new: 3
rewards:
  math_rule:
    worker_cls: a.b.D
"#;

fn roll(text: &str) -> Import {
    let document = Document::from_yaml(Path::new("roll.yaml"), text).unwrap();
    Import::new(&document).expect("a file of ROLL")
}

fn verdict(file: &Import, path: &str) -> Verdict {
    let key = file.keys.iter().find(|key| key.path == path);
    key.unwrap_or_else(|| panic!("{path}")).verdict.clone()
}

#[test]
fn a_bound_of_tokens_is_used_if_its_switch_is_on() {
    let key = "actor_train.max_tokens_per_microbatch_in_train";
    let size = "actor_train.training_args.per_device_train_batch_size";
    let file = |switch: &str| {
        roll(&format!(
            "pretrain: m\ndynamic: true\nrewards: [{{kind: numeric}}]\nactor_train:\n  \
             data_args: {{file_name: a.jsonl}}\n  use_dynamic_batching_in_train: {switch}\n  \
             max_tokens_per_microbatch_in_train: 4096\n  training_args: \
             {{per_device_train_batch_size: 4, gradient_accumulation_steps: 8}}\n"
        ))
    };
    for switch in ["true", "${dynamic}"] {
        let used = Verdict::Used("training.micro_batch_tokens".to_owned());
        assert_eq!(verdict(&file(switch), key), used, "{switch}");
        let config = RunConfig::new(&file(switch).document).unwrap();
        assert_eq!(config.train.micro_batch_tokens, Some(4096.into()));
        assert_eq!(config.train.mini_batch_size, Some(32));
        let size = verdict(&file(switch), size);
        assert!(matches!(size, Verdict::NoMeaning(_)), "{size}");
    }
    let off = verdict(&file("false"), key);
    assert!(matches!(off, Verdict::NoMeaning(_)), "{off}");
    let used = Verdict::Used("training.micro_batch_size".to_owned());
    assert_eq!(verdict(&file("false"), size), used);
}

#[test]
fn every_key_has_its_verdict() {
    let file = roll(FILE);
    let used = |path: &str| match verdict(&file, path) {
        Verdict::Used(key) => key,
        other => panic!("{path}: {other}"),
    };
    assert_eq!(used("rollout_batch_size"), "algorithm.rollout_batch_size");
    assert_eq!(used("save_steps"), "checkpoint.every_steps");
    assert_eq!(
        used("actor_train.training_args.learning_rate"),
        "optimizer.learning_rate"
    );
    assert_eq!(
        used("actor_infer.generating_args.temperature"),
        "sampler.temperature"
    );
    for path in [
        "defaults",
        "hydra.run.dir",
        "system_envs.A",
        "actor_train.strategy_args.strategy_name",
        "actor_train.data_args.template",
        "actor_infer.generating_args.max_new_tokens",
        "reference.strategy_args.strategy_name",
        "length_loss_weight",
        // What only a critic has, without one.
        "value_clip",
    ] {
        let verdict = verdict(&file, path);
        assert!(
            matches!(verdict, Verdict::NoMeaning(_)),
            "{path}: {verdict}"
        );
    }
    for path in [
        "difficulty_loss_weight",
        // An update of ROLL has the completions of all workers.
        "actor_train.device_mapping",
        "actor_train.data_args.domain_interleave_probs.math_rule",
        "rewards.math_rule.worker_cls",
        "something_new",
    ] {
        let verdict = verdict(&file, path);
        assert!(
            matches!(verdict, Verdict::NotSupported(_)),
            "{path}: {verdict}"
        );
    }
    let lines: Vec<_> = file.keys.iter().map(|key| key.line).collect();
    assert!(lines.is_sorted() && lines[0] == Some(2));
}

#[test]
fn keys_that_are_left_out_are_listed_where_the_default_differs() {
    let text = "pretrain: m\nuse_kl_loss: true\nrewards: [{kind: numeric}]\nactor_train: {data_args: {file_name: a.jsonl}}\n";
    let file = roll(text);
    let keys: Vec<&str> = file.defaults.iter().map(|default| default.key).collect();
    let expected = [
        "adv_estimator",
        "rollout_batch_size",
        "num_return_sequences_in_group",
        "kl_loss_coef",
    ];
    assert_eq!(keys, expected);
    let absent = RunConfig::new(&file.document).unwrap();
    for default in &file.defaults {
        let with = |value: &str| roll(&format!("{text}{}: {value}\n", default.key));
        // The default here is what the run has. An estimator that is stated has a stage of tokens,
        // too, which spreads the advantage.
        let here = with(default.here);
        let stated = RunConfig::new(&here.document).unwrap();
        if default.key == "adv_estimator" {
            let [stated, absent] = [&stated, &absent].map(|run| &run.train.recipe.advantage);
            assert_eq!(stated.pipeline().sequence, absent.pipeline().sequence);
        } else {
            let [stated, absent] = [&stated, &absent].map(|run| run.to_value().unwrap());
            assert_eq!(stated, absent, "{default:?}");
        }
        assert!(here.defaults.iter().all(|other| other.key != default.key));
        // The other default is another run, or none without a critic.
        let theirs = RunConfig::new(&with(default.theirs).document);
        let differs =
            theirs.is_err() || theirs.unwrap().to_value().unwrap() != absent.to_value().unwrap();
        assert!(differs, "{default:?}");
    }
    // Neither has a KL without its switch.
    let file = roll(&text.replace("use_kl_loss: true\n", ""));
    assert!(
        file.defaults
            .iter()
            .all(|default| default.key != "kl_loss_coef")
    );
}

#[test]
fn the_schedule_of_a_file_of_roll_is_answered_by_both_keys() {
    let path = "actor_train.training_args.lr_scheduler_type";
    let file = |schedule: &str| {
        roll(&format!(
            "pretrain: m\n{schedule}actor_train: {{training_args: {{lr_scheduler_type: cosine}}}}\n"
        ))
    };
    for (schedule, expected) in [
        (
            "",
            "not supported: set schedule.decay and schedule.decay_until",
        ),
        (
            "schedule: {decay_until: 10}\n",
            "not supported: set schedule.decay and schedule.decay_until",
        ),
        (
            "schedule: {decay: cosine, decay_until: 10}\n",
            "no meaning here: schedule.decay and schedule.decay_until are set",
        ),
    ] {
        assert_eq!(verdict(&file(schedule), path).to_string(), expected);
    }
}

#[test]
fn our_keys_in_a_file_of_roll_come_first() {
    let file = roll(&format!(
        "{FILE}training: {{mini_batch_size: 128, compute_dtype: bf16}}\ndata: {{weights: [1]}}\n"
    ));
    for (path, place) in [
        (
            "actor_train.training_args.gradient_accumulation_steps",
            "training.mini_batch_size",
        ),
        ("actor_train.device_mapping", "training.mini_batch_size"),
        ("actor_train.model_args.dtype", "training.compute_dtype"),
        (
            "actor_train.data_args.domain_interleave_probs.math_rule",
            "data.weights",
        ),
    ] {
        let set = Verdict::NoMeaning(format!("{place} is set"));
        assert_eq!(verdict(&file, path), set, "{path}");
    }
    let rewards = "rewards:\n  math_rule:\n    worker_cls: a.b.D";
    let ours = "training: {mini_batch_size: 128}\nrewards: [{kind: numeric}]";
    let run = RunConfig::new(&roll(&FILE.replace(rewards, ours)).document).unwrap();
    assert_eq!(run.train.mini_batch_size, Some(128));
}

const DISTILLATION: &str = "\
pretrain: m
rewards: [{kind: numeric}]
actor_train: {data_args: {file_name: a.jsonl}}
TEACHER
";

#[test]
fn our_sections_stand_in_a_file_of_roll() {
    let ours = "is_pure_opd: true
teacher: {model: t}
recipe: {policy_loss: {distillation: {coef: 0.5}}}
demonstrations: {train: [b.jsonl]}
training: {demonstrations: {batch_size: 3}}
trackers: [{command: [cat]}]
rollout_log: {every_steps: 7}";
    let file = roll(&DISTILLATION.replace("TEACHER", ours));
    let used = |path: &str, place: &str| {
        assert_eq!(verdict(&file, path), Verdict::Used(place.to_owned()));
    };
    used("teacher.model", "teacher.model");
    let set = Verdict::NoMeaning("teacher.model is set".to_owned());
    assert_eq!(verdict(&file, "is_pure_opd"), set);
    let coef = "recipe.policy_loss.distillation.coef";
    used(coef, &format!("algorithm.{coef}"));
    let run = RunConfig::new(&file.document).unwrap();
    let term = run.train.recipe.policy_loss.distillation;
    assert_eq!(term.map(|term| term.coef), Some(0.5));
    assert_eq!(run.train.demonstrations.unwrap().batch_size, 3);
    assert_eq!(
        (run.trackers.len(), run.rollout_log.every_steps),
        (1, Some(7))
    );
}

/// A run without them would learn something else.
#[test]
fn distillation_of_roll_leads_to_the_keys_here() {
    let theirs = "is_pure_opd: true
opd_kl_coef: 0.5
teacher: {model_args: {model_name_or_path: t}}
student_train: {training_args: {learning_rate: 1.0e-6}}";
    let file = roll(&DISTILLATION.replace("TEACHER", theirs));
    for path in [
        "is_pure_opd",
        "opd_kl_coef",
        "teacher.model_args.model_name_or_path",
    ] {
        let verdict = verdict(&file, path).to_string();
        assert!(verdict.starts_with("not supported: set teacher.model and"));
    }
    let student = verdict(&file, "student_train.training_args.learning_rate");
    assert_eq!(student.to_string(), "not supported: name it actor_train");
}

#[test]
fn a_slip_in_a_file_of_roll_has_a_suggestion() {
    let file = roll(&DISTILLATION.replace("TEACHER", "pg_clip_hihg: 0.3"));
    assert_eq!(
        verdict(&file, "pg_clip_hihg").to_string(),
        "not supported: not a known key, did you mean `pg_clip_high`?"
    );
}

#[test]
fn used_keys_set_the_run() {
    let file = roll(&FILE.replace(
        "rewards:\n  math_rule:\n    worker_cls: a.b.D",
        "rewards: [{kind: numeric}]",
    ));
    let run = RunConfig::new(&file.document).unwrap();
    assert_eq!(run.model.path, Path::new("models/run-42"));
    assert_eq!(run.run_dir, Path::new("./output"));
    assert_eq!(
        (run.seed(), run.max_steps, run.max_prompt_tokens),
        (42, 100, 2048)
    );
    assert_eq!(run.checkpoint.every_steps, Some(20));
    assert_eq!(run.evaluation.every_steps, Some(5));
    assert_eq!(run.evaluation.sampler.temperature, 0.6);
    assert_eq!(run.data.train, [Path::new("data/math.jsonl")]);
    assert_eq!(run.data.held_out, [Path::new("data/test.jsonl")]);
    let train = &run.train;
    assert_eq!((train.prompts_per_step, train.num_generations), (16, 8));
    assert_eq!(
        (train.micro_batch_size, train.mini_batch_size),
        (2, Some(16))
    );
    assert_eq!(
        (train.optimizer.learning_rate, train.optimizer.weight_decay),
        (1e-6, 0.)
    );
    assert_eq!(train.schedule.warmup_steps, 20);
    assert_eq!(train.sampling.temperature, 0.99);
    assert_eq!(train.recipe.reward_shaping.norm.mean, NormLevel::Batch);
    assert_eq!(train.recipe.reward_shaping.clip, Some(10.));
    assert_eq!(
        train.sample_filters,
        [SampleFilter::ShorterThan { length: 8192 }]
    );
}

#[test]
fn an_error_has_the_key_and_the_line_of_the_file() {
    let file = roll(&FILE.replace("ppo_epochs: 1", "ppo_epochs: 0"));
    let error = RunConfig::new(&file.document).unwrap_err().to_string();
    assert!(error.starts_with("roll.yaml:20: ppo_epochs: 0"), "{error}");
}

#[test]
fn a_file_of_this_program_is_not_one_of_roll() {
    let text = "model: m\ndata: {train: a}\nalgorithm: {rollout_batch_size: 3}\n";
    let document = Document::from_yaml(Path::new("run.yaml"), text).unwrap();
    assert!(Import::new(&document).is_none());
}

#[test]
fn a_reference_to_itself_is_an_error() {
    let file = roll("pretrain: ${pretrain}\nseed: ${a.b}\n");
    assert_eq!(
        verdict(&file, "pretrain"),
        Verdict::Used("model.path".to_owned())
    );
}

/// Many keys that name one long text would take far more memory than the file.
#[test]
fn interpolation_is_bounded() {
    let model = |length: usize| {
        let long = "y".repeat(length);
        let file = roll(&format!(
            "a: {long}\nb: ${{a}}\nc: ${{a}}\nd: m\nnum_gpus_per_node: 1\npretrain: ${{d}}\n\
             data: {{train: t}}\nrewards: [{{kind: exact}}]\n"
        ));
        RunConfig::new(&file.document).unwrap().model.path
    };
    assert_eq!(model(10), Path::new("m"));
    assert_eq!(model(600_000), Path::new("${d}"));
}
