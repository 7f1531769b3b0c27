//! The sequences of trajectories, side by side and joined.

use anyhow::Result;
use candle_core::{Device, Tensor};

use crate::{Rollout, TokenBatch};

/// B rows, each of which joins some of S sequences of up to T tokens: those of a trajectory, or of
/// a role in a trajectory.
///
/// Advantages compare these rows. For them, the responses of a row are one response of up to J
/// tokens.
#[derive(Debug, Clone)]
pub(super) struct JoinedRows {
    /// The sequences of each row. Each sequence is in one row.
    sequences: Vec<Vec<usize>>,
    /// The places between `[S, T]` and `[B, J]`; absent if the rows are the sequences.
    places: Option<Places>,
}

#[derive(Debug, Clone)]
struct Places {
    /// `[B * J]`: the place in `[S * T]` of each joined token, or `S * T`.
    joined: Tensor,
    /// `[S * T]`: the place in `[B * J]` of each token, or `B * J`.
    split: Tensor,
    /// The row of each sequence.
    rows: Tensor,
    /// S and T.
    dims: (usize, usize),
    /// J.
    width: usize,
}

impl JoinedRows {
    /// A row for each of `rollouts`, whose tokens are `tokens`.
    pub(super) fn of_trajectories(rollouts: &[Rollout], tokens: &TokenBatch) -> Result<Self> {
        let mut first = 0;
        let sequences = rollouts.iter().map(|rollout| {
            let own = first..first + 1 + rollout.branches.len();
            first = own.end;
            own.collect()
        });
        Self::new(sequences.collect(), tokens)
    }

    /// Rows with these sequences of `tokens`. Each sequence must be in one row.
    pub(super) fn new(sequences: Vec<Vec<usize>>, tokens: &TokenBatch) -> Result<Self> {
        let are_joined = sequences.iter().enumerate().any(|(row, own)| own != &[row]);
        let places = are_joined.then(|| Places::new(&sequences, tokens));
        Ok(Self {
            sequences,
            places: places.transpose()?,
        })
    }

    /// The sequences of each row.
    pub(super) fn sequences(&self) -> &[Vec<usize>] {
        &self.sequences
    }

    /// Repeats the value of each row for its sequences, which must be in order.
    pub(super) fn repeat<T: Copy>(&self, values: impl IntoIterator<Item = T>) -> Vec<T> {
        let pairs = self.sequences.iter().zip(values);
        let values = pairs.flat_map(|(sequences, value)| sequences.iter().map(move |_| value));
        values.collect()
    }

    /// Joins values of tokens: `[S, T]` or `[S, 1]` as `[B, J]`.
    pub(super) fn join(&self, x: &Tensor) -> Result<Tensor> {
        let Some(places) = &self.places else {
            return Ok(x.clone());
        };
        let x = x.broadcast_as(places.dims)?;
        let shape = (self.sequences.len(), places.width);
        Ok(gather(&x, &places.joined)?.reshape(shape)?)
    }

    /// Splits values of joined tokens, `[B, J]` as `[S, T]`, and repeats those of rows: `[B]` as
    /// `[S]`.
    pub(super) fn split(&self, x: &Tensor) -> Result<Tensor> {
        match &self.places {
            None => Ok(x.clone()),
            Some(places) if x.dims().get(1).is_some_and(|&width| width == places.width) => {
                Ok(gather(x, &places.split)?.reshape(places.dims)?)
            }
            Some(places) => Ok(x.contiguous()?.index_select(&places.rows, 0)?),
        }
    }
}

impl Places {
    fn new(sequences: &[Vec<usize>], tokens: &TokenBatch) -> Result<Self> {
        let (s, t) = tokens.dims();
        let lengths = tokens.sequences().iter().map(|own| own.response().len());
        let lengths: Vec<usize> = lengths.collect();
        let joined_lengths = sequences
            .iter()
            .map(|own| own.iter().map(|&sequence| lengths[sequence]).sum::<usize>());
        let width = joined_lengths.max().unwrap_or(0);
        let mut joined = vec![s * t; sequences.len() * width];
        let mut split = vec![joined.len(); s * t];
        let mut rows = vec![0; s];
        for (row, own) in sequences.iter().enumerate() {
            let mut to = row * width;
            for &sequence in own {
                rows[sequence] = row;
                for from in (sequence * t..).take(lengths[sequence]) {
                    joined[to] = from;
                    split[from] = to;
                    to += 1;
                }
            }
        }
        let device = tokens.targets().device();
        Ok(Self {
            joined: indices(&joined, device)?,
            split: indices(&split, device)?,
            rows: indices(&rows, device)?,
            dims: (s, t),
            width,
        })
    }
}

fn indices(places: &[usize], device: &Device) -> Result<Tensor> {
    let places: Vec<u32> = places.iter().map(|&place| place as u32).collect();
    Ok(Tensor::new(places, device)?)
}

/// The values at `places`, with 0 after the last one.
fn gather(x: &Tensor, places: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?.flatten_all()?;
    let zero = Tensor::zeros(1, x.dtype(), x.device())?;
    Ok(Tensor::cat(&[&x, &zero], 0)?.index_select(places, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;
    use crate::rollout::{Completion, Row};

    fn completion(length: usize) -> Completion {
        Completion {
            tokens: vec![1; length],
            drawn_log_probs: vec![0.; length],
            log_probs: None,
            written: None,
            weight_versions: vec![0; length],
            finish_reason: FinishReason::StopToken,
            experts: None,
        }
    }

    /// A trajectory whose sequences have these lengths.
    fn rollout(lengths: &[usize]) -> Rollout {
        let row = |&length: &usize| Row {
            prompt_tokens: vec![0],
            completion: completion(length),
            role: None,
        };
        let (last, branches) = lengths.split_last().unwrap();
        Rollout {
            prompt_index: 0,
            sample_index: 0,
            prompt_tokens: vec![0],
            completion: completion(*last),
            role: None,
            episode: None,
            branches: branches.iter().map(row).collect(),
        }
    }

    #[test]
    fn responses_are_joined_and_split() {
        let rollouts = [rollout(&[2, 1]), rollout(&[2])];
        let tokens = TokenBatch::from_rollouts(&rollouts, &Device::Cpu).unwrap();
        let all = JoinedRows::of_trajectories(&rollouts, &tokens).unwrap();
        let values = [[1f32, 2.], [3., f32::NAN], [4., 5.]];
        let values = Tensor::new(&values, &Device::Cpu).unwrap();
        let joined = all.join(&values).unwrap();
        assert_eq!(
            joined.to_vec2::<f32>().unwrap(),
            [[1., 2., 3.], [4., 5., 0.]]
        );
        let split = all.split(&joined).unwrap();
        assert_eq!(
            split.to_vec2::<f32>().unwrap(),
            [[1., 2.], [3., 0.], [4., 5.]]
        );
        let of_trajectories = Tensor::new(&[7f32, 8.], &Device::Cpu).unwrap();
        let repeated = all.split(&of_trajectories).unwrap();
        assert_eq!(repeated.to_vec1::<f32>().unwrap(), [7., 7., 8.]);
        assert_eq!(all.repeat([true, false]), [true, true, false]);
        // The second row has no sequence, and the third one is not in order.
        let parts = vec![vec![1], vec![], vec![0, 2]];
        let parts = JoinedRows::new(parts, &tokens).unwrap();
        let joined = parts.join(&values).unwrap();
        assert_eq!(
            joined.to_vec2::<f32>().unwrap(),
            [[3., 0., 0., 0.], [0.; 4], [1., 2., 4., 5.]]
        );
        let split = parts.split(&joined).unwrap();
        assert_eq!(
            split.to_vec2::<f32>().unwrap(),
            [[1., 2.], [3., 0.], [4., 5.]]
        );
    }
}
