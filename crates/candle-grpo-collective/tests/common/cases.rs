//! Cases for every `Collective` implementation. All ranks run them, in this order.
//!
//! Most inputs are integers that every rank can compute for all ranks, so sums are exact.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_collective::Collective;
use candle_grpo_test_support::{assert_close, message, noise_tensor, numbers, words};
use half::bf16;

type Case = fn(&dyn Collective, &Device) -> Result<()>;

const CASES: [(&str, Case); 12] = [
    ("sums_are_those_of_all_ranks", sums_are_those_of_all_ranks),
    ("long_tensors_are_summed", long_tensors_are_summed),
    (
        "sums_of_floats_have_the_same_bits_on_all_ranks",
        sums_of_floats_have_the_same_bits_on_all_ranks,
    ),
    (
        "a_part_of_a_sum_is_on_its_rank",
        a_part_of_a_sum_is_on_its_rank,
    ),
    (
        "parts_are_gathered_in_the_order_of_the_ranks",
        parts_are_gathered_in_the_order_of_the_ranks,
    ),
    ("each_rank_can_broadcast", each_rank_can_broadcast),
    (
        "operations_change_only_their_view",
        operations_change_only_their_view,
    ),
    (
        "bytes_of_different_lengths_are_gathered",
        bytes_of_different_lengths_are_gathered,
    ),
    (
        "a_barrier_waits_for_all_ranks",
        a_barrier_waits_for_all_ranks,
    ),
    (
        "groups_communicate_among_themselves",
        groups_communicate_among_themselves,
    ),
    ("bad_arguments_are_errors", bad_arguments_are_errors),
    (
        "random_operations_agree_with_one_process",
        random_operations_agree_with_one_process,
    ),
];

/// Runs all cases on `ranks`.
///
/// # Errors
///
/// Names the failed case.
pub(crate) fn run(ranks: &dyn Collective, device: &Device) -> Result<()> {
    for (name, case) in CASES {
        case(ranks, device).map_err(|error| error.context(name))?;
        if ranks.rank() == 0 {
            println!("{name}: ok on {} ranks", ranks.world_size());
        }
    }
    Ok(())
}

/// Operations of groups, and of all ranks between them.
fn groups_communicate_among_themselves(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let (rank, count) = (ranks.rank(), ranks.world_size());
    let group = ranks.split(rank % 2)?;
    let others = ranks.split(rank / 2)?;
    let members: Vec<usize> = (rank % 2..count).step_by(2).collect();
    assert_eq!(
        (group.rank(), group.world_size()),
        (rank / 2, members.len())
    );
    assert_eq!(others.rank(), rank % 2);
    assert_eq!(others.world_size(), 2.min(count - rank / 2 * 2));
    for round in 0..3 {
        let own = |rank: usize| (rank * 10 + round) as f32;
        let sum = Tensor::full(own(rank), 1000, device)?;
        group.all_reduce_sum(&[&sum])?;
        let expected: f32 = members.iter().map(|&rank| own(rank)).sum();
        assert_eq!(numbers(&sum)?, [f64::from(expected); 1000]);
        let one = Tensor::ones(7, DType::F32, device)?;
        ranks.all_reduce_sum(&[&one])?;
        assert_eq!(numbers(&one)?, [count as f64; 7]);
        let all = Tensor::full(rank as u32, members.len(), device)?;
        group.all_gather(&[&all])?;
        let expected: Vec<f64> = members.iter().map(|&rank| rank as f64).collect();
        assert_eq!(numbers(&all)?, expected);
    }
    assert_eq!(group.all_gather_bytes(&[rank as u8])?.len(), members.len());
    Ok(())
}

const LENGTHS: [usize; 6] = [0, 1, 7, 64, 1000, 70_001];
const SUMMED: [DType; 3] = [DType::F32, DType::F64, DType::BF16];
const COPIED: [DType; 9] = [
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
];

/// One rank's integers from 0 to 255, which every dtype can represent.
fn integers(len: usize, seed: u64, rank: usize) -> impl Iterator<Item = f64> {
    let words = words(seed.wrapping_mul(1_000_003).wrapping_add(rank as u64));
    words.map(|word| (word >> 56) as f64).take(len)
}

fn tensor(len: usize, seed: u64, rank: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let values: Vec<f64> = integers(len, seed, rank).collect();
    Tensor::from_vec(values, len, &Device::Cpu)?
        .to_dtype(dtype)?
        .to_device(device)
}

/// The sum over all ranks' integers, rounded once.
fn sum(len: usize, seed: u64, world_size: usize, dtype: DType) -> Vec<f64> {
    let mut sum = vec![0.; len];
    for rank in 0..world_size {
        for (sum, value) in sum.iter_mut().zip(integers(len, seed, rank)) {
            *sum += value;
        }
    }
    if dtype == DType::BF16 {
        for sum in &mut sum {
            *sum = bf16::from_f64(*sum).to_f64();
        }
    }
    sum
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    numbers(&tensor.to_device(&Device::Cpu)?)
}

fn refs(tensors: &[Tensor]) -> Vec<&Tensor> {
    tensors.iter().collect()
}

fn sums_are_those_of_all_ranks(ranks: &dyn Collective, device: &Device) -> Result<()> {
    for dtype in SUMMED {
        for len in LENGTHS {
            let own = tensor(len, 1, ranks.rank(), dtype, device)?;
            ranks.all_reduce_sum(&[&own])?;
            assert_eq!(
                values(&own)?,
                sum(len, 1, ranks.world_size(), dtype),
                "{dtype:?} {len}"
            );
        }
    }
    // Several tensors in several dtypes, in two calls that overlap with others.
    let own: Vec<(usize, DType, Tensor)> = LENGTHS
        .iter()
        .flat_map(|len| SUMMED.map(|dtype| (*len, dtype)))
        .map(|(len, dtype)| {
            Ok((
                len,
                dtype,
                tensor(len, len as u64, ranks.rank(), dtype, device)?,
            ))
        })
        .collect::<Result<_>>()?;
    let tensors: Vec<&Tensor> = own.iter().map(|(.., tensor)| tensor).collect();
    let (first, second) = tensors.split_at(7);
    // The first one ends before the second.
    let _first = ranks.start_all_reduce_sum(first)?;
    let second = ranks.start_all_reduce_sum(second)?;
    ranks.finish(second)?;
    for (len, dtype, own) in &own {
        assert_eq!(
            values(own)?,
            sum(*len, *len as u64, ranks.world_size(), *dtype),
            "{dtype:?} {len}"
        );
    }
    // Nothing to sum.
    ranks.all_reduce_sum(&[])?;
    let ticket = ranks.start_all_reduce_sum(&[])?;
    ranks.finish(ticket)
}

fn long_tensors_are_summed(ranks: &dyn Collective, device: &Device) -> Result<()> {
    for (dtype, len) in [
        (DType::F32, (4 << 20) + 3),
        (DType::BF16, (4 << 20) + 5),
        (DType::F64, (2 << 20) + 1),
    ] {
        let own = tensor(len, 2, ranks.rank(), dtype, device)?;
        let short = tensor(5, 3, ranks.rank(), dtype, device)?;
        ranks.all_reduce_sum(&[&short, &own])?;
        assert!(
            values(&own)? == sum(len, 2, ranks.world_size(), dtype),
            "{dtype:?}"
        );
        assert_eq!(
            values(&short)?,
            sum(5, 3, ranks.world_size(), dtype),
            "{dtype:?}"
        );
    }
    let part = (3 << 20) / 2 + 1;
    let len = part * ranks.world_size();
    let own = tensor(len, 4, ranks.rank(), DType::F32, device)?;
    ranks.reduce_scatter_sum(&[&own])?;
    ranks.all_gather(&[&own])?;
    assert!(values(&own)? == sum(len, 4, ranks.world_size(), DType::F32));
    let own = tensor(len * 2, 5, ranks.rank(), DType::F32, device)?;
    ranks.broadcast(&[&own], ranks.world_size() - 1)?;
    let root: Vec<f64> = integers(len * 2, 5, ranks.world_size() - 1).collect();
    assert!(values(&own)? == root);
    Ok(())
}

fn sums_of_floats_have_the_same_bits_on_all_ranks(
    ranks: &dyn Collective,
    device: &Device,
) -> Result<()> {
    for dtype in SUMMED {
        for len in [7, 1000, 70_001] {
            let of = |rank: usize| noise_tensor(len, 40 + rank as u64, dtype, device);
            let mut expected = vec![0.; len];
            for rank in 0..ranks.world_size() {
                for (sum, value) in expected.iter_mut().zip(values(&of(rank)?)?) {
                    *sum += value;
                }
            }
            let own = of(ranks.rank())?;
            ranks.all_reduce_sum(&[&own])?;
            let own = values(&own)?;
            // Half a unit in the last place for a sum up to 4.
            let tolerance = if dtype == DType::BF16 {
                1. / 128.
            } else {
                1e-6
            };
            assert_close(&own, &expected, tolerance);
            let bits: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
            let all = ranks.all_gather_bytes(&bits)?;
            assert!(all.iter().all(|other| *other == bits), "{dtype:?} {len}");
        }
    }
    Ok(())
}

fn a_part_of_a_sum_is_on_its_rank(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    for (dtype, starts) in SUMMED
        .into_iter()
        .flat_map(|dtype| [(dtype, false), (dtype, true)])
    {
        let own: Vec<Tensor> = LENGTHS
            .iter()
            .map(|part| tensor(part * world_size, *part as u64, rank, dtype, device))
            .collect::<Result<_>>()?;
        if starts {
            let ticket = ranks.start_reduce_scatter_sum(&refs(&own))?;
            ranks.finish(ticket)?;
        } else {
            ranks.reduce_scatter_sum(&refs(&own))?;
        }
        for (part, own) in LENGTHS.into_iter().zip(&own) {
            let expected = sum(part * world_size, part as u64, world_size, dtype);
            let range = rank * part..(rank + 1) * part;
            assert_eq!(
                values(own)?[range.clone()],
                expected[range],
                "{dtype:?} {part}"
            );
        }
    }
    Ok(())
}

fn parts_are_gathered_in_the_order_of_the_ranks(
    ranks: &dyn Collective,
    device: &Device,
) -> Result<()> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let gathered = |part: usize| -> Vec<f64> {
        let part_of = |rank| {
            integers(part * world_size, 6, rank)
                .skip(rank * part)
                .take(part)
        };
        (0..world_size).flat_map(part_of).collect()
    };
    let mut all = Vec::new();
    for dtype in COPIED {
        for part in LENGTHS {
            let own = tensor(part * world_size, 6, rank, dtype, device)?;
            ranks.all_gather(&[&own])?;
            assert_eq!(values(&own)?, gathered(part), "{dtype:?} {part}");
            all.push(tensor(part * world_size, 6, rank, dtype, device)?);
        }
    }
    ranks.all_gather(&refs(&all))?;
    for own in &all {
        let part = own.elem_count() / world_size;
        assert_eq!(values(own)?, gathered(part), "{:?} {part}", own.dtype());
    }
    Ok(())
}

fn each_rank_can_broadcast(ranks: &dyn Collective, device: &Device) -> Result<()> {
    for root in 0..ranks.world_size() {
        let own: Vec<Tensor> = COPIED
            .iter()
            .flat_map(|dtype| LENGTHS.map(|len| (*dtype, len)))
            .map(|(dtype, len)| tensor(len, 7, ranks.rank(), dtype, device))
            .collect::<Result<_>>()?;
        ranks.broadcast(&refs(&own), root)?;
        for own in &own {
            let expected: Vec<f64> = integers(own.elem_count(), 7, root).collect();
            assert_eq!(values(own)?, expected, "{:?} from {root}", own.dtype());
        }
    }
    Ok(())
}

fn operations_change_only_their_view(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    type Operation = fn(&dyn Collective, &Tensor) -> Result<()>;
    let operations: [Operation; 4] = [
        |ranks, view| ranks.all_reduce_sum(&[view]),
        |ranks, view| {
            ranks
                .reduce_scatter_sum(&[view])
                .and_then(|()| ranks.all_gather(&[view]))
        },
        |ranks, view| ranks.all_gather(&[view]),
        |ranks, view| ranks.broadcast(&[view], 0),
    ];
    for dtype in SUMMED {
        for (index, operation) in operations.iter().enumerate() {
            // Rows 2 and 3 of 6, whose length is divisible by every number of ranks.
            let columns = 3 * world_size;
            let own = tensor(6 * columns, 8, rank, dtype, device)?.reshape((6, columns))?;
            let before = values(&own)?;
            operation(ranks, &own.narrow(0, 2, 2)?)?;
            let after = values(&own)?;
            let view = 2 * columns..4 * columns;
            assert_eq!(after[..view.start], before[..view.start]);
            assert_eq!(after[view.end..], before[view.end..]);
            if index < 2 {
                let expected = sum(6 * columns, 8, world_size, dtype);
                assert_eq!(after[view.clone()], expected[view], "{dtype:?}");
            }
        }
    }
    Ok(())
}

fn bytes_of_different_lengths_are_gathered(ranks: &dyn Collective, _: &Device) -> Result<()> {
    let bytes = |rank: usize, len: usize| -> Vec<u8> {
        words(9 + rank as u64)
            .map(|word| (word >> 56) as u8)
            .take(len)
            .collect()
    };
    let lengths: [fn(usize) -> usize; 4] = [
        |_| 0,
        |rank| rank,
        |rank| 100_000 / (rank + 1),
        |rank| (rank % 2) * 3,
    ];
    for length in lengths {
        let all = ranks.all_gather_bytes(&bytes(ranks.rank(), length(ranks.rank())))?;
        let expected: Vec<Vec<u8>> = (0..ranks.world_size())
            .map(|rank| bytes(rank, length(rank)))
            .collect();
        assert!(
            all == expected,
            "lengths {:?}",
            all.iter().map(Vec::len).collect::<Vec<_>>()
        );
    }
    Ok(())
}

fn a_barrier_waits_for_all_ranks(ranks: &dyn Collective, _: &Device) -> Result<()> {
    // Rank 0's folder, in which each rank leaves a file before the barrier.
    let own = tempfile::tempdir()?;
    let all = ranks.all_gather_bytes(own.path().to_string_lossy().as_bytes())?;
    let shared = std::path::PathBuf::from(String::from_utf8_lossy(&all[0]).into_owned());
    for late in 0..ranks.world_size() {
        let folder = shared.join(late.to_string());
        std::fs::create_dir_all(&folder)?;
        let files = || std::fs::read_dir(&folder).map(Iterator::count);
        // One rank arrives after all others have left their file.
        while ranks.rank() == late && files()? + 1 < ranks.world_size() {
            std::thread::yield_now();
        }
        std::fs::write(folder.join(ranks.rank().to_string()), "")?;
        ranks.barrier()?;
        assert_eq!(files()?, ranks.world_size());
    }
    // No rank needs the folder any longer.
    ranks.barrier()
}

fn bad_arguments_are_errors(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let world_size = ranks.world_size();
    let own = tensor(6 * world_size, 10, ranks.rank(), DType::F32, device)?;
    let transposed = own.reshape((2, 3 * world_size))?.t()?;
    let check = |result: Result<()>, expected: &str| {
        let message = message(result);
        assert!(
            message.contains(expected),
            "{message}, must contain {expected}"
        );
    };
    check(
        ranks.all_reduce_sum(&[&own, &transposed]),
        "all_reduce_sum: tensor 1",
    );
    check(
        ranks.reduce_scatter_sum(&[&transposed]),
        "reduce_scatter_sum: tensor 0",
    );
    check(ranks.all_gather(&[&transposed]), "all_gather: tensor 0");
    check(ranks.broadcast(&[&transposed], 0), "must be contiguous");
    check(
        ranks.broadcast(&[&own], world_size),
        &format!("broadcast: root {world_size}"),
    );
    let integers = own.to_dtype(DType::U8)?;
    check(
        ranks.all_reduce_sum(&[&integers]),
        "tensor 0 is U8, must be f32, f64 or bf16",
    );
    if world_size > 1 {
        let odd = own.narrow(0, 0, world_size + 1)?;
        check(
            ranks.reduce_scatter_sum(&[&odd]),
            &format!("must be a multiple of {world_size}"),
        );
        check(
            ranks.all_gather(&[&odd]),
            &format!("has {} elements", world_size + 1),
        );
    }
    Ok(())
}

fn random_operations_agree_with_one_process(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let mut choices = words(11);
    let mut choose = |below: u64| (choices.next().unwrap_or_default() >> 32) % below;
    for round in 0..200 {
        let seed = 1000 + round;
        let operation = choose(5);
        let root = choose(world_size as u64) as usize;
        let tensors: Vec<(usize, DType)> = (0..choose(6))
            .map(|_| {
                let exponent = choose(17);
                let part = choose((1 << exponent) + 1) as usize;
                let len = if matches!(operation, 1 | 2) {
                    part * world_size
                } else {
                    part
                };
                (len, SUMMED[choose(3) as usize])
            })
            .collect();
        let own: Vec<Tensor> = tensors
            .iter()
            .map(|(len, dtype)| tensor(*len, seed, rank, *dtype, device))
            .collect::<Result<_>>()?;
        match operation {
            0 => ranks.all_reduce_sum(&refs(&own))?,
            1 => ranks.reduce_scatter_sum(&refs(&own))?,
            2 => ranks.all_gather(&refs(&own))?,
            3 => ranks.broadcast(&refs(&own), root)?,
            _ => ranks
                .start_all_reduce_sum(&refs(&own))
                .and_then(|ticket| ranks.finish(ticket))?,
        }
        for ((len, dtype), own) in tensors.into_iter().zip(&own) {
            let own = values(own)?;
            let part = len / world_size;
            let range = rank * part..(rank + 1) * part;
            let is_right = match operation {
                1 => own[range.clone()] == sum(len, seed, world_size, dtype)[range],
                2 => (0..world_size).all(|other| {
                    let expected = integers(len, seed, other).skip(other * part).take(part);
                    expected.eq(own[other * part..][..part].iter().copied())
                }),
                3 => integers(len, seed, root).eq(own),
                _ => own == sum(len, seed, world_size, dtype),
            };
            assert!(
                is_right,
                "round {round}, operation {operation}, {len} of {dtype:?}"
            );
        }
    }
    Ok(())
}
