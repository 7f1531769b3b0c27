//! Trajectories with several sequences.

use candle_core::Tensor;
use candle_grpo_core::{GroupAdvantage, Scale};
use candle_grpo_loss::{Aggregation, PolicyLoss};
use candle_grpo_test_support::device;
use candle_grpo_train::sequence::Batch;
use candle_grpo_train::{Actor, Sequence, TokenBatch, TrainingBatch};
use rstest::rstest;

use crate::common::{actor_config, max_difference, model, parameters};

fn actor(aggregation: Aggregation) -> Actor {
    let config = actor_config(PolicyLoss {
        aggregation,
        ..PolicyLoss::grpo()
    });
    Actor::new(model(), parameters(), config).unwrap()
}

/// The gradient for two trajectories, where the first has two policy turns.
fn gradients(batch: &Batch, aggregation: Aggregation) -> Actor {
    // One advantage of each trajectory.
    let scores = [1f32, 0.25];
    let advantages = GroupAdvantage::grpo().compute(scores.as_slice(), 2, Scale::None);
    let advantages: Vec<f32> = advantages.unwrap().to_vec1().unwrap();
    let of_sequences = batch.of_sequences(&advantages).unwrap();
    let of_sequences = Tensor::new(of_sequences, device()).unwrap();
    let shares = Tensor::new(batch.trajectory_shares(), device()).unwrap();
    let tokens = TokenBatch::of_batch(batch, device()).unwrap();
    let shares = shares.unsqueeze(1).unwrap();
    let shares = shares.broadcast_as(tokens.dims()).unwrap();
    let shares = shares.contiguous().unwrap();
    let totals = batch.totals();
    assert_eq!((totals.sequences, totals.rows), (2., 2.));
    let mut inputs = TrainingBatch::new(tokens, &of_sequences);
    if aggregation != Aggregation::TokenMean {
        inputs = inputs.with_policy(|policy| policy.token_weights(&shares));
    }
    let mut actor = actor(aggregation);
    actor.forward_backward(&inputs, &totals).unwrap();
    actor
}

#[rstest]
fn a_trajectory_of_several_sequences_counts_as_one(
    #[values(Aggregation::TokenMean, Aggregation::SeqMeanTokenMean)] aggregation: Aggregation,
) {
    let other = Sequence::of_answer(&[1, 2], &[2, 0]).unwrap();
    let whole = Sequence::of_answer(&[1, 2], &[3, 4, 2, 5, 1, 0])
        .and_then(|x| x.with_written(&[true, true, true, false, true, true]))
        .unwrap();
    let first = Sequence::of_answer(&[1, 2], &[3, 4, 2]).unwrap();
    let second = Sequence::of_answer(&[1, 2, 3, 4, 2, 5], &[1, 0]).unwrap();

    let together = Batch::new(vec![whole, other.clone()]).unwrap();
    let apart = Batch::new(vec![second, other, first])
        .and_then(|batch| batch.with_trajectories(vec![0, 1, 0]))
        .unwrap();
    let together = gradients(&together, aggregation);
    let apart = gradients(&apart, aggregation);
    assert!(together.gradients().global_norm().unwrap() > 1e-2);
    for (name, expected) in together.gradients().iter() {
        let found = apart.gradients().get(name).unwrap();
        let largest = max_difference(expected, &expected.zeros_like().unwrap());
        let difference = max_difference(found, expected);
        assert!(
            difference <= 1e-5 * largest.max(1e-2),
            "{name}: {difference} of {largest}"
        );
    }
}
