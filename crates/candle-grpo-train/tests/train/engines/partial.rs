//! Completions that servers sample over several calls.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_loss::RolloutCorrection;
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{
    CompletionSeed, Deliver, Engine, GenerationBatch, Partial, PolicyWeights, PromptRequest,
    RolloutConfig, WeightSync,
};
use candle_grpo_train::{
    Completion, FinishReason, Generator, Interrupted, Progress, SamplingConfig, StepMetrics,
    TrainerParts,
};
use rstest::rstest;
use serde_json::{Value, json};

use super::fake_server::Fault;
use super::served_policy::Draw;
use super::{Policy, Setup};
use crate::common::{self, digest, model, prompts, sampling, tokenizer};

/// With it, all completions have more than two tokens.
const SEED: u64 = 5;

/// Completions by their places.
pub(super) type Places = BTreeMap<usize, Completion>;

/// Samples two completions for each of three prompts until `enough` have ended. Returns these, and
/// the beginnings of others.
pub(super) fn call(
    client: &ServerGenerator,
    sampling: &SamplingConfig,
    begun: &Places,
    enough: usize,
    progress: &dyn Progress,
) -> Result<(Places, Places)> {
    let prompts = prompts(&["abc", "d", "ee"]);
    let requests: Vec<PromptRequest<'_>> = prompts
        .iter()
        .map(|prompt| PromptRequest {
            tokens: &prompt.tokens,
            seeds: (0..2)
                .map(|sample| CompletionSeed {
                    seed: SEED,
                    stream: 1,
                    prompt: prompt.index,
                    sample,
                    turn: 0,
                })
                .collect(),
            max_new_tokens: sampling.max_new_tokens,
        })
        .collect();
    let ended = AtomicUsize::new(0);
    let unfinished = Mutex::new(Places::new());
    let begun: Vec<Option<Completion>> = (0..6).map(|place| begun.get(&place).cloned()).collect();
    let partial = Partial {
        begun: &begun,
        is_enough: &|| ended.load(Ordering::Relaxed) >= enough,
        unfinished: &|place, completion| {
            assert!(
                unfinished
                    .lock()
                    .unwrap()
                    .insert(place, completion)
                    .is_none()
            );
            Ok(())
        },
    };
    let decode = {
        let tokenizer = tokenizer();
        move |tokens: &[u32]| Ok(tokenizer.decode(tokens, false).unwrap())
    };
    let batch = GenerationBatch {
        prompts: &requests,
        sampling,
        decode: Some(&decode),
        progress,
        records_experts: false,
        partial: Some(partial),
    };
    let mut delivered = Places::new();
    client.generate(&batch, &mut |place, completion| {
        assert!(delivered.insert(place, completion).is_none());
        ended.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })?;
    Ok((delivered, unfinished.into_inner().unwrap()))
}

/// Samples four completions, while those of the prompt "d" wait after `TOKENS` tokens.
fn interrupted<const TOKENS: usize>(
    setup: &Setup,
    client: &ServerGenerator,
    progress: &dyn Progress,
) -> Result<(Places, Places)> {
    for server in &setup.servers {
        server.engine().waits_after = Box::new(|draw| (draw.prompt.len() == 1).then_some(TOKENS));
    }
    call(client, &sampling(), &Places::new(), 4, progress)
}

/// A server with the policy after one step, and its client.
fn started(engine: Engine, sync: WeightSync) -> (Setup, ServerGenerator) {
    let setup = Setup::new(engine, sync, 1);
    let client = setup.client(&setup.config(), &sampling());
    setup.policy(1).push(&client).unwrap();
    (setup, client)
}

/// The path that ends requests.
fn abort_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang => "/abort_request",
        _ => "/abort_requests",
    }
}

/// Checks that each token has the log-prob of the weights of its version, which are in `policies`.
pub(super) fn assert_drawn(
    prompt: &[u32],
    completion: &Completion,
    policies: &BTreeMap<u64, Policy>,
) {
    let log_probs = completion.log_probs.as_ref().unwrap();
    assert_eq!(*log_probs, completion.drawn_log_probs);
    for (at, version) in completion.weight_versions.iter().enumerate() {
        let merged = policies[version].weights(&model()).merged().unwrap();
        let context = [prompt, &completion.tokens[..at]].concat();
        let (token, log_prob) = (vec![completion.tokens[at]], vec![log_probs[at]]);
        let answer = (context.as_slice(), &token, &log_prob);
        let difference = super::difference([answer], &merged, 1.);
        assert!(difference < 1e-5, "{difference} at {at} in {completion:?}");
    }
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Sglang, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
fn interrupted_completions_continue_with_other_weights(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
) {
    let (setup, client) = started(engine, sync);
    let (ended, begun) = interrupted::<2>(&setup, &client, &NoProgress).unwrap();
    assert!(ended.keys().eq(&[0, 1, 4, 5]), "{ended:?}");
    assert!(begun.keys().eq(&[2, 3]), "{begun:?}");
    for completion in begun.values() {
        assert_eq!(completion.tokens.len(), 2);
        assert_eq!(completion.weight_versions, [1, 1]);
    }

    setup.policy(2).push(&client).unwrap();
    let requests: Arc<Mutex<Vec<Value>>> = Arc::default();
    let (log, path) = (Arc::clone(&requests), setup.draw_path());
    setup.servers[0].set_faults(move |request| {
        if request.path() == path {
            let body = serde_json::from_slice(&request.body).unwrap();
            log.lock().unwrap().push(body);
        }
        None
    });
    let (ended, unfinished) = call(&client, &sampling(), &begun, 6, &NoProgress).unwrap();
    assert!(unfinished.is_empty());
    let policies = [1, 2].map(|version| (version, setup.policy(version)));
    let policies = BTreeMap::from(policies);
    let d = prompts(&["d"])[0].tokens.clone();
    for (place, begun) in &begun {
        let completion = &ended[place];
        assert!(completion.tokens.len() <= sampling().max_new_tokens);
        assert_eq!(completion.tokens[..2], begun.tokens);
        assert_eq!(completion.drawn_log_probs[..2], begun.drawn_log_probs);
        let versions = &completion.weight_versions;
        assert_eq!(versions[..2], [1, 1]);
        assert!(versions[2..].iter().all(|version| *version == 2) && versions.len() > 2);
        assert_drawn(&d, completion, &policies);
    }
    // The rest of each was requested after its first tokens, with random numbers of its own.
    let requests = requests.lock().unwrap();
    for (place, begun) in &begun {
        let prompt = json!([&d[..], &begun.tokens].concat());
        let request = requests.iter().find(|request| match engine {
            Engine::Sglang => request["input_ids"] == prompt,
            _ => request["prompt"] == prompt,
        });
        let request = request.unwrap();
        let (most, seed) = match engine {
            Engine::Sglang => {
                let sampling = &request["sampling_params"];
                (&sampling["max_new_tokens"], &sampling["sampling_seed"])
            }
            _ => (&request["max_tokens"], &request["seed"]),
        };
        assert_eq!(*most, 6);
        let first = CompletionSeed {
            seed: SEED,
            stream: 1,
            prompt: 1,
            sample: *place as u64 % 2,
            turn: 0,
        };
        assert_eq!(*seed, first.to_u64_after(2) >> 1);
        assert_ne!(*seed, first.to_u64() >> 1);
    }
}

/// An abort may reach a server within the step that samples the last token.
#[test]
fn an_interrupted_completion_of_full_length_has_ended() {
    let (setup, client) = started(Engine::Vllm, WeightSync::Disk);
    let mut sampling = sampling();
    sampling.stop_token_ids.clear();
    let length = sampling.max_new_tokens;
    setup.servers[0].engine().waits_after =
        Box::new(move |draw| (draw.prompt.len() == 1).then_some(length));
    let (ended, unfinished) = call(&client, &sampling, &Places::new(), 4, &NoProgress).unwrap();
    assert!(unfinished.is_empty(), "{unfinished:?}");
    assert_eq!(ended.len(), 6);
    for completion in ended.values() {
        assert_eq!(completion.tokens.len(), length);
        assert_eq!(completion.finish_reason, FinishReason::Length);
    }
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn a_completion_may_be_interrupted_before_its_first_token(#[case] engine: Engine) {
    let (setup, client) = started(engine, WeightSync::Disk);
    let (ended, unfinished) = interrupted::<0>(&setup, &client, &NoProgress).unwrap();
    assert!(ended.keys().eq(&[0, 1, 4, 5]), "{ended:?}");
    assert!(unfinished.is_empty(), "{unfinished:?}");
}

/// A request that reaches the server after the first interruption is ended by the next one.
#[test]
fn servers_are_interrupted_until_all_requests_have_ended() {
    let (setup, client) = started(Engine::Vllm, WeightSync::Disk);
    let mut lost = false;
    setup.servers[0].set_faults(move |request| {
        let is_first =
            request.path() == abort_path(Engine::Vllm) && !std::mem::replace(&mut lost, true);
        is_first.then(|| Fault::Instead(Reply::new(200, "{}")))
    });
    let (_, begun) = interrupted::<2>(&setup, &client, &NoProgress).unwrap();
    assert!(begun.keys().eq(&[2, 3]), "{begun:?}");
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn a_server_that_cannot_be_interrupted_is_named(#[case] engine: Engine) {
    let (setup, client) = started(engine, WeightSync::Disk);
    let refuse = move |request: &Request| {
        let reply = || Reply::new(404, json!({"detail": "Not Found"}).to_string());
        (request.path() == abort_path(engine)).then(|| Fault::Instead(reply()))
    };
    setup.servers[0].set_faults(refuse);
    let error = interrupted::<2>(&setup, &client, &NoProgress).unwrap_err();
    let url = setup.servers[0].url();
    let expected = format!("{url}: status 404: Not Found ({})", abort_path(engine));
    assert_eq!(error.to_string(), expected);
}

/// Cancels as soon as a server is interrupted.
#[derive(Default)]
struct CancelLater(AtomicBool);

impl Progress for CancelLater {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[test]
fn a_canceled_call_does_not_wait_for_interrupted_requests() {
    let (setup, client) = started(Engine::Vllm, WeightSync::Disk);
    let progress = Arc::new(CancelLater::default());
    let cancel = Arc::clone(&progress);
    setup.servers[0].set_faults(move |request| {
        let is_abort = request.path() == abort_path(Engine::Vllm);
        is_abort.then(|| {
            cancel.0.store(true, Ordering::Release);
            Fault::Instead(Reply::new(200, "{}"))
        })
    });
    let error = interrupted::<2>(&setup, &client, &*progress).unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
}

#[test]
fn completions_that_have_not_started_send_no_request() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let mut config = setup.config();
    config.max_inflight = 1;
    let client = setup.client(&config, &sampling());
    setup.policy(1).push(&client).unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    setup.servers[0].set_faults(move |request| {
        count.fetch_add(
            usize::from(request.path() == "/v1/completions"),
            Ordering::Relaxed,
        );
        None
    });
    setup.servers[0].engine().waits_after = Box::new(|draw| (draw.prompt.len() == 1).then_some(2));
    let (ended, begun) = call(&client, &sampling(), &Places::new(), 2, &NoProgress).unwrap();
    assert!(ended.keys().eq(&[0, 1]), "{ended:?}");
    assert!(begun.keys().all(|place| *place == 2), "{begun:?}");
    assert!(requests.load(Ordering::Relaxed) <= 3);
}

/// A server that continues a completion does not see a stop string that began before.
#[rstest]
#[case::to_the_end(None)]
#[case::interrupted(Some(1))]
fn a_stop_string_may_begin_in_an_earlier_call(#[case] interrupted: Option<usize>) {
    let (setup, client) = started(Engine::Vllm, WeightSync::Disk);
    let tokens = tokenizer().encode("a", false).unwrap().get_ids().to_vec();
    let begun = Completion {
        tokens,
        drawn_log_probs: vec![-1.],
        log_probs: Some(vec![-1.]),
        written: None,
        weight_versions: vec![0],
        finish_reason: FinishReason::Length,
        experts: None,
    };
    let begun = Places::from([(2, begun.clone()), (3, begun)]);
    let mut sampling = sampling();
    sampling.stop_strings = ["aa", "ab", "ac", "ad", "ae"].map(str::to_owned).to_vec();
    sampling.stop_token_ids.clear();
    let enough = match interrupted {
        None => 6,
        Some(_) => {
            setup.servers[0].engine().waits_after =
                Box::new(|draw| (draw.prompt.len() == 2 && draw.prompt[0] == 4).then_some(1));
            4
        }
    };
    let (ended, unfinished) = call(&client, &sampling, &begun, enough, &NoProgress).unwrap();
    assert!(unfinished.is_empty(), "{unfinished:?}");
    for place in [2, 3] {
        assert_eq!(ended[&place].tokens.len(), 2, "{ended:?}");
        assert_eq!(ended[&place].finish_reason, FinishReason::StopString);
    }
}

/// Remembers the weights of all versions, and the completions with their prompts.
struct Recorded {
    servers: ServerGenerator,
    /// The stream whose requests wait until new weights arrive.
    waiting_stream: Option<u64>,
    /// True while requests wait.
    waits: Arc<AtomicBool>,
    policies: Mutex<BTreeMap<u64, Policy>>,
    ended: Mutex<Vec<(Vec<u32>, Completion)>>,
}

impl Generator for Recorded {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let waits = self.waiting_stream == Some(batch.prompts[0].seeds[0].stream);
        let is_first = !self.policies.lock().unwrap().contains_key(&1);
        self.waits.store(waits && is_first, Ordering::Release);
        let requests = batch.prompts.iter();
        let prompts: Vec<&[u32]> = requests
            .flat_map(|request| request.seeds.iter().map(|_| request.tokens))
            .collect();
        self.servers.generate(batch, &mut |place, completion| {
            let ended = (prompts[place].to_vec(), completion.clone());
            self.ended.lock().unwrap().push(ended);
            deliver(place, completion)
        })
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        let policy = Policy {
            version: weights.version,
            parameters: weights
                .merged()?
                .copy_to(candle_grpo_test_support::device())?,
            adapters: None,
        };
        self.policies
            .lock()
            .unwrap()
            .insert(weights.version, policy);
        // Probes do not wait.
        self.waits.store(false, Ordering::Release);
        self.servers.weights_changed(weights, progress)
    }
}

/// Trains four steps, and checks the tokens. Requests wait after two tokens where `waits` is true.
/// Returns the number of completions whose tokens have several versions.
fn train(
    engine: Engine,
    change: fn(&mut RolloutConfig),
    waiting_stream: Option<u64>,
    waits: fn(&Draw, bool) -> bool,
) -> (usize, Vec<StepMetrics>) {
    let mut config = common::config();
    config.optimizer.learning_rate = 1e-2;
    change(&mut config.rollout);
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection {
        weight: Some(ImportanceWeight::truncated(2.)),
        ..RolloutCorrection::default()
    });
    let setup = Setup::new(engine, WeightSync::Disk, 2);
    let waiting = Arc::new(AtomicBool::new(false));
    for server in &setup.servers {
        let waiting = Arc::clone(&waiting);
        let waits_after = move |draw: &Draw| {
            let waits = waits(draw, waiting.load(Ordering::Acquire));
            waits.then_some(2)
        };
        server.engine().waits_after = Box::new(waits_after);
    }
    // Requests that wait take no place from others.
    let client = RolloutConfig {
        max_inflight: 24,
        ..setup.config()
    };
    let recorded = Arc::new(Recorded {
        servers: setup.client(&client, &config.sampling),
        waiting_stream,
        waits: waiting,
        policies: Mutex::default(),
        ended: Mutex::default(),
    });
    let generator: Arc<dyn Generator> = Arc::clone(&recorded) as _;
    let mut trainer = common::trainer_of(TrainerParts {
        generator: Some(generator),
        ..common::parts(digest, config)
    });
    let metrics: Vec<StepMetrics> = (0..4).map(|_| trainer.step().unwrap()).collect();
    drop(trainer);
    let policies = recorded.policies.lock().unwrap();
    if waiting_stream.is_none() {
        assert!(policies.keys().eq(&[0, 1, 2, 3]));
    }
    let ended = recorded.ended.lock().unwrap();
    let mut mixed = 0;
    for (prompt, completion) in ended.iter() {
        let versions = &completion.weight_versions;
        mixed += usize::from(versions.first() != versions.last());
        assert_drawn(prompt, completion, &policies);
    }
    (mixed, metrics)
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn a_run_continues_the_completions_of_earlier_steps(#[case] engine: Engine) {
    let partial = |config: &mut RolloutConfig| config.partial = true;
    // At most three of the six groups in flight have a prompt of one token.
    let (mixed, metrics) = train(engine, partial, None, |draw, _| draw.prompt.len() == 1);
    assert!(mixed > 2, "{mixed}");
    for metrics in metrics {
        assert!(!metrics.skipped);
        assert_eq!(metrics.policy["unfinished_groups"], 3.);
    }
}

/// The weights after the first step arrive while the second one is sampled.
#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn weights_arrive_while_completions_are_in_flight(#[case] engine: Engine) {
    let in_flight = |config: &mut RolloutConfig| {
        (config.max_staleness, config.in_flight_updates) = (1, true);
    };
    let (mixed, metrics) = train(engine, in_flight, Some(2), |_, waits| waits);
    assert!(mixed > 6, "{mixed}");
    assert_eq!(metrics[1].policy["staleness_max"], 1.);
    let mean = metrics[1].policy["staleness_mean"];
    assert!(mean > 0. && mean < 0.9, "{mean}");
}
