//! Tests of `embedding.cu` against the lookup, sums of gradients and the CPU path.

use candle_core::{Device, Result, Tensor};
use candle_grpo_cuda_on_host::{
    Buffer, Expected, Grid, Kernels, ORDERS, embedding_sort, forward_and_backward,
};
use candle_grpo_kernels::embedding;
use candle_grpo_test_support::noise;

fn check<T: Kernels>(
    vocab: usize,
    width: usize,
    ids: &[u32],
    behind: usize,
    tolerance: f64,
) -> Result<()> {
    let n = ids.len();
    // Multiples of 1/256: f32 adds hundreds of them without rounding.
    let buffer = |len: usize, seed| -> Buffer<T> {
        let mut numbers: Vec<T> = noise(len, seed)
            .iter()
            .map(|x| T::from_f64((x * 256.0).round() / 256.0))
            .collect();
        numbers.resize(len + behind, T::from_f64(f64::NAN));
        Buffer::new(&numbers)
    };
    let (weight, gradient) = (buffer(vocab * width, 1), buffer(n * width, 2));
    let mut dweight_expected = vec![0.0; vocab * width];
    for (place, &id) in ids
        .iter()
        .enumerate()
        .filter(|(_, id)| (**id as usize) < vocab)
    {
        for column in 0..width {
            dweight_expected[id as usize * width + column] +=
                gradient[place * width + column].to_f64();
        }
    }
    // The CPU path returns an error for an id out of range. Here such an id reads a row of NaN.
    let nan = vec![T::from_f64(f64::NAN); width];
    let table = |x: &[T]| Tensor::from_slice(x, (x.len() / width, width), &Device::Cpu);
    let weight_of = table(&[&weight[..vocab * width], &nan].concat())?;
    let ids_of: Vec<u32> = ids.iter().map(|id| (*id).min(vocab as u32)).collect();
    let ids_of = Tensor::from_vec(ids_of, n, &Device::Cpu)?;
    let mut on_cpu =
        forward_and_backward(&[weight_of], &table(&gradient[..n * width])?, |inputs| {
            embedding(&ids_of, &inputs[0])
        })?;
    on_cpu[1].truncate(vocab * width);
    let rows_on_cpu = on_cpu.remove(0);
    let dweight_expected = Expected {
        exact: dweight_expected,
        on_cpu: on_cpu.remove(0),
    };
    let ids = Buffer::new(ids);
    let slices = width.div_ceil(2 * 32 * 16 / size_of::<T>());
    for order in ORDERS {
        let seven = T::from_f64(7.0);
        let mut rows = Buffer::filled(seven, n * width + behind);
        let mut counts = Buffer::filled(0u32, vocab);
        let mut starts = Buffer::filled(u32::MAX, vocab + 1);
        let mut ranks = Buffer::filled(u32::MAX, n);
        let mut positions = Buffer::filled(u32::MAX, n);
        let mut sum = Buffer::filled(0f32, vocab * width);
        let mut rounded = Buffer::filled(T::from_f64(f64::NAN), vocab * width);
        let by_rows = Grid {
            grid: [n.div_ceil(8) as u32, 1, 1],
            block: [32, 8, 1],
            shared_bytes: 0,
        };
        let by_vocab = Grid {
            grid: [vocab.div_ceil(8) as u32, 1, 1],
            ..by_rows
        };
        let by_places = Grid {
            grid: [n as u32, slices as u32, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
        };
        let (n32, vocab32, width32) = (n as u32, vocab as u32, width as i32);
        // SAFETY: the buffers have the sizes of n, vocab and width.
        unsafe {
            T::embedding_forward(
                by_rows,
                order,
                weight.as_ptr(),
                ids.as_ptr(),
                rows.as_mut_ptr(),
                n as u64,
                vocab32,
                width32,
            )
            .unwrap();
            embedding_sort(
                Grid::new(1, 1024),
                order,
                ids.as_ptr(),
                counts.as_mut_ptr(),
                starts.as_mut_ptr(),
                ranks.as_mut_ptr(),
                positions.as_mut_ptr(),
                n32,
                vocab32,
            )
            .unwrap();
            T::embedding_add(
                by_places,
                order,
                gradient.as_ptr(),
                ids.as_ptr(),
                starts.as_ptr(),
                positions.as_ptr(),
                sum.as_mut_ptr(),
                vocab32,
                width32,
            )
            .unwrap();
            T::embedding_sum(
                by_vocab,
                order,
                gradient.as_ptr(),
                starts.as_ptr(),
                positions.as_ptr(),
                rounded.as_mut_ptr(),
                vocab as u64,
                width32,
            )
            .unwrap();
        }
        for (place, &id) in ids.iter().enumerate() {
            let row = &rows[place * width..][..width];
            if (id as usize) < vocab {
                assert!(row == &weight[id as usize * width..][..width]);
            } else {
                assert!(row.iter().all(|x| x.to_f64().is_nan()));
            }
        }
        for (found, on_cpu) in rows.iter().map(|x| x.to_f64()).zip(&rows_on_cpu) {
            assert!(found == *on_cpu || (found.is_nan() && on_cpu.is_nan()));
        }
        assert!(rows[n * width..].iter().all(|x| *x == seven));
        let mut sorted: Vec<u32> = (0..n32).filter(|i| ids[*i as usize] < vocab32).collect();
        sorted.sort_by_key(|i| ids[*i as usize]);
        assert_eq!(positions[..sorted.len()], sorted);
        assert_eq!(starts[vocab] as usize, sorted.len());
        let found: Vec<f64> = sum.iter().map(|x| f64::from(*x)).collect();
        dweight_expected.assert_close(&found, tolerance);
        let found: Vec<f64> = rounded.iter().map(|x| x.to_f64()).collect();
        dweight_expected.assert_close(&found, tolerance);
    }
    Ok(())
}

fn check_all<T: Kernels>(tolerance: f64) -> Result<()> {
    // More than one chunk of the sort.
    let many: Vec<u32> = (0..1333u32)
        .map(|i| if i % 3 == 0 { 4 } else { i * i % 9 })
        .collect();
    let far = [2, u32::MAX, 0, 9, 2, 1, 1, 8];
    for behind in [0, 1] {
        check::<T>(1, 1, &[0], behind, tolerance)?;
        check::<T>(9, 72, &far, behind, tolerance)?;
        check::<T>(9, 5, &many, behind, tolerance)?;
        check::<T>(9, 576, &many, behind, tolerance)?;
    }
    Ok(())
}

each_dtype!(gradients_of_a_row_are_summed: f32 3e-6, bf16 4e-3, f16 6e-4);
