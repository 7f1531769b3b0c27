//! The policy as its own teacher.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor, safetensors};
use candle_grpo_core::inputs::Input;
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::{
    DistillationLoss, KlLoss, PolicyLoss, Recipe, TeacherTerm, TeacherTermForm,
};
use candle_grpo_nn::optim::{MasterWeights, Sharding};
use candle_grpo_nn::{DecoderConfig, Lora, LoraConfig};
use candle_grpo_test_support::{device, message, stay_on_cpu};
use candle_grpo_train::learn::step::{self, Needs, Passes, TaughtBy};
use candle_grpo_train::learn::{
    MemoryPlan, Models, Ranks, Reference, ReferenceRefresh, SelfTeacherConfig, ShownTexts,
    SiblingConfig, TeacherPart,
};
use candle_grpo_train::rewards::{Score, Scores};
use candle_grpo_train::run::RolloutRecord;
use candle_grpo_train::{
    ChatTemplate, ComputeDType, FinishReason, Prompt, RewardFunction, Sample, StepMetrics,
    TokenBatch, TrainConfig, Trainer, TrainerParts, WeightedRewards,
};
use rstest::rstest;
use serde_json::{Value, json};

use crate::common::{
    self, assert_ranks_agree, digest, max_difference, model, parameters, parts, pretrained,
    prompts, run, step_batch, tokenizer, trainer_of,
};

fn nothing(_: &Sample) -> f32 {
    0.
}

/// Every `every_steps` steps, a mixture with this share of the policy.
fn refresh(every_steps: usize, alpha: f64) -> Option<ReferenceRefresh> {
    Some(ReferenceRefresh { every_steps, alpha })
}

/// A teacher that reads `prompt`.
fn reading(prompt: &str, refresh: Option<ReferenceRefresh>) -> TeacherPart {
    TeacherPart::Own {
        config: SelfTeacherConfig {
            prompt: Some(prompt.to_owned()),
            refresh,
            ..SelfTeacherConfig::default()
        },
        chat_template: None,
    }
}

/// A KL term to the reference, and the same term to the teacher, in a policy that its rewards
/// change.
fn two_terms() -> TrainConfig {
    let mut config = common::config();
    let form = TeacherTermForm::Loss {
        kl: Kl::new(KlEstimator::K3),
    };
    config.recipe.policy_loss = PolicyLoss {
        kl: Some(KlLoss::k3(0.1)),
        distillation: Some(TeacherTerm {
            form,
            ..TeacherTerm::new(0.1)
        }),
        ..PolicyLoss::grpo()
    };
    config.optimizer.learning_rate = 1e-2;
    config
}

fn with_adapters(config: TrainConfig) -> TrainConfig {
    TrainConfig {
        adapters: Some(LoraConfig::all_linear(2, 4.)),
        ..config
    }
}

fn in_bf16(config: TrainConfig) -> TrainConfig {
    TrainConfig {
        compute_dtype: ComputeDType::Bf16,
        ..config
    }
}

/// The columns of a teacher are those of the tokens of the policy, after another prompt.
#[test]
fn a_teacher_scores_the_same_completion_after_its_own_prompt() -> anyhow::Result<()> {
    stay_on_cpu();
    let config = two_terms();
    let mut models = Models::new(model(), parameters(), &config)?;
    let teacher = || Reference::new(&model(), &parameters(), ComputeDType::F32);
    models.learn_from(&TeacherPart::other(teacher()?))?;
    let prompts = prompts(&["abc", "d", "ee"]);
    let mut batch = step_batch(&models, &prompts, &config)?;
    let read: [&[u32]; 3] = [&[5, 4, 3, 2, 1], &[2], &[1, 1]];
    let teachers = |own: &[u32]| {
        let teacher = |(prompt, read): (&Prompt, &[u32])| TaughtBy {
            prompt: Some(([own, &prompt.tokens].concat(), read.to_vec())),
            ..TaughtBy::default()
        };
        let groups = prompts.iter().zip(read).map(teacher);
        let all = groups.flat_map(|teacher| vec![Some(teacher); config.num_generations]);
        all.collect::<Vec<_>>()
    };
    let ranks = Ranks::default();
    let passes = Passes::new(&config, &ranks)?;
    let needs = Needs::new(&config, None).all();
    let plain = batch.clone();
    batch = batch.with_teachers(teachers(&[]))?;
    step::signals(&mut batch, needs, &models, &config, passes)?;
    let found = batch.input(Input::TeacherLogProbs).unwrap();

    let responses = batch.tokens().sequences().iter().enumerate();
    let expected: Vec<_> = responses
        .map(|(i, sequence)| (read[i / config.num_generations], sequence.response()))
        .collect();
    let expected = TokenBatch::new(&expected, device())?;
    let expected = teacher()?.log_probs(&expected, config.sampling.temperature)?;
    assert_eq!(found.to_vec2::<f32>()?, expected.to_vec2::<f32>()?);
    let own = batch.input(Input::RefLogProbs).unwrap();
    assert!(max_difference(found, own) > 0.1);

    let wrong = |teachers| message(plain.clone().with_teachers(teachers));
    assert_eq!(
        wrong(vec![None]),
        "teachers: 1, must be one for each of 12 completions"
    );
    assert!(wrong(teachers(&[1])).starts_with("sequence 0: its prompt does not begin with"));

    // A branch of a trajectory goes on after the prompt of its row, for the teacher as well.
    let teacher = TaughtBy {
        prompt: Some((prompts[0].tokens[..1].to_vec(), vec![5, 4])),
        ..TaughtBy::default()
    };
    let mut by = vec![None; 12];
    by[0] = Some(teacher);
    let branch = plain.with_teachers(by)?;
    let read = branch.tokens().sequences()[0].for_teacher();
    assert_eq!(read.prompt(), [&[5, 4], &prompts[0].tokens[1..]].concat());
    Ok(())
}

/// With the prompt of the policy, the teacher is a reference with the same schedule.
#[rstest]
#[case::frozen(None)]
#[case::copied(refresh(2, 1.))]
#[case::moving_average(refresh(1, 0.25))]
fn a_teacher_follows_the_policy_as_a_reference_does(
    #[case] refresh: Option<ReferenceRefresh>,
    #[values(false, true)] bf16: bool,
) {
    let config = if bf16 {
        in_bf16(two_terms())
    } else {
        two_terms()
    };
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(reading("{prompt}", refresh)),
        ..parts(
            digest,
            TrainConfig {
                reference_refresh: refresh,
                ..config
            },
        )
    });
    let metrics = run(&mut trainer, 5);
    let terms = |step: &StepMetrics| (step.policy["kl"], step.policy["teacher_kl"]);
    for step in &metrics {
        let (reference, teacher) = terms(step);
        assert_eq!(reference, teacher, "step {}", step.step);
    }
    assert!(terms(&metrics[1]).1 > 1e-5, "{:?}", terms(&metrics[1]));
    // After two steps the copy is the policy.
    let is_copied = refresh.is_some_and(|refresh| refresh.alpha == 1.);
    assert_eq!(terms(&metrics[2]).1 < 1e-6, is_copied);
}

/// The frozen teacher of adapters is the policy without them, as the reference is.
#[rstest]
fn the_frozen_teacher_of_adapters_is_the_base(#[values(false, true)] bf16: bool) {
    let config = with_adapters(two_terms());
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(reading("{prompt}", None)),
        ..parts(digest, if bf16 { in_bf16(config) } else { config })
    });
    let metrics = run(&mut trainer, 3);
    for step in &metrics {
        assert_eq!(step.policy["kl"], step.policy["teacher_kl"]);
    }
    assert!(metrics[2].policy["teacher_kl"] > 1e-5);
}

fn save(trainer: &Trainer, folder: &Path) {
    trainer
        .write_checkpoint(folder, &pretrained(), ComputeDType::F32)
        .unwrap();
}

fn adapters_in(folder: &Path) -> HashMap<String, Tensor> {
    let lora = Lora::load(&folder.join("adapter"), &model(), &Device::Cpu).unwrap();
    lora.parameters().frozen_copy().unwrap()
}

#[rstest]
fn a_teacher_follows_the_adapters_alone(#[values(false, true)] bf16: bool) {
    let config = with_adapters(two_terms());
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(reading("{prompt}", refresh(1, 0.25))),
        ..parts(digest, if bf16 { in_bf16(config) } else { config })
    });
    let (before, after) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    save(&trainer, before.path());
    let mut metrics = run(&mut trainer, 1);
    save(&trainer, after.path());
    let (old, new) = (adapters_in(before.path()), adapters_in(after.path()));
    let path = after.path().join("teacher.safetensors");
    let teacher = safetensors::load(path, &Device::Cpu).unwrap();
    assert_eq!(teacher.len(), new.len());
    for (name, found) in &teacher {
        let mixed = ((&old[name] * 0.75).unwrap() + (&new[name] * 0.25).unwrap()).unwrap();
        assert!(max_difference(found, &mixed) < 1e-7, "{name}");
    }
    // It computes with them: nearer to the policy than the base is.
    metrics.extend(run(&mut trainer, 2));
    let last = &metrics[2].policy;
    assert!(0. < last["teacher_kl"] && last["teacher_kl"] < last["kl"]);
}

#[rstest]
#[case::frozen(two_terms(), None)]
#[case::copied(two_terms(), refresh(2, 1.))]
#[case::moving_average(two_terms(), refresh(1, 0.1))]
#[case::between_copies(two_terms(), refresh(3, 1.))]
#[case::bf16(in_bf16(two_terms()), refresh(1, 0.1))]
#[case::adapters(with_adapters(two_terms()), refresh(1, 0.1))]
#[case::adapters_in_bf16(in_bf16(with_adapters(two_terms())), refresh(2, 1.))]
#[case::frozen_with_adapters(with_adapters(two_terms()), None)]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    #[case] config: TrainConfig,
    #[case] refresh: Option<ReferenceRefresh>,
) {
    let build = || {
        trainer_of(TrainerParts {
            teacher: Some(reading("{prompt}ab", refresh)),
            ..parts(digest, config.clone())
        })
    };
    let folder = tempfile::tempdir().unwrap();
    let mut whole = build();
    run(&mut whole, 2);
    save(&whole, folder.path());
    let mut resumed = build();
    resumed.load_state(folder.path()).unwrap();
    assert_eq!(run(&mut resumed, 3), run(&mut whole, 3));
    let has_teacher = folder.path().join("teacher.safetensors").exists();
    assert_eq!(has_teacher, refresh.is_some());
}

#[test]
fn a_run_that_resumes_with_another_schedule_is_an_error() {
    let build = |refresh| {
        trainer_of(TrainerParts {
            teacher: Some(reading("{prompt}ab", refresh)),
            ..parts(digest, two_terms())
        })
    };
    for (from, to) in [(None, refresh(1, 0.5)), (refresh(1, 0.5), None)] {
        let folder = tempfile::tempdir().unwrap();
        save(&build(from), folder.path());
        let error = build(to).load_state(folder.path()).unwrap_err();
        let words = "teacher.safetensors: a teacher cannot begin to follow the policy, or cease to";
        assert!(format!("{error:#}").contains(words), "{error:#}");
    }
}

/// A frozen teacher is not saved, so the run must resume from the same model.
#[test]
fn a_frozen_teacher_needs_the_first_model() {
    let mut config = two_terms();
    config.recipe.policy_loss.kl = None;
    let build = |seed: u64, refresh| {
        trainer_of(TrainerParts {
            parameters: common::drawn_parameters(&model(), seed, device()),
            teacher: Some(reading("{prompt}ab", refresh)),
            ..parts(digest, config.clone())
        })
    };
    let folder = tempfile::tempdir().unwrap();
    save(&build(3, None), folder.path());
    build(3, None).load_state(folder.path()).unwrap();
    let error = build(4, None).load_state(folder.path()).unwrap_err();
    let words = "the run began with other weights";
    assert!(format!("{error:#}").contains(words), "{error:#}");
    // One that follows the policy is saved.
    let folder = tempfile::tempdir().unwrap();
    let follows = || refresh(1, 0.5);
    save(&build(3, follows()), folder.path());
    build(4, follows()).load_state(folder.path()).unwrap();
}

#[rstest]
#[case::log_probs(two_terms())]
#[case::distributions(distilled())]
fn the_steps_of_ranks_are_those_of_one_rank(#[case] config: TrainConfig) {
    stay_on_cpu();
    let build = || TrainerParts {
        teacher: Some(reading("{prompt}cd", refresh(1, 0.5))),
        ..parts(digest, config.clone())
    };
    assert_ranks_agree(&[2, 5], build, 3);
}

/// Learns the distributions of its teacher alone.
fn distilled() -> TrainConfig {
    let mut config = common::config();
    config.recipe = Recipe {
        distillation_loss: Some(DistillationLoss::default()),
        ..Recipe::gkd()
    };
    config.optimizer.learning_rate = 1e-2;
    config
}

/// The policy learns to answer as if it had read more.
#[test]
fn the_policy_approaches_itself_with_another_prompt() {
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(reading("{prompt}bdb", None)),
        ..parts(nothing, distilled())
    });
    let metrics = run(&mut trainer, 30);
    let mean = |steps: &[StepMetrics]| {
        let all = steps.iter().map(|step| step.policy["divergence"]);
        all.sum::<f64>() / steps.len() as f64
    };
    let (first, last) = (mean(&metrics[..5]), mean(&metrics[25..]));
    assert!(first > 0.01 && last < 0.6 * first, "{first} {last}");
}

#[test]
fn the_plan_of_memory_has_the_copy() {
    let numbers: usize = parameters().iter().map(|(_, x)| x.elem_count()).sum();
    let adapters = with_adapters(two_terms());
    let lora = LoraConfig::all_linear(2, 4.);
    let lora = Lora::init(lora, &model(), 0, &Device::Cpu).unwrap();
    let adapted: usize = lora.parameters().iter().map(|(_, x)| x.elem_count()).sum();
    let ema = refresh(1, 0.1);
    for (config, refresh, bytes) in [
        (two_terms(), None, 4 * numbers),
        (two_terms(), ema, 4 * numbers),
        (in_bf16(two_terms()), None, 2 * numbers),
        (in_bf16(two_terms()), ema, 6 * numbers),
        (adapters.clone(), None, 0),
        (adapters.clone(), ema, 4 * adapted),
        (in_bf16(adapters), ema, 6 * adapted),
    ] {
        let plan = MemoryPlan::new(&model(), &config, 3, 0).unwrap();
        let teacher = SelfTeacherConfig {
            refresh,
            ..SelfTeacherConfig::default()
        };
        let with = |tokens| plan.with_self_teacher(&model(), &config, (&teacher, tokens), 1);
        let short = with(3).unwrap();
        assert_eq!(short.teacher, bytes, "{refresh:?}");
        assert_eq!(short.peak(), plan.peak() + bytes);
        // A pass over long prompts takes more than an update.
        assert!(with(100_000).unwrap().training > plan.training);
    }
}

fn with_sibling(config: SelfTeacherConfig, min_reward: f64) -> SelfTeacherConfig {
    SelfTeacherConfig {
        sibling: Some(SiblingConfig { min_reward }),
        ..config
    }
}

/// Checks a step of the policy that learns from itself, beside the same step by hand. `read`
/// returns what the teacher of a completion in a group reads.
fn assert_teacher_reads(
    config: SelfTeacherConfig,
    reward: impl RewardFunction + 'static,
    read: impl Fn(&[RolloutRecord], usize) -> Option<String>,
) {
    let teacher = TeacherPart::Own {
        config,
        chat_template: None,
    };
    let mut config = two_terms();
    config.recipe.policy_loss.kl = None;
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(teacher),
        ..parts(reward, config.clone())
    });
    let metrics = trainer.step().unwrap();
    let records = trainer.rollouts(&Default::default()).unwrap();
    let teacher = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let tokenizer = tokenizer();
    let encode = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    let (mut sum, mut count, mut taught) = (0., 0., 0);
    for group in records.chunks(config.num_generations) {
        for (i, record) in group.iter().enumerate() {
            let Some(read) = read(group, i) else {
                continue;
            };
            taught += 1;
            let response = response_of(record, &encode);
            let prompt = encode(&record.prompt);
            let log_probs = |prompt: &[u32]| {
                let batch = TokenBatch::new(&[(prompt, &response)], device()).unwrap();
                let found = teacher
                    .log_probs(&batch, config.sampling.temperature)
                    .unwrap();
                found.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            for (read, own) in log_probs(&encode(&read)).iter().zip(log_probs(&prompt)) {
                sum += f64::from(read - own);
                count += 1.;
            }
        }
    }
    assert!(0 < taught && taught < records.len(), "{taught}");
    let share = taught as f64 / records.len() as f64;
    assert!((metrics.policy["teacher_share"] - share).abs() < 1e-12);
    let found = metrics.policy["teacher_log_ratio"];
    assert!(
        (found - sum / count).abs() < 1e-4,
        "{found} {}",
        sum / count
    );
}

/// The best other completion of the group with at least this reward.
fn best_sibling(group: &[RolloutRecord], of: usize, min_reward: f32) -> Option<&str> {
    let others = group.iter().enumerate().filter(|(j, _)| *j != of);
    let mut best: Option<&RolloutRecord> = None;
    for (_, other) in others {
        let is_better = best.is_none_or(|best| other.reward > best.reward);
        if other.reward >= Some(min_reward) && is_better {
            best = Some(other);
        }
    }
    best.map(|best| best.completion.as_str())
}

#[test]
fn a_teacher_sees_the_best_sibling() {
    stay_on_cpu();
    let config = with_sibling(source(Some("{prompt}e{sibling}"), None), 0.5);
    assert_teacher_reads(config, digest, |group, i| {
        let sibling = best_sibling(group, i, 0.5)?;
        Some(format!("{}e{sibling}", group[i].prompt))
    });
}

/// Repeats the second letter of a completion, if it has one.
struct Critic;

fn criticism(completion: &str) -> Option<String> {
    completion
        .chars()
        .nth(1)
        .map(|letter| letter.to_string().repeat(3))
}

impl RewardFunction for Critic {
    fn score(&self, samples: &[Sample]) -> anyhow::Result<Vec<Score>> {
        Ok(samples.iter().map(|sample| digest(sample).into()).collect())
    }

    fn scores(&self, samples: &[Sample]) -> anyhow::Result<Scores> {
        let feedback = samples.iter().map(|sample| criticism(sample.completion));
        Scores::new(self.score(samples)?, samples)?.with_feedback(feedback.collect())
    }
}

#[test]
fn a_teacher_sees_the_feedback() {
    stay_on_cpu();
    let shows = |prompt| SelfTeacherConfig {
        feedback: true,
        ..source(Some(prompt), None)
    };
    // A sum passes on what its terms say.
    let reward = || WeightedRewards::new().with("critic", 0.5, Critic);
    assert_teacher_reads(shows("{feedback}{prompt}d"), reward(), |group, i| {
        let feedback = criticism(&group[i].completion)?;
        Some(format!("{feedback}{}d", group[i].prompt))
    });
    let both = with_sibling(shows("{feedback}{prompt}{sibling}"), 0.1);
    assert_teacher_reads(both, reward(), |group, i| {
        let feedback = criticism(&group[i].completion)?;
        let sibling = best_sibling(group, i, 0.1)?;
        Some(format!("{feedback}{}{sibling}", group[i].prompt))
    });
}

/// A teacher with few positions, or with a long prompt.
#[rstest]
#[case::another(TeacherPart::other(with_positions(8)), 0, 8)]
#[case::itself(reading(&format!("{{prompt}}{}", "ab".repeat(8)), None), 16, 24)]
fn a_completion_that_its_teacher_cannot_read_has_none(
    #[case] teacher: TeacherPart,
    #[case] added: usize,
    #[case] positions: usize,
) {
    let mut config = two_terms();
    config.recipe.policy_loss.kl = None;
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(teacher),
        ..parts(digest, config)
    });
    let metrics = trainer.step().unwrap();
    let records = trainer.rollouts(&Default::default()).unwrap();
    let lengths = records
        .iter()
        .map(|x| x.prompt.len() + added + x.response_length);
    let taught = lengths.filter(|&length| length <= positions).count();
    assert!(0 < taught && taught < records.len(), "{taught}");
    let share = taught as f64 / records.len() as f64;
    assert!((metrics.policy["teacher_share"] - share).abs() < 1e-12);
    // A single teacher has no metrics of its own.
    assert!(!metrics.policy.keys().any(|name| name.contains('/')));
}

fn with_positions(max_position_embeddings: usize) -> Reference {
    let model = DecoderConfig {
        max_position_embeddings,
        ..model()
    };
    Reference::new(&model, &parameters(), ComputeDType::F32).unwrap()
}

/// The tokens of a completion, which ends with a stop token unless it is too long.
fn response_of(record: &RolloutRecord, encode: &dyn Fn(&str) -> Vec<u32>) -> Vec<u32> {
    let mut tokens = encode(&record.completion);
    if record.finish_reason == FinishReason::StopToken {
        tokens.push(common::END);
    }
    assert_eq!(tokens.len(), record.response_length);
    tokens
}

/// The prompt of a row with these columns.
fn prompt(text: &str, columns: Value) -> Prompt {
    Prompt::new(7, text, columns, &tokenizer()).unwrap()
}

fn source(prompt: Option<&str>, prompt_column: Option<&str>) -> SelfTeacherConfig {
    SelfTeacherConfig {
        prompt: prompt.map(str::to_owned),
        prompt_column: prompt_column.map(str::to_owned),
        ..SelfTeacherConfig::default()
    }
}

/// The text of the tokens that a teacher reads.
fn text(
    config: &SelfTeacherConfig,
    template: Option<&str>,
    prompt: &Prompt,
) -> anyhow::Result<String> {
    let template = template.map(ChatTemplate::new).transpose()?;
    let tokens = config.prompts(template)?;
    let tokens = tokens.tokens(prompt, ShownTexts::default(), &tokenizer())?;
    let text = tokenizer().decode(&tokens, false);
    text.map_err(|error| anyhow::anyhow!("{error}"))
}

/// Prints roles and contents: a user's message after "a", an assistant's after "b".
const CHAT: &str = "{% for m in messages %}{{ 'a' if m.role == 'user' else 'e' }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}";

#[test]
fn a_teacher_reads_a_template_or_a_column() {
    let columns = json!({
        "q": "cd", "solution": "ee", "messages": [{"role": "user", "content": "cc"}], "number": 3,
    });
    let plain = prompt("cd", columns.clone());
    let template = source(Some("{prompt}{solution}{q}"), None);
    assert_eq!(text(&template, None, &plain).unwrap(), "cdeecd");
    let column = source(None, Some("solution"));
    assert_eq!(text(&column, None, &plain).unwrap(), "ee");

    let messages = vec![
        json!({"role": "system", "content": "d"}),
        json!({"role": "user", "content": "cd"}),
    ];
    let chat = prompt("edacdb", columns.clone()).with_messages(messages.clone());
    assert_eq!(text(&template, Some(CHAT), &chat).unwrap(), "edacdeecdb");
    assert_eq!(text(&column, Some(CHAT), &chat).unwrap(), "edaeeb");
    let whole = source(None, Some("messages"));
    assert_eq!(text(&whole, Some(CHAT), &chat).unwrap(), "accb");

    // The start of the answer stays.
    let mut begun = messages.clone();
    begun.push(json!({"role": "assistant", "content": "ad"}));
    let begun = prompt("edacdbad", columns.clone()).with_messages(begun);
    assert_eq!(text(&template, Some(CHAT), &begun).unwrap(), "edacdeecdbad");
    assert_eq!(text(&whole, Some(CHAT), &begun).unwrap(), "accbad");

    let tools = "{{ tools[0] }}{{ flag }}{{ messages[0].content }}";
    let variables = json!({"flag": "c"}).as_object().unwrap().clone();
    let with_row = chat.clone().with_tools(Some(json!(["e"])));
    let with_row = with_row.with_variables(variables);
    assert_eq!(text(&whole, Some(tools), &with_row).unwrap(), "eccc");

    let system = prompt("ed", columns.clone()).with_messages(messages[..1].to_vec());
    for (config, template, prompt, words) in [
        (
            source(Some("{none}"), None),
            None,
            &plain,
            "column \"none\" of \"{none}\": absent",
        ),
        (
            source(None, Some("none")),
            None,
            &plain,
            "column \"none\": absent, the row has",
        ),
        (
            source(None, Some("number")),
            None,
            &plain,
            "column \"number\": a number, must be a text or messages",
        ),
        (
            whole,
            None,
            &plain,
            "column \"messages\": messages, must be a text",
        ),
        (
            template.clone(),
            None,
            &chat,
            "the model has no chat template",
        ),
        (
            template,
            Some(CHAT),
            &system,
            "has the role \"system\", must be user",
        ),
    ] {
        let error = format!("{:#}", text(&config, template, prompt).unwrap_err());
        assert!(error.starts_with("the teacher's prompt 7: "), "{error}");
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn settings_of_a_teacher_that_contradict_each_other_are_named() {
    let train = TrainConfig::default();
    for (config, words) in [
        (
            source(None, None),
            "prompt: absent, must be given, or prompt_column",
        ),
        (
            source(Some("a"), Some("b")),
            "prompt_column: given, must be absent with prompt",
        ),
        (
            source(Some("{"), None),
            "prompt: \"{\", must close each brace",
        ),
        (
            with_sibling(source(Some("{prompt}"), None), 1.),
            "sibling: given, must be absent unless prompt contains {sibling}",
        ),
        (
            with_sibling(source(None, Some("a")), 1.),
            "sibling: given, must be absent unless prompt contains {sibling}",
        ),
        (
            with_sibling(source(Some("{sibling}"), None), f64::NAN),
            "sibling.min_reward: NaN, must be finite",
        ),
        (
            SelfTeacherConfig {
                feedback: true,
                ..source(Some("{prompt}"), None)
            },
            "feedback: true, must be false unless prompt contains {feedback}",
        ),
        (
            SelfTeacherConfig {
                refresh: refresh(0, 1.),
                ..source(Some("a"), None)
            },
            "refresh.every_steps: 0, must be at least 1",
        ),
        (
            SelfTeacherConfig {
                refresh: refresh(1, 0.),
                ..source(Some("a"), None)
            },
            "refresh.alpha: 0, must be",
        ),
    ] {
        let error = message(config.validate(&train));
        assert!(error.starts_with(words), "{error}");
        let mut parts = parts(digest, two_terms());
        parts.teacher = Some(TeacherPart::Own {
            config,
            chat_template: None,
        });
        let error = message(Trainer::new(parts));
        assert!(error.starts_with(&format!("teacher.{words}")), "{error}");
    }
    let alone = TrainConfig {
        num_generations: 1,
        ..TrainConfig::default()
    };
    let shown = with_sibling(source(Some("{sibling}"), None), 1.);
    let words = "sibling: given, must be absent with num_generations: 1";
    assert!(message(shown.validate(&alone)).starts_with(words));
    shown.validate(&train).unwrap();
    let divided = TrainConfig {
        sharding: Sharding::Resident,
        ..in_bf16(two_terms())
    };
    let follows = SelfTeacherConfig {
        refresh: refresh(1, 0.5),
        ..source(Some("a"), None)
    };
    let full = TrainConfig {
        sharding: Sharding::Full,
        ..two_terms()
    };
    let words = "refresh: given, must be absent with sharding: full, as it reads whole weights";
    assert_eq!(message(follows.validate(&full)), words);
    source(Some("a"), None).validate(&full).unwrap();
    let mut distilled = full.clone();
    distilled.recipe.distillation_loss = Some(DistillationLoss::default());
    let words = "recipe.distillation_loss: given, must be absent with sharding: full and the policy as a teacher, whose output layer is divided";
    assert_eq!(message(source(Some("a"), None).validate(&distilled)), words);
    follows.validate(&with_adapters(full)).unwrap();
    let words = "refresh: given, must be absent with sharding: resident, as it reads whole weights";
    assert_eq!(message(follows.validate(&divided)), words);
    source(Some("a"), None).validate(&divided).unwrap();
    follows.validate(&with_adapters(divided)).unwrap();
}

/// Its weights and those of the reference are divided as well. A teacher of adapters that follows
/// the policy shares them.
#[rstest]
#[case::frozen(two_terms(), None)]
#[case::under_adapters(with_adapters(two_terms()), None)]
#[case::adapters_that_it_follows(with_adapters(two_terms()), refresh(1, 0.5))]
fn ranks_that_divide_all_weights_have_the_steps_of_one_rank(
    #[case] config: TrainConfig,
    #[case] refresh: Option<ReferenceRefresh>,
) {
    stay_on_cpu();
    let config = TrainConfig {
        sharding: Sharding::Full,
        ..config
    };
    let build = || TrainerParts {
        teacher: Some(reading("b{prompt}", refresh)),
        ..parts(digest, config.clone())
    };
    assert_ranks_agree(&[2, 3], build, 3);
}

/// Master weights in bf16 are averaged in f32.
#[test]
fn a_teacher_follows_master_weights_in_bf16() {
    let mut config = in_bf16(two_terms());
    config.optimizer.master_weights = MasterWeights::Bf16;
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(reading("{prompt}", refresh(1, 0.5))),
        ..parts(digest, config)
    });
    let metrics = run(&mut trainer, 3);
    let last = &metrics[2].policy;
    assert!(0. < last["teacher_kl"] && last["teacher_kl"] < last["kl"]);
}
