//! Passes over weights that ranks divide: gathers and sums run beside the blocks.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_grpo::collective::{Collective, connect};
use candle_grpo::nn::optim::Sharding;
use candle_grpo::nn::{
    AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens, Parameters,
};
use candle_grpo_test_support::{CudaCalls, cuda, cuda_peak_bytes, with_failing_allocations};
use rstest::rstest;

use crate::{has_gpus, run_ranks};

/// The number of weights in a block.
const TENSORS: u64 = 9;
/// Their elements. The f32 gradients of two of its matrices are the 25 MiB that are summed together
/// at least, and a block has three.
const BLOCK: u64 = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN / 2 + 3 * HIDDEN * WIDTH + 2 * HIDDEN;
const HIDDEN: u64 = 256;
const WIDTH: u64 = 12800;

/// A rank of a test has this variable: the file that it writes after the test.
const RANK: &str = "CANDLE_GRPO_TEST_RANK_OF_PASSES";

/// Ranks whose operations end before a call returns.
struct Waiting(Arc<dyn Collective>);

impl Collective for Waiting {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        self.0.all_reduce_sum(tensors)
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        self.0.reduce_scatter_sum(tensors)
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> candle_core::Result<()> {
        self.0.all_gather(tensors)
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> candle_core::Result<()> {
        self.0.broadcast(tensors, root)
    }

    fn barrier(&self) -> candle_core::Result<()> {
        self.0.barrier()
    }
}

/// An update of a model.
struct Update {
    /// The bits of the hidden states in each pass, and of all weights.
    bits: Vec<Vec<u32>>,
    /// The calls of a forward and of a backward pass, and the bytes that each adds. `None` without
    /// the emulation.
    passes: Option<[(CudaCalls, u64); 2]>,
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let numbers = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok(numbers.into_iter().map(f32::to_bits).collect())
}

/// Waits for the device, and returns the bytes that are in use on it.
fn used_bytes(device: &Device) -> Result<Option<u64>> {
    device.synchronize()?;
    // Restarts the search for the peak.
    cuda_peak_bytes();
    Ok(cuda_peak_bytes())
}

/// Counts the calls of `pass`, and the most bytes beside those that are in use before.
fn counted<T>(
    device: &Device,
    pass: impl FnOnce() -> Result<T>,
) -> Result<(T, Option<(CudaCalls, u64)>)> {
    let used = used_bytes(device)?;
    let before = CudaCalls::now();
    let result = pass()?;
    let calls = CudaCalls::now().zip(before);
    let calls = calls.map(|(after, before)| after - before);
    let added = cuda_peak_bytes().zip(used).map(|(peak, used)| peak - used);
    Ok((result, calls.zip(added)))
}

fn config(layers: usize, width: u64) -> DecoderConfig {
    DecoderConfig {
        vocab_size: 32,
        hidden_size: HIDDEN as usize,
        intermediate_size: width as usize,
        num_hidden_layers: layers,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 8,
        tie_word_embeddings: true,
        ..DecoderConfig::default()
    }
}

/// The weights of a decoder, of which each rank has its part.
fn divided(
    config: &DecoderConfig,
    options: &AdamWConfig,
    ranks: &Arc<dyn Collective>,
    device: &Device,
) -> Result<(Parameters, Decoder)> {
    let parameters = Parameters::init(config, 7, device)?;
    let parameters = options.divide(parameters, DType::BF16, (ranks, Sharding::Full))?;
    let decoder = Decoder::new(config, parameters.detached_var_builder())?;
    let decoder = decoder.gathering(&parameters)?;
    Ok((parameters, decoder))
}

/// Trains a decoder with `layers` blocks on two micro-batches.
fn update(ranks: &Arc<dyn Collective>, layers: usize, device: &Device) -> Result<Update> {
    let options = AdamWConfig {
        learning_rate: 1e-2,
        ..AdamWConfig::default()
    };
    let (parameters, decoder) = divided(&config(layers, WIDTH), &options, ranks, device)?;
    let mut optimizer = AdamW::sharded(options, &parameters, ranks, Sharding::Full)?;
    let mut gradients = Gradients::new();
    let (mut found, mut passes) = (Vec::new(), None);
    for pass in 0..2 {
        let own = [pass + 1, ranks.rank() as u32];
        let tokens = PackedTokens::new(&[vec![1, own[0], own[1], 4], vec![5, own[1]]], device)?;
        let ((hidden, recorded), forward) = counted(device, || Ok(decoder.record(&tokens)?))?;
        let gradient = hidden.ones_like()?;
        let ((), backward) = counted(device, || {
            optimizer.begin_reduction(&mut gradients, ranks)?;
            recorded.backward(&gradient, &parameters, &mut gradients)?;
            Ok(gradients.finish_reduction()?)
        })?;
        found.push(bits(&hidden)?);
        passes = forward
            .zip(backward)
            .map(|(forward, backward)| [forward, backward]);
    }
    optimizer.step(&parameters, &gradients)?;
    for (name, _) in parameters.iter() {
        found.push(bits(&parameters.whole(name)?)?);
    }
    Ok(Update {
        bits: found,
        passes,
    })
}

/// Compares updates on this rank with operations that run beside the blocks, and that do not.
fn compare(ranks: &Arc<dyn Collective>, device: &Device, is_lazy: bool) -> Result<()> {
    assert!(ranks.is_asynchronous());
    let waiting: Arc<dyn Collective> = Arc::new(Waiting(Arc::clone(ranks)));
    assert!(!waiting.is_asynchronous());
    let [two, three] = [2, 3].map(|layers| update(ranks, layers, device));
    let (two, three) = (two?, three?);
    assert!(three.bits == update(&waiting, 3, device)?.bits);
    let Some(([forward, backward], [forward_of_two, backward_of_two])) =
        three.passes.zip(two.passes)
    else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    // Two blocks are gathered. The backward pass also has the whole gradients of two: one that is
    // summed, and the one below.
    let (gathered, whole) = (2 * 2 * BLOCK, 2 * 4 * BLOCK);
    for (pass, (calls, added), (calls_of_two, _), operations, most) in [
        ("forward", forward, forward_of_two, TENSORS, gathered),
        // Gathers, and sums.
        (
            "backward",
            backward,
            backward_of_two,
            2 * TENSORS,
            gathered + whole,
        ),
    ] {
        let block = calls - calls_of_two;
        println!("{pass}: {calls:?}, a block: {block:?}, {added} bytes");
        assert_eq!((calls.waits, calls.copies_to_host), (0, 0), "{calls:?}");
        assert_eq!(block.operations, operations, "{block:?}");
        assert_eq!(block.hidden, operations, "{block:?}");
        // One or two calls start operations for a block, and three for the ends of the pass. Each
        // has eight on events, of which another thread may do the last one.
        let events = 8 * (3 * operations / TENSORS + 3);
        assert!(calls.events <= events, "{calls:?}, must be {events}");
        // An emulated GPU that works late frees memory late.
        let most = most + BLOCK / 2;
        assert!(
            is_lazy || added < most,
            "{pass}: {added}, must be below {most}"
        );
    }
    Ok(())
}

/// Each gather is enqueued before the kernels of another block, and each sum, too. They wait for
/// the kernels before them, and kernels wait for those that they need, by events alone: the
/// emulated GPU refuses kernels, copies and frees without an order.
#[rstest]
#[case::lazy(true)]
#[case::eager(false)]
fn gathers_and_sums_run_beside_the_blocks(#[case] is_lazy: bool) -> Result<()> {
    let case = if is_lazy {
        "case_1_lazy"
    } else {
        "case_2_eager"
    };
    let name = format!("gathers_and_sums_run_beside_the_blocks::{case}");
    on_two_ranks(&name, is_lazy, |ranks, device| {
        compare(ranks, device, is_lazy)
    })
}

/// If a pass fails for lack of memory, gathers and sums may still run. Their memory is not freed
/// under them, and the next pass finds the weights as they were.
#[test]
fn a_pass_that_fails_waits_for_what_has_started() -> Result<()> {
    let name = "a_pass_that_fails_waits_for_what_has_started";
    on_two_ranks(name, true, |ranks, device| {
        let options = AdamWConfig::default();
        let (parameters, decoder) = divided(&config(3, HIDDEN), &options, ranks, device)?;
        let optimizer = AdamW::sharded(options, &parameters, ranks, Sharding::Full)?;
        let tokens = PackedTokens::new(&[vec![1, 2, 3, 4], vec![5, 6]], device)?;
        let pass = || -> Result<Vec<u32>> {
            let mut gradients = Gradients::new();
            let (hidden, recorded) = decoder.record(&tokens)?;
            optimizer.begin_reduction(&mut gradients, ranks)?;
            recorded.backward(&hidden.ones_like()?, &parameters, &mut gradients)?;
            gradients.finish_reduction()?;
            let (norm, _) = gradients.clip_factor(1.)?;
            let mut found = bits(&hidden)?;
            found.push((norm as f32).to_bits());
            Ok(found)
        };
        let expected = pass()?;
        // All ranks fail at the same allocation.
        let mut failed = 0;
        for before in (0..).step_by(11) {
            let Some((found, number)) = with_failing_allocations(before, 1, pass) else {
                println!("skipped: no emulated GPU fails allocations");
                return Ok(());
            };
            if number == 0 {
                break;
            }
            // A pass goes on if a weight keeps its memory.
            match found {
                Ok(found) => assert!(found == expected, "allocation {before}"),
                Err(_) => failed += 1,
            }
            assert!(pass()? == expected, "allocation {before}");
        }
        assert!(failed > 12, "{failed}");
        Ok(())
    })
}

/// Runs the test of this name on two ranks, each of which calls `rank`.
fn on_two_ranks(
    name: &str,
    is_lazy: bool,
    rank: impl FnOnce(&Arc<dyn Collective>, &Device) -> Result<()>,
) -> Result<()> {
    if let Some(end) = std::env::var_os(RANK) {
        let device = cuda().map_err(anyhow::Error::msg)?;
        let ranks = connect(device)?;
        if let Err(error) = rank(&ranks, device) {
            eprintln!("{error:#}");
            ranks.abort(1);
        }
        return Ok(fs::write(end, [])?);
    }
    if !has_gpus(2) {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let end = |rank: usize| folder.path().join(rank.to_string());
    let command = |rank: usize| -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([&format!("passes::{name}"), "--exact", "--nocapture"]);
        command
            .env(RANK, end(rank))
            .env("CUDA_VISIBLE_DEVICES", rank.to_string())
            .env("CUDA_ON_HOST_LAZY", if is_lazy { "1" } else { "0" });
        Ok(command)
    };
    run_ranks((0..2).map(command).collect::<Result<_>>()?);
    // A filter that selects no test also succeeds.
    for rank in 0..2 {
        assert!(end(rank).exists(), "rank {rank} has not run {name}");
    }
    Ok(())
}
