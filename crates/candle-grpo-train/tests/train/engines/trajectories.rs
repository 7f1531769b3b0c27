//! Multi-turn trajectories from servers.

use std::sync::Arc;

use candle_grpo_train::rollout::{Engine, WeightSync};
use candle_grpo_train::{Generator, Sampler, SamplingConfig};
use rstest::rstest;

use super::{Setup, TURNS, draw_with, short};
use crate::common::{model, sampler};
use crate::environment::{echo, environments};

/// A server samples the same tokens as the sampler in this process for the same seeds, so
/// trajectories differ only if their turns' requests do.
#[rstest]
#[case::vllm(Engine::Vllm)]
#[case::sglang(Engine::Sglang)]
fn the_trajectories_of_a_server_are_those_of_this_process(#[case] engine: Engine) {
    let sampling = SamplingConfig {
        max_new_tokens: 20,
        temperature: 1.,
        ..short()
    };
    let setup = Setup::new(engine, WeightSync::Disk, 2);
    setup.draw_as_local(&sampling);
    let client = setup.client(&setup.config(), &sampling);
    // The weights of the start.
    setup.policy(0).push(&client).unwrap();
    let client: Arc<dyn Generator> = Arc::new(client);
    let environments = environments(echo(TURNS as usize));
    let served = Sampler::from_generator(client, model().vocab_size, sampling.clone())
        .unwrap()
        .with_environments(environments.clone());
    let local = sampler(sampling).with_environments(environments);
    let (served, local) = (
        draw_with(&served, 3).unwrap(),
        draw_with(&local, 3).unwrap(),
    );
    assert_eq!(served.len(), local.len());
    for (served, local) in served.iter().zip(&local) {
        assert_eq!(served.prompt_tokens, local.prompt_tokens);
        assert_eq!(served.episode, local.episode);
        let (served, local) = (&served.completion, &local.completion);
        assert_eq!(served.tokens, local.tokens);
        assert_eq!(served.written, local.written);
        assert_eq!(served.finish_reason, local.finish_reason);
        let log_probs = served.log_probs.iter().flatten();
        for (a, b) in log_probs.zip(local.log_probs.iter().flatten()) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}
